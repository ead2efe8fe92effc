"""Chunks of which only boxes have been written so far.

Boxes gather in one buffer per chunk, the newest call on top, until they cover it; then the chunk is encoded at once.
Buffers live in a fixed share of the budget. When it is full, and at every flush, the oldest are spilled: each box is
appended to a data file as plain bytes and noted as a part. A chunk with parts is assembled from disk at commit, one
chunk at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrace.checkpoint.leaves import LeafState
from tailrace.flow.regions import Region, missing_regions
from tailrace.flow.sources import Array

Key = tuple[int, int]  # leaf number, chunk number


@dataclass(slots=True)
class Assembly:
    """A chunk's buffer and the boxes written into it, oldest call first. Boxes are relative to the chunk."""

    leaf: LeafState
    chunk: int
    buffer: Array
    boxes: list[tuple[int, Region]] = field(default_factory=list)
    _known: set[Region] = field(default_factory=set)  # of `boxes`
    _smallest: int = 0  # elements of the smallest box
    _elements: int = 0  # of all boxes; what two of them share counts twice

    def put(self, sequence: int, box: Region, data: Array) -> None:
        """Lay `data` over what older calls wrote and under what newer ones did.

        Thousands of boxes of one size, such as rows, cost the same each.
        """
        latest = not self.boxes or self.boxes[-1][0] <= sequence
        newer = [] if latest else [other for when, other in self.boxes if when > sequence]
        for seen in missing_regions(newer, box) if newer else [box]:
            self.buffer[seen.slices] = data[seen.relative_to(box.start).slices]
        if box in self._known or (self.boxes and box.size > self._smallest):  # may hide others: they need no record
            self.boxes = [(when, other) for when, other in self.boxes if when > sequence or not _inside(other, box)]
            self._known = {other for _, other in self.boxes}
            self._elements = sum(other.size for _, other in self.boxes)
        self._smallest = min(self._smallest, box.size) if self.boxes else box.size
        self.boxes.append((sequence, box))
        self._known.add(box)
        self._elements += box.size
        if not latest:
            self.boxes.sort(key=lambda entry: entry[0])

    @property
    def complete(self) -> bool:
        """Whether every element of the chunk (clipped at the leaf's edge) was written."""
        whole = Region.whole(self.leaf.region_of(self.chunk).shape)
        return self._elements >= whole.size and not missing_regions([box for _, box in self.boxes], whole)


def _inside(inner: Region, outer: Region) -> bool:
    return inner.intersection(outer) == inner


class Assemblies:
    """All half-written chunks of a writer, within a fixed number of bytes.

    `finish(assembly)` must append the whole chunk, `spill(assembly)` its boxes as parts. The chunk is let go when they
    return, so that one that fails (no memory) loses nothing and may be tried again.
    """

    def __init__(
        self, limit_bytes: int, *, finish: Callable[[Assembly], None], spill: Callable[[Assembly], None]
    ) -> None:
        self._limit_bytes, self._finish, self._spill = limit_bytes, finish, spill
        self._held: OrderedDict[Key, Assembly] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()

    def put(
        self, leaf: LeafState, chunk: int, sequence: int, box: Region, data: Array, *, may_finish: Callable[[int], bool]
    ) -> None:
        """Add a box of a chunk; encode the chunk when that completes it and `may_finish(newest sequence)` agrees."""
        key = leaf.number, chunk
        with self._lock:
            assembly = self._held.get(key)
            if assembly is None:
                self._make_room(leaf.chunk_bytes)
                assembly = Assembly(leaf, chunk, np.zeros(leaf.chunk_shape, leaf.dtype))
                self._held[key] = assembly
                self._bytes += leaf.chunk_bytes
            assembly.put(sequence, box, data)
            if assembly.complete and may_finish(assembly.boxes[-1][0]):
                self._finish(assembly)
                self._take(key)

    def spill_all(self) -> None:
        """Put every half-written chunk on disk as parts."""
        with self._lock:
            while self._held:
                self._spill_oldest()

    def discard(self, leaf: LeafState) -> None:
        """Forget the half-written chunks of a leaf that is declared anew or deleted."""
        with self._lock:
            for key in [key for key in self._held if key[0] == leaf.number]:
                self._take(key)

    def boxes(self, leaf: LeafState) -> dict[int, list[Region]]:
        """For each half-written chunk of the leaf, the boxes it has in memory."""
        with self._lock:
            return {key[1]: [box for _, box in held.boxes] for key, held in self._held.items() if key[0] == leaf.number}

    def _make_room(self, nbytes: int) -> None:
        while self._held and self._bytes + nbytes > self._limit_bytes:
            self._spill_oldest()

    def _spill_oldest(self) -> None:
        key, assembly = next(iter(self._held.items()))
        self._spill(assembly)
        self._take(key)

    def _take(self, key: Key) -> None:
        self._bytes -= self._held.pop(key).leaf.chunk_bytes


def overlay(
    base: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], parts: Iterator[tuple[Region, Array]]
) -> Array:
    """A chunk from its last whole state, if it had one, and the parts written over it, oldest first."""
    whole = np.zeros(shape, dtype) if base is None else base
    for region, data in parts:
        whole[region.slices] = data
    return whole
