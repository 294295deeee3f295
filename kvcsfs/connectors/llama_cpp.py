"""llama.cpp: keeps a server's slot states in the store by prefix of the prompt, and restores the longest.

The server writes and reads its slot files on the mount; one query of the SDK says which prefixes there are. Needs
`llama-server --slots --slot-save-path <slot_directory>`. Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcsfs.connectors.keys import KeySpace, prefix_hashes
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store

log = logging.getLogger("kvcs.connectors")


class LlamaPrefixCache:
    """The prefix cache of one server's slot. Nothing raises but the constructor."""

    def __init__(
        self,
        server: str,
        model: str,
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
            dtype, layout: of its KV cache (`--cache-type-k`), and what else its slot files depend on.
            step_tokens: prefixes are stored at this length and its doublings, and at their full length.
            request_s: how long one request to the server may take; a prompt is computed within it.
            options: see `Settings`.
        Raises:
            ValueError: a model without a name, a step below 1, an option that can't be used.
        """
        if step_tokens < 1:
            raise ValueError(f"step_tokens must be at least 1, not {step_tokens}")
        settings = Settings.take(options)
        self._space = KeySpace(model, settings.version, "llama.cpp", dtype, layout, "all")
        self._url, self._slot, self._step, self._seconds = server.rstrip("/"), slot, step_tokens, request_s
        self._store = Store(settings)

    def slot_directory(self, mount: Path) -> Path:
        """The directory of the mount that the server must have as its `--slot-save-path`; made if it isn't there."""
        directory = mount / self._space.prefix
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def warm(self, tokens: Sequence[int]) -> int:
        """Make the slot hold the state of `tokens`, computing what no stored prefix has; that prefix's length.

        What was computed is stored at several lengths, for prompts that share only a part. If the server fails, the
        slot holds less, and the next completion computes it.
        """
        lengths = self._lengths(len(tokens))
        names = prefix_hashes(tokens, lengths)
        found = self._store.exists([self._space.key(name) for name in names])
        known = self._restore([(n, name) for n, name, ok in zip(lengths, names, found, strict=True) if ok])
        for length, name, there in zip(lengths, names, found, strict=True):
            if length > known and not (self._compute(tokens[:length]) and (there or self._save(name))):
                break
        return known

    def erase(self) -> bool:
        """Forget what the slot holds."""
        return self._post(f"/slots/{self._slot}?action=erase", {})

    def stats(self) -> dict[str, int]:
        """Counts: restored, computed, saved, and what failed."""
        return self._store.stats()

    def close(self) -> None:
        self._store.close()

    def _lengths(self, tokens: int) -> list[int]:
        lengths, length = [], self._step
        while length < tokens:
            lengths.append(length)
            length *= 2
        return [*lengths, tokens] if tokens else []

    def _restore(self, found: list[tuple[int, str]]) -> int:
        """Fill the slot from the longest prefix that can be read; its length."""
        for length, name in reversed(found):
            if self._post(f"/slots/{self._slot}?action=restore", {"filename": name}):
                self._store.count("restored")
                return length
            self._store.count("misses")  # evicted since
            self.erase()  # what a failed restore leaves is not known
        return 0

    def _compute(self, tokens: Sequence[int]) -> bool:
        request = {"prompt": list(tokens), "n_predict": 0, "cache_prompt": True, "id_slot": self._slot}
        done = self._post("/completion", request)
        self._store.count("computed", int(done))
        return done

    def _save(self, name: str) -> bool:
        done = self._post(f"/slots/{self._slot}?action=save", {"filename": name})
        self._store.count("saved" if done else "save_failed")
        return True  # the state is computed all the same

    def _post(self, path: str, body: dict[str, Any]) -> bool:
        request = urllib.request.Request(  # noqa: S310  # the address is the operator's own
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:  # noqa: S310
                response.read()
        except (OSError, ValueError) as exc:
            self._store.count("server_failed")
            log.debug("llama.cpp refused %s: %s", path, exc)
            return False
        return True
