"""The leaves and texts of an open transaction: which keys there are, and which may not be together."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tailrace.checkpoint.chunks import ChunkWriter, check_chunk_fits, largest_chunk_bytes
from tailrace.checkpoint.leaves import LeafState, Part, Place
from tailrace.checkpoint.ledger import Ledger
from tailrace.checkpoint.pending import Replayed
from tailrace.errors import KeyPathError, LeafError, ShapeError
from tailrace.flow.budget import MemoryBudget
from tailrace.flow.regions import Region, Shape
from tailrace.format import journal, zarr
from tailrace.format.keys import KeyPath, collision, disk_name, display, plain

SMALL_BYTES = 256 << 10  # a leaf of up to this size is one chunk; smaller chunks would slow readers


class Registry:
    """Every leaf and text by its name on disk. Thread-safe.

    What changes them is numbered and recorded under one lock, so that a journal replayed says the same, and no chunk
    is ever recorded before the leaf it belongs to.
    """

    def __init__(self, ledger: Ledger, chunks: ChunkWriter, budget: MemoryBudget, compression: str | None) -> None:
        self.leaves: dict[str, LeafState] = {}
        self.texts: dict[str, tuple[KeyPath, str]] = {}
        self._containers: set[str] = set()  # names of everything that has leaves below it
        self._ledger, self._chunks, self._budget, self._compression = ledger, chunks, budget, compression
        self._numbers = 0
        self._lock = threading.RLock()

    def declare(
        self,
        path: KeyPath,
        shape: Sequence[int],
        dtype: Any,
        *,
        chunk_shape: Sequence[int] | None = None,
        stacked_axes: Sequence[int] = (),
        chunk_bytes: int | None = None,
        kind: str = "array",
    ) -> LeafState:
        """The leaf so declared: as it stands if it was declared so before, else new and empty."""
        path = plain(path)
        name = disk_name(path)
        try:
            shape = tuple(map(operator.index, shape))
            dtype = np.dtype(dtype).newbyteorder("=")
        except TypeError as error:
            raise LeafError(
                f"leaf {display(path)!r}: shape {shape!r} and dtype {dtype!r} describe no array: {error}."
            ) from error
        dtype_name = zarr.dtype_name(dtype)
        chunks = self._chunk_shape(path, shape, dtype, chunk_shape, stacked_axes, chunk_bytes)
        with self._lock:
            known = self.leaves.get(name)
            if known is not None:
                if known.path != path and display(known.path) != display(path):
                    raise collision(name, known.path, path)
                if chunk_shape is None and (known.shape, known.dtype) == (shape, dtype) and self._fits(known):
                    chunks = known.chunk_shape  # chosen under another budget perhaps, and none is asked for
                if known.kind == kind and known.same_declaration(shape, dtype, chunks, self._compression):
                    return known
            elif name in self.texts and display(self.texts[name][0]) != display(path):
                raise collision(name, self.texts[name][0], path)
            self._forget(name)
            self._occupy(path, name)
            sequence = self._ledger.number()
            leaf = self._new(path, shape, dtype, chunks, self._compression, kind, sequence)
            self._ledger.add(
                journal.Declare(leaf.number, sequence, path, shape, dtype_name, chunks, self._compression, kind)
            )
        return leaf

    def inherit(
        self, path: KeyPath, meta: zarr.ArrayMetadata, data: bytes, kind: str, compression: str | None
    ) -> LeafState:
        """A leaf as another checkpoint stores it. `data` is its zarr.json, kept where it is not what we would write."""
        ours = zarr.render(meta.shape, meta.dtype, meta.chunk_shape, compression=compression)
        # The index is written anew, so chunks are always under the keys that we write; how they are encoded stays.
        kept = None if zarr.parse(ours, 3).codecs == meta.codecs else zarr.with_default_keys(data)
        with self._lock:
            name = disk_name(path)
            self._occupy(path, name)
            sequence = self._ledger.number()
            leaf = self._new(path, meta.shape, meta.dtype, meta.chunk_shape, compression, kind, sequence, kept)
            self._declare_again(leaf)
        return leaf

    def add_text(self, path: KeyPath, value: str) -> None:
        """Set a text, in place of whatever is at the key."""
        path = plain(path)
        name = disk_name(path)
        with self._lock:
            other = self.texts.get(name) or ((self.leaves[name].path, "") if name in self.leaves else None)
            if other is not None and display(other[0]) != display(path):
                raise collision(name, other[0], path)
            self._forget(name)
            self._occupy(path, name)
            self.texts[name] = path, value
            self._ledger.add(journal.Text(self._ledger.number(), path, value))

    def delete(self, path: KeyPath) -> bool:
        """Drop the leaf or text at a key; whether there was one."""
        with self._lock:
            return self._forget(disk_name(path))

    def load(self, replayed: Replayed) -> None:
        """Take over what earlier writers of the transaction made durable."""
        by_path: dict[KeyPath, LeafState] = {}
        for path, declared in replayed.declared.items():
            leaf = self._new(
                path,
                declared.shape,
                zarr.dtype_from_name(declared.dtype),
                declared.chunk_shape,
                declared.compression,
                declared.kind,
                declared.sequence,
                declared.metadata,
            )
            self._occupy(path, leaf.name)
            self._declare_again(leaf)
            by_path[path] = leaf
        for path, text in replayed.texts.items():
            self.texts[disk_name(path)] = path, text
            self._occupy(path, disk_name(path))
        self._chunks.untrusted |= replayed.files
        for file in sorted(replayed.files):  # also those that no chunk is in any more: commit must know of them
            self._chunks.number_of(file, inherited=file in replayed.inherited)
        for path, file, record in replayed.chunks:
            number = self._chunks.number_of(file, inherited=file in replayed.inherited)
            place = Place(number, record.offset, record.length, record.sequence)
            if isinstance(record, journal.Chunk):
                self._chunks.place(by_path[path], record.chunk, place)
            else:
                part = Part(record.sequence, Region(record.start, record.shape), place, record.crc32c)
                self._chunks.add_part(by_path[path], record.chunk, part)
        for leaf in by_path.values():
            if leaf.parts:
                check_chunk_fits(leaf.key, leaf.chunk_bytes, self._budget, leaf.compression)

    def sorted(self) -> list[LeafState]:
        """All leaves in the order of their keys on disk."""
        return sorted(self.leaves.values(), key=lambda leaf: f"{leaf.name}/".encode())

    def _chunk_shape(
        self,
        path: KeyPath,
        shape: Shape,
        dtype: np.dtype[Any],
        chunk_shape: Sequence[int] | None,
        stacked: Sequence[int],
        nbytes: int | None,
    ) -> Shape:
        if any(extent < 0 for extent in shape):
            raise ShapeError(f"leaf {display(path)!r}: shape {shape} has a negative extent.")
        if chunk_shape is None:
            if 0 < math.prod(shape) * dtype.itemsize <= SMALL_BYTES and not stacked:
                return shape
            limit = 4 * largest_chunk_bytes(self._budget, self._compression)  # of which it takes a quarter at most
            return zarr.choose_chunk_shape(shape, dtype, budget_bytes=limit, stacked_axes=stacked, target_bytes=nbytes)
        try:
            chunks = tuple(map(operator.index, chunk_shape))
        except TypeError as error:
            raise ShapeError(f"leaf {display(path)!r}: chunk_shape {chunk_shape!r} is no shape: {error}.") from error
        if len(chunks) != len(shape) or any(extent < 1 for extent in chunks):
            raise ShapeError(
                f"leaf {display(path)!r}: chunk_shape {chunks} does not fit shape {shape}: give one extent >= 1 for "
                "each axis."
            )
        chunks = tuple(min(c, max(1, n)) for c, n in zip(chunks, shape, strict=True))
        check_chunk_fits(display(path), math.prod(chunks) * dtype.itemsize, self._budget, self._compression)
        return chunks

    def _fits(self, leaf: LeafState) -> bool:
        return leaf.chunk_bytes <= largest_chunk_bytes(self._budget, leaf.compression)

    def _new(
        self,
        path: KeyPath,
        shape: Shape,
        dtype: np.dtype[Any],
        chunks: Shape,
        compression: str | None,
        kind: str,
        sequence: int,
        metadata: bytes | None = None,
    ) -> LeafState:
        self._numbers += 1
        leaf = LeafState(
            path,
            shape=shape,
            dtype=dtype,
            chunk_shape=chunks,
            compression=compression,
            kind=kind,
            sequence=sequence,
            number=self._numbers,
            metadata=metadata,
        )
        self.leaves[leaf.name] = leaf
        return leaf

    def _declare_again(self, leaf: LeafState) -> None:
        """Give a leaf its number in this writer's journal."""
        self._ledger.add(
            journal.Declare(
                leaf.number,
                leaf.sequence,
                leaf.path,
                leaf.shape,
                zarr.dtype_name(leaf.dtype),
                leaf.chunk_shape,
                leaf.compression,
                leaf.kind,
                leaf.metadata,
            )
        )

    def _occupy(self, path: KeyPath, name: str) -> None:
        """Refuse a key that holds others or lies below a leaf; note what now holds it."""
        if name in self._containers:
            if any(other.startswith(f"{name}.") for other in (*self.leaves, *self.texts)):
                raise KeyPathError(
                    f"key {display(path)!r} would be a leaf, but there are leaves below it already. Rename one of them."
                )
            # all of them were deleted
            self._containers = {other for other in self._containers if not f"{other}.".startswith(f"{name}.")}
        at = len(name)
        for end in range(len(path) - 1, 0, -1):
            at -= len(str(path[end])) + 1
            above = name[:at]
            if above in self.leaves or above in self.texts:
                raise KeyPathError(
                    f"key {display(path)!r} would be below {display(path[:end])!r}, which is a leaf already. Rename "
                    "one of them."
                )
            self._containers.add(above)

    def _forget(self, name: str) -> bool:
        leaf, text = self.leaves.pop(name, None), self.texts.pop(name, None)
        if leaf is not None:
            self._chunks.bury(leaf)
            path = leaf.path
        elif text is not None:
            path = text[0]
        else:
            return False
        self._ledger.add(journal.Delete(self._ledger.number(), path))  # the path of then: ("a", 0) is also "a/0"
        return True
