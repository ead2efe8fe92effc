"""Writing regions of leaves as chunks: the hot path of a transaction."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from tailrace.checkpoint.assembly import Assemblies, Assembly, overlay
from tailrace.checkpoint.leaves import LeafState, Part, Place
from tailrace.checkpoint.ledger import Ledger
from tailrace.errors import BudgetError, CorruptionError
from tailrace.flow import parallel, pump
from tailrace.flow.budget import MemoryBudget
from tailrace.flow.regions import Region, chunks_touching, split
from tailrace.flow.sources import Array, ArraySource, Source
from tailrace.format import codecs, journal, zarr
from tailrace.storage.datafiles import Lanes
from tailrace.storage.reading import OpenFiles

Progress = Callable[[int], None]
Piece = tuple[LeafState, Region, Source, Region, int]  # leaf, region in it, source, region in that, sequence
LEAST_BUFFER_BYTES = 1 << 16
DEAD_CRC32C = 0x48674BC7  # crc32c of any bytes followed by their own crc32c, little-endian


class ChunkWriter:
    """Turns regions into chunks in data files, and notes them in the ledger.

    The budget is divided once: write buffers (one per thread), half-written chunks (a quarter), and the rest for
    pieces on their way from a source. So pieces never wait for half-written chunks, which only a flush may end.
    """

    def __init__(self, root: Path, ledger: Ledger, budget: MemoryBudget, *, threads: int, direct: bool = True) -> None:
        self.files: list[str] = []  # relative paths; a Place counts them
        self.dead: dict[int, list[tuple[int, int, int]]] = {}  # file -> offset, length, crc32c of what lost its use
        self.untrusted: set[str] = set()  # files of other writers: what they hold between chunks is not known
        self.unflushed_bytes = 0
        self._numbers: dict[str, int] = {}
        self._numbering = threading.Lock()
        threads = min(threads, budget.limit_bytes // (8 * LEAST_BUFFER_BYTES))
        self._ledger, self._budget, self._threads = ledger, budget, threads
        buffer_bytes = 1 << min(24, (budget.limit_bytes // (8 * threads)).bit_length() - 1)
        half_written_bytes = budget.limit_bytes // 4
        self._fixed_bytes = threads * buffer_bytes + half_written_bytes
        budget.reserve(self._fixed_bytes)
        self.lanes = Lanes(root, lanes=threads, buffer_bytes=buffer_bytes, direct=direct)
        self._half_written = Assemblies(half_written_bytes, finish=self._finish, spill=self._spill)
        self._reading = OpenFiles(root)
        self._pool: ThreadPoolExecutor | None = None
        self.piece_bytes = min(pump.PIECE_BYTES, budget.limit_bytes // 8)

    # Regions

    def write(
        self, leaf: LeafState, region: Region, source: Source, sequence: int, progress: Progress | None = None
    ) -> None:
        """Write a region of a leaf from a source of the region's shape; the source may change on return."""
        self.write_many([(leaf, region, source, sequence)], progress)

    def write_many(
        self, regions: Iterable[tuple[LeafState, Region, Source, int]], progress: Progress | None = None
    ) -> None:
        """Write many regions, pieces of all of them side by side on the writer's threads."""
        pieces = self._pieces(regions)
        first = next(pieces, None)
        if first is None:
            return
        second = next(pieces, None)

        def move(piece: Piece) -> None:
            self._move(*piece)
            if progress is not None:
                progress(piece[1].size * piece[0].dtype.itemsize)

        if second is None or self._threads == 1:  # nothing to overlap: spare the hand-over to another thread
            for piece in _chain(first, second, pieces):
                move(piece)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tailrace-write")
        pump.run(_chain(first, second, pieces), move, self._pool, self._threads)

    def _pieces(self, regions: Iterable[tuple[LeafState, Region, Source, int]]) -> Iterator[Piece]:
        for leaf, region, source, sequence in regions:
            most = max(self.piece_bytes, leaf.chunk_bytes) // leaf.dtype.itemsize
            for piece in split(region, leaf.chunk_shape, most):
                yield leaf, piece, source, piece.relative_to(region.start), sequence

    def _move(self, leaf: LeafState, region: Region, source: Source, inside: Region, sequence: int) -> None:
        encode_bytes = 2 * leaf.chunk_bytes if leaf.compression else 0
        if isinstance(source, ArraySource):
            if not encode_bytes:
                self._put(leaf, region, source.view(inside), sequence)
                return
            with self._budget.holding(encode_bytes):
                self._put(leaf, region, source.view(inside), sequence)
            return
        itemsize = leaf.dtype.itemsize + getattr(source, "scratch_itemsize", 0)  # a cast reads into memory of its own
        with self._budget.holding(region.size * itemsize + encode_bytes):
            data = np.empty(region.shape, leaf.dtype)
            source.read_into(inside, data)
            self._put(leaf, region, data, sequence)

    def _put(self, leaf: LeafState, region: Region, data: Array, sequence: int) -> None:
        """Store a region whose bytes are in memory: whole chunks at once, boxes of others half-written."""
        for index in chunks_touching(region, leaf.chunk_shape):
            chunk = leaf.chunk_number(index)
            whole = leaf.region_of(chunk)
            common = region.intersection(whole)
            if common is None:  # rank 0, or the one chunk is the region
                common = region
            block = data[pump.relative_slices(common, region.start)] if data.ndim else data
            if common == whole:
                self.append(leaf, chunk, sequence, block)
            else:
                self._half_written.put(
                    leaf,
                    chunk,
                    sequence,
                    common.relative_to(whole.start),
                    block,
                    may_finish=lambda newest: not self._ledger.older_active(newest, besides=sequence),
                )

    # Whole chunks

    def append(self, leaf: LeafState, chunk: int, sequence: int, block: Array) -> None:
        """Encode one whole chunk (clipped at the leaf's edge) and append it."""
        blocks = pump.padded_blocks(block, leaf.chunk_shape)
        if leaf.compression:
            whole = np.ascontiguousarray(next(blocks)) if block.shape == leaf.chunk_shape else _joined(blocks)
            blocks = iter([np.frombuffer(codecs.encode_chunk(whole, compression=leaf.compression)[0], np.uint8)])
        with self.lanes.take() as lane:
            offset, length = lane.append_checksummed(blocks)
            file = self.number_of(lane.relative)
        self.unflushed_bytes += length
        self.place(leaf, chunk, Place(file, offset, length, sequence))
        self._ledger.add(journal.Chunk(leaf.number, chunk, sequence, file, offset, length))

    def append_small(self, leaves: Sequence[tuple[LeafState, Array]], sequence: int, progress: Progress | None) -> None:
        """Append uncompressed leaves of one chunk each, one after the other in one data file."""
        if not leaves:
            return
        places = []
        with self.lanes.take() as lane:
            for _, data in leaves:
                offset, length = lane.append_small(data)
                places.append((offset, length, lane.relative))
        for (leaf, data), (offset, length, relative) in zip(leaves, places, strict=True):
            file = self.number_of(relative)
            self.unflushed_bytes += length
            self.place(leaf, 0, Place(file, offset, length, sequence))
            self._ledger.add(journal.Chunk(leaf.number, 0, sequence, file, offset, length))
            if progress is not None:
                progress(data.nbytes)

    def append_encoded(self, data: Array, sequence: int) -> Place:
        """Append a chunk that is encoded already."""
        with self.lanes.take() as lane:
            offset, length, _ = lane.append((data,))
            self.untrusted.add(lane.relative)  # others' chunks need not end in their crc32c
            return Place(self.number_of(lane.relative), offset, length, sequence)

    def place(self, leaf: LeafState, chunk: int, new: Place) -> None:
        """Set a chunk's place, unless a newer call already did; the loser's bytes are dead."""
        with leaf.lock:
            old = leaf.chunks.get(chunk)
            loser = old
            if leaf.void:
                loser = new
            elif old is None or old.sequence < new.sequence:
                leaf.chunks.put(chunk, new)
                for part in leaf.parts.get(chunk, ()):
                    if part.sequence < new.sequence:
                        self._bury(part.place, part.crc32c)
                if chunk in leaf.parts:
                    leaf.parts[chunk] = [part for part in leaf.parts[chunk] if part.sequence > new.sequence]
                    if not leaf.parts[chunk]:
                        del leaf.parts[chunk]
            else:
                loser = new
        if loser is not None:
            self._bury_chunk(leaf, loser)

    def add_part(self, leaf: LeafState, chunk: int, part: Part) -> None:
        """Note a box of a chunk that is on disk, unless a newer call wrote the whole chunk."""
        with leaf.lock:
            base = leaf.chunks.get(chunk)
            if not leaf.void and (base is None or base.sequence < part.sequence):
                insort(leaf.parts.setdefault(chunk, []), part, key=attrgetter("sequence"))
                return
        self._bury(part.place, part.crc32c)

    def bury(self, leaf: LeafState) -> None:
        """Everything written to a leaf is dead: it was deleted or declared anew."""
        with leaf.lock:  # what is still on its way is buried where it arrives
            leaf.void = True
        self._half_written.discard(leaf)
        for place in leaf.chunks.places():
            self._bury_chunk(leaf, place)
        for part in (part for parts in leaf.parts.values() for part in parts):
            self._bury(part.place, part.crc32c)

    def _bury_chunk(self, leaf: LeafState, place: Place) -> None:
        if leaf.metadata is None:  # others' chunks need not end in their crc32c; commit reads what is dead there
            self._bury(place, DEAD_CRC32C)

    def _bury(self, place: Place, checksum: int) -> None:
        self.dead.setdefault(place.file, []).append((place.offset, place.length, checksum))

    def number_of(self, relative: str, *, inherited: bool = False) -> int:
        """The number of a data file, noted in the ledger when it is new."""
        number = self._numbers.get(relative)
        if number is not None:
            return number
        with self._numbering:
            if inherited:
                self.untrusted.add(relative)
            if relative not in self._numbers:
                self._ledger.add(journal.DataFile(len(self.files), relative, inherited))
                self.files.append(relative)
                self._numbers[relative] = len(self.files) - 1
            return self._numbers[relative]

    # Half-written chunks

    def _finish(self, assembly: Assembly) -> None:
        leaf, newest = assembly.leaf, assembly.boxes[-1][0]
        if assembly.chunk in leaf.parts or leaf.chunks.get(assembly.chunk) is not None:
            self._spill(assembly)  # what is on disk may be newer than some of the boxes: commit sorts them
            return
        whole = leaf.region_of(assembly.chunk)
        self.append(leaf, assembly.chunk, newest, assembly.buffer[tuple(slice(0, n) for n in whole.shape)])

    def _spill(self, assembly: Assembly) -> None:
        leaf = assembly.leaf
        for sequence, box in assembly.boxes:
            with self.lanes.take() as lane:
                offset, length, checksum = lane.append(pump.padded_blocks(assembly.buffer[box.slices], box.shape))
                file = self.number_of(lane.relative)
            self.unflushed_bytes += length
            self.add_part(leaf, assembly.chunk, Part(sequence, box, Place(file, offset, length, sequence), checksum))
            self._ledger.add(
                journal.Partial(
                    leaf.number, assembly.chunk, sequence, file, offset, length, checksum, box.start, box.shape
                )
            )

    def spill(self) -> None:
        """Put every half-written chunk on disk."""
        self._half_written.spill_all()

    def missing(self, leaf: LeafState) -> list[Region]:
        """Regions of the leaf that were never written."""
        boxes = self._half_written.boxes(leaf)  # before the parts: a box that is spilled meanwhile is seen twice
        with leaf.lock:
            return leaf.missing(boxes)

    def settle(self, leaf: LeafState) -> None:
        """Assemble every chunk of the leaf that has parts, one at a time. The leaf must be covered."""
        if not leaf.parts:
            return
        self.lanes.write_through()
        for chunk, parts in sorted(leaf.parts.items()):
            base = leaf.chunks.get(chunk)
            with self._budget.holding(min(3 * leaf.chunk_bytes, self._budget.limit_bytes - self._fixed_bytes)):
                whole = overlay(
                    None if base is None else self._read_chunk(leaf, base),
                    leaf.chunk_shape,
                    leaf.dtype,
                    ((part.region, self._read_part(leaf, part)) for part in parts),
                )
                clipped = whole[tuple(slice(0, n) for n in leaf.region_of(chunk).shape)] if whole.ndim else whole
                self.append(leaf, chunk, parts[-1].sequence, clipped)
                leaf.parts.pop(chunk, None)
                for part in parts:
                    if part.sequence == parts[-1].sequence:  # as old as the whole, which so did not bury it
                        self._bury(part.place, part.crc32c)

    def _read_chunk(self, leaf: LeafState, place: Place) -> Array:
        data = self._reading.read(self.files[place.file], place.offset, place.length)
        meta = zarr.parse(zarr.render(leaf.shape, leaf.dtype, leaf.chunk_shape, compression=leaf.compression), 3)
        return codecs.decode_chunk(data, meta, np.empty(leaf.chunk_shape, leaf.dtype))

    def _read_part(self, leaf: LeafState, part: Part) -> Array:
        data = self._reading.read(self.files[part.place.file], part.place.offset, part.place.length)
        if crc32c(data) != part.crc32c:
            raise CorruptionError(
                f"leaf {leaf.key!r}: the part of it at byte {part.place.offset} of {self.files[part.place.file]} was "
                "damaged since it was written."
            )
        return np.frombuffer(data, leaf.dtype).reshape(part.region.shape)

    # Ends

    def close(self) -> None:
        """Release threads, buffers and files; nothing is synced."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self.lanes.close()
        self._reading.close()
        self._budget.release(self._fixed_bytes)


def _chunk_share(compression: str | None) -> int:
    """The largest chunk, as a divisor of the budget: encoding holds up to three chunks beside the fixed shares."""
    return 8 if compression else 4


def largest_chunk_bytes(budget: MemoryBudget, compression: str | None) -> int:
    """The largest chunk that may be declared under a budget."""
    return budget.limit_bytes // _chunk_share(compression)


def check_chunk_fits(key: str, chunk_bytes: int, budget: MemoryBudget, compression: str | None) -> None:
    """Refuse a chunk of which the budget cannot hold what writing and assembling it needs."""
    most = largest_chunk_bytes(budget, compression)
    if chunk_bytes > most:
        raise BudgetError(
            f"leaf {key!r}: chunk_shape makes chunks of {chunk_bytes} bytes, a memory_budget of {budget.limit_bytes} "
            f"bytes allows {most}. "
            f"Choose smaller chunks, leave chunk_shape out, or raise memory_budget."
        )


def default_threads() -> int:
    """Threads that write: at least two, of which one copies while the other waits for the disk."""
    return max(2, parallel.default_threads())


def _chain(first: Piece, second: Piece | None, rest: Iterator[Piece]) -> Iterator[Piece]:
    yield first
    if second is not None:
        yield second
    yield from rest


def _joined(blocks: Iterator[Array]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.concatenate([np.ascontiguousarray(block).reshape(-1).view(np.uint8) for block in blocks])
