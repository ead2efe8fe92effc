"""The load pump: regions of leaves -> the memory budget -> data files -> destinations.

    1  plan      requests become parts of chunks, sorted by file and offset, joined to jobs           flow/plan.py
    2  reserve   a job takes from the budget, at once, what it will hold beside its destination
    3  read      neighbours in one `preadv`, straight into the destination where a part of a chunk is one run of it
    4  verify    the crc32c of a chunk, block by block, while its bytes are still in the processor's cache
    5  copy      what could not be read in place, from a block of at most 1 MiB
    6  give back

A chunk that has a checksum is read whole, once for all that is wanted of it, and verified. Only a `sparing` request
for less than an eighth of a large uncompressed chunk reads that alone: its checksum covers the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from crc32c import crc32c

from tailrace.errors import BudgetError, CorruptionError
from tailrace.flow.budget import MemoryBudget
from tailrace.flow.parallel import run_jobs
from tailrace.flow.plan import Layout, Lookup, Part, Planner, Request, Way
from tailrace.flow.regions import Region, chunk_region, chunks_touching
from tailrace.flow.sources import Array
from tailrace.format import codecs
from tailrace.format.codecs import ABSENT, BLOCK_BYTES
from tailrace.format.ocdbt import DataFile, Indirect
from tailrace.format.zarr import CRC_BYTES
from tailrace.storage.reading import IOV_MAX, OpenFiles

MAX_GAP_BYTES = 16 << 10  # between neighbours: reading past it costs less than another call
_PASSES = frozenset({Way.DIRECT, Way.STREAM})
_SCRATCH_BYTES = BLOCK_BYTES + (128 << 10)  # a block, and gaps, padding and checksums of a batch

__all__ = ["Request", "fetch"]


def fetch(
    requests: Iterable[Request],
    lookup: Lookup,
    files: OpenFiles,
    budget: MemoryBudget,
    *,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> None:
    """Fill the destination of every request.

    `lookup` says where a chunk is. `progress` is told, from any thread but one at a time, how many bytes of
    destinations have just been filled. Raises CorruptionError, naming leaf, region and file, for bytes that are not
    what was written; destinations are then partly filled.
    """
    planner = Planner(lookup)
    told = threading.Lock()

    def work(job: list[Part]) -> None:
        with budget.holding(_job_bytes(job, budget)):
            _Home(planner, files).bring(job)
        if progress is not None:
            with told:
                progress(sum(part.out.nbytes for part in job))

    run_jobs(planner.jobs(requests), work, threads=threads)


def _job_bytes(job: list[Part], budget: MemoryBudget) -> int:
    """What the job's parts hold, one after the other, beside their destinations."""
    needed = {(id(part.layout), part.length): part for part in job}
    largest = max(_SCRATCH_BYTES, *(part.layout.scratch_bytes(length) for (_, length), part in needed.items()))
    if largest > budget.limit_bytes:
        if job[0].layout.way is Way.WHOLE:
            raise BudgetError(
                f"leaf {job[0].request.key!r}: its chunks can only be decoded whole, which takes {largest} bytes; "
                f"the memory budget is {budget.limit_bytes}. Raise memory_budget."
            )
        return budget.limit_bytes
    return largest


class _Home:
    """Brings the parts of one job to their destinations."""

    def __init__(self, planner: Planner, files: OpenFiles) -> None:
        self._planner = planner
        self._files = files
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)

    def bring(self, parts: Iterable[Part]) -> None:
        batch = _Batch(self._files, self._scratch)
        for group in _by_chunk(parts):
            part = group[0]
            if part.way <= Way.EXACT and part.length <= BLOCK_BYTES and len(group) == 1:
                batch.add(part)
                continue
            batch.read()
            if part.way is Way.SHARD:
                self._read_shard(part)
                continue
            if part.way is Way.STREAM or len(group) > 1:
                self._read_stream(group)
                continue
            try:
                self._bring_one(part)
            except CorruptionError as error:
                raise part.explain(error) from error
        batch.read()

    def _bring_one(self, part: Part) -> None:
        meta = part.layout.meta
        if part.way <= Way.EXACT:
            self._read_in_place(part)
        elif part.way is Way.STRIDED:
            self._read_strided(part, part.box, part.out)
        else:
            data = part.data if part.data is not None else self._files.read(part.file, part.offset, part.length)
            chunk = codecs.decode_chunk(data, meta)
            part.out[...] = chunk[part.box.slices] if part.box.start else chunk

    def _read_stream(self, parts: list[Part]) -> None:
        """All that is wanted of one chunk, decoded once."""
        first = parts[0]
        meta = first.layout.meta
        targets = [codecs.Scatter(meta, part.box, part.out) for part in parts]
        try:
            for block in codecs.decode_stream(self._reader(first), first.length, meta):
                for target in targets:
                    target.write(block)
        except CorruptionError as error:
            raise first.explain(error) from error

    def _read_in_place(self, part: Part) -> None:
        """One run of a chunk, straight into its destination; what surrounds it and the checksum go through scratch."""
        body = part.out.reshape(-1).view(np.uint8)
        if part.way is Way.EXACT:
            self._files.read_ranges(part.file, part.offset, [body])
            return
        offset, found = part.offset, 0
        for block in self._whole_chunk(part, body):
            self._files.read_ranges(part.file, offset, [block])
            offset += block.nbytes
            if part.layout.crc:
                found = crc32c(block.data, found)
        if part.layout.crc:
            stored = self._scratch[:CRC_BYTES]
            self._files.read_ranges(part.file, offset, [stored])
            _compare(stored, found)

    def _whole_chunk(self, part: Part, body: Array) -> Iterator[Array]:
        before, after = part.first, part.layout.chunk_bytes - part.first - part.span
        for start in range(0, before, BLOCK_BYTES):
            yield self._scratch[: min(BLOCK_BYTES, before - start)]
        for start in range(0, body.nbytes, BLOCK_BYTES):
            yield body[start : start + BLOCK_BYTES]
        for start in range(0, after, BLOCK_BYTES):
            yield self._scratch[: min(BLOCK_BYTES, after - start)]

    def _read_strided(self, part: Part, box: Region, out: Array) -> None:
        """A box whose runs lie apart: the span from the first to the last where it is small, else its halves."""
        first, span = part.layout.run(box)
        if span <= BLOCK_BYTES:
            block = self._scratch[:span]
            self._files.read_ranges(part.file, part.offset + first, [block])
            # An array of the chunk's strides over the span; ml_dtypes need the detour through bytes.
            dtype = part.layout.meta.dtype
            out[...] = np.ndarray(box.shape, dtype, block.data, 0, part.layout.strides)
            return
        axis = next(i for i, extent in enumerate(box.shape) if extent > 1)
        half = box.shape[axis] // 2
        for low, high in ((0, half), (half, box.shape[axis])):
            start = (*box.start[:axis], box.start[axis] + low, *box.start[axis + 1 :])
            shape = (*box.shape[:axis], high - low, *box.shape[axis + 1 :])
            self._read_strided(part, Region(start, shape), out[(slice(None),) * axis + (slice(low, high),)])

    def _read_shard(self, part: Part) -> None:
        meta = part.layout.meta
        try:
            # A copy: the index may be a view of the scratch, which the inner chunks come through.
            index = codecs.read_shard_index(self._reader(part), part.length, meta).copy()
        except CorruptionError as error:
            raise part.explain(error) from error
        inner = meta.inner
        assert inner is not None
        layout, file = Layout(inner), DataFile(b"", part.file.encode())
        for place in chunks_touching(part.box, inner.chunk_shape):
            chunk = chunk_region(place, inner.shape, inner.chunk_shape)
            common = chunk.intersection(part.box)
            assert common is not None
            out = part.out[common.relative_to(part.box.start).slices] if place else part.out
            offset, length = map(int, index[place])
            value = None if offset == ABSENT else Indirect(file, part.offset + offset, length)
            box = common.relative_to(chunk.start)
            self.bring(self._planner.chunk_parts(layout, value, box, out, part.request))

    def _reader(self, part: Part) -> Callable[[int, int], Array]:
        def read(offset: int, length: int) -> Array:
            block = self._scratch[:length] if length <= BLOCK_BYTES else np.empty(length, np.uint8)
            self._files.read_ranges(part.file, part.offset + offset, [block])
            return block

        return read


def _by_chunk(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Neighbours that one pass over their chunk can serve, together; every other part alone."""
    group: list[Part] = []
    for part in parts:
        shared = group and part.way in _PASSES and group[0].way in _PASSES
        if shared and part.offset == group[0].offset and part.file == group[0].file:
            group.append(part)
            continue
        if group:
            yield group
        group = [part]
    if group:
        yield group


class _Batch:
    """Small neighbours of one file, read in one call and then verified."""

    def __init__(self, files: OpenFiles, scratch: Array) -> None:
        self._files = files
        self._scratch = scratch
        self._clear(0)

    def _clear(self, end: int) -> None:
        self._parts: list[Part] = []
        self._buffers: list[Array] = []
        self._checks: list[tuple[Part, int, int]] = []  # part, its buffers from and to, the last one being the crc
        self._nbytes = 0
        self._used = 0  # of the scratch
        self._start = self._end = end

    def add(self, part: Part) -> None:
        """Take a part for the next call, after making the call for the earlier ones if this does not fit."""
        gap = part.offset - self._end
        aside = part.length - part.span + gap
        if self._parts and (
            part.file != self._parts[0].file
            or not 0 <= gap <= MAX_GAP_BYTES
            or self._used + aside > _SCRATCH_BYTES
            or self._nbytes + part.length > BLOCK_BYTES
            or len(self._buffers) + 5 > IOV_MAX
        ):
            self.read()
        if not self._parts:
            self._start = self._end = part.offset
            gap = 0
        self._parts.append(part)
        self._aside(gap)
        first_buffer = len(self._buffers)
        if part.way is Way.DIRECT:
            self._aside(part.first)
            self._buffers.append(part.out.reshape(-1).view(np.uint8))
            self._aside(part.layout.chunk_bytes - part.first - part.span)
            if part.layout.crc:
                self._aside(CRC_BYTES)
                self._checks.append((part, first_buffer, len(self._buffers)))
        else:
            self._buffers.append(part.out.reshape(-1).view(np.uint8))
        self._end = part.offset + part.length
        self._nbytes += gap + part.length

    def read(self) -> None:
        """Fill all destinations taken so far."""
        if not self._parts:
            return
        first = self._parts[0]
        try:
            self._files.read_ranges(first.file, self._start, self._buffers)
        except CorruptionError as error:
            raise first.explain(error) from error
        for part, start, stop in self._checks:
            found = 0
            for i in range(start, stop - 1):
                found = crc32c(self._buffers[i].data, found)
            try:
                _compare(self._buffers[stop - 1], found)
            except CorruptionError as error:
                raise part.explain(error) from error
        self._clear(0)

    def _aside(self, nbytes: int) -> None:
        if nbytes:
            self._buffers.append(self._scratch[self._used : self._used + nbytes])
            self._used += nbytes


def _compare(stored: Array, computed: int) -> None:
    expected = int.from_bytes(stored.tobytes(), "little")
    if expected != computed:
        raise CorruptionError(f"crc32c of a chunk is {computed:#010x}, stored was {expected:#010x}: it is damaged.")
