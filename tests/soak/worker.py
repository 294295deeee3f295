"""One client of a soak: puts, gets and deletes until it is ended, in whatever way, and checks every byte it reads.

Arguments: face (sdk or posix), number, number of workers, socket, mount ("-" for none), directory of the records.
A wrong byte is a line on stdout that begins with WRONG.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from kvcs import KvcsError, KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from tests.soak.record import Record, is_torn, value_of

KEYS = 60
BATCH = 8


class Worker:
    """Works on the keys below `w<number>/`, and reads those of the others."""

    def __init__(self, number: int, workers: int, socket: str, mount: str, records: Path) -> None:
        self.number, self.workers, self.mount = number, workers, Path(mount)
        self.record = Record(records / str(number))
        self.dice = random.Random()
        self.client = KvcsLowLevelClient(socket, default_deadline_s=10.0)

    def keys(self, number: int) -> list[str]:
        return [f"w{number}/k{i}" for i in self.dice.sample(range(KEYS), BATCH)]

    def check(self, key: str, value: bytes | bytearray | None) -> None:
        own = key.startswith(f"w{self.number}/")
        wrong = self.record.complaint(key, value) if own else is_torn(key, value) if value is not None else ""
        if wrong:
            print(f"WRONG {wrong}", flush=True)

    def put(self) -> None:
        """Put a batch, or delete one."""
        keys = self.keys(self.number)
        delete = self.dice.random() < 0.1
        versions = [self.record.begin(key, delete) for key in keys]
        if delete:
            statuses = [0 if s in (0, -2) else s for s in map(int, self.client.ll_batch_delete(keys))]
        else:
            items = [LLPutItem(k, value_of(k, v)) for k, v in zip(keys, versions, strict=True)]
            statuses = [r.status for r in self.client.ll_batch_put(items)]
        for key, version, status in zip(keys, versions, statuses, strict=True):
            if status == 0:
                self.record.end(key, version)

    def get(self) -> None:
        """Read a batch, and check it."""
        number = self.number if self.dice.random() < 0.7 else self.dice.randrange(self.workers)
        keys = self.keys(number)
        try:
            results = self.client.ll_batch_get_items([LLGetItemOpt(key) for key in keys])
        except KvcsError:
            time.sleep(0.05)
            return
        for result in results:
            self.check(result.key, result.data)

    def write(self) -> None:
        """Write a file as engines do, under another name first, or remove one."""
        key = self.keys(self.number)[0]
        if self.dice.random() < 0.1:
            self.record.begin(key, delete=True)
            (self.mount / key).unlink()  # not found may also mean that nothing is mounted now: unknown, then
            self.record.end(key, 0)
            return
        version = self.record.begin(key)
        file = self.mount / key
        aside = file.with_name(f"{file.name}.tmp")
        file.parent.mkdir(exist_ok=True)
        with open(aside, "wb") as out:
            out.write(value_of(key, version))
            out.flush()
            os.fsync(out.fileno())
        aside.rename(file)
        self.record.end(key, version)

    def read(self) -> None:
        """Read a file, and check it."""
        key = self.keys(self.number)[0]
        try:
            value = (self.mount / key).read_bytes()
        except FileNotFoundError:
            return
        self.check(key, value)

    def run(self, face: str) -> None:
        """Work for ever."""
        mounted = face == "posix"
        write, read = (self.write, self.read) if mounted else (self.put, self.get)
        while True:
            try:
                # Both faces read what either wrote.
                self.dice.choice([write, write, read, read, read, self.get])()
            except OSError:  # no daemon, or no room: the record says begun, whatever became of it
                time.sleep(0.05)


if __name__ == "__main__":
    face_, number_, workers_, socket_, mount_, records_ = sys.argv[1:]
    Worker(int(number_), int(workers_), socket_, mount_, Path(records_)).run(face_)
