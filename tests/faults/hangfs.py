"""A file system in memory that stops answering when told to: the stand-in for a file server that went away.

`HangFs(path)` mounts it in a process of its own; run as a script it serves. As with NFS, and other than with a FUSE
file system that answers flush or has read a request, a process can be killed while it waits: the process is stopped.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Self

import pyfuse3
import trio


class HangFs:
    """The test's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def hang(self) -> None:
        """No request is read from now on."""
        self._process.send_signal(signal.SIGSTOP)

    def go(self) -> None:
        """All are answered, also those that wait."""
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()
        subprocess.run(["umount", "-l", self.path], check=True)


class Node:
    """A file or directory."""

    def __init__(self, number: int, mode: int) -> None:
        self.number, self.mode = number, mode
        self.data = bytearray()
        self.names: dict[bytes, Node] = {}


class Memory(pyfuse3.Operations):
    """The served end."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes = {1: Node(1, stat.S_IFDIR | 0o755)}

    def _new(self, parent: int, name: bytes, mode: int) -> Node:
        node = Node(len(self._nodes) + 1, mode)
        self._nodes[node.number] = node
        self._nodes[parent].names[name] = node
        return node

    def _attributes(self, node: Node) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_mode, entry.st_size = node.number, node.mode, len(node.data)
        entry.st_nlink, entry.st_blocks = 1, (len(node.data) + 511) // 512
        entry.attr_timeout = entry.entry_timeout = 0  # nothing is answered for us
        return entry

    async def lookup(self, parent, name, ctx):
        node = self._nodes[parent].names.get(name)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(node)

    async def getattr(self, number, ctx):
        return self._attributes(self._nodes[number])

    async def setattr(self, number, attr, fields, fh, ctx):
        node = self._nodes[number]
        if fields.update_size:
            del node.data[attr.st_size :]
            node.data.extend(bytes(attr.st_size - len(node.data)))
        if fields.update_mode:
            node.mode = attr.st_mode
        return self._attributes(node)

    async def mkdir(self, parent, name, mode, ctx):
        return self._attributes(self._new(parent, name, stat.S_IFDIR | mode))

    async def create(self, parent, name, mode, flags, ctx):
        node = self._new(parent, name, stat.S_IFREG | mode)
        return pyfuse3.FileInfo(fh=node.number), self._attributes(node)

    async def open(self, number, flags, ctx):
        return pyfuse3.FileInfo(fh=number, keep_cache=False)

    async def opendir(self, number, ctx):
        return number

    async def readdir(self, number, start, token):
        for i, (name, node) in enumerate(self._nodes[number].names.items()):
            if i >= start and not pyfuse3.readdir_reply(token, name, self._attributes(node), i + 1):
                return

    async def read(self, number, offset, size):
        return bytes(self._nodes[number].data[offset : offset + size])

    async def write(self, number, offset, data):
        held = self._nodes[number].data
        held.extend(bytes(max(0, offset - len(held))))
        held[offset : offset + len(data)] = data
        return len(data)

    async def unlink(self, parent, name, ctx):
        del self._nodes[parent].names[name]

    async def rename(self, parent, name, new_parent, new_name, flags, ctx):
        self._nodes[new_parent].names[new_name] = self._nodes[parent].names.pop(name)

    async def fsync(self, number, datasync):
        pass

    async def fsyncdir(self, number, datasync):
        pass

    async def statfs(self, ctx):
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = answer.f_frsize = 4096
        answer.f_blocks = answer.f_bfree = answer.f_bavail = 1 << 20
        return answer


async def serve(path: str) -> None:
    """Serve until killed."""
    pyfuse3.init(Memory(), path, {"fsname=hangfs", "allow_other"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        await trio.to_thread.run_sync(os.statvfs, path)
        print("ready", flush=True)


if __name__ == "__main__":
    trio.run(serve, sys.argv[1])
