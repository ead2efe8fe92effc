"""save: from a tree to a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tailrace.checkpoint.pending import discard
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import InputError
from tailrace.flow.budget import DEFAULT_BUDGET
from tailrace.flow.regions import Region
from tailrace.flow.sources import Array, Source
from tailrace.format import structure
from tailrace.format.keys import KeyPath
from tailrace.format.structure import Node
from tailrace.storage.location import resolve
from tailrace.tree.flatten import flatten
from tailrace.tree.leaves import Item, collect

Progress = Callable[[int], None]

_SMALL_BYTES = 16 << 10  # a source so small costs less fetched whole than handed to another thread


class Prepared(NamedTuple):
    """A tree of which everything is known to be storable; nothing of it is copied yet."""

    node: Node
    items: list[Item]
    records: list[tuple[KeyPath, Node]]  # the parts of `node` that must be recorded beside other trees


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    overwrite: bool = False,
    memory_budget: int | str = DEFAULT_BUDGET,
    compression: Literal["zstd"] | None = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Save a tree as the checkpoint at `path`: all of it, durably, or nothing.

    The tree is any nesting of containers with arrays, jax.Arrays, numbers and str as leaves; docs/leaves.md says what
    each becomes. A leaf that cannot be stored is refused before a byte is written. An unfinished save of a process
    that died at this path is discarded. A failure leaves what was at the path before.

    Args:
        path: Where to; its parents are made.
        tree: What to save.
        overwrite: Replace a checkpoint at `path`, at once and as a whole.
        memory_budget: Most host bytes held beside the tree.
        compression: "zstd", or none, which suits float weights.
        metadata: Whatever JSON can hold; `tailrace.open(path).metadata` gives it back.
        progress: Told the bytes of each piece as it is written.
    """
    prepared = prepare(tree)
    custom = checked_metadata(metadata)
    discard(resolve(path))
    transaction = Transaction(path, memory_budget=memory_budget, overwrite=overwrite, compression=compression)
    try:
        whole = prepared._replace(records=[((), prepared.node)])  # of one tree also the order of its keys is kept
        write_prepared(transaction, whole, progress)
        if custom:
            transaction.set_metadata(custom)
        transaction.finish()
    except BaseException:
        transaction.abort()
        raise


def prepare(tree: Any, prefix: KeyPath = ()) -> Prepared:
    """The leaves and containers of a tree below `prefix`, everything checked that can be refused."""
    node, leaves = flatten(tree)
    if prefix:
        leaves = [((*prefix, *path), value) for path, value in leaves]
    empty = [
        path for path, at in structure.places(node, prefix) if not isinstance(at, structure.Leaf) and path != prefix
    ]
    return Prepared(node, collect(leaves, empty), list(structure.records(node, prefix)))


def write_prepared(transaction: Transaction, prepared: Prepared, progress: Progress | None = None) -> None:
    """Write everything prepared; host arrays together, what must be fetched or swapped piece by piece."""
    for prefix, node in prepared.records:
        transaction.set_structure(prefix, node)
    transaction.write_arrays(_host_arrays(prepared.items), progress=progress)
    for path, value, kind in prepared.items:
        if isinstance(value, str):
            transaction.set_text(path, value)
        elif not (isinstance(value, np.ndarray) or _is_small(value)):
            transaction.write_source(path, value, kind=kind, progress=progress)


def _host_arrays(items: list[Item]) -> Iterator[tuple[KeyPath, Array, str]]:
    """The arrays that are on the host, and one by one those small enough to be fetched whole."""
    for path, value, kind in items:
        if isinstance(value, np.ndarray):
            yield path, value, kind
        elif not isinstance(value, str) and _is_small(value):
            out = np.empty(value.shape, value.dtype)
            value.read_into(Region.whole(value.shape), out)
            yield path, out, kind


def _is_small(source: Source) -> bool:
    return math.prod(source.shape) * source.dtype.itemsize <= _SMALL_BYTES


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metadata as a dict of what JSON holds; InputError for anything JSON would change or refuse."""
    if metadata is None:
        return {}
    try:
        plain = dict(metadata)
        same = msgspec.json.decode(msgspec.json.encode(plain)) == plain
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"metadata= must be a dict that JSON can hold: {error}.") from error
    if not same:
        raise InputError(
            "metadata= must come back from JSON as it was: use dicts with str keys, lists, numbers, str, bool and None."
        )
    return plain
