"""Containers: recorded, put together, read back."""

from __future__ import annotations

import collections
import json
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from tailrace.errors import FormatError, KeyPathError
from tailrace.format import structure
from tailrace.format.structure import (
    LEAF,
    NULL,
    Custom,
    Dataclass,
    Dict,
    List,
    Tuple,
    assemble,
    decode,
    encode,
    rebuild,
)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Config:
    width: Any
    name: Any


PAIR = structure.NamedTuple(__name__, "Pair", ("a", "b"), (LEAF, NULL))


def test_a_node_survives_json_with_int_keys_and_order():
    """What is written as JSON comes back as the same node, the kinds of keys and their order included."""
    node = Dict((7, "b", "a"), (LEAF, List((NULL, Tuple(()))), PAIR))

    assert decode(encode(node)) == node
    assert json.loads(encode(node))[0] == "dict"


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[", b'["dict",["a"],[]]', b'["dict",["a","a"],[["leaf"],["leaf"]]]', b'["set",[]]', b"\xff"]
)
def test_json_that_is_no_node_is_a_format_error(text):
    """Damaged or foreign JSON is one of our errors, never a crash."""
    with pytest.raises(FormatError, match="tree structure"):
        decode(text)


def test_json_nested_without_end_is_a_format_error():
    """Hostile nesting does not exhaust the stack."""
    with pytest.raises(FormatError):
        decode(b'["list",[' * 100_000)


def test_paths_alone_make_nested_dicts():
    """Leaves in no record hang in dicts with str keys, in the order of the paths."""
    root = assemble([], [("b", "x"), ("a",), ("b", "y")])

    assert rebuild(root, lambda path: "/".join(map(str, path))) == {"b": {"x": "b/x", "y": "b/y"}, "a": "a"}
    assert list(root.keys) == ["b", "a"]
    assert structure.is_plain(root)


@pytest.mark.parametrize("node", [Dict((), ()), Dict((1,), (LEAF,)), List((LEAF,)), NULL, Dict(("a",), (NULL,))])
def test_what_paths_cannot_say_is_not_plain(node):
    """Empty containers, None, int keys and anything but a dict must be recorded."""
    assert not structure.is_plain(node)


def test_a_later_record_replaces_an_earlier_one_at_its_prefix():
    """The record written last says what the container is."""
    recorded = [(("a",), List((LEAF, LEAF))), (("a",), Tuple((LEAF,)))]

    assert rebuild(assemble(recorded, [("a", 0)]), lambda path: path) == {"a": (("a", 0),)}


def test_records_merge_below_plain_dicts():
    """Two trees written under one root merge, each with its own containers."""
    first = Dict(("opt", "n"), (List((LEAF,)), NULL))
    second = Dict(("params",), (Dict((3,), (LEAF,)),))
    recorded = [*structure.records(first), *structure.records(second)]
    root = assemble(recorded, [("opt", 0), ("params", 3), ("w",)])

    assert rebuild(root, lambda _: 1) == {"opt": [1], "n": None, "params": {3: 1}, "w": 1}


def test_a_text_part_finds_the_recorded_int_place():
    """`layers/0` typed as text is the recorded position 0: both have one name on disk."""
    root = assemble([(("layers",), List((LEAF,)))], [("layers", "0")])

    assert list(structure.leaf_paths(root)) == [("layers", 0)]


def test_a_leaf_that_is_gone_leaves_its_dict():
    """A deleted leaf is dropped from a dict, and a list that lost all its leaves goes with them."""
    recorded = [((), Dict(("a", "b", "l"), (LEAF, NULL, List((LEAF, LEAF)))))]

    assert rebuild(assemble(recorded, []), lambda _: 1) == {"b": None}


def test_a_list_that_lost_one_leaf_is_refused():
    """Half a list is neither what was written nor anything else."""
    with pytest.raises(KeyPathError, match=r"'l' is a list, and 'l/1'"):
        assemble([(("l",), List((LEAF, LEAF)))], [("l", 0)])


def test_a_leaf_beyond_a_list_is_refused():
    """A list does not grow by a leaf written beside it."""
    with pytest.raises(KeyPathError, match="the list at 'l' was written with 1 entries"):
        assemble([(("l",), List((LEAF,)))], [("l", 0), ("l", 1)])


@pytest.mark.parametrize("paths", [[("a",), ("a", "b")], [("a", "b"), ("a",)]])
def test_a_leaf_cannot_hold_another(paths):
    """One key cannot be a leaf and a container, in whatever order they come."""
    with pytest.raises(KeyPathError, match="rename one of them"):
        assemble([], paths)


def test_none_gives_way_to_a_leaf():
    """A leaf written where None was recorded takes its place."""
    assert rebuild(assemble([(("a",), NULL)], [("a",)]), lambda _: 1) == {"a": 1}


def test_classes_that_are_imported_come_back_as_themselves():
    """A NamedTuple and a dataclass whose modules are imported are rebuilt as their own classes."""
    node = Dict(("p", "c"), (PAIR, Dataclass(__name__, "Config", ("width", "name"), (LEAF, LEAF))))
    found = rebuild(node, lambda path: path[-1])

    assert found == {"p": Pair("a", None), "c": Config("width", "name")}
    assert type(found["p"]) is Pair


def test_classes_that_are_unknown_come_back_as_equals():
    """Without its class a NamedTuple is an equal namedtuple, a dataclass a dict; nothing is imported for it."""
    pair = rebuild(structure.NamedTuple("no.such", "Outer.Pair", ("a", "b"), (LEAF, LEAF)), lambda path: path[-1])
    config = rebuild(Dataclass("no.such", "Config", ("x",), (LEAF,)), lambda path: path[-1])

    assert pair == collections.namedtuple("Pair", "a b")("a", "b")
    assert type(pair).__name__ == "Pair"
    assert config == {"x": "x"}


def test_a_class_whose_fields_changed_is_not_filled():
    """A NamedTuple with other fields today comes back as it was saved."""
    found = rebuild(structure.NamedTuple(__name__, "Pair", ("a", "z"), (LEAF, LEAF)), lambda path: path[-1])

    assert found._asdict() == {"a": "a", "z": "z"}


def test_custom_nodes_come_back_as_dict_or_list():
    """What only JAX can rebuild is a dict of its keys, or a list where they are positions."""
    assert rebuild(Custom("m", "C", ("x",), (LEAF,)), lambda _: 1) == {"x": 1}
    assert rebuild(Custom("m", "C", (0, 1), (LEAF, NULL)), lambda _: 1) == [1, None]


def test_a_tree_of_139583_leaves_is_put_together_in_a_second():
    """The largest published model (Kimi-K2's Hugging Face files) has that many leaves."""
    paths = [("model", f"layer_{i // 1200}", "mlp", f"expert_{i}", "weight") for i in range(139_583)]
    start = time.process_time()
    root = assemble([], paths)
    again = assemble([((), root)], paths)
    seconds = time.process_time() - start

    assert again == root
    assert list(structure.leaf_paths(root)) == paths
    assert seconds < 4  # two of them; a second each with room for a busy machine
