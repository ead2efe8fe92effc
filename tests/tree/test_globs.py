"""Patterns over keys."""

from __future__ import annotations

import pytest

from tailrace.errors import InputError, MissingKeyError
from tailrace.tree.globs import Glob, nearest, renamed, select

KEYS = ["params/a/kernel", "params/a/bias", "params/b/kernel", "opt/0/mu", "step"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("params/**", {0, 1, 2}),
        ("**", {0, 1, 2, 3, 4}),
        ("**/kernel", {0, 2}),
        ("params/*/bias", {1}),
        ("params/**/kernel", {0, 2}),
        ("s?ep", {4}),
        ("*", {4}),
        ("step", {4}),
        ("**/step", {4}),
        ("params/a/k*", {0}),
    ],
)
def test_what_a_pattern_matches(pattern, matched):
    """`*` stays within one part, `**` spans any number of them, none included."""
    assert {i for i, key in enumerate(KEYS) if Glob(pattern).match(key) is not None} == matched


def test_characters_of_regular_expressions_are_plain():
    """A dot, bracket or plus in a key means itself."""
    assert Glob("a.b[0]+").match("a.b[0]+") == ()
    assert Glob("a.b").match("axb") is None


def test_select_takes_one_or_many():
    """A list of patterns selects what any of them matches."""
    assert select(KEYS, ["step", "opt/**"], "it") == {"step", "opt/0/mu"}


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("params", "it holds 3 leaves; write 'params/\\*\\*'"),
        ("params/a/kernal", "Nearest: params/a/kernel"),
        ("zzz/**", "At the top there are: opt, params, step"),
    ],
)
def test_a_pattern_that_matches_nothing_shows_what_is_near(pattern, hint):
    """Nothing selected is an error, never an empty tree."""
    with pytest.raises(MissingKeyError, match=hint):
        select(KEYS, pattern, "it")


@pytest.mark.parametrize(
    ("old", "new", "key", "expected"),
    [
        ("params/**", "model/**", "params/a/kernel", "model/a/kernel"),
        ("**/kernel", "**/w", "params/a/kernel", "params/a/w"),
        ("**/step", "x/**/y", "step", "x/y"),
        ("params/*/bias", "b_*", "params/a/bias", "b_a"),
        ("step", "count", "step", "count"),
    ],
)
def test_rename_carries_what_the_wildcards_stand_for(old, new, key, expected):
    """Each wildcard on the right takes what the one on the left matched."""
    assert renamed(KEYS, {old: new}, "it")[key] == expected


def test_the_first_rule_that_matches_counts():
    """Rules are tried in the order they are written."""
    names = renamed(KEYS, {"params/a/**": "first/**", "params/**": "second/**"}, "it")

    assert names["params/a/bias"] == "first/bias"
    assert names["params/b/kernel"] == "second/b/kernel"


def test_rename_refuses_what_cannot_be_meant():
    """Other wildcards on the right, a rule without a match, and two leaves made one are errors."""
    with pytest.raises(InputError, match="same wildcards"):
        renamed(KEYS, {"params/**": "x"}, "it")
    with pytest.raises(MissingKeyError, match="matches no leaf"):
        renamed(KEYS, {"nothing/**": "x/**"}, "it")
    with pytest.raises(InputError, match="the one name 'step'"):
        renamed(KEYS, {"opt/0/mu": "step"}, "it")


def test_nearest_prefers_the_same_last_part():
    """A leaf that moved is nearer than one that is spelt alike."""
    assert nearest("model/a/kernel", KEYS, 1) == ["params/a/kernel"]
