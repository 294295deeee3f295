"""Who may do what: the rules by themselves, their configuration, and slots that don't cross domains."""

from __future__ import annotations

import os

import pytest

from kvcsfs import config
from kvcsfs.config import AccessRule
from kvcsfs.engine.access import Access
from kvcsfs.engine.catalog import Catalog, FreeSlot
from kvcsfs.errors import ConfigError
from tests.stores import entry

ALICE, BOB, ML = 1001, 1002, 2001
RULES = (
    AccessRule("", None, write=False),
    AccessRule("a/", frozenset({ALICE})),
    AccessRule("a/shared/", frozenset(), frozenset({ML}), write=False),
    AccessRule("a/shared/", frozenset({ALICE})),
)


@pytest.mark.parametrize(
    ("uid", "gids", "key", "read", "write"),
    [
        (ALICE, [], "a/k", True, True),
        (BOB, [], "a/k", False, False),
        (BOB, [ML], "a/k", False, False),
        (BOB, [ML], "a/shared/k", True, False),
        (BOB, [5, ML], "a/shared/k", True, False),
        (BOB, [], "a/shared/k", False, False),
        (ALICE, [], "a/shared/k", True, True),
        (BOB, [], "other", True, False),
        (BOB, [], "a", True, False),
        (BOB, [], "ab/k", True, False),
        (0, [], "a/k", True, True),
        (os.geteuid(), [], "a/shared/k", True, True),
    ],
)
def test_the_longest_prefix_decides(uid, gids, key, read, write):
    access = Access(RULES)
    assert (access.may(uid, gids, 0, key, False), access.may(uid, gids, 0, key, True)) == (read, write)


def test_without_rules_everything_is_permitted():
    access = Access()
    assert access.may(BOB, [], 0, "k", True)
    assert access.domain("k") is None
    assert not access.restricted


def test_a_key_without_a_rule_is_nobodys():
    access = Access(RULES[1:])
    assert not access.may(ALICE, [], 0, "b/k", False)
    assert access.domain("b/k") is None


def test_what_covers_many_keys_needs_every_rule_below():
    access = Access(RULES)
    assert access.may_below(ALICE, [], 0, "", False)
    assert not access.may_below(BOB, [], 0, "", False), "a/ is below it"
    assert not access.may_below(BOB, [], 0, "a", False), "a/ starts with it"
    assert access.may_below(BOB, [], 0, "b", False)
    assert access.may_below(BOB, [ML], 0, "a/shared/x", False)
    assert not access.may_below(BOB, [ML], 0, "a/shared/x", True)
    assert not access.may_below(ALICE, [], 0, "", True)


def test_rules_can_be_replaced():
    access = Access(RULES)
    access.load(())
    assert access.may(BOB, [], 0, "a/k", True)


# -- slots


def test_a_slot_is_not_written_again_for_another_domain():
    access = Access(RULES)
    catalog = Catalog(1 << 20, access.domain)
    catalog.add_free(FreeSlot(7, 8192, domain="a/"))
    assert catalog.promise([8192], ["other"]).create == [0]
    assert catalog.promise([8192], ["a/k"]).reuse[0].slot == 7
    catalog.check()


def test_a_victim_of_another_domain_is_unlinked():
    access = Access(RULES)
    catalog = Catalog(8192, access.domain)
    catalog.load([victim := entry("a/k", 100)])
    plan = catalog.promise([8192], ["other"])
    assert (plan.recycle, plan.unlink, plan.create) == ({}, [victim], [0])


def test_a_reclaimed_slot_stays_in_its_domain():
    access = Access(RULES)
    catalog = Catalog(1 << 20, access.domain)
    catalog.load([old := entry("a/k", 100)])
    catalog.remove(old)
    catalog.reclaimed(old, FreeSlot(old.slot, 8192))
    assert [s.domain for s in catalog.free_slots()] == ["a/"]
    catalog.check()


# -- configuration


def loaded(tmp_path, text: str) -> tuple[AccessRule, ...]:
    file = tmp_path / "kvcsfs.toml"
    file.write_text(f'[[mountpoints]]\npath = "{tmp_path}"\ncapacity = "1GiB"\n[[access]]\n{text}')
    return config.load(file, {}).access


def test_names_and_numbers(tmp_path):
    (rule,) = loaded(tmp_path, 'prefix = "a/"\nusers = ["root", 1001]\ngroups = ["daemon", 5]\nwrite = false')
    assert rule == AccessRule("a/", frozenset({0, 1001}), frozenset({1, 5}), read=True, write=False)


def test_everyone(tmp_path):
    assert loaded(tmp_path, 'prefix = ""\nusers = ["*"]') == (AccessRule("", None),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('users = ["*"]', 'access[0].prefix: None: expected a text that ends with "/"'),
        ('prefix = "a"\nusers = ["*"]', "access[0].prefix: 'a': expected a text that ends with \"/\""),
        ('prefix = "a/"', "access[0]: expected users or groups"),
        ('prefix = "a/"\nusers = ["no such user"]', "access[0].users: 'no such user' isn't known here"),
        ('prefix = "a/"\nusers = [-1]', "access[0].users: -1 isn't known here"),
        ('prefix = "a/"\nusers = [true]', "access[0].users: True isn't known here"),
        ('prefix = "a/"\nusers = "alice"', "access[0].users: 'alice': expected a list of names or numbers"),
        ('prefix = "a/"\ngroups = ["*"]', "access[0].groups: '*' is for users"),
        ('prefix = "a/"\nusers = ["*"]\nread = 1', "access[0].read: 1: expected true or false"),
        ('prefix = "a/"\nusers = ["*"]\nwrit = true', "access[0].writ: unknown key"),
    ],
)
def test_a_wrong_rule_is_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
