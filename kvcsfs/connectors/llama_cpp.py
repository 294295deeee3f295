"""llama.cpp: keeps a server's slot states in the store by prefix of the prompt, and restores the longest.

The server writes a slot file in pieces of 8 to 64 KiB, each of which would be a request to the mount. So a state passes
through a file in memory, from and to which the SDK moves it as one value: what was saved is stored while the server
goes on. Needs
`llama-server --slots --slot-save-path <slots>`. Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import logging
import mmap
import os
import urllib.request
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

from kvcsfs import wire
from kvcsfs.connectors.keys import KeySpace, prefix_hashes
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store

log = logging.getLogger("kvcs.connectors")

# Up to this size the file of a restored state is filled again, as half of a restore was fresh memory.
KEPT_BYTES = 64 << 20


class LlamaPrefixCache:
    """The prefix cache of one server's slot. Nothing raises but the constructor."""

    def __init__(
        self,
        server: str,
        model: str,
        slots: str | os.PathLike[str],
        *,
        dtype: str = "f16",
        layout: str = "any",
        slot: int = 0,
        step_tokens: int = 256,
        request_s: float = 600.0,
        **options: Any,
    ) -> None:
        """Prepare for the server at the URL `server`.

        Args:
            model: stands for the weights and their quantisation.
            slots: the server's `--slot-save-path`, best in memory (tmpfs); made if it isn't there. A state that is
                restored or saved is in it, and one more that is being stored.
            dtype, layout: of its KV cache (`--cache-type-k`), and what else its slot files depend on.
            step_tokens: prefixes are stored at this length and its doublings, and at their full length.
            request_s: how long one request to the server may take; a prompt is computed within it.
            options: see `Settings`; one state at a time waits to be stored, whatever its size.
        Raises:
            ValueError: a model without a name, a directory that can't be made, a step below 1, an option that
                can't be used.
        """
        if step_tokens < 1:
            raise ValueError(f"step_tokens must be at least 1, not {step_tokens}")
        settings = Settings.take(options)
        self._space = KeySpace(model, settings.version, "llama.cpp", dtype, layout, "all")
        self._url, self._slot, self._step, self._seconds = server.rstrip("/"), slot, step_tokens, request_s
        try:
            Path(slots).mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ValueError(f"slots: {os.fspath(slots)}: {exc.strerror}") from exc
        # The same after a restart, which so leaves nothing behind; another server's slot has others. What is saved has
        # one of its own: a server that was busy saves when we wait no longer, and would cut a state that we read in.
        name = f"kvcs-{hashlib.sha256(f'{self._url} {slot}'.encode()).hexdigest()[:16]}"
        self._saved, self._loaded = (Path(slots) / f"{name}-{action}" for action in ("save", "restore"))
        self._store = Store(dataclasses.replace(settings, queue_bytes=wire.MAX_VALUE_BYTES, queue_items=1))

    def warm(self, tokens: Sequence[int]) -> int:
        """Make the slot hold the state of `tokens`, computing what no stored prefix has; that prefix's length.

        What was computed is stored at several lengths, for prompts that share only a part; the last may still be on its
        way when this returns. If the server fails, the slot holds less, and the next completion computes it.
        """
        lengths = self._lengths(len(tokens))
        try:
            numbers = list(map(index, tokens))  # numpy's are none that json can write
            keys = [self._space.key(name) for name in prefix_hashes(numbers, lengths)]
        except Exception:  # noqa: BLE001  tokens that are none
            self._store.mishap("restore", 1)
            return 0
        self._store.flush()  # or what the last call saved would be computed again
        sizes = self._store.sizes(keys)
        known = self._restore([state for state in zip(lengths, keys, sizes, strict=True) if state[2]])
        for length, key, size in zip(lengths, keys, sizes, strict=True):
            if length > known:
                if not self._compute(numbers[:length]):
                    break
                if not size:
                    self._save(key)
        return known

    def erase(self) -> bool:
        """Forget what the slot holds."""
        return self._post(f"/slots/{self._slot}?action=erase", {})

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was saved is stored; False if that took too long."""
        return self._store.flush(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counts: restored, computed, saved, and what failed."""
        return self._store.stats()

    def close(self) -> None:
        """Store what is on its way, for 5 s at most, and end."""
        self._store.close()
        self._loaded.unlink(missing_ok=True)

    def _lengths(self, tokens: int) -> list[int]:
        lengths, length = [], self._step
        while length < tokens:
            lengths.append(length)
            length *= 2
        return [*lengths, tokens] if tokens else []

    def _restore(self, found: list[tuple[int, str, int]]) -> int:
        """Fill the slot from the longest prefix that can be read; its length."""
        for length, key, size in reversed(found):
            try:
                done = self._fill(key, size)
            except OSError as exc:
                self._store.note("restore", 1, str(exc))
                continue
            if done:
                self._store.count("restored")
                return length
        return 0

    def _fill(self, key: str, size: int) -> bool:
        """Fill the slot from one value; False if that was evicted since, or the server doesn't take it."""
        done = False
        try:
            if not self._load(key, size):
                return False
            done = self._post_slot("restore", self._loaded)
            if not done:
                self.erase()  # what a failed restore leaves is not known
            return done
        finally:
            # One that was refused may still be read by a server that is late: the next is another file.
            if not done or size > KEPT_BYTES:
                self._loaded.unlink(missing_ok=True)

    def _load(self, key: str, size: int) -> bool:
        """Read a value into the slot file. Raises OSError: no room for it."""
        with self._loaded.open("a+b") as file:  # the last one's, if it is there
            file.truncate(size)
            os.posix_fallocate(file.fileno(), 0, size)  # else no room is a SIGBUS in the mapping
            memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return self._store.load([key], [memory])[0]

    def _compute(self, tokens: list[int]) -> bool:
        request = {"prompt": tokens, "n_predict": 0, "cache_prompt": True, "id_slot": self._slot}
        done = self._post("/completion", request)
        self._store.count("computed", int(done))
        return done

    def _save(self, key: str) -> None:
        try:
            state = self._state()
        except (OSError, ValueError) as exc:  # ValueError: it is empty
            self._store.note("save", 1, f"{exc}; is {self._saved.parent} the server's --slot-save-path?")
            return
        if state is None:
            self._store.count("save_failed")
            return
        self._store.flush()  # so that the directory needs room for no third state
        self._store.save_later(key, state, lambda _stored: None)

    def _state(self) -> mmap.mmap | None:
        """The slot's state, as the server writes it; None if it doesn't."""
        try:
            if not self._post_slot("save", self._saved):
                return None
            with self._saved.open("rb") as file:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        finally:
            self._saved.unlink(missing_ok=True)  # from here on nobody cuts it under the mapping

    def _post_slot(self, action: str, file: Path) -> bool:
        return self._post(f"/slots/{self._slot}?action={action}", {"filename": file.name})

    def _post(self, path: str, body: dict[str, Any]) -> bool:
        request = urllib.request.Request(  # noqa: S310  # the address is the operator's own
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:  # noqa: S310
                response.read()
        except (OSError, ValueError, http.client.HTTPException) as exc:  # the last: it died as it answered
            self._store.count("server_failed")
            log.debug("llama.cpp refused %s: %s", path, exc)
            return False
        return True
