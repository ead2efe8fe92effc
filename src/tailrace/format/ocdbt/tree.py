"""From sorted entries to a tree of nodes, in one pass that holds one node per height."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tailrace.format.ocdbt.files import DataFile, Indirect
from tailrace.format.ocdbt.nodes import Child, Entry, Root, Statistics, encode_interior_node, encode_leaf_node

ENTRIES_PER_NODE = 512  # TensorStore, too, lists many leaves twice as fast from such nodes as from a single one
NODE_BYTES = 1 << 20  # most of a node before compression, so large inline values do not make large nodes
_ENTRY_BYTES = 24  # about what a node holds beside an entry's key and inline value


def write_tree(
    entries: Iterable[Entry],
    append: Callable[[bytes], int],
    file: DataFile,
    *,
    entries_per_node: int = ENTRIES_PER_NODE,
) -> Root | None:
    """Append the nodes of a tree of `entries`, children before parents, and return its root; None if there are none.

    `entries` must rise strictly by key. `append` appends a node to `file` and returns its offset there.
    """
    assert entries_per_node >= 2, "an interior node of one child would never end in a root"
    tree = _Tree(append, file, entries_per_node)
    previous = None
    for entry in entries:
        key, _ = entry
        assert previous is None or previous < key, f"entry {key!r} after {previous!r}"
        previous = key
        tree.add_entry(entry)
    return tree.finish()


class _Tree:
    """The nodes being filled: one leaf, and one interior node per height above it."""

    def __init__(self, append: Callable[[bytes], int], file: DataFile, entries_per_node: int) -> None:
        self._append = append
        self._file = file
        self._entries_per_node = entries_per_node
        self._entries: list[Entry] = []
        self._entry_bytes = 0
        self._levels: list[list[Child]] = []  # at index h the children, of height h, of the next node of height h + 1
        self._level_bytes: list[int] = []

    def add_entry(self, entry: Entry) -> None:
        key, value = entry
        nbytes = _ENTRY_BYTES + len(key) + (0 if isinstance(value, Indirect) else len(value))
        full = len(self._entries) == self._entries_per_node or self._entry_bytes + nbytes > NODE_BYTES
        if full and self._entries:
            self._close_leaf()
        self._entries.append(entry)
        self._entry_bytes += nbytes

    def finish(self) -> Root | None:
        if self._entries:
            self._close_leaf()
        height = 0
        while height < len(self._levels):
            children = self._levels[height]
            if height + 1 == len(self._levels) and len(children) == 1:
                return Root(children[0].node, height, children[0].statistics)
            if children:
                self._close_interior(height)
            height += 1
        return None

    def _close_leaf(self) -> None:
        entries, self._entries, self._entry_bytes = self._entries, [], 0
        indirect_bytes = sum(value.length for _, value in entries if isinstance(value, Indirect))
        below = Statistics(len(entries), 0, indirect_bytes)
        self._add_child(0, entries[0][0], encode_leaf_node(entries), below)

    def _close_interior(self, child_height: int) -> None:
        children = self._levels[child_height]
        self._levels[child_height], self._level_bytes[child_height] = [], 0
        below = Statistics(*map(sum, zip(*(child.statistics for child in children), strict=True)))
        node = encode_interior_node(child_height + 1, children)
        self._add_child(child_height + 1, children[0].first_key, node, below)

    def _add_child(self, height: int, first_key: bytes, node: bytes, below: Statistics) -> None:
        place = Indirect(self._file, self._append(node), len(node))
        child = Child(first_key, place, below._replace(tree_bytes=below.tree_bytes + len(node)))
        if height == len(self._levels):
            self._levels.append([])
            self._level_bytes.append(0)
        nbytes = 2 * _ENTRY_BYTES + len(first_key)
        count = len(self._levels[height])
        if count == self._entries_per_node or (count >= 2 and self._level_bytes[height] + nbytes > NODE_BYTES):
            self._close_interior(height)
        self._levels[height].append(child)
        self._level_bytes[height] += nbytes
