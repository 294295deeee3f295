"""Slots and the kernel's proof: what may be written again, and what may be committed."""

from __future__ import annotations

import array
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcsfs.engine import footer
from kvcsfs.engine.entry import BLOCK, Entry, charge
from kvcsfs.engine.scan import scan
from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import BusyError, ConfigError, InvalidValueError
from tests.stores import checksum, path_of, slot_files, stored

VALUE = b"v" * 5000


@pytest.fixture
def store(tmp_path) -> Iterator[SlotStore]:
    made = SlotStore(tmp_path)
    yield made
    made.close()


def staged(store: SlotStore, value: bytes = VALUE) -> tuple[Entry, int]:
    """A written object that isn't sealed, and its writable descriptor."""
    slot = store.directory.number()
    fd = store.create(slot, charge(len(value)))
    os.pwrite(fd, value, 0)
    return Entry("k", slot, len(value), checksum(value), store.directory.number(), 1.0), fd


# -- the object


def test_a_sealed_object_is_value_padding_footer(store, tmp_path):
    entry = stored(store, "m/a", VALUE)
    path = path_of(tmp_path, entry.slot)
    data = path.read_bytes()
    assert len(data) == 3 * BLOCK == charge(len(VALUE))
    assert data[:5000] == VALUE
    assert data[5000 : 2 * BLOCK] == bytes(2 * BLOCK - 5000)
    assert data[-BLOCK:] == footer.of(entry)
    assert path.stat().st_mode & 0o7777 == 0o600


def footers(store: SlotStore) -> dict[int, str | None]:
    """The key of every slot, None for one of no value."""
    found: dict[int, str | None] = {}
    for folder in scan(store.slots):
        assert not folder.complaints
        found.update({row[0]: row[1] for row in folder.rows} | dict.fromkeys(folder.leftovers))
    return found


def test_a_voided_object_is_no_object(store):
    entry = stored(store, "m/a", VALUE)
    store.void(entry)
    assert footers(store) == {entry.slot: None}


def test_voiding_or_unlinking_what_is_gone_is_fine(store):
    entry = stored(store, "m/a", VALUE)
    store.unlink(entry.slot)
    store.unlink(entry.slot)
    store.void(entry)
    assert store.recycle(entry.slot, entry.charged) is None


def test_numbers_never_come_again(tmp_path):
    first = SlotStore(tmp_path)
    a = [first.directory.number(), first.directory.number()]
    first.close()
    (tmp_path / "epoch" / "²").touch()  # a digit to str.isdigit, no number to int
    second = SlotStore(tmp_path)
    b = second.directory.number()
    second.close()
    assert a[0] < a[1] < b
    assert b >> 40 == second.directory.epoch == first.directory.epoch + 1


# -- recycle


def test_recycle_voids_the_footer_and_keeps_the_file(store, tmp_path):
    entry = stored(store, "m/a", VALUE)
    before = path_of(tmp_path, entry.slot).stat().st_ino
    fd = store.recycle(entry.slot, entry.charged)
    assert fd is not None
    assert os.fstat(fd).st_ino == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pread(fd, 1, 0)
    os.close(fd)
    assert footers(store) == {entry.slot: None}


def test_recycle_of_another_size_unlinks(store, tmp_path):
    entry = stored(store, "m/a", VALUE)
    assert store.recycle(entry.slot, entry.charged + BLOCK) is None
    assert slot_files(tmp_path) == []


def _opened(path: Path) -> tuple[object, ...]:
    return (os.open(path, os.O_RDONLY),)


def _duplicated(path: Path) -> tuple[object, ...]:
    fd = os.open(path, os.O_RDONLY)
    copy = os.dup(fd)
    os.close(fd)
    return (copy,)


def _mapped(path: Path) -> tuple[object, ...]:
    fd = os.open(path, os.O_RDONLY)
    view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.close(fd)
    return (view,)


def _in_flight(path: Path) -> tuple[object, ...]:
    near, far = socket.socketpair()
    fd = os.open(path, os.O_RDONLY)
    near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)
    return (near, far)


def _let_go(held: tuple[Any, ...]) -> None:
    for thing in held:
        if isinstance(thing, int):
            os.close(thing)
        else:
            thing.close()


@pytest.mark.parametrize("hold", [_opened, _duplicated, _mapped, _in_flight])
def test_a_slot_that_somebody_can_read_is_not_written_again(store, tmp_path, hold):
    entry = stored(store, "m/a", VALUE)
    path = path_of(tmp_path, entry.slot)
    held = hold(path)
    with open(path, "rb") as reader:
        _ = reader.fileno()
        assert store.recycle(entry.slot, entry.charged) is None
        assert not path.exists(), "it is unlinked instead"
        assert reader.read()[-BLOCK:] == footer.of(entry), "and what its reader has stays as it was"
    _let_go(held)


@pytest.mark.parametrize("hold", [_opened, _duplicated, _mapped, _in_flight])
def test_each_hold_alone_stops_the_reuse_and_letting_go_allows_it(store, tmp_path, hold):
    kept, reused = stored(store, "a", VALUE), stored(store, "b", VALUE)
    held = hold(path_of(tmp_path, kept.slot))
    assert store.recycle(kept.slot, kept.charged) is None
    _let_go(held)
    _let_go(hold(path_of(tmp_path, reused.slot)))
    fd = store.recycle(reused.slot, reused.charged)
    assert fd is not None
    os.close(fd)


# -- seal


def test_seal_is_refused_while_somebody_can_write(store):
    entry, fd = staged(store)
    with pytest.raises(BusyError):
        store.seal(entry)
    assert footers(store) == {entry.slot: None}
    os.close(fd)
    store.seal(entry)
    assert footers(store) == {entry.slot: "k"}


def test_seal_is_refused_while_the_object_is_mapped_for_writing(store, tmp_path):
    entry, fd = staged(store)
    os.close(fd)
    both = os.open(path_of(tmp_path, entry.slot), os.O_RDWR)
    view = mmap.mmap(both, 0)
    os.close(both)
    with pytest.raises(BusyError):
        store.seal(entry)
    view.close()
    store.seal(entry)


def test_seal_is_refused_while_somebody_reads_what_is_not_committed(store, tmp_path):
    entry, fd = staged(store)
    os.close(fd)
    reader = os.open(path_of(tmp_path, entry.slot), os.O_RDONLY)
    with pytest.raises(BusyError):
        store.seal(entry)
    os.close(reader)
    store.seal(entry)


@pytest.mark.parametrize("change", [-BLOCK, -1, 1, BLOCK])
def test_an_object_of_another_size_than_reserved_is_refused(store, change):
    entry, fd = staged(store)
    os.ftruncate(fd, entry.charged + change)
    os.close(fd)
    with pytest.raises(InvalidValueError, match="were reserved"):
        store.seal(entry)


def test_verify_reads_the_value(store, tmp_path):
    entry = stored(store, "m/a", VALUE)
    with open(path_of(tmp_path, entry.slot), "r+b") as file:
        assert store.verify(entry)
        file.seek(4999)
        file.write(b"x")
        file.flush()
        assert not store.verify(entry)
        file.truncate(100)
        assert not store.verify(entry)


# -- the directory


def test_a_second_daemon_is_refused(store, tmp_path):
    with pytest.raises(ConfigError, match="in use by another kvcsfs daemon"):
        SlotStore(tmp_path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("kvcsfs 2 abc\n", "format 2"),
        ("something else\n", "not a kvcsfs data"),
        ("kvcsfs x y\n", "not a kvcsfs data"),
        ("kvcsfs ² y\n", "not a kvcsfs data"),
    ],
)
def test_a_directory_that_is_not_ours_is_refused(tmp_path, version, message):
    (tmp_path / "VERSION").write_text(version)
    with pytest.raises(ConfigError, match=message) as caught:
        SlotStore(tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "VERSION").read_text() == version


def test_a_directory_that_can_not_be_used_is_one_line(tmp_path):
    (tmp_path / "slots").write_text("a file")
    with pytest.raises(ConfigError, match="can't be used as a data directory") as caught:
        SlotStore(tmp_path)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_ours_are_left_alone(store, tmp_path):
    entry = stored(store, "m/a", VALUE)
    own = path_of(tmp_path, entry.slot)
    folder = own.parent
    wrong_folder = tmp_path / "slots" / f"{(entry.slot + 1) % 256:02x}"
    strange = [folder / "README", folder / f"0{own.name}", folder / f"0x{own.name}", wrong_folder / own.name]
    strange += [tmp_path / "slots" / "ff" / "-1", folder / own.name.upper().replace("0", "0_0", 1)]
    for path in strange:
        path.write_bytes(b"somebody's")
    (folder / "1").mkdir(exist_ok=True)
    strange_slot = (
        tmp_path / "slots" / f"{(1 << 64) % 256:02x}" / f"{1 << 64:x}"
    )  # more than a snapshot can hold
    strange_slot.write_bytes(own.read_bytes())
    assert footers(store) == {entry.slot: "m/a"}
    assert all(path.exists() for path in strange)
