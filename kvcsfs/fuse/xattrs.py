"""Extended attributes, all computed: the recursive usage of a directory, and what the index knows of a file.

They are found by name and not listed, so that `cp -a` and `rsync -X` don't carry them along as if they were content.
"""

from __future__ import annotations

from pyfuse3 import ENOATTR, FUSEError

from kvcsfs.engine.entry import Entry
from kvcsfs.fuse.inodes import HUB, Directory, File, Node
from kvcsfs.fuse.tree import Tree

PREFIX = "user.kvcs."


async def value(tree: Tree, node: Node, name: bytes) -> bytes:
    """The value of an attribute. ENODATA for one that there isn't."""
    wanted = name.decode(errors="replace").removeprefix(PREFIX)
    found: dict[str, str] = {}
    if isinstance(node, Directory) and node.index != HUB:
        found = await _of_directory(tree, node)
    elif isinstance(node, File) and node.entry is not None and node.writer is None:
        found = _of_entry(node.entry)
    if not name.startswith(PREFIX.encode()) or wanted not in found:
        raise FUSEError(ENOATTR)
    return found[wanted].encode()


async def _of_directory(tree: Tree, node: Directory) -> dict[str, str]:
    entries, value_bytes, _ = await tree.engine.usage(node.index, node.path)
    return {"entries": str(entries), "bytes": str(value_bytes)}


def _of_entry(entry: Entry) -> dict[str, str]:
    return {
        "checksum": entry.checksum.hex(),
        "created": f"{entry.created:.6f}",
        "used": f"{entry.used:.6f}",
        "hits": str(entry.hits),
    }
