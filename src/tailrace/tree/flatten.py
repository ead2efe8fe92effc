"""A tree taken apart into containers and leaves, and put together again.

dict, list, tuple, NamedTuple, dataclass and None are understood without JAX. Where JAX is imported, every node that is
registered with it is taken apart as registered (flax.struct, optax states, nnx.State, your own), one level at a time,
so that dicts whose keys JAX cannot sort still work. JAX is never imported from here: where it is not imported, nothing
can be registered with it.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tailrace.errors import KeyPathError, LeafError
from tailrace.format import structure
from tailrace.format.keys import KeyPath, display
from tailrace.format.structure import Key, Node

_LEAF_TYPES = frozenset({np.ndarray, bool, int, float, complex, str, bytes})
_DICT_TYPES = frozenset({OrderedDict, defaultdict})  # JAX would sort the keys of the second
_registered: set[type] = set()  # types that JAX takes apart; a type once registered stays so


class Parts(NamedTuple):
    """One container: its keys and children, how it is recorded, and how an equal one is made of new children."""

    keys: Sequence[Key]
    children: Sequence[Any]
    node: Callable[[tuple[Node, ...]], Node]
    build: Callable[[list[Any]], Any]


class Flat(NamedTuple):
    """A tree's containers, and its leaves in order."""

    node: Node
    leaves: list[tuple[KeyPath, Any]]


def flatten(tree: Any) -> Flat:
    """The containers and leaves of a tree.

    Raises KeyPathError for dict keys that are neither str nor int, for a tree that is one bare leaf, and for None.
    """
    leaves: list[tuple[KeyPath, Any]] = []
    try:
        node = _flatten(tree, (), leaves)
    except RecursionError:
        raise LeafError(
            "the tree is nested too deeply, or a container holds itself: cut it where it repeats."
        ) from None
    if isinstance(node, structure.Leaf | structure.Null):
        raise KeyPathError(
            f"the tree is one bare {type(tree).__name__}, which has no key to be stored under: "
            f"give it one, such as {{'x': value}}."
        )
    return Flat(node, leaves)


def rebuild_like(tree: Any, value: Callable[[KeyPath], Any]) -> Any:
    """A tree with the containers of this one, and `value(path)` for each of its leaves."""
    return _rebuild(tree, (), value)


def _flatten(at: Any, path: KeyPath, leaves: list[tuple[KeyPath, Any]]) -> Node:
    if at is None:
        return structure.NULL
    parts = take_apart(at, path)
    if parts is None:
        leaves.append((path, at))
        return structure.LEAF
    return parts.node(
        tuple([_flatten(child, (*path, key), leaves) for key, child in zip(parts.keys, parts.children, strict=True)])
    )


def _rebuild(at: Any, path: KeyPath, value: Callable[[KeyPath], Any]) -> Any:
    if at is None:
        return None
    parts = take_apart(at, path)
    if parts is None:
        return value(path)
    return parts.build(
        [_rebuild(child, (*path, key), value) for key, child in zip(parts.keys, parts.children, strict=True)]
    )


def take_apart(at: Any, path: KeyPath = ()) -> Parts | None:
    """The container's parts, or None for a leaf."""
    kind = type(at)
    if kind in _LEAF_TYPES:
        return None
    if kind is dict:
        return _mapping(at, path, lambda values: dict(zip(at, values, strict=True)))
    if kind is list:
        return Parts(range(len(at)), at, structure.List, list)
    if kind is tuple:
        return Parts(range(len(at)), at, structure.Tuple, tuple)
    if kind in _DICT_TYPES:
        return _mapping(at, path, lambda values: _replaced(at, dict(zip(at, values, strict=True))))
    if isinstance(at, tuple) and hasattr(at, "_fields") and not _jax_has_other_keys(at, kind):
        names = tuple(at._fields)
        return Parts(names, at, lambda nodes: structure.NamedTuple(*_name(kind), names, nodes), kind._make)
    if _jax_takes_apart(at, kind):
        return _registered_parts(at, kind)
    if isinstance(at, dict):
        return _mapping(at, path, lambda values: _replaced(at, dict(zip(at, values, strict=True))))
    if isinstance(at, list):
        return Parts(range(len(at)), at, structure.List, lambda values: _replaced(at, values))
    if isinstance(at, tuple):
        return Parts(range(len(at)), at, structure.Tuple, kind)
    if dataclasses.is_dataclass(at) and not isinstance(at, type) and not _is_array_like(at):
        return _dataclass_parts(at, kind)
    return None


def _is_array_like(at: Any) -> bool:
    """Whether a dataclass speaks of one array, as a Source or the metadata of Orbax do, and so is a leaf."""
    return hasattr(at, "shape") and hasattr(at, "dtype")


def _mapping(at: dict[Any, Any], path: KeyPath, build: Callable[[list[Any]], Any]) -> Parts:
    keys = tuple([key if type(key) is str else _plain_key(key, path) for key in at])
    return Parts(keys, tuple(at.values()), lambda nodes: structure.Dict(keys, nodes), build)


def _plain_key(key: Any, path: KeyPath) -> Key:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return int(key)
    where = f"the dict at {display(path)!r}" if path else "the top-level dict"
    way_out = f"use int({key!r})" if isinstance(key, np.integer) else "use a str or an int"
    raise KeyPathError(f"{where} has the key {key!r}, a {type(key).__name__}; keys are str or int: {way_out}.")


def _replaced(at: Any, values: Any) -> Any:
    """A copy of a dict or list of some subclass, with its attributes, holding other values."""
    made = copy.copy(at)
    made.clear()
    (made.update if isinstance(at, dict) else made.extend)(values)
    return made


def _dataclass_parts(at: Any, kind: type) -> Parts:
    names = tuple(field.name for field in dataclasses.fields(at))

    def build(values: list[Any]) -> Any:
        made = copy.copy(at)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)  # frozen ones too; what __init__ computed is among the fields
        return made

    children = tuple(getattr(at, name) for name in names)
    return Parts(names, children, lambda nodes: structure.Dataclass(*_name(kind), names, nodes), build)


def _jax_takes_apart(at: Any, kind: type) -> bool:
    """Whether JAX is imported and knows this type as a node."""
    tree_util = sys.modules.get("jax.tree_util")
    if tree_util is None:
        return False
    if kind in _registered:
        return True
    known = tree_util.tree_structure(at, is_leaf=lambda below: below is not at) != tree_util.tree_structure(0)
    if known:
        _registered.add(kind)
    return bool(known)


def _jax_has_other_keys(at: Any, kind: type) -> bool:
    """Whether a NamedTuple's class is registered with JAX as something else than its fields."""
    return _jax_takes_apart(at, kind) and _registered_parts(at, kind).keys != at._fields


def _registered_parts(at: Any, kind: type) -> Parts:
    tree_util = sys.modules["jax.tree_util"]
    pairs, treedef = tree_util.tree_flatten_with_path(at, is_leaf=lambda below: below is not at)
    keys = tuple([_jax_key(way[0]) for way, _ in pairs])
    children = tuple([child for _, child in pairs])
    if dataclasses.is_dataclass(at) and all(isinstance(key, str) for key in keys):
        names = tuple(map(str, keys))
        return Parts(keys, children, lambda nodes: structure.Dataclass(*_name(kind), names, nodes), treedef.unflatten)
    if isinstance(at, dict):
        return Parts(keys, children, lambda nodes: structure.Dict(keys, nodes), treedef.unflatten)
    return Parts(keys, children, lambda nodes: structure.Custom(*_name(kind), keys, nodes), treedef.unflatten)


def _jax_key(entry: Any) -> Key:
    """The str or int in one of JAX's key entries."""
    for attribute in ("key", "idx", "name"):
        key = getattr(entry, attribute, None)
        if key is not None:
            return key if type(key) in (str, int) else _plain_key(key, ())
    return str(entry)


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
