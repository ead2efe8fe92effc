"""The containers that leaves hang in: dicts, lists, tuples, classes, and what in them is empty.

A node is pure data without values. A leaf's key path is the way from the root to its place: dict keys (str or int),
list and tuple positions (int), field names (str). A tree of nothing but nested, non-empty dicts with str keys is
*plain*: its leaves' paths say it all, so it need not be recorded.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import msgspec

from tailrace.errors import FormatError, KeyPathError
from tailrace.format.keys import KeyPath, display

Key = str | int


class Leaf(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="leaf"):
    """The place of an array or a text."""


class Null(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="none"):
    """None, which is a container of nothing."""


class Dict(msgspec.Struct, frozen=True, array_like=True, tag="dict"):
    """A mapping; keys keep their order and are str or int."""

    keys: tuple[Key, ...]
    children: tuple[Node, ...]


class List(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """A list."""

    children: tuple[Node, ...]


class Tuple(msgspec.Struct, frozen=True, array_like=True, tag="tuple"):
    """A tuple."""

    children: tuple[Node, ...]


class NamedTuple(msgspec.Struct, frozen=True, array_like=True, tag="namedtuple"):
    """A NamedTuple; `keys` are all its fields."""

    module: str
    name: str
    keys: tuple[str, ...]
    children: tuple[Node, ...]


class Dataclass(msgspec.Struct, frozen=True, array_like=True, tag="dataclass"):
    """A dataclass; `keys` are the fields that hold data, static ones are not recorded."""

    module: str
    name: str
    keys: tuple[str, ...]
    children: tuple[Node, ...]


class Custom(msgspec.Struct, frozen=True, array_like=True, tag="custom"):
    """Another node that JAX knows how to take apart; only `like` can put it together again."""

    module: str
    name: str
    keys: tuple[Key, ...]
    children: tuple[Node, ...]


Node = Leaf | Null | Dict | List | Tuple | NamedTuple | Dataclass | Custom
LEAF, NULL, EMPTY = Leaf(), Null(), Dict((), ())

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Node] = msgspec.json.Decoder(Node)


def encode(node: Node) -> bytes:
    """The node as JSON: nested arrays that begin with the kind of container."""
    return _encoder.encode(node)


def decode(data: bytes) -> Node:
    """The node that `encode` wrote. Raises FormatError for anything else."""
    try:
        return check(_decoder.decode(data))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"the recorded tree structure cannot be read: {error}") from error


def check(node: Node) -> Node:
    """The node itself if every container has as many keys as children and no key twice; else FormatError."""
    todo: list[Node] = [node]
    while todo:
        at = todo.pop()
        if isinstance(at, Leaf | Null):
            continue
        if not isinstance(at, List | Tuple) and not len(at.keys) == len(at.children) == len(set(map(str, at.keys))):
            raise FormatError(
                f"the recorded tree structure has a {type(at).__name__} with {len(at.children)} entries "
                f"under {len(set(map(str, at.keys)))} different keys."
            )
        todo.extend(at.children)
    return node


def entries(node: Node) -> Iterator[tuple[Key, Node]]:
    """What the container holds, by key, position or field name."""
    if isinstance(node, Leaf | Null):
        return iter(())
    if isinstance(node, List | Tuple):
        return iter(enumerate(node.children))
    return zip(node.keys, node.children, strict=True)


def places(node: Node, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every place that holds no further place, in order: leaves, None and empty containers."""
    todo: list[tuple[KeyPath, Node]] = [(prefix, node)]
    while todo:
        path, at = todo.pop()
        below = [((*path, key), child) for key, child in entries(at)]
        if below:
            todo.extend(reversed(below))
        else:
            yield path, at


def leaf_paths(node: Node, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of all leaves, in order."""
    return (path for path, at in places(node, prefix) if isinstance(at, Leaf))


def is_plain(node: Node) -> bool:
    """Whether the leaves' paths alone say what this node is."""
    return isinstance(node, Leaf) or (isinstance(node, Dict) and _mergeable(node) and all(map(is_plain, node.children)))


def _mergeable(node: Dict) -> bool:
    return bool(node.keys) and all(type(key) is str for key in node.keys)


def records(node: Node, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """The parts of a tree that must be recorded, each at its prefix; plain dicts around them need not be.

    So two trees written under one root merge where both are plain dicts.
    """
    if isinstance(node, Dict) and _mergeable(node):
        for key, child in entries(node):
            yield from records(child, (*prefix, key))
    elif not isinstance(node, Leaf):
        yield prefix, node


def rebuild(node: Node, value: Callable[[KeyPath], Any]) -> Any:
    """The Python containers of this node, with `value(path)` at each leaf.

    A NamedTuple or dataclass becomes its own class if that class is imported already and still has the same fields;
    else a NamedTuple becomes an equal `collections.namedtuple`, and a dataclass a dict of its fields. Any other node
    becomes a dict, or a list where its keys are positions. Nothing is imported.
    """
    return _rebuild(node, (), value)


def _rebuild(node: Node, path: KeyPath, value: Callable[[KeyPath], Any]) -> Any:
    if isinstance(node, Leaf):
        return value(path)
    if isinstance(node, Null):
        return None
    values = [_rebuild(child, (*path, key), value) for key, child in entries(node)]
    if isinstance(node, List):
        return values
    if isinstance(node, Tuple):
        return tuple(values)
    if isinstance(node, NamedTuple):
        return _named_tuple(node.module, node.name, node.keys)(*values)
    if isinstance(node, Custom) and node.keys == tuple(range(len(values))):
        return values
    if isinstance(node, Dataclass) and (cls := _dataclass(node)) is not None:
        made: Any = object.__new__(cls)  # as it was, without running __init__ on it once more
        for key, child in zip(node.keys, values, strict=True):
            object.__setattr__(made, key, child)
        return made
    return dict(zip(node.keys, values, strict=True))


def imported_class(module: str, name: str) -> type | None:
    """The class of this module and qualified name, if the module is imported already."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _named_tuple(module: str, name: str, names: tuple[str, ...]) -> Callable[..., Any]:
    cls = imported_class(module, name)
    if cls is not None and issubclass(cls, tuple) and getattr(cls, "_fields", None) == names:
        make: Callable[[Iterable[Any]], Any] = cls._make  # type: ignore[attr-defined]  # a NamedTuple has it
        return lambda *values: make(values)
    return _equal_named_tuple(name.rpartition(".")[2], names)


@lru_cache(maxsize=1024)
def _equal_named_tuple(name: str, names: tuple[str, ...]) -> Callable[..., Any]:
    try:
        return namedtuple(name, names)  # made at run time from what was recorded
    except ValueError:  # a field or name that Python's namedtuple refuses, such as a keyword
        return lambda *values: dict(zip(names, values, strict=True))


def _dataclass(node: Dataclass) -> type | None:
    cls = imported_class(node.module, node.name)
    if cls is None or not is_dataclass(cls) or tuple(field.name for field in fields(cls)) != node.keys:
        return None
    return cls


class _Draft:
    """A container while records and leaves are put together; children by the text of their key."""

    __slots__ = ("children", "had_leaves", "path", "template")

    def __init__(self, template: Node | None, path: KeyPath) -> None:
        self.template = template  # None: a dict that only paths speak of
        self.path = path
        self.children: dict[str, tuple[Key, _Draft | Node]] = {}
        self.had_leaves = False


_GONE = None  # a recorded leaf place whose leaf is not there
_PRESENT = LEAF
_EXPECTED = Leaf()  # recorded, its leaf not seen yet; told apart from _PRESENT by identity


def assemble(recorded: Sequence[tuple[KeyPath, Node]], paths: Iterable[KeyPath]) -> Node:
    """The whole tree, from the recorded parts and the paths of all leaves.

    A later record replaces an earlier one at its prefix. Leaves in no record hang in dicts. A recorded place whose
    leaf does not exist is dropped from its dict, and a container that lost all its leaves goes with them. Raises
    KeyPathError where only some leaves of a list, tuple or class exist, and where a leaf would have to hold others.
    """
    root = _Draft(None, ())
    for prefix, node in recorded:
        if prefix:
            parent = _reach(root, prefix[:-1], prefix)
            parent.children[str(prefix[-1])] = (prefix[-1], _expand(node, prefix))
        else:
            expanded = _expand(node, ())
            root = expanded if isinstance(expanded, _Draft) else _Draft(None, ())
    for path in paths:
        parent = _reach(root, path[:-1], path)
        last = path[-1]
        text = last if type(last) is str else str(last)
        found = parent.children.get(text)
        if found is None:
            _check_open(parent, path)
            parent.children[text] = (last, _PRESENT)
        elif isinstance(found[1], _Draft) and found[1].children:
            raise KeyPathError(f"key {display(path)!r} is a leaf and also holds others: rename one of them.")
        else:
            parent.children[text] = (found[0], _PRESENT)
    return _settle(root) or EMPTY


def _expand(node: Node, path: KeyPath) -> _Draft | Node:
    if isinstance(node, Leaf):
        return _EXPECTED
    if isinstance(node, Null):
        return node
    draft = _Draft(node, path)
    for key, child in entries(node):
        below = _expand(child, (*path, key))
        draft.children[str(key)] = (key, below)
        draft.had_leaves |= below is _EXPECTED or (isinstance(below, _Draft) and below.had_leaves)
    return draft


def _reach(root: _Draft, way: KeyPath, path: KeyPath) -> _Draft:
    at = root
    for depth, key in enumerate(way):
        text = key if type(key) is str else str(key)
        found = at.children.get(text)
        if found is not None and isinstance(found[1], _Draft):
            at = found[1]
            continue
        if found is None:
            _check_open(at, path)
        elif found[1] is _PRESENT:
            raise KeyPathError(
                f"key {display(path[: depth + 1])!r} is a leaf and cannot also hold {display(path)!r}: "
                f"rename one of them."
            )
        below = _Draft(None, way[: depth + 1])
        at.children[text] = (key if found is None else found[0], below)
        at = below
    return at


def _check_open(draft: _Draft, path: KeyPath) -> None:
    if draft.template is not None and not isinstance(draft.template, Dict | Custom):
        raise KeyPathError(
            f"key {display(path)!r}: the {type(draft.template).__name__.lower()} at {display(draft.path)!r} was "
            f"written with {len(draft.children)} entries and has no such place. Write the whole container again, "
            f"or use another key."
        )


def _settle(draft: _Draft) -> Node | None:
    """The draft as a node, or None where it lost all its leaves."""
    kept: list[tuple[Key, Node]] = []
    leaves_kept = False
    lost: list[Key] = []
    for key, below in draft.children.values():
        node = _settle(below) if isinstance(below, _Draft) else (_GONE if below is _EXPECTED else below)
        if node is None:
            lost.append(key)
        else:
            kept.append((key, node))
            leaves_kept = leaves_kept or not isinstance(node, Null)
    template = draft.template
    if template is None or isinstance(template, Dict | Custom):
        if not kept and draft.had_leaves:
            return None
        keys, children = tuple(key for key, _ in kept), tuple(node for _, node in kept)
        if isinstance(template, Custom):
            return Custom(template.module, template.name, keys, children)
        return Dict(keys, children)
    if lost:
        if not leaves_kept:
            return None
        raise KeyPathError(
            f"{display(draft.path)!r} is a {type(template).__name__.lower()}, and {display((*draft.path, lost[0]))!r} "
            f"in it does not exist while other entries do. Delete or write the whole container."
        )
    children = tuple(node for _, node in kept)
    if isinstance(template, List | Tuple):
        return type(template)(children)
    assert isinstance(template, NamedTuple | Dataclass)
    return type(template)(template.module, template.name, template.keys, children)
