"""load: from a checkpoint to a tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tailrace.checkpoint import reader
from tailrace.checkpoint.leaf import Leaf
from tailrace.checkpoint.reader import Checkpoint
from tailrace.errors import InputError
from tailrace.flow.budget import DEFAULT_BUDGET
from tailrace.format import structure
from tailrace.format.keys import KeyPath, check_path, display
from tailrace.format.structure import Node
from tailrace.tree import globs
from tailrace.tree.arrays import read_all, read_wanted
from tailrace.tree.flatten import flatten, rebuild_like
from tailrace.tree.leaves import loaded
from tailrace.tree.match import Diff, Wanted, compare, wanted

Progress = Callable[[int], None]
Name = tuple[str, ...]  # a path whose ints are text, since 7 and "7" are one name on disk


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    only: str | Sequence[str] | None = None,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    memory_budget: int | str = DEFAULT_BUDGET,
    progress: Progress | None = None,
) -> Any:
    """The tree saved at `path`, on any machine, whatever devices it was saved from.

    Without `like`: numpy arrays in the containers they were saved in, numbers and str as they were. With `like`, a tree
    of arrays, jax.ShapeDtypeStructs, numbers and str: a tree with its containers, jax.Arrays where it has jax.Arrays
    or ShapeDtypeStructs (on their shardings), numpy elsewhere. Every difference raises one MismatchError before
    anything is read; a dtype may widen without loss.

    Args:
        path: A checkpoint of tailrace or Orbax.
        like: What to load into.
        only: Pattern or patterns of keys, such as "params/**"; other leaves of `like` are returned as they are.
        missing: "keep" returns like's own value for leaves the checkpoint does not have.
        unexpected: "ignore" leaves out what `like` does not have.
        rename: Patterns of stored keys and what each becomes, such as {"old/**": "new/**"}.
        cast: Cast also where values may be lost.
        memory_budget: Most host bytes held beside the result.
        progress: Told the bytes of each read as it arrives.
    """
    _check_choice("missing", missing, ("error", "keep"))
    _check_choice("unexpected", unexpected, ("error", "ignore"))
    if like is None and (missing != "error" or unexpected != "error" or cast):
        raise InputError("missing=, unexpected= and cast= compare with `like`: pass the tree to load into.")
    with reader.open(Path(path), memory_budget=memory_budget) as checkpoint:
        if like is None:
            return _load_as_saved(checkpoint, only, rename, progress)
        return _load_like(checkpoint, like, only, missing, unexpected, rename, cast, progress)


def _check_choice(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{argument}={value!r}: choose {' or '.join(map(repr, allowed))}.")


def _load_as_saved(
    checkpoint: Checkpoint,
    only: str | Sequence[str] | None,
    rename: Mapping[str, str] | None,
    progress: Progress | None,
) -> Any:
    root = checkpoint.root
    if only is not None:
        places = {path: display(path) for path, _ in structure.places(root)}
        chosen = globs.select(places.values(), only, str(checkpoint.path))
        root = prune(root, {path for path, key in places.items() if key in chosen}) or structure.EMPTY
    origin = {path: path for path in structure.leaf_paths(root)}
    if rename is not None:
        root, origin = _renamed_tree(root, rename, str(checkpoint.path))
    arrays = {path: checkpoint.leaf(path) for path in origin.values() if path not in checkpoint.texts}
    buffers = dict(zip(arrays, read_all(checkpoint, list(arrays.values()), progress), strict=True))

    def value(path: KeyPath) -> Any:
        stored = origin[path]
        text = checkpoint.texts.get(stored)
        return text if text is not None else loaded(buffers[stored], arrays[stored].kind)

    return structure.rebuild(root, value)


def prune(node: Node, kept: set[KeyPath], path: KeyPath = ()) -> Node | None:
    """The node with only these places in it; a list, tuple or class that loses some of them becomes a dict."""
    below = list(structure.entries(node))
    if not below:
        return node if path in kept else None
    left = [(key, pruned) for key, child in below if (pruned := prune(child, kept, (*path, key))) is not None]
    if not left:
        return None
    keys, children = tuple(key for key, _ in left), tuple(child for _, child in left)
    if len(left) < len(below) or isinstance(node, structure.Dict):
        return structure.Dict(keys, children)
    if isinstance(node, structure.List | structure.Tuple):
        return type(node)(children)
    assert isinstance(node, structure.NamedTuple | structure.Dataclass | structure.Custom)
    return type(node)(node.module, node.name, node.keys, children)  # type: ignore[arg-type]


def _renamed_tree(root: Node, rename: Mapping[str, str], what: str) -> tuple[Node, dict[KeyPath, KeyPath]]:
    """The tree after renaming, whose renamed leaves hang in dicts, and where each of its leaves is stored."""
    by_key = {display(path): path for path in structure.leaf_paths(root)}
    names = globs.renamed(list(by_key), rename, what)
    origin = {by_key[key] if new == key else _parsed(new): by_key[key] for key, new in names.items()}
    stay = {path for path, at in structure.places(root) if not isinstance(at, structure.Leaf)} | set(origin)
    left = prune(root, stay)
    return structure.assemble([((), left)] if left else [], origin), origin


def _parsed(key: str) -> KeyPath:
    path = tuple(key.split("/"))
    check_path(path)
    return path


class _Match(NamedTuple):
    path: KeyPath  # in `like`
    want: Wanted
    leaf: Leaf


def _load_like(
    checkpoint: Checkpoint,
    like: Any,
    only: str | Sequence[str] | None,
    missing: str,
    unexpected: str,
    rename: Mapping[str, str] | None,
    cast: bool,
    progress: Progress | None,
) -> Any:
    own = dict(flatten(like).leaves)
    asked = {_name(path): (path, value) for path, value in own.items()}
    stored = _stored_names(checkpoint, rename)
    if only is not None:
        asked, stored = _selected(asked, stored, only, checkpoint)
    diff = Diff()
    matches: list[_Match] = []
    values: dict[KeyPath, Any] = {}
    for name, (path, value) in asked.items():
        want = wanted(path, value)
        where = stored.get(name)
        if where is None:
            if missing == "error":
                diff.missing.append("/".join(name))
            elif not (hasattr(value, "__array__") or isinstance(value, str | bool | int | float | complex)):
                diff.missing.append(f"{'/'.join(name)}   (like has no value to keep there, only a shape)")
            continue
        text = checkpoint.texts.get(where)
        have = text if text is not None else checkpoint.leaf(where)
        compare(diff, "/".join(name), want, have, cast=cast)
        if isinstance(have, str):
            values[path] = have
        else:
            matches.append(_Match(path, want, have))
    if unexpected == "error":
        diff.unexpected.extend("/".join(name) for name in stored if name not in asked)
    if diff:
        raise diff.error(checkpoint.path, ["/".join(name) for name in asked], ["/".join(name) for name in stored])
    read = read_wanted(checkpoint, [(match.leaf, match.want) for match in matches], progress)
    values.update(zip((match.path for match in matches), read, strict=True))
    return rebuild_like(like, lambda path: values[path] if path in values else own[path])


def _name(path: KeyPath) -> Name:
    return tuple([part if type(part) is str else str(part) for part in path])


def _stored_names(checkpoint: Checkpoint, rename: Mapping[str, str] | None) -> dict[Name, KeyPath]:
    paths = checkpoint.paths()
    if rename is None:
        return {_name(path): path for path in paths}
    names = globs.renamed([display(path) for path in paths], rename, str(checkpoint.path))
    return {
        _name(path) if (new := names[display(path)]) == display(path) else _name(_parsed(new)): path for path in paths
    }


def _selected(
    asked: dict[Name, tuple[KeyPath, Any]],
    stored: dict[Name, KeyPath],
    only: str | Sequence[str],
    checkpoint: Checkpoint,
) -> tuple[dict[Name, tuple[KeyPath, Any]], dict[Name, KeyPath]]:
    keys = {"/".join(name) for name in (*asked, *stored)}
    chosen = globs.select(sorted(keys), only, f"`like` and {checkpoint.path}")
    return (
        {name: value for name, value in asked.items() if "/".join(name) in chosen},
        {name: path for name, path in stored.items() if "/".join(name) in chosen},
    )
