"""The public Writer: a transaction that takes any leaf value and any tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import LeafError
from tailrace.format.keys import KeyPath, disk_name, display, parse_key
from tailrace.tree.flatten import take_apart
from tailrace.tree.leaves import stored
from tailrace.tree.save import prepare, write_prepared


class Writer(Transaction):
    """Everything that becomes one checkpoint at `path`, or nothing.

    Declare leaves and assign regions of them, write whole leaves or trees, in any order and from any thread; `flush`
    makes what was written so far durable. As a context manager: a clean exit commits, an exception or a kill leaves it
    invisible and resumable, with `Writer(path, resume=True)`.
    """

    def write(self, key: str | int | KeyPath, value: Any, *, durable: bool = False) -> None:
        """Write a whole leaf: an array, a jax.Array, a number, a str, or a leaf of another checkpoint.

        It replaces a leaf of that key. On return `value` may be changed; it is durable after `flush`, or at once with
        `durable=True`. Raises LeafError for a value that cannot be stored, before anything is written.
        """
        path = parse_key(key)
        if value is None or take_apart(value) is not None:
            raise LeafError(
                f"leaf {display(path)!r} is a {type(value).__name__}, a container: "
                f"write_tree({{...}}) or write_tree(value, prefix={display(path)!r}) writes it."
            )
        what, kind = stored(path, value)
        if isinstance(what, str):
            self.set_text(path, what)
        elif isinstance(what, np.ndarray):
            self.write_arrays([(path, what, kind)])
        else:
            self.write_source(path, what, kind=kind)
        if durable:
            self.flush()

    def write_tree(self, tree: Any, prefix: str | int | KeyPath = ()) -> None:
        """Write all leaves of a tree, below `prefix`, and record its containers.

        Trees written one after the other merge where both have dicts with str keys; any other container is replaced by
        a later one at its key. Raises LeafError or KeyPathError before anything of this tree is written.
        """
        prepared = prepare(tree, parse_key(prefix) if prefix != () else ())
        replaced = [tuple(map(str, at)) for at, _ in prepared.records if at]
        if replaced:
            self._drop_below(replaced, {disk_name(item.path) for item in prepared.items})
        write_prepared(self, prepared)

    def _drop_below(self, prefixes: list[tuple[str, ...]], kept: set[str]) -> None:
        """Drop what earlier writes left at or below containers that are replaced."""
        earlier = [leaf.path for leaf in list(self.registry.leaves.values())]
        earlier += [path for path, _ in list(self.registry.texts.values())]
        lengths = {len(prefix) for prefix in prefixes}
        wanted = set(prefixes)
        for path in earlier:
            names = tuple(map(str, path))
            if disk_name(path) not in kept and any(names[:length] in wanted for length in lengths):
                self.delete(path)
