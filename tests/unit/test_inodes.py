"""Inode numbers, lookup counts and paths."""

import pytest

from kvcsfs.fuse.inodes import Inodes


def test_a_number_is_never_given_twice():
    inodes = Inodes()
    assert inodes.root.number == 1
    numbers = set()
    for _ in range(3):
        node = inodes.file(0, "a", None)
        node.lookups = 2
        numbers.add(node.number)
        inodes.forget([(node.number, 1)])
        assert inodes.get(node.number) is node
        inodes.forget([(node.number, 1)])
        assert inodes.get(node.number) is None
        inodes.check()
    assert len(numbers) == 3


def test_an_open_file_outlives_its_name_and_the_kernels_memory():
    inodes = Inodes()
    node = inodes.file(0, "a", None)
    node.lookups, node.opens = 1, 1
    inodes.detach(node, {"mode": 0o600})
    assert node.gone
    assert node.kept == {"mode": 0o600}
    other = inodes.file(0, "a", None)
    assert other.number != node.number
    inodes.forget([(node.number, 1)])
    assert inodes.get(node.number) is node
    assert list(inodes.open_files()) == [node]
    node.opens = 0
    inodes.drop_unused(node)
    assert inodes.get(node.number) is None
    assert inodes.files[0, "a"] is other
    inodes.check()


def test_moving_takes_the_place_of_another():
    inodes = Inodes()
    node, other = inodes.file(0, "a", None), inodes.file(0, "b", None)
    inodes.move(node, "b", inodes.root, b"b")
    assert other.gone
    inodes.drop_unused(other)
    assert (node.key, node.name, node.parent) == ("b", b"b", inodes.root)
    assert inodes.files == {(0, "b"): node}
    directory = inodes.directory(0, "d/", inodes.root, b"d")
    inodes.move(directory, "e/", inodes.root, b"e")
    assert inodes.directory(0, "e/", inodes.root, b"e") is directory
    other = inodes.directory(0, "f/", inodes.root, b"f")
    inodes.move(directory, "f/", inodes.root, b"f")
    inodes.drop_unused(other)
    assert inodes.directories[0, "f/"] is directory
    inodes.check()


def test_the_kernel_may_forget_too_much_or_what_is_unknown():
    inodes = Inodes()
    node = inodes.directory(0, "d/", inodes.root, b"d")
    node.lookups = 1
    inodes.forget([(node.number, 5), (12345, 1), (node.number, 1)])
    assert inodes.get(node.number) is None
    assert inodes.get(1) is inodes.root
    inodes.check()


def test_the_same_key_of_two_mountpoints_is_two_files():
    inodes = Inodes()
    assert inodes.file(0, "a", None).number != inodes.file(1, "a", None).number
    inodes.check()


@pytest.mark.parametrize(
    ("path", "base", "partial"),
    [("", "", ""), ("a/b/", "a/b/", ""), ("a/bcd", "a/", "bcd"), ("bcd", "", "bcd")],
)
def test_a_directory_may_be_the_beginning_of_a_component(path, base, partial):
    inodes = Inodes()
    node = inodes.directory(0, path, None, b"")
    assert (node.base, node.partial) == (base, partial)


def test_a_file_that_was_dropped_takes_no_name_from_what_has_it_now():
    inodes = Inodes()
    dropped = inodes.file(0, "key", None)
    inodes.drop_unused(dropped)
    inodes.detach(dropped, {})
    file = inodes.file(0, "key", None)
    inodes.detach(dropped, {})
    assert inodes.files[0, "key"] is file
    inodes.check()
