"""Access rules over the socket, with peers that are other users."""

from __future__ import annotations

import dataclasses
import errno
import os
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from kvcsfs import wire
from kvcsfs.batch.face import BatchFace
from kvcsfs.config import AccessRule
from kvcsfs.engine.engine import Engine
from tests.needs import needs_root
from tests.rawclient import RawClient
from tests.stores import bytes_on_disk, config, running

pytestmark = needs_root

ALICE, BOB, ML = 61001, 61002, 62001
RULES = (
    AccessRule("a/", frozenset({ALICE})),
    AccessRule("b/", frozenset({BOB})),
    AccessRule("b/shared/", frozenset({BOB}), frozenset({ML}), write=False),
)
DENIED = -errno.EACCES


@asynccontextmanager
async def serving(path: Path, rules: Sequence[AccessRule] = RULES) -> AsyncIterator[Engine]:
    os.chmod(path, 0o711)
    settings = dataclasses.replace(config(path, 64 << 20), access=tuple(rules))
    async with running(settings) as engine, trio.open_nursery() as nursery:
        face = BatchFace(engine, settings.socket)
        os.chmod(settings.socket, 0o666)
        nursery.start_soon(face.serve)
        yield engine
        face.stop()


async def as_user(path: Path, uid: int, gids: Sequence[int], script: Callable[[RawClient], object]) -> None:
    """Run a script of a client in a process of another user."""

    def run() -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.chdir(path)  # the directories above are root's
                os.setgroups(list(gids))
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                with RawClient(Path("sock")) as client:
                    script(client)
                status = 0
            except BaseException:  # noqa: BLE001  told, and then the child must end
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0, "the client's script failed; its traceback is on stderr"

    await trio.to_thread.run_sync(run)


def fill(client: RawClient) -> None:
    for key in ("a/k", "b/k", "b/shared/k", "c/k"):
        assert client.put(key, key.encode() * 1000) == 0


async def test_a_peer_reads_and_writes_its_own_keys_alone(tmp_path):
    def alice(client: RawClient) -> None:
        assert client.get("a/k") == b"a/k" * 1000
        assert client.put("a/new", b"x") == 0
        keys = ["a/k", "b/k", "none/k", "b/shared/k", "c/k", "a/none"]
        (reply,), (fds,) = client.open(keys)
        assert reply.sizes == [3000, DENIED, DENIED, DENIED, DENIED, 0]
        assert len(fds) == 1
        assert os.pread(fds[0], 3000, 0) == b"a/k" * 1000
        sizes = client.ask(wire.Query(5, 0, keys), wire.QueryReply).sizes
        assert sizes == [3000, DENIED, DENIED, DENIED, DENIED, 0]
        (reserved,), (fds,) = client.reserve(["b/k", "a/2", "c/new"], [10, 10, 10])
        assert [min(t, 0) for t in reserved.tokens] == [DENIED, 0, DENIED]
        os.pwrite(fds[0], b"0123456789", 0)
        os.close(fds[0])
        assert client.commit([reserved.tokens[1]], [b"0123456789"]) == [0]
        assert client.get("a/2") == b"0123456789"
        deleted = client.ask(wire.Delete(6, 0, ["b/k", "a/new", "a/none"]), wire.DeleteReply).statuses
        assert deleted == [DENIED, 0, -errno.ENOENT]
        assert client.ask(wire.Check(7, 0, ["b/k", "a/k"]), wire.CheckReply).statuses == [DENIED, 3000]

    async with serving(tmp_path):
        await as_user(tmp_path, 0, [], fill)
        await as_user(tmp_path, ALICE, [], alice)


async def test_groups_count_the_supplementary_ones_too(tmp_path):
    def member(client: RawClient) -> None:
        assert client.get("b/shared/k") == b"b/shared/k" * 1000
        assert client.put("b/shared/k", b"x") == DENIED
        assert client.open(["b/k"])[0][0].sizes == [DENIED]

    def other(client: RawClient) -> None:
        assert client.open(["b/shared/k"])[0][0].sizes == [DENIED]

    async with serving(tmp_path):
        await as_user(tmp_path, 0, [], fill)
        await as_user(tmp_path, 61009, [*range(70000, 71000), ML, 7], member)
        await as_user(tmp_path, ML, [], member)  # as the primary group
        await as_user(tmp_path, 61009, [5], other)


async def test_what_covers_many_keys_needs_rights_to_all(tmp_path):
    def alice(client: RawClient) -> None:
        for request in (
            wire.Usage(5, 0, ""),
            wire.List(5, 0, ""),
            wire.Usage(5, 0, "b/"),
            wire.List(5, 0, "b/"),
            wire.Evict(5, 0, "", 0),
            wire.Evict(5, 0, "b/", 0),
            wire.Remove(5, 0, ""),
            wire.Remove(5, 0, "b"),
        ):
            failure = client.ask(request, wire.Failure)
            assert (failure.errno, failure.id) == (errno.EACCES, 5)
            assert f"user {ALICE} may not" in failure.message
        assert client.ask(wire.Usage(5, 0, "a/"), wire.UsageReply).entries == 1
        assert [e.key for e in client.ask(wire.List(5, 0, "a/"), wire.ListReply).entries] == ["a/k"]
        assert client.ask(wire.Remove(5, 0, "a/"), wire.EvictReply).entries == 1
        assert client.status()["entries"] == 3

    async with serving(tmp_path):
        await as_user(tmp_path, 0, [], fill)
        await as_user(tmp_path, ALICE, [], alice)


async def test_another_peers_lease_and_reservation_are_out_of_reach(tmp_path):
    def bob(client: RawClient) -> None:
        (opened,), _ = client.open(["b/k"])
        (reserved,), (writable,) = client.reserve(["b/new"], [10])
        pid = os.fork()
        if pid == 0:  # the other user, while this one holds them
            status = 1
            try:
                os.setresuid(ALICE, ALICE, ALICE)
                alice(opened.lease, reserved.tokens[0])
                status = 0
            except BaseException:  # noqa: BLE001  told, and then the child must end
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert client.status()["leases"] == 1
        os.pwrite(writable[0], b"0123456789", 0)
        os.close(writable[0])
        assert client.commit(reserved.tokens, [b"0123456789"]) == [0]
        assert client.get("b/new") == b"0123456789"

    def alice(lease: int, token: int) -> None:
        with RawClient(Path("sock")) as client:
            client.send(wire.Release(0, lease))
            client.send(wire.Abort(0, [token]))
            assert client.commit([token], [b"evil"]) == [-errno.ESTALE]

    async with serving(tmp_path, [*RULES, AccessRule("", None)]):
        await as_user(tmp_path, 0, [], fill)
        await as_user(tmp_path, 0, [], bob)  # root first, as it forks into the other user


async def test_stale_bytes_of_one_domain_never_reach_another(tmp_path):
    """A writer that commits without writing reads what was in its slot: that must not be another tenant's."""
    secret = b"secret-of-bob" * 300

    def bob(client: RawClient) -> None:
        for i in range(20):
            assert client.put(f"b/{i}", secret) == 0
        keys = [f"b/{i}" for i in range(20)]
        assert client.ask(wire.Delete(5, 0, keys), wire.DeleteReply).statuses == [0] * 20

    def alice(client: RawClient) -> None:
        keys = [f"a/{i}" for i in range(20)]
        (reply,), (fds,) = client.reserve(keys, [len(secret)] * 20)
        for fd in fds:
            os.close(fd)
        empty = [bytes(len(secret))] * 20
        assert client.commit(reply.tokens, empty) == [0] * 20
        _, (fds,) = client.open(keys)
        for fd in fds:
            assert os.pread(fd, len(secret), 0) == bytes(len(secret))

    async with serving(tmp_path) as engine:
        await as_user(tmp_path, BOB, [], bob)
        assert engine.volumes[0].catalog.ledger.free_slots > 0
        await as_user(tmp_path, ALICE, [], alice)
        assert bytes_on_disk(tmp_path / "data0") == engine.volumes[0].catalog.ledger.used


async def test_free_slots_of_before_a_start_or_a_reload_are_given_up(tmp_path):
    def bob(client: RawClient) -> None:
        for i in range(20):
            assert client.put(f"b/{i}", b"x" * 5000) == 0
        keys = [f"b/{i}" for i in range(20)]
        assert client.ask(wire.Delete(5, 0, keys), wire.DeleteReply).statuses == [0] * 20

    async def gone(engine: Engine) -> None:
        with trio.fail_after(5):
            while engine.volumes[0].catalog.ledger.free_slots:
                await trio.sleep(0.001)
        assert bytes_on_disk(tmp_path / "data0") == 0

    async with serving(tmp_path) as engine:
        await as_user(tmp_path, BOB, [], bob)
        assert engine.volumes[0].catalog.ledger.free_slots
    async with serving(tmp_path) as engine:
        await gone(engine)
        await as_user(tmp_path, BOB, [], bob)
        engine.reload(dataclasses.replace(engine.config, access=RULES[:1]))
        await gone(engine)


async def test_a_reload_takes_rights_from_connections_that_are_open(tmp_path):
    rules = (AccessRule("a/", frozenset({ALICE})),)
    reserved_read, reserved_write = os.pipe()
    go_read, go_write = os.pipe()

    def alice(client: RawClient) -> None:
        assert client.put("a/k", b"x") == 0
        (reply,), (fds,) = client.reserve(["a/new"], [3])
        os.pwrite(fds[0], b"new", 0)
        os.close(fds[0])
        os.write(reserved_write, b"x")
        os.read(go_read, 1)
        assert client.open(["a/k"])[0][0].sizes == [DENIED]
        assert client.commit(reply.tokens, [b"new"]) == [-errno.ESTALE]

    async with serving(tmp_path, rules) as engine:

        async def change() -> None:
            await trio.to_thread.run_sync(os.read, reserved_read, 1)
            engine.reload(dataclasses.replace(engine.config, access=(AccessRule("a/", frozenset({BOB})),)))
            os.write(go_write, b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            await as_user(tmp_path, ALICE, [], alice)
        (found,) = await engine.query_many(0, ["a/new"])
        assert found is None
    for fd in (reserved_read, reserved_write, go_read, go_write):
        os.close(fd)
