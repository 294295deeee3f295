"""The mount against a plain directory: the same operations must give the same results, errors and contents."""

import errno
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.faces.mounted import Mounted
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    pytest.mark.property,
    needs_fuse,
]

NAMES = st.sampled_from(["a", "b", "c.tmp", "%x", "d", "d/a", "d/b", "d/e", "d/e/a", "none/a"])
FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDWR,
        os.O_RDWR | os.O_CREAT,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_APPEND,
        os.O_RDWR | os.O_TRUNC,
    ]
)
OFFSETS = st.sampled_from([0, 1, 4095, 4096, 10_000, 130_000, 300_000])
SIZES = st.sampled_from([0, 1, 5, 4096, 5000, 140_000])
Handle = tuple[int, int]


class Tree(RuleBasedStateMachine):
    """Does everything twice. `self.ours` is on the mount, `self.theirs` on an ordinary file system."""

    base: ClassVar[tuple[Path, Path]]
    numbers: ClassVar[Iterator[int]] = itertools.count()
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        name = str(next(self.numbers))
        self.ours, self.theirs = (base / name for base in self.base)
        self.open: set[Handle] = set()
        for path in (self.ours, self.theirs):
            path.mkdir()

    def teardown(self) -> None:
        for fd in itertools.chain(*self.open):
            os.close(fd)
        self.same_tree()
        for path in (self.ours, self.theirs):
            shutil.rmtree(path)

    def both(self, act: Callable[[Path], Any]) -> Any:
        """Do one thing on either side, and see that the same came of it."""
        ours, theirs = (self.outcome(act, path) for path in (self.ours, self.theirs))
        assert ours == theirs
        return ours

    @staticmethod
    def outcome(act: Callable[[Any], Any], place: Any) -> Any:
        try:
            return act(place)
        except OSError as exc:
            return errno.errorcode[exc.errno or 0]

    def on_both(self, handle: Handle, act: Callable[[int], Any]) -> None:
        ours, theirs = (self.outcome(act, fd) for fd in handle)
        assert ours == theirs

    @rule(target=handles, name=NAMES, flags=FLAGS)
    def open_file(self, name: str, flags: int) -> Handle | None:
        opened = [
            self.outcome(lambda p: os.open(p / name, flags, 0o644), p) for p in (self.ours, self.theirs)
        ]
        if isinstance(opened[0], int) and isinstance(opened[1], int):
            self.open.add((opened[0], opened[1]))
            return opened[0], opened[1]
        assert opened[0] == opened[1]
        return None

    @rule(handle=consumes(handles))
    def close(self, handle: Handle | None) -> None:
        if handle is not None:
            self.open.discard(handle)
            self.on_both(handle, os.close)

    @rule(handle=handles, offset=OFFSETS, size=SIZES, byte=st.integers(1, 255))
    def write(self, handle: Handle | None, offset: int, size: int, byte: int) -> None:
        if handle in self.open:
            assert handle is not None
            self.on_both(handle, lambda fd: os.pwrite(fd, bytes([byte]) * size, offset))

    @rule(handle=handles, offset=OFFSETS, size=SIZES)
    def read(self, handle: Handle | None, offset: int, size: int) -> None:
        if handle in self.open:
            assert handle is not None
            self.on_both(handle, lambda fd: os.pread(fd, size, offset))

    @rule(handle=handles, size=OFFSETS)
    def ftruncate(self, handle: Handle | None, size: int) -> None:
        if handle in self.open:
            assert handle is not None
            self.on_both(handle, lambda fd: os.ftruncate(fd, size))

    @rule(handle=handles)
    def fsync_and_fstat(self, handle: Handle | None) -> None:
        def attributes(fd: int) -> tuple[int, ...]:
            found = os.fstat(fd)
            return (
                (found.st_mode, found.st_size, found.st_nlink) if S_ISREG(found.st_mode) else (found.st_mode,)
            )

        if handle in self.open:
            assert handle is not None
            self.on_both(handle, os.fsync)
            self.on_both(handle, attributes)

    @rule(handle=handles)
    def read_mapped(self, handle: Handle | None) -> None:
        def read(fd: int) -> bytes:
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as area:
                return area[:]

        if handle in self.open:
            assert handle is not None
            if os.fstat(handle[1]).st_size:
                self.on_both(handle, read)

    @rule(name=NAMES, size=OFFSETS)
    def truncate(self, name: str, size: int) -> None:
        self.both(lambda p: os.truncate(p / name, size))

    @rule(name=NAMES, size=SIZES, byte=st.integers(1, 255))
    def write_whole(self, name: str, size: int, byte: int) -> None:
        self.both(lambda p: (p / name).write_bytes(bytes([byte]) * size))

    @rule(name=NAMES)
    def unlink(self, name: str) -> None:
        self.both(lambda p: os.unlink(p / name))

    @rule(name=NAMES)
    def mkdir(self, name: str) -> None:
        self.both(lambda p: os.mkdir(p / name))

    @rule(name=NAMES)
    def rmdir(self, name: str) -> None:
        self.both(lambda p: os.rmdir(p / name))

    @rule(old=NAMES, new=NAMES)
    def rename(self, old: str, new: str) -> None:
        if (self.theirs / old).is_dir() and os.listdir(self.theirs / old):
            return  # EXDEV here, by decision
        self.both(lambda p: os.rename(p / old, p / new))

    @rule(name=NAMES, mode=st.sampled_from([0o600, 0o755]))
    def chmod_and_utime(self, name: str, mode: int) -> None:
        self.both(lambda p: os.chmod(p / name, mode))
        self.both(lambda p: os.utime(p / name, (5, 7)))
        self.both(lambda p: (os.stat(p / name).st_mode, os.stat(p / name).st_mtime))

    @invariant()
    def same_tree(self) -> None:
        def tree(path: Path) -> list[tuple[str, int | None]]:
            return sorted(
                (str(f.relative_to(path)), None if f.is_dir() else f.stat().st_size) for f in path.rglob("*")
            )

        self.both(tree)
        self.both(lambda p: {str(f.relative_to(p)): f.read_bytes() for f in p.rglob("*") if f.is_file()})


def test_the_mount_is_like_a_plain_directory(tmp_path):
    with Mounted(tmp_path / "data", tmp_path / "mnt") as store, tempfile.TemporaryDirectory() as plain:
        Tree.base = (store.path, Path(plain))
        run_state_machine_as_test(
            Tree,
            settings=settings(
                max_examples=int(os.environ.get("MODEL_EXAMPLES", "30")),
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        store.call("check")
        assert store.stop() == ""
