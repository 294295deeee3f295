"""Batches over a real socket: their frames, descriptors, statuses and commits."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil

import pytest
import trio

from kvcsfs import wire
from kvcsfs.batch.face import BatchFace
from kvcsfs.batch.sender import Sender
from kvcsfs.engine import jobs
from kvcsfs.engine.store import SlotStore
from tests.faces.served import nothing_held, serving, with_client
from tests.rawclient import RawClient
from tests.stores import checksum, config, keys, path_of, running, values


async def test_the_answer_to_an_open_comes_in_frames_of_64_descriptors(tmp_path):
    contents = values([f"m/{i:03}" for i in range(300)], 600)
    names = list(contents)

    def script(client: RawClient) -> None:
        for start in (0, 150):
            part = names[start : start + 150]
            (reply,), (fds,) = client.reserve(part, [600] * 150)
            for name, fd in zip(part, fds, strict=True):
                os.pwrite(fd, contents[name], 0)
                os.close(fd)
            assert client.commit(reply.tokens, [contents[n] for n in part]) == [0] * 150
        asked = [*names[:100], "none", *names[100:]]
        replies, parts = client.open(asked)
        counts = [64, 64, 64, 64, 44]
        assert [len(f) for f in parts] == counts
        firsts = [(r.first, r.more, len(r.sizes)) for r in replies]
        assert firsts == [
            (0, True, 64),
            (64, True, 65),
            (129, True, 64),
            (193, True, 64),
            (257, False, 44),
        ]
        assert len({r.lease for r in replies}) == 1
        assert [len(r.checksums) for r in replies] == [16 * n for n in counts]
        assert replies[1].sizes[100 - 64] == 0
        sums = b"".join(r.checksums for r in replies)
        got = [os.pread(fd, 600, 0) for part in parts for fd in part]
        assert got == [contents[n] for n in names], "descriptor i belongs to hit i"
        assert sums == b"".join(checksum(contents[n]) for n in names)
        for fd in (fd for part in parts for fd in part):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            os.close(fd)
        assert client.status()["leases"] == 1
        client.send(wire.Release(0, replies[0].lease))
        assert client.status()["leases"] == 0

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_a_reserve_of_300_keys_is_two_frames(tmp_path):
    contents = values([f"m/{i:03}" for i in range(300)], 600)

    def script(client: RawClient) -> None:
        sizes = [600] * 300
        sizes[0] = 0
        replies, parts = client.reserve(list(contents), sizes)
        assert [len(f) for f in parts] == [253, 46]
        assert [(r.first, r.more, len(r.tokens)) for r in replies] == [(0, True, 254), (254, False, 46)]
        assert replies[0].tokens[0] == -errno.EINVAL
        tokens = [t for r in replies for t in r.tokens if t > 0]
        written = list(contents.values())[1:]
        for value, fd in zip(written, (fd for part in parts for fd in part), strict=True):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            os.pwrite(fd, value, 0)
            os.close(fd)
        assert client.commit(tokens, written) == [0] * 299
        for name in ("m/001", "m/253", "m/254", "m/299"):
            assert client.get(name) == contents[name]

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_the_first_keys_of_a_long_reserve_can_be_committed_before_the_rest_is_sent(
    tmp_path, monkeypatch
):
    names, taken = [f"k{i}" for i in range(300)], Sender._descriptors_taken

    async def late(self: Sender, count: int) -> None:
        if count == 47:
            await trio.sleep(0.3)
        await taken(self, count)

    def script(client: RawClient) -> None:
        client.send(wire.Reserve(5, 0, names, [5] * 300))
        first, fds = client.receive()
        assert isinstance(first, wire.ReserveReply)
        assert first.more
        for fd in fds:
            os.pwrite(fd, b"value", 0)
            os.close(fd)
        client.send(wire.Commit(6, first.tokens, checksum(b"value") * len(fds)))
        (rest, fds), (committed, _) = client.receive(), client.receive()
        assert isinstance(rest, wire.ReserveReply)
        assert committed == wire.CommitReply(6, [0] * len(first.tokens))
        for fd in fds:
            os.close(fd)

    monkeypatch.setattr(Sender, "_descriptors_taken", late)
    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_opening_and_reserving_nothing(tmp_path):
    def script(client: RawClient) -> None:
        assert client.open([]) == ([wire.OpenReply(2, 0, 0, [], b"", b"", False)], [[]])
        assert client.reserve([], []) == ([wire.ReserveReply(3, 0, [], False)], [[]])
        assert client.commit([], []) == []

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_statuses_of_a_batch(tmp_path):
    def script(client: RawClient) -> None:
        assert client.put("k", b"x" * 10) == 0
        (reply,), (fds,) = client.reserve(["", "x" * 1025, "m.tmp", "big"], [1, 1, 1, 64 << 20])
        assert fds == []
        assert reply.tokens == [-errno.EINVAL, -errno.ENAMETOOLONG, -errno.EINVAL, -errno.ENOSPC]
        client.send(wire.Reserve(9, 0, ["k"], [1], "error"))
        answer, _ = client.receive()
        assert answer == wire.ReserveReply(9, 0, [-errno.EEXIST], False)
        assert client.commit([12345], [b""]) == [-errno.ESTALE]
        assert client.ask(wire.Delete(9, 0, ["k", "none"]), wire.DeleteReply).statuses == [0, -errno.ENOENT]
        assert client.ask(wire.Check(9, 0, ["none"]), wire.CheckReply).statuses == [0]

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_abort_gives_everything_back(tmp_path):
    def script(client: RawClient) -> None:
        (reply,), (fds,) = client.reserve(["a", "b"], [5000, 5000])
        for fd in fds:
            os.close(fd)
        client.send(wire.Abort(0, reply.tokens))
        assert client.commit(reply.tokens, [b"", b""]) == [-errno.ESTALE] * 2

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)
        assert await keys(engine) == []


async def test_the_requests_of_the_command_line(tmp_path):
    def script(client: RawClient) -> None:
        for key in ("a/1", "a/2", "b"):
            client.put(key, b"x" * 5000)
        assert client.ask(wire.Usage(2, 0, "a/"), wire.UsageReply) == wire.UsageReply(2, 2, 10000, 24576)
        page = client.ask(wire.List(3, 0, "a/", "", 1), wire.ListReply)
        assert ([e.key for e in page.entries], page.more) == (["a/1"], True)
        page = client.ask(wire.List(3, 0, "a/", "a/1", 1), wire.ListReply)
        assert ([(e.key, e.size, e.checksum) for e in page.entries], page.more) == (
            [("a/2", 5000, checksum(b"x" * 5000))],
            False,
        )
        assert client.ask(wire.Evict(4, 0, "", 1), wire.EvictReply) == wire.EvictReply(4, 1, 12288)
        assert client.ask(wire.Remove(5, 0, "a/"), wire.EvictReply) == wire.EvictReply(5, 1, 12288)
        assert client.status()["entries"] == 1

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_a_slow_client_is_not_waited_for_by_others(tmp_path):
    def script(client: RawClient) -> None:
        for i in range(3):
            client.put(f"k{i}", b"x" * 5000)
        with RawClient(tmp_path / "sock") as slow:
            for i in range(100):  # more answers with descriptors than may be in flight, none of them read
                slow.send(wire.Open(i + 2, 0, ["k0", "k1", "k2"]))
            assert client.get("k1") == b"x" * 5000

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_a_mountpoint_that_is_not_configured_fails_the_batch(tmp_path):
    settings = config(tmp_path, mountpoints=2, backend="pooled")

    def script(client: RawClient) -> None:
        assert (client.hello.backend, [m.index for m in client.hello.mountpoints]) == ("pooled", [0, 1])
        requests: list[wire.Message] = [
            wire.Query(5, 2, ["k"]),
            wire.Open(5, 2, ["k"]),
            wire.Reserve(5, -1, ["k"], [1]),
        ]
        requests += [wire.Delete(5, 1 << 40, ["k"]), wire.Usage(5, 2), wire.List(5, 2), wire.Evict(5, 2)]
        requests += [wire.Check(5, 2, ["k"]), wire.Remove(5, 2, "k")]
        for request in requests:
            failure = client.ask(request, wire.Failure)
            assert (failure.id, failure.errno) == (5, errno.ENODEV)
            assert "expected 0 to 1" in failure.message
        assert client.ask(wire.Query(6, 1, ["k"]), wire.QueryReply).sizes == [0]

    async with running(settings) as engine, trio.open_nursery() as nursery:
        face = BatchFace(engine, settings.socket)
        nursery.start_soon(face.serve)
        await with_client(tmp_path, script)
        face.stop()


async def test_what_an_unclean_stop_left_is_unproven_until_it_is_checked(tmp_path, expected_warnings):
    expected_warnings.append("dropped 1 entries with a wrong checksum")

    def store(client: RawClient) -> None:
        for key in ("good", "bad"):
            client.put(key, b"x" * 5000)

    def check(client: RawClient) -> None:
        (reply,), (fds,) = client.open(["bad", "none", "good"])
        assert reply.flags == bytes([wire.UNPROVEN] * 2)
        for fd in fds:
            os.close(fd)
        client.send(wire.Release(0, reply.lease))
        assert client.ask(wire.Check(9, 0, ["good", "bad", "none"]), wire.CheckReply).statuses == [5000, 0, 0]
        (reply,), (fds,) = client.open(["bad", "good"])
        assert (reply.sizes, reply.flags) == ([0, 5000], b"\0")
        os.close(fds[0])
        client.put("new", b"y")
        (reply,), (fds,) = client.open(["new"])
        assert reply.flags == b"\0"
        os.close(fds[0])

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, store)
        shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
    async with serving(tmp_path / "crash") as engine:
        (bad,) = await engine.query_many(0, ["bad"])
        assert bad is not None
        fd = os.open(path_of(tmp_path / "crash" / "data0", bad.slot), os.O_WRONLY)
        os.pwrite(fd, b"?", 77)
        os.close(fd)
        await with_client(tmp_path / "crash", check)


async def test_while_the_store_recovers_puts_are_refused_and_gets_miss(tmp_path):
    def script(client: RawClient) -> None:
        assert client.get("k") is None
        assert client.ask(wire.Query(5, 0, ["k"]), wire.QueryReply).sizes == [0]
        for request in (wire.Reserve(5, 0, ["k"], [1]), wire.Delete(5, 0, ["k"]), wire.Evict(5, 0)):
            assert client.ask(request, wire.Failure).errno == errno.EBUSY

    async with serving(tmp_path) as engine:
        engine.volumes[0].recovering = True
        await with_client(tmp_path, script)
        engine.volumes[0].recovering = False


@pytest.mark.usefixtures("in_threads")
async def test_an_object_that_can_not_be_opened_is_an_error_in_its_place(tmp_path, monkeypatch):
    contents = values(["a", "b", "c"])
    real = SlotStore.open_read

    def script(client: RawClient) -> None:
        for key, value in contents.items():
            client.put(key, value)
        trio.from_thread.run_sync(break_b)
        (reply,), (fds,) = client.open(["a", "b", "none", "c"])
        assert reply.sizes == [5000, -errno.EIO, 0, 5000]
        assert [os.pread(fd, 5000, 0) for fd in fds] == [contents["a"], contents["c"]]
        assert reply.checksums == checksum(contents["a"]) + checksum(contents["c"])
        for fd in fds:
            os.close(fd)

    def break_b() -> None:
        volume = engine.volumes[0]
        jobs.close_all(volume.descriptors.clear())
        slot = volume.catalog.index.get("b").slot

        def failing(self, wanted):
            if wanted == slot:
                raise OSError(errno.EIO, "Input/output error")
            return real(self, wanted)

        monkeypatch.setattr(SlotStore, "open_read", failing)

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)
