"""Prefix caching with a real model: llama.cpp keeps the KV cache of a prompt's prefix in kvcsfs.

The practice, in `answer()`: the key names model, version and the hash of the prefix. Ask the store; on a hit
the engine reads the cached state and skips the computation; on a miss, or if anything fails, it computes
and writes back. llama.cpp reads and writes files, so it uses the mount; the query goes through the SDK. Both
faces show the same values.

The run starts a daemon and an engine below a scratch directory and shows what a hit is worth: in the same
engine process, in a new one, after the daemon restarted; then both faces side by side, and eviction.
It fails if two answers differ, or if a hit was expected and did not come.
"""

import argparse
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcs import KvcsError, KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from llama_engine import ANSWER_TOKENS, EngineError, LlamaEngine, find_model
from local_store import LocalStore, StoreError

FAMILY = "smollm2-135m/v1/prefix"
# 2 (keys and values) x 30 layers x 3 KV heads x 64 elements x 2 bytes: SmolLM2-135M's config.json, f16 cache.
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2
MAX_VALUE_BYTES = 1 << 30  # the SDK's default of 4 MiB is for engines that cut a prefix into blocks
MAX_TOKENS = 8000  # the model's context is 8192
SCRATCH = Path(__file__).resolve().parent.parent / ".scratch" / "demo"

PREAMBLE = "<|im_start|>system\nYou are a helpful assistant. Answer in one short sentence.\n"
QUESTION = "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


class DemoError(Exception):
    """The run did not show what it is there to show."""


@dataclass(frozen=True)
class Outcome:
    """One request: where its prefix came from, and what it cost."""

    hit: bool
    prefix_seconds: float  # computing or restoring the prefix
    save_seconds: float
    first_token_seconds: float  # prefix and question, without the write-back
    text: str


def prefix_name(prefix: list[int]) -> str:
    """The hash that stands for a prefix: over tokens, since those are what the KV cache is computed from."""
    return hashlib.sha256(",".join(map(str, prefix)).encode()).hexdigest()[:32]


def key_of(prefix: list[int]) -> str:
    return f"{FAMILY}/{prefix_name(prefix)}"


def is_cached(client: KvcsLowLevelClient, key: str) -> bool:
    """A store that fails is a store without the key: the prefix can always be computed."""
    try:
        return client.ll_batch_query([key])[0].status == "ok"
    except KvcsError:
        return False


def answer(
    engine: LlamaEngine, client: KvcsLowLevelClient, prefix: list[int], question: list[int]
) -> Outcome:
    """Answer `question` after `prefix`, with the prefix's KV cache out of the store if it is there."""
    name, saved = prefix_name(prefix), 0.0
    hit = is_cached(client, key_of(prefix))
    if hit:
        try:
            spent = engine.restore(name)
        except EngineError:
            hit = False  # evicted between query and read
    if not hit:
        spent = engine.compute(prefix, show_progress)
        try:
            saved = engine.save(name)
        except EngineError as exc:
            print(f"  write-back failed, the answer is not affected: {exc}")
    said = engine.ask(prefix + question)
    return Outcome(hit, spent, saved, spent + said.first_token_seconds, said.text)


# --- what a person sees ---


def show_progress(done: int, total: int) -> None:
    """One line that moves on a terminal; in a log, one line at the end."""
    if sys.stdout.isatty():
        print(
            f"\r  computing the prefix: {done}/{total} tokens", end="" if done < total else "\n", flush=True
        )
    elif done == total:
        print(f"  computed the prefix: {total} tokens", flush=True)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def show_table(rows: Sequence[tuple[str, Outcome]]) -> None:
    say("time to first token")
    print(f"{'':34}{'prefix':>10}{'write-back':>12}{'first token':>13}  answer")
    for label, row in rows:
        saved = f"{row.save_seconds:.3f} s" if not row.hit else "-"
        print(
            f"{label:34}{row.prefix_seconds:8.3f} s{saved:>12}{row.first_token_seconds:11.3f} s  {row.text!r}"
        )
    cold, slowest_hit = (
        rows[0][1].first_token_seconds,
        max(row.first_token_seconds for _, row in rows if row.hit),
    )
    print(f"the slowest hit is {cold / slowest_hit:.0f} times as fast as computing")


def run_tool(*command: str) -> None:
    """Show a command and what it prints, as at a shell."""
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


# --- the steps ---


def start_engine(stack: ExitStack, store: LocalStore, tokens: int) -> LlamaEngine:
    slots = store.mount / FAMILY
    slots.mkdir(parents=True, exist_ok=True)
    engine = LlamaEngine(find_model(), slots, tokens + 128 + ANSWER_TOKENS, store.home / "llama.log")
    stack.callback(engine.stop)
    return engine


def expect(outcome: Outcome, *, hit: bool, when: str) -> Outcome:
    if outcome.hit != hit:
        wanted, got = ("a hit", "a miss") if hit else ("a miss", "a hit")
        raise DemoError(f"{when}: expected {wanted}, got {got}")
    return outcome


def same_answer(rows: Sequence[tuple[str, Outcome]]) -> None:
    """A restored KV cache is the computed one, so the model must say the same."""
    label, first = rows[0]
    for other, row in rows[1:]:
        if row.text != first.text:
            raise DemoError(f"answers differ: {first.text!r} ({label}), {row.text!r} ({other})")


def make_tokens(engine: LlamaEngine, count: int) -> tuple[list[int], list[int]]:
    """A prefix of exactly `count` tokens, like a system prompt that many share, and a question."""
    rules = (
        f"Rule {i}: be kind, be brief, and say so when you are not sure about topic {i}.\n"
        for i in range(count)
    )
    return engine.tokenize(PREAMBLE + "".join(rules))[:count], engine.tokenize(QUESTION)


def show_hits(store: LocalStore, client: KvcsLowLevelClient, tokens: int) -> str:
    """Cold, then three kinds of hit; returns the key."""
    rows: list[tuple[str, Outcome]] = []

    def ask(engine: LlamaEngine, label: str, *, hit: bool) -> None:
        say(f"{label} (engine process {engine.pid}, daemon process {store.pid})")
        outcome = expect(answer(engine, client, prefix, question), hit=hit, when=label)
        print(f"  {'hit' if hit else 'miss'}: first token after {outcome.first_token_seconds:.3f} s")
        rows.append((label, outcome))

    with ExitStack() as first:
        engine = start_engine(first, store, tokens)
        prefix, question = make_tokens(engine, tokens)
        ask(engine, "cold", hit=False)
        engine.erase()
        ask(engine, "hit, same engine process", hit=True)
    with ExitStack() as second:
        engine = start_engine(second, store, tokens)
        ask(engine, "hit, new engine process", hit=True)
        engine.erase()
        store.restart()
        ask(engine, "hit, after a daemon restart", hit=True)
    show_table(rows)
    same_answer(rows)
    return key_of(prefix)


def show_both_faces(store: LocalStore, client: KvcsLowLevelClient, key: str) -> None:
    """The value that the engine wrote as a file is the value that the SDK reads."""
    say("one value, two faces")
    start = time.monotonic()
    got = client.ll_batch_get_items([LLGetItemOpt(key)])[0]
    sdk_ms = (time.monotonic() - start) * 1e3
    start = time.monotonic()
    content = (store.mount / key).read_bytes()
    mount_ms = (time.monotonic() - start) * 1e3
    print(
        f"SDK: {got.status} B in {sdk_ms:.0f} ms; open() on the mount: {len(content)} B in {mount_ms:.0f} ms"
    )
    if got.data is None or bytes(got.data) != content:
        raise DemoError(f"{key}: the SDK and the mount show different bytes")
    print("the bytes are the same")
    run_tool("ls", "-l", str(store.mount / FAMILY))
    run_tool("du", "-h", "--max-depth=2", str(store.mount))
    run_tool("df", "-h", str(store.mount))


def fill(client: KvcsLowLevelClient, size_bytes: int, key: str, limit: int) -> int:
    """Put made values until `key` is gone; returns how many that took, at most `limit`."""
    for count in range(1, limit + 1):
        made = LLPutItem(f"made/values/{count:04}", os.urandom(size_bytes))
        status = client.ll_batch_put([made])[0].status
        if status != 0:
            raise DemoError(f"a put into the small store failed: {os.strerror(-status)}")
        if client.ll_batch_query([key])[0].status == "not_found":
            return count
    raise DemoError(f"{limit} values of {size_bytes} bytes went in, and {key} is still not evicted")


def show_eviction(store: LocalStore, client: KvcsLowLevelClient, tokens: int) -> None:
    """In a store that is too small, the least recently used value goes, and the engine computes it again."""
    say(f"a small store: {store.capacity_bytes >> 20} MiB for a prefix of {tokens} tokens and other values")
    with ExitStack() as stack:
        engine = start_engine(stack, store, tokens)
        prefix, question = make_tokens(engine, tokens)
        rows = [
            ("cold", expect(answer(engine, client, prefix, question), hit=False, when="small store, cold"))
        ]
        engine.erase()
        rows.append(
            ("hit", expect(answer(engine, client, prefix, question), hit=True, when="small store, again"))
        )
        count = fill(client, store.capacity_bytes // 8, key_of(prefix), limit=64)
        print(f"  {count} newer values of {store.capacity_bytes >> 23} MiB pushed the prefix out")
        run_tool("df", "-h", str(store.mount))
        engine.erase()
        outcome = answer(engine, client, prefix, question)
        rows.append(("computed again", expect(outcome, hit=False, when="small store, after eviction")))
        show_table(rows)
        same_answer(rows)


def open_store(stack: ExitStack, home: Path, capacity_bytes: int) -> tuple[LocalStore, KvcsLowLevelClient]:
    store = stack.enter_context(LocalStore(home, capacity_bytes))
    client = KvcsLowLevelClient(str(store.socket), max_value_size=MAX_VALUE_BYTES)
    stack.callback(client.close)
    return store, client


@contextmanager
def only_run_in(scratch: Path) -> Iterator[None]:
    """Keep a second run out of `scratch`: each begins by clearing it."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another run is using {scratch}; give this one its own with --scratch") from None
        yield


def run(tokens: int, scratch: Path) -> None:
    """The whole demonstration below `scratch`; leaves logs and data there, and nothing running or mounted."""
    short = max(32, tokens // 8)
    with only_run_in(scratch):
        with ExitStack() as stack:
            # Room for eight such prefixes: a file that grows reserves in doubling steps while it is written.
            store, client = open_store(
                stack, scratch / "large", max(64 << 20, 8 * tokens * KV_BYTES_PER_TOKEN)
            )
            show_both_faces(store, client, show_hits(store, client, tokens))
        with ExitStack() as stack:
            store, client = open_store(
                stack, scratch / "small", max(16 << 20, 8 * short * KV_BYTES_PER_TOKEN)
            )
            show_eviction(store, client, short)


def token_count(text: str) -> int:
    if not text.isdecimal() or not 32 <= int(text) <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 32 to {MAX_TOKENS}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A language model finds its prefix cache in kvcsfs again.")
    parser.add_argument(
        "--tokens", type=token_count, default=2000, help="length of the prefix (default 2000)"
    )
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where data, mounts and logs go")
    arguments = parser.parse_args(argv)
    try:
        run(arguments.tokens, arguments.scratch.resolve())
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running or mounted", file=sys.stderr)
        return 130
    except (DemoError, EngineError, StoreError, KvcsError, OSError, subprocess.CalledProcessError) as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    say("every answer was the same")
    return 0


if __name__ == "__main__":
    # A plain kill cleans up like Ctrl-C: both unwind through the same `with` blocks.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
