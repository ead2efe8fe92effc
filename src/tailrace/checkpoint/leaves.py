"""What a transaction knows of each leaf: its declaration, and where each of its chunks is so far."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tailrace.flow.regions import Region, Shape, chunk_region, grid_shape, missing_regions
from tailrace.format.keys import KeyPath, disk_name, display


class Place(NamedTuple):
    """A byte range of a data file, and the number of the call that wrote it. `file` counts the writer's files."""

    file: int
    offset: int
    length: int
    sequence: int


class Part(NamedTuple):
    """A box inside a chunk that is on disk as plain bytes."""

    sequence: int
    region: Region  # relative to the chunk
    place: Place
    crc32c: int


class ChunkTable:
    """Where each chunk of a leaf is: 28 bytes a chunk, no object each; one chunk alone is kept as it is."""

    __slots__ = ("_one", "_placed", "_table", "chunks")
    _ENTRY = np.dtype([("file", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("sequence", "<u8")])

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._one: Place | None = None
        self._placed = 0
        self._table: np.ndarray[Any, np.dtype[Any]] | None = None

    def get(self, chunk: int) -> Place | None:
        """The chunk's place, or None while it has none."""
        if self._table is None:
            return self._one
        place = Place(*self._table[chunk].item())
        return place if place.sequence else None

    def put(self, chunk: int, place: Place) -> None:
        """Set the chunk's place."""
        self._placed += self.get(chunk) is None
        if self.chunks == 1:
            self._one = place
            return
        if self._table is None:
            self._table = np.zeros(self.chunks, self._ENTRY)  # sequence 0: no place; numbers start at 1
        self._table[chunk] = place

    @property
    def full(self) -> bool:
        """Whether every chunk has a place."""
        return self._placed == self.chunks

    def places(self) -> Iterator[Place]:
        """Every chunk's place, in C order, chunks without one left out."""
        if self._table is None:
            if self._one is not None:
                yield self._one
            return
        for entry in self._table:
            place = Place(*entry.item())
            if place.sequence:
                yield place

    def absent(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each chunk, whether it has no place."""
        if self._table is None:
            return np.full(self.chunks, self._one is None)
        absent: np.ndarray[Any, np.dtype[np.bool_]] = self._table["sequence"] == 0
        return absent


class LeafState:
    """One declared leaf of an open transaction."""

    __slots__ = (
        *("chunk_shape", "chunks", "compression", "dtype", "grid", "kind", "lock", "metadata", "name", "number"),
        *("parts", "path", "sequence", "shape", "void"),
    )

    def __init__(
        self,
        path: KeyPath,
        *,
        shape: Shape,
        dtype: np.dtype[Any],
        chunk_shape: Shape,
        compression: str | None,
        kind: str,
        sequence: int,
        number: int,
        metadata: bytes | None = None,
    ) -> None:
        self.path, self.name = path, disk_name(path)
        self.shape, self.dtype, self.chunk_shape = shape, dtype, chunk_shape
        self.compression, self.kind, self.metadata = compression, kind, metadata
        self.sequence, self.number = sequence, number
        self.grid = grid_shape(shape, chunk_shape)
        self.chunks = ChunkTable(math.prod(self.grid))
        self.parts: dict[int, list[Part]] = {}
        self.void = False  # deleted, or declared anew: nothing may be written any more
        self.lock = threading.Lock()

    @property
    def key(self) -> str:
        """The key as people type it."""
        return display(self.path)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk before encoding; edge chunks are padded to it."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    def chunk_number(self, index: Shape) -> int:
        """The number of the chunk at a grid index, counted in C order."""
        number = 0
        for i, n in zip(index, self.grid, strict=True):
            number = number * n + i
        return number

    def chunk_index(self, chunk: int) -> Shape:
        """The grid index of a chunk."""
        return tuple(int(i) for i in np.unravel_index(chunk, self.grid)) if self.grid else ()

    def region_of(self, chunk: int) -> Region:
        """The part of the leaf that the chunk holds, clipped at the leaf's edge."""
        return chunk_region(self.chunk_index(chunk), self.shape, self.chunk_shape)

    def same_declaration(self, shape: Shape, dtype: np.dtype[Any], chunk_shape: Shape, compression: str | None) -> bool:
        """Whether declaring the leaf so again changes nothing. One that others encoded is always declared anew."""
        same = (self.shape, self.dtype, self.chunk_shape, self.compression) == (shape, dtype, chunk_shape, compression)
        return same and self.metadata is None

    def missing(self, boxes: dict[int, list[Region]] | None = None) -> list[Region]:
        """Regions never written. `boxes` are boxes inside chunks that are held in memory."""
        if self.chunks.full:
            return []
        absent = self.chunks.absent()
        left = []
        boxes = boxes or {}
        for chunk in self.parts.keys() | boxes.keys():
            if absent[chunk]:
                region = self.region_of(chunk)
                covered = [part.region for part in self.parts.get(chunk, ())] + boxes.get(chunk, [])
                whole = Region.whole(region.shape)
                left += [
                    Region(tuple(a + b for a, b in zip(hole.start, region.start, strict=True)), hole.shape)
                    for hole in missing_regions(covered, whole)
                ]
                absent[chunk] = False
        left += [self._leaf_region(box) for box in _boxes_of(absent.reshape(self.grid))]
        return sorted(left, key=lambda region: region.start)

    def _leaf_region(self, box: Region) -> Region:
        start = tuple(a * c for a, c in zip(box.start, self.chunk_shape, strict=True))
        stop = tuple(min(b * c, n) for b, c, n in zip(box.stop, self.chunk_shape, self.shape, strict=True))
        return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def _boxes_of(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Iterator[Region]:
    """Cut the true cells of a grid into boxes, greedily, each as long as it goes along the last axes first."""
    if not mask.ndim:
        if mask:
            yield Region((), ())
        return
    left = mask.copy()
    for flat in np.flatnonzero(mask):
        start = tuple(int(i) for i in np.unravel_index(flat, mask.shape))
        if not left[start]:
            continue
        shape = [1] * mask.ndim
        for axis in reversed(range(mask.ndim)):
            while start[axis] + shape[axis] < mask.shape[axis]:
                face = tuple(
                    slice(a + n, a + n + 1) if i == axis else slice(a, a + n)
                    for i, (a, n) in enumerate(zip(start, shape, strict=True))
                )
                if not left[face].all():
                    break
                shape[axis] += 1
        box = Region(start, tuple(shape))
        left[box.slices] = False
        yield box
