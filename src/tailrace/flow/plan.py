"""From what is wanted to what is read: requests -> parts of chunks -> jobs in file order.

A leaf is asked for by regions (`Request`). Each chunk that a region touches becomes a `Part`: bytes of a data file,
how to bring them home, and the view of the destination that they fill. Parts are planned a window at a time, so that
their number never costs memory, sorted by file and offset within it, and joined to jobs of neighbours.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from tailrace.errors import CorruptionError
from tailrace.flow.regions import Region, chunk_region, chunks_touching
from tailrace.flow.sources import Array
from tailrace.format.codecs import BLOCK_BYTES
from tailrace.format.ocdbt import DataFile, Indirect
from tailrace.format.zarr import CRC_BYTES, ArrayMetadata

Lookup = Callable[[bytes], bytes | Indirect | None]

WINDOW_PARTS = 4096  # planned at once: about 2 MB
JOB_BYTES = 8 << 20
JOB_PARTS = 512
EXACT_BYTES = 16 << 20  # of a large chunk without checksum, so that several threads share it
PARTIAL_MIN_BYTES = 64 << 10  # a smaller chunk is read whole and verified, whatever is wanted of it
PARTIAL_SHARE = 8  # less than this part of a chunk is read alone, unverified
_WINDOW_BYTES = 8 << 20  # of a zstd decoder at the levels in use; others are rare and transient


class Request(NamedTuple):
    """A region of a leaf, and where it goes.

    `out` has the region's shape and the leaf's dtype, and any strides. `complete` leaves hold every chunk: a missing
    one is damage, elsewhere it stands for the fill value. `sparing` reads little of a large chunk for a small region,
    unverified.
    """

    key: str
    name: str
    metadata: ArrayMetadata
    region: Region
    out: Array
    complete: bool = False
    sparing: bool = False


class Way(enum.IntEnum):
    """How a part is brought home."""

    DIRECT = 0  # plain, one contiguous run: straight into the destination, the rest of the chunk aside, verified
    EXACT = 1  # plain, one contiguous run: nothing but the run, unverified
    STRIDED = 2  # plain, many runs: the span of them, unverified
    STREAM = 3  # decoded front to back, verified
    SHARD = 4  # inner chunks, each in its own way
    WHOLE = 5  # decoded whole, in memory
    INLINE = 6  # the bytes are in the index


class Layout:
    """What planning has to know of one array's metadata, worked out once."""

    __slots__ = ("chunk_bytes", "crc", "encoded_bytes", "meta", "plain", "single_suffix", "strides", "way", "whole")

    def __init__(self, meta: ArrayMetadata) -> None:
        self.meta = meta
        self.plain = meta.plain
        self.crc = meta.crc_protected
        self.chunk_bytes = meta.chunk_bytes
        self.encoded_bytes = self.chunk_bytes + CRC_BYTES * self.crc
        self.whole = Region.whole(meta.chunk_shape)
        self.strides = tuple(
            math.prod(meta.chunk_shape[axis + 1 :]) * meta.dtype.itemsize for axis in range(len(meta.chunk_shape))
        )
        self.way = Way.STREAM if meta.streamable else Way.SHARD if meta.inner is not None else Way.WHOLE
        grid = (0,) * len(meta.shape)
        self.single_suffix = meta.chunk_key("", grid) if meta.shape == meta.chunk_shape else None

    def scratch_bytes(self, length: int) -> int:
        """Memory that a part of an encoded chunk of `length` bytes takes beside its destination."""
        if self.plain:
            return 2 * BLOCK_BYTES
        if self.way is Way.STREAM:
            return 4 * BLOCK_BYTES + min(_WINDOW_BYTES, self.chunk_bytes)
        if self.way is Way.WHOLE:
            return length + 3 * self.chunk_bytes
        sharding = self.meta.chain and self.meta.chain.sharding
        assert sharding
        inner = Layout(sharding.inner)
        return 3 * sharding.index_bytes + inner.scratch_bytes(inner.chunk_bytes)

    def run(self, box: Region) -> tuple[int, int]:
        """First byte of a box among the chunk's decoded bytes, and bytes up to its last."""
        first = sum(a * stride for a, stride in zip(box.start, self.strides, strict=True))
        last = sum((n - 1) * stride for n, stride in zip(box.shape, self.strides, strict=True))
        return first, last + self.meta.dtype.itemsize


class Part(NamedTuple):
    """What is wanted of one chunk. `first` and `span` are its run among the chunk's decoded bytes."""

    file: str
    offset: int
    length: int
    way: Way
    layout: Layout
    first: int
    span: int
    box: Region  # within the chunk
    out: Array
    request: Request
    data: bytes | None = None

    def explain(self, error: CorruptionError) -> CorruptionError:
        """The same error, told with leaf, region and file."""
        where = f"file {self.file} at {self.offset}" if self.file else "the index itself"
        return CorruptionError(f"leaf {self.request.key!r}, region {self.request.region}: {where}: {error}")


class Planner:
    """Cuts requests into parts. Not for several threads at once."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._layouts: dict[int, Layout] = {}
        self._paths: dict[DataFile, str] = {}

    def jobs(self, requests: Iterable[Request]) -> Iterator[list[Part]]:
        """Parts of one file each, in order of their offsets within a window."""
        window: list[Part] = []
        for request in requests:
            for part in self._parts(request):
                window.append(part)
                if len(window) == WINDOW_PARTS:
                    yield from _cut(window)
                    window = []
        yield from _cut(window)

    def _parts(self, request: Request) -> Iterator[Part]:
        meta, region = request.metadata, request.region
        layout = self._layouts.get(id(meta))
        if layout is None:  # the layout holds the metadata, so no other gets its id
            layout = self._layouts[id(meta)] = Layout(meta)
        if layout.single_suffix is not None and region.shape == meta.shape and 0 not in region.shape:
            value = self._value(f"{request.name}/{layout.single_suffix}".encode(), request)
            yield from self.chunk_parts(layout, value, layout.whole, request.out, request)
            return
        for index in chunks_touching(region, meta.chunk_shape):
            chunk = chunk_region(index, meta.shape, meta.chunk_shape)
            common = chunk.intersection(region)
            assert common is not None
            out = request.out[common.relative_to(region.start).slices] if index else request.out
            value = self._value(meta.chunk_key(request.name, index).encode(), request)
            yield from self.chunk_parts(layout, value, common.relative_to(chunk.start), out, request)

    def _value(self, key: bytes, request: Request) -> bytes | Indirect | None:
        value = self._lookup(key)
        if value is None and request.complete:
            raise CorruptionError(
                f"leaf {request.key!r}, region {request.region}: the index has no chunk {key.decode()!r}, "
                f"though every chunk was written."
            )
        return value

    def chunk_parts(
        self, layout: Layout, value: bytes | Indirect | None, box: Region, out: Array, request: Request
    ) -> Iterator[Part]:
        """The parts that fill `out` with a box of the chunk at `value`; none, and `out` filled, where it is None."""
        if value is None:
            out[...] = layout.meta.fill_value
            return
        if isinstance(value, bytes):
            yield Part("", 0, len(value), Way.INLINE, layout, 0, 0, box, out, request, value)
            return
        file, offset, length = value
        path = self._paths.get(file)
        if path is None:
            path = self._paths[file] = file.path
        if not layout.plain:
            yield Part(path, offset, length, layout.way, layout, 0, 0, box, out, request)
            return
        first, span = (0, layout.chunk_bytes) if box is layout.whole else layout.run(box)
        part = Part(path, offset, length, Way.DIRECT, layout, first, span, box, out, request)
        if length != layout.encoded_bytes:
            raise part.explain(CorruptionError(f"a chunk of {layout.encoded_bytes} bytes has {length}."))
        together = span == out.nbytes and out.flags.c_contiguous
        few = span * PARTIAL_SHARE <= layout.chunk_bytes and layout.chunk_bytes > PARTIAL_MIN_BYTES
        if layout.crc and not (few and request.sparing):
            yield part if together else part._replace(way=Way.STREAM)
        elif together:
            yield from _exact(part)
        else:
            yield part._replace(way=Way.STRIDED)


def _exact(part: Part) -> Iterator[Part]:
    """The run alone, in parts that threads can share."""
    offset = part.offset + part.first
    if part.span <= EXACT_BYTES:
        yield part._replace(way=Way.EXACT, offset=offset, length=part.span)
        return
    target = part.out.reshape(-1).view(np.uint8)
    for start in range(0, part.span, EXACT_BYTES):
        piece = target[start : start + EXACT_BYTES]
        yield part._replace(way=Way.EXACT, offset=offset + start, length=piece.nbytes, span=piece.nbytes, out=piece)


def _cut(window: list[Part]) -> Iterator[list[Part]]:
    """Jobs: neighbours in one file, of limited bytes and number; parts of one chunk stay together."""
    window.sort(key=itemgetter(0, 1))
    job: list[Part] = []
    nbytes = 0
    for part in window:
        full = nbytes + part.length > JOB_BYTES or len(job) >= JOB_PARTS
        if job and (part.file != job[0].file or (full and part.offset != job[-1].offset)):
            yield job
            job, nbytes = [], 0
        job.append(part)
        nbytes += part.length
    if job:
        yield job
