"""The floor: threads that move the same bytes to and from open files. Nothing is named, found, evicted or proven."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128

from kvcsfs.sdk.crew import PROCESSORS
from kvcsfs.sdk.workers import CHUNK_BYTES
from tests.bench.engine_times import BATCHES_KEPT, Step

Move = Callable[[int, list[memoryview], int], int]


@contextmanager
def bare(folder: Path, pages: Sequence[memoryview]) -> Iterator[dict[str, tuple[Step, Step]]]:
    """Contestants that store and load pages, a thread a processor, with checksums and without.

    A batch is written over the oldest one, into what the file system has allocated.
    """
    folder.mkdir()
    count = len(pages)
    descriptors = [
        os.open(folder / str(i), os.O_RDWR | os.O_CREAT, 0o600) for i in range(BATCHES_KEPT * count)
    ]
    with ThreadPoolExecutor(PROCESSORS) as pool:

        def steps(hashed: bool) -> tuple[Step, Step]:
            def page(move: Move, descriptor: int, view: memoryview) -> None:
                hasher = xxh3_128()
                for at in range(0, len(view), CHUNK_BYTES):
                    chunk = view[at : at + CHUNK_BYTES]
                    assert move(descriptor, [chunk], at) == len(chunk)
                    if hashed:
                        hasher.update(chunk)

            def step(move: Move) -> Step:
                def run(turn: int) -> None:
                    first = turn % BATCHES_KEPT * count

                    def share(begin: int) -> None:
                        for i in range(begin, count, PROCESSORS):
                            page(move, descriptors[first + i], pages[i])

                    list(pool.map(share, range(PROCESSORS)))

                return run

            return step(os.pwritev), step(os.preadv)

        try:
            yield {"bare threads": steps(True), "bare threads, unhashed": steps(False)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
