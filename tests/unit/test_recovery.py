"""What a start finds: from slots/ alone, and with a snapshot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcsfs.engine import recovery, scan
from kvcsfs.engine.catalog import FreeSlot
from kvcsfs.engine.entry import BLOCK, UNPROVEN, Entry
from kvcsfs.engine.recovery import Found, SnapshotWriter
from kvcsfs.engine.store import SlotStore
from tests.stores import path_of, slot_files, stored
from tests.unit.test_footer import block


def restart(path: Path) -> Found:
    """What a new start finds, in order of use."""
    store = SlotStore(path)
    try:
        found = recovery.recover(store)
    finally:
        store.close()
    catalog = recovery.load(found, 1 << 40)
    catalog.check()
    assert list(catalog.lru) == found.entries
    return found


def snapshot(store: SlotStore, entries: list[Entry], clean: bool, free: tuple[FreeSlot, ...] = ()) -> None:
    writer = SnapshotWriter(store.directory)
    writer.add(recovery.rows(entries))
    writer.finish(free, {"modes": 1}, clean)


def found_keys(found: Found) -> list[str]:
    return [e.key for e in found.entries]


def test_from_slots_alone(tmp_path):
    store = SlotStore(tmp_path)
    a, b = stored(store, "m/a", b"x" * 5000), stored(store, "m/.b.tmp", b"y")
    store.close()
    found = restart(tmp_path)
    assert not found.clean
    by_key = {e.key: e for e in found.entries}
    assert set(by_key) == {"m/a", "m/.b.tmp"}
    again = by_key["m/a"]
    assert (again.slot, again.size, again.checksum, again.generation) == (
        a.slot,
        5000,
        a.checksum,
        a.generation,
    )
    assert (again.created, again.used, again.proven, again.temporary) == (1000.0, 1000.0, False, False)
    assert by_key[b.key].temporary


@pytest.mark.parametrize("clean", [True, False])
def test_another_store_at_the_path_is_not_taken_for_this_one(tmp_path, clean):
    """Both stopped cleanly in their first epoch, and their slots have the same numbers."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        store = SlotStore(tmp_path / name)
        snapshot(store, [stored(store, name, b"x")], clean)
        store.close()
    store = SlotStore(tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "away")
    (tmp_path / "other").rename(tmp_path / "mine")
    assert found_keys(recovery.recover(store)) == ["mine"]
    store.close()


def test_an_empty_directory(tmp_path):
    assert restart(tmp_path) == Found([], [], {}, clean=False)


def test_void_torn_and_short_files_are_unlinked(tmp_path):
    store = SlotStore(tmp_path)
    kept, void, torn, short, cut = (stored(store, f"k{i}", b"x" * 5000) for i in range(5))
    store.void(void)
    with open(path_of(tmp_path, torn.slot), "r+b") as file:
        file.seek(-BLOCK + 20, os.SEEK_END)
        file.write(b"\xff")
    os.truncate(path_of(tmp_path, short.slot), 100)
    with open(path_of(tmp_path, cut.slot), "r+b") as file:  # a valid footer, of a value of another size
        data = file.read()
        file.seek(0)
        file.write(data[-2 * BLOCK :])
        file.truncate(2 * BLOCK)
    (tmp_path / "slots" / "05" / "5").touch()
    store.close()
    assert found_keys(restart(tmp_path)) == ["k0"]
    assert slot_files(tmp_path) == [path_of(tmp_path, kept.slot)]


@pytest.mark.parametrize("older_first", [True, False])
def test_of_two_objects_with_one_key_the_higher_generation_wins(tmp_path, older_first):
    store = SlotStore(tmp_path)
    generations = (5, 6) if older_first else (6, 5)
    made = [stored(store, "k", b"x" * 5000, generation) for generation in generations]
    store.close()
    (found,) = restart(tmp_path).entries
    assert found.generation == 6
    assert found.slot == next(e.slot for e in made if e.generation == 6)
    assert len(slot_files(tmp_path)) == 1


def test_foreign_names_stay(tmp_path):
    store = SlotStore(tmp_path)
    stored(store, "k", b"x")
    store.close()
    foreign = tmp_path / "slots" / "00" / "lost+found"
    foreign.write_bytes(b"?")
    assert found_keys(restart(tmp_path)) == ["k"]
    assert foreign.exists()


def test_an_object_of_a_newer_format_is_left_alone_and_told(tmp_path, expected_warnings):
    expected_warnings.append("left alone: footer of format 2")
    store = SlotStore(tmp_path)
    newer = stored(store, "new", b"x" * 5000)
    with open(path_of(tmp_path, newer.slot), "r+b") as file:
        file.seek(-BLOCK, os.SEEK_END)
        file.write(block(version=2))
    store.close()
    assert found_keys(restart(tmp_path)) == []
    assert path_of(tmp_path, newer.slot).exists()


def test_a_slot_that_can_not_be_read_does_not_stop_the_others(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("left alone: Input/output error")
    store = SlotStore(tmp_path)
    bad, good = stored(store, "bad", b"x"), stored(store, "good", b"x")
    store.close()
    real = os.pread
    inode = path_of(tmp_path, bad.slot).stat().st_ino

    def failing(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode:
            raise OSError(5, "Input/output error")
        return bytes(real(fd, size, offset))

    monkeypatch.setattr(os, "pread", failing)
    assert found_keys(restart(tmp_path)) == ["good"]
    assert path_of(tmp_path, bad.slot).exists()
    assert path_of(tmp_path, good.slot).exists()


def test_a_file_that_can_not_be_unlinked_does_not_stop_the_start(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("can't be removed: Operation not permitted")
    store = SlotStore(tmp_path)
    void = stored(store, "void", b"x")
    stored(store, "good", b"x")
    store.void(void)
    store.close()

    def failing(self: SlotStore, slot: int) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(SlotStore, "unlink", failing)
    assert found_keys(restart(tmp_path)) == ["good"]


# -- snapshots


def two(path: Path) -> tuple[SlotStore, Entry, Entry]:
    store = SlotStore(path)
    a, b = stored(store, "a", b"x"), stored(store, "b", b"y")
    a.used, a.hits, b.used = 2009.0, 4, 2003.0
    return store, a, b


def test_a_clean_snapshot_is_used_without_reading_footers(tmp_path, monkeypatch):
    store, a, b = two(tmp_path)
    b.flags |= UNPROVEN
    snapshot(store, [a, b], clean=True, free=(FreeSlot(77, 8192),))
    store.close()
    monkeypatch.setattr(scan, "scan", lambda slots: pytest.fail("the footers were read"))
    found = restart(tmp_path)
    assert found.clean
    assert found_keys(found) == ["b", "a"], "the least recently used first"
    assert [(e.used, e.hits, e.proven) for e in found.entries] == [(2003.0, 0, False), (2009.0, 4, True)]
    assert found.free_slots == [FreeSlot(77, 8192)]
    assert found.extras == {"modes": 1}


def test_a_clean_snapshot_of_another_boot_proves_nothing(tmp_path, monkeypatch):
    store, a, b = two(tmp_path)
    snapshot(store, [a, b], clean=True)
    store.close()
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    found = restart(tmp_path)
    assert found.clean
    assert not any(e.proven for e in found.entries)


def test_a_clean_snapshot_is_clean_once(tmp_path):
    store, a, b = two(tmp_path)
    snapshot(store, [a, b], clean=True)
    store.close()
    crashed = SlotStore(tmp_path)  # a start that wrote no snapshot
    stored(crashed, "c", b"z")
    crashed.void(a)
    crashed.close()
    found = restart(tmp_path)
    assert not found.clean
    assert set(found_keys(found)) == {"b", "c"}


def test_a_stale_snapshot_only_gives_the_order_of_use(tmp_path):
    store, a, b = two(tmp_path)
    gone = Entry("gone", store.directory.number(), 1, bytes(16), 1, 1.0)
    snapshot(store, [a, b, gone], clean=False, free=(FreeSlot(77, 8192),))
    b2 = stored(store, "b", b"new")
    store.void(b)
    store.close()
    found = restart(tmp_path)
    assert not found.clean
    assert found_keys(found) == ["b", "a"]
    other, one = found.entries
    assert (one.used, one.hits, one.proven) == (2009.0, 4, False)
    assert (other.slot, other.used, other.hits) == (b2.slot, 1000.0, 0), (
        "use of the replaced object is not its own"
    )
    assert found.free_slots == []
    assert found.extras == {"modes": 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: b"",
        lambda d: d[:5],
        lambda d: d[:-1],
        lambda d: d[: len(d) // 2],
        lambda d: d[:20] + bytes([d[20] ^ 1]) + d[21:],
        lambda d: b"\xff\xff\xff\xff" + d[4:],
        lambda d: d[:-30] + bytes(30),
    ],
)
def test_a_damaged_snapshot_is_told_and_not_used(tmp_path, damage, expected_warnings):
    expected_warnings.append("not used, the footers are read instead")
    store, a, b = two(tmp_path)
    snapshot(store, [a, b], clean=True)
    store.close()
    path = tmp_path / "snapshot"
    path.write_bytes(damage(path.read_bytes()))
    found = restart(tmp_path)
    assert not found.clean
    assert sorted(found_keys(found)) == ["a", "b"]


def test_a_snapshot_half_written_never_takes_the_place_of_the_last(tmp_path):
    store, a, b = two(tmp_path)
    snapshot(store, [a, b], clean=False)
    before = (tmp_path / "snapshot").read_bytes()
    writer = SnapshotWriter(store.directory)
    writer.add(recovery.rows([a]))
    writer.abandon()
    assert (tmp_path / "snapshot").read_bytes() == before
    assert not (tmp_path / "snapshot.new").exists()
    store.close()


def test_another_store_that_came_to_the_path_meanwhile_is_not_taken_for_this_one(tmp_path):
    path, other = tmp_path / "disk", tmp_path / "other"
    for each in (path, other):
        each.mkdir()
        SlotStore(each).close()
    store = SlotStore(path)
    entry = stored(store, "k", b"value")
    # Of no value there: recovery would remove what has that number here.
    path_of(other, entry.slot).write_bytes(bytes(8192))
    path.rename(tmp_path / "away")
    other.rename(path)
    assert found_keys(recovery.recover(store)) == ["k"]
    assert path_of(tmp_path / "away", entry.slot).exists()
    assert path_of(path, entry.slot).exists()
    store.close()
