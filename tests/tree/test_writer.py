"""Writer: whole leaves and trees in one transaction."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from tailrace.errors import KeyPathError, LeafError
from tailrace.tree.load import load
from tailrace.tree.writer import Writer

Pair = collections.namedtuple("Pair", "a b")


def test_leaves_of_every_kind_are_written_one_by_one(tmp_path):
    """Arrays, jax.Arrays, numbers and str under text and tuple keys."""
    with Writer(tmp_path / "checkpoint") as writer:
        writer.write("a/array", np.arange(3))
        writer.write(("a", "b/c"), jnp.ones(2))
        writer.write("step", 7)
        writer.write("name", "net")
    found = load(tmp_path / "checkpoint")

    np.testing.assert_array_equal(found["a"]["array"], np.arange(3))
    np.testing.assert_array_equal(found["a"]["b/c"], np.ones(2))
    assert (found["step"], found["name"]) == (7, "net")


def test_trees_merge_with_leaves_and_with_each_other(tmp_path):
    """Each tree keeps its containers; dicts with str keys around them merge."""
    with Writer(tmp_path / "checkpoint") as writer:
        writer.write_tree({"opt": (Pair(np.ones(2), None), []), "shared": {"x": 1}})
        writer.write_tree({"params": {3: np.zeros(1)}, "shared": {"y": 2}})
        writer.write_tree([5, {}], prefix="deep/list")
        writer.write("deep/leaf", 6)
    found = load(tmp_path / "checkpoint")

    assert isinstance(found["opt"][0], Pair)
    assert found["opt"][1] == []
    assert list(found["params"]) == [3]
    assert found["shared"] == {"x": 1, "y": 2}
    assert found["deep"] == {"list": [5, {}], "leaf": 6}


def test_a_leaf_written_again_is_replaced(tmp_path):
    """The last value of a key counts, whatever kinds the two have."""
    with Writer(tmp_path / "checkpoint") as writer:
        writer.write("x", np.ones(3))
        writer.write("x", "text")
        writer.write("y", "text")
        writer.write("y", np.float32(2))

    assert load(tmp_path / "checkpoint") == {"x": "text", "y": np.float32(2)}


def test_a_container_written_again_is_replaced_with_its_leaves(tmp_path):
    """A list written over a longer one, and None over a list, leave nothing of what was there."""
    with Writer(tmp_path / "checkpoint") as writer:
        writer.write_tree({"a": [1, 2, "three"], "b": [1, 2], "c": {"x": 1}})
        writer.write_tree({"a": [4], "b": None, "c": {"y": 2}})

    assert load(tmp_path / "checkpoint") == {"a": [4], "b": None, "c": {"x": 1, "y": 2}}


def test_a_durable_write_survives_the_writer(tmp_path):
    """After `write(durable=True)` a writer that dies has lost nothing of it."""
    writer = Writer(tmp_path / "checkpoint")
    writer.write("x", np.arange(4), durable=True)
    with pytest.raises(RuntimeError, match="dies"), writer:
        raise RuntimeError("dies")
    with Writer(tmp_path / "checkpoint", resume=True) as again:
        missing = again.missing()

    assert missing == {}
    np.testing.assert_array_equal(load(tmp_path / "checkpoint")["x"], np.arange(4))


def test_the_array_may_be_changed_once_write_returned(tmp_path):
    """What is written is what the array held when `write` was called."""
    array = np.ones(100_000)
    with Writer(tmp_path / "checkpoint") as writer:
        writer.write("x", array)
        array[:] = 2

    np.testing.assert_array_equal(load(tmp_path / "checkpoint")["x"], np.ones(100_000))


@pytest.mark.parametrize("value", [None, {"a": 1}, [1], (), Pair(1, 2)], ids=repr)
def test_a_container_is_no_leaf(tmp_path, value):
    """`write` refuses containers and names `write_tree`."""
    with pytest.raises(LeafError, match="write_tree"), Writer(tmp_path / "checkpoint") as writer:
        writer.write("x", value)

    assert list(tmp_path.iterdir()) == []


def test_a_tree_with_one_bad_leaf_is_refused_as_a_whole(tmp_path):
    """Nothing of a tree is written when one of its leaves cannot be."""
    with Writer(tmp_path / "checkpoint") as writer:
        with pytest.raises(LeafError, match="leaf 't/bad'"):
            writer.write_tree({"good": np.ones(2), "bad": b"x"}, prefix="t")
        with pytest.raises(KeyPathError, match="would both be stored"):
            writer.write_tree({"a.b": 1, "a": {"b": 2}})
        writer.write("only", 1)

    assert load(tmp_path / "checkpoint") == {"only": 1}
