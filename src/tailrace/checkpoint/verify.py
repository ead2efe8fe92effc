"""Every byte of a checkpoint, read and checked.

Of ours each byte is held by one checksum or is zero: small files by tailrace.json, which holds its own; chunks by the
crc32c that ends them; nodes of the index by theirs; dead ranges, and chunks inherited without a checksum, by
tailrace.json; and what none of these names is padding, which is zero. Of a foreign checkpoint all leaves are decoded,
and those without checksums are named.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from crc32c import crc32c

from tailrace.checkpoint import publish
from tailrace.checkpoint.locate import check_small
from tailrace.errors import CorruptionError, FormatError, StorageError
from tailrace.flow.parallel import run_jobs
from tailrace.flow.regions import Region, chunk_region, grid_shape
from tailrace.flow.sources import Array
from tailrace.format import manifest
from tailrace.format.codecs import BLOCK_BYTES
from tailrace.format.manifest import DataFileInfo, Manifest
from tailrace.format.ocdbt import Indirect
from tailrace.format.zarr import CRC_BYTES, ArrayMetadata
from tailrace.storage.foreign import ForeignArray

if TYPE_CHECKING:
    from tailrace.checkpoint.leaf import Leaf
    from tailrace.checkpoint.reader import Checkpoint

MAX_REPORTED = 10
_JOB_BYTES = 16 << 20
_CHUNK_KEY = re.compile(rb"(.+)/c((?:/\d+)*)", re.DOTALL)
_OWN_CRC = -1  # a range that ends in its crc32c

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` read, all of it sound. `unprotected` leaves could be decoded but carry no checksum."""

    leaves: int
    bytes: int
    files: int
    seconds: float
    unprotected: list[str] = field(default_factory=list)


class _Range(NamedTuple):
    """Bytes of a data file, and their crc32c; _OWN_CRC where the last four bytes are it."""

    offset: int
    length: int
    crc32c: int


def verify(checkpoint: Checkpoint, progress: Progress | None = None) -> VerifyReport:
    """Read and check everything.

    Raises CorruptionError after all of it has been read; the message has the first problems found, each with its
    leaf, region and file. `progress` is told bytes as they have been checked.
    """
    started = time.monotonic()
    check = _Check(checkpoint, progress)
    if checkpoint.manifest is not None:
        check.own(checkpoint.manifest)
    else:
        check.foreign()
    if check.problems:
        raise CorruptionError(_message(checkpoint, check.problems))
    return VerifyReport(
        leaves=len(checkpoint),
        bytes=check.nbytes,
        files=check.files,
        seconds=time.monotonic() - started,
        unprotected=check.unprotected,
    )


def _message(checkpoint: Checkpoint, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{checkpoint.path}: {problems[0]}"
    listed = "".join(f"\n  - {problem}" for problem in problems[:MAX_REPORTED])
    more = f"\n  and {len(problems) - MAX_REPORTED} more" if len(problems) > MAX_REPORTED else ""
    return f"{checkpoint.path}: {len(problems)} problems:{listed}{more}"


class _Check:
    def __init__(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._files = checkpoint.files
        self._progress = progress
        self._lock = threading.Lock()
        self._index_is_whole = True
        self.problems: list[str] = []
        self.unprotected: list[str] = []
        self.nbytes = 0
        self.files = 0

    def own(self, own: Manifest) -> None:
        """Check a checkpoint of ours."""
        self._small_files(own)
        self._listing(own)
        ranges = self._ranges()
        for name, info in own.data_files.items():
            self._data_file(name, info, ranges.pop(name, []))
        for name in sorted(ranges):
            self.problems.append(f"file {name}: the index refers to it, {manifest.FILE_NAME} does not list it.")

    def foreign(self) -> None:
        """Decode every leaf of another writer's checkpoint."""
        for leaf in self._leaves():
            try:
                meta = leaf.metadata
                if isinstance(meta, ForeignArray) or not _protected(meta):
                    self.unprotected.append(leaf.key)
                self._decode(leaf)
            except FormatError as error:
                self.problems.append(str(error))
        self.files = sum(len(names) for _, _, names in os.walk(self._checkpoint.path))

    def _leaves(self) -> Iterator[Leaf]:
        return (self._checkpoint.leaf(path) for path in self._checkpoint.paths() if path not in self._checkpoint.texts)

    def _decode(self, leaf: Leaf) -> None:
        # A destination of one element, met again at every index: all is decoded, nothing is kept.
        sink = np.lib.stride_tricks.as_strided(np.empty(1, leaf.dtype), leaf.shape, (0,) * leaf.ndim)
        self._checkpoint.read_into([(leaf, Region.whole(leaf.shape), sink)], progress=self._done)

    # Ours

    def _small_files(self, own: Manifest) -> None:
        expected = {manifest.FILE_NAME: None, **own.files}
        for name, small in expected.items():
            data = self._files.read_whole(name)
            try:
                if data is None:
                    raise CorruptionError(f"{name} is missing, {manifest.FILE_NAME} lists it.")
                self._done(len(data))
                if small is None:
                    manifest.decode(data)
                else:
                    check_small(name, data, small)
            except FormatError as error:
                self.problems.append(str(error))

    def _listing(self, own: Manifest) -> None:
        """Files that tailrace.json does not list: what it does not know it cannot vouch for."""
        root = os.fspath(self._checkpoint.path)
        known = {manifest.FILE_NAME, publish.REPLACED_MARKER, *own.files, *own.data_files}

        def refuse(error: OSError) -> None:
            raise StorageError.wrap(error, f"listing {root}")

        for directory, _, names in os.walk(root, onerror=refuse):
            base = "" if directory == root else f"{os.path.relpath(directory, root)}/"
            self.files += len(names)
            self.problems += [
                f"file {base}{name} is unknown: {manifest.FILE_NAME} does not list it."
                for name in sorted(names)
                if base + name not in known
            ]

    def _ranges(self) -> dict[str, Array]:
        """Offset and length of everything the index names, by file; on the way, that no chunk is missing."""
        places: dict[str, list[tuple[int, int]]] = {}
        packed: dict[str, list[Array]] = {}

        def take(place: Indirect) -> None:
            found = places.setdefault(place.file.path, [])
            found.append((place.offset, place.length))
            if len(found) == 4096:  # as numpy 16 bytes each, as Python objects ten times that
                packed.setdefault(place.file.path, []).append(np.array(found, np.int64))
                found.clear()

        try:
            for place in self._checkpoint.index.nodes():
                take(place)
            self._leaf_chunks(take)
        except FormatError as error:  # a damaged node hides what is below it, which then is no padding
            self._index_is_whole = False
            self.problems.append(str(error))
        return {
            name: np.concatenate([*packed.get(name, []), np.array(found, np.int64).reshape(-1, 2)])
            for name, found in places.items()
        }

    def _leaf_chunks(self, take: Callable[[Indirect], None]) -> None:
        """Every chunk of every leaf to `take`; a missing, surplus or inline damaged one is a problem."""
        known = {leaf.name: leaf for leaf in self._leaves()}
        bare = {name for name, leaf in known.items() if not _ends_in_crc(leaf.metadata)}
        counted: dict[str, int] = {}
        for key, value in self._checkpoint.index.entries():
            text = key.decode(errors="replace")
            match = _CHUNK_KEY.fullmatch(key)
            name = match[1].decode(errors="replace") if match else text.removesuffix("/zarr.json")
            leaf = known.get(name)
            if leaf is None or (match is None and not text.endswith("/zarr.json")):
                self.problems.append(f"the index has the key {text!r}, which belongs to no leaf.")
            if isinstance(value, Indirect) and match and name not in bare:  # tailrace.json holds the others' checksums
                take(value)
            if leaf is None or match is None:
                continue
            place = tuple(map(int, match[2].split(b"/")[1:]))
            grid = grid_shape(leaf.shape, leaf.chunk_shape)
            if len(place) != len(grid) or any(i >= n for i, n in zip(place, grid, strict=True)):
                self.problems.append(f"leaf {leaf.key!r}: the index has the chunk {text!r}, its grid is {grid}.")
            counted[name] = counted.get(name, 0) + 1
            if isinstance(value, bytes) and name not in bare and not _sound(value):
                self.problems.append(f"leaf {leaf.key!r}, chunk {text!r}, in the index itself: wrong crc32c.")
        for name, leaf in known.items():
            wanted = int(np.prod(grid_shape(leaf.shape, leaf.chunk_shape), dtype=np.int64))
            if counted.get(name, 0) != wanted:
                self.problems.append(f"leaf {leaf.key!r} has {counted.get(name, 0)} chunks, {wanted} were written.")

    def _data_file(self, name: str, info: DataFileInfo, named: Array | list[tuple[int, int]]) -> None:
        try:
            length = self._files.length(name)
        except CorruptionError as error:
            self.problems.append(str(error))
            return
        if length != info.length:
            self.problems.append(f"file {name} has {length} bytes, {manifest.FILE_NAME} says {info.length}.")
        rows = np.unique(np.array(named, np.int64).reshape(-1, 2), axis=0)  # sorted; a range named twice is read once
        budget = self._checkpoint.budget

        found: list[tuple[int, _Range | str]] = []

        def work(job: tuple[int, int, list[_Range]]) -> None:
            start, stop, ranges = job
            with budget.holding(BLOCK_BYTES):
                # As a list: extending from a list is one step that no other thread interrupts.
                found.extend(list(self._stretch(name, start, min(stop, length), ranges)))

        run_jobs(_stretches(rows, info.dead, max(length, info.length)), work)
        found.sort(key=itemgetter(0))
        damaged = [problem for _, problem in found if isinstance(problem, _Range)]
        owners = self._owners(name, {item.offset for item in damaged[:MAX_REPORTED]}) if damaged else {}
        self.problems += [
            problem if isinstance(problem, str) else _blame(name, problem, owners.get(problem.offset, ""))
            for _, problem in found
        ]

    def _stretch(self, name: str, start: int, stop: int, ranges: list[_Range]) -> Iterator[tuple[int, _Range | str]]:
        """Read [start, stop) once; the ranges in it that are damaged, and what is not zero between them."""
        block = np.empty(BLOCK_BYTES, np.uint8)
        end = start
        for item in ranges:
            if item.offset > end:
                yield from self._zeros(name, end, item.offset, block)
            if not self._range_is_sound(name, item, block):
                yield item.offset, item
            end = max(end, item.offset + item.length)
        if stop > end:
            yield from self._zeros(name, end, stop, block)

    def _range_is_sound(self, name: str, item: _Range, block: Array) -> bool:
        own = item.crc32c == _OWN_CRC
        end = item.offset + item.length - CRC_BYTES * own
        found = 0
        try:
            for start in range(item.offset, end, BLOCK_BYTES):
                part = block[: min(BLOCK_BYTES, end - start)]
                self._files.read_ranges(name, start, [part])
                found = crc32c(part.data, found)
                self._done(part.nbytes)
            if not own:
                return found == item.crc32c
            stored = block[:CRC_BYTES]
            self._files.read_ranges(name, end, [stored])
        except CorruptionError:  # past the end of the file
            return False
        self._done(CRC_BYTES)
        return item.length >= CRC_BYTES and int.from_bytes(stored.tobytes(), "little") == found

    def _zeros(self, name: str, start: int, stop: int, block: Array) -> Iterator[tuple[int, str]]:
        if not self._index_is_whole:
            return
        for at in range(start, stop, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, stop - at)]
            try:
                self._files.read_ranges(name, at, [part])
            except CorruptionError:  # the length has been reported
                return
            self._done(part.nbytes)
            if part.any():
                byte = at + int((part != 0).argmax())
                yield byte, f"file {name}: byte {byte} is padding and not zero."
                return

    def _owners(self, name: str, offsets: set[int]) -> dict[int, str]:
        """Whose the damaged ranges are; looked up afterwards, so that nothing is kept for sound ones."""
        owners = {
            place.offset: "index node, "
            for place in self._checkpoint.index.nodes()
            if place.offset in offsets and place.file.path == name
        }
        if not self._index_is_whole:
            return owners
        leaves = {leaf.name: leaf for leaf in self._leaves()}
        for key, value in self._checkpoint.index.entries():
            if not isinstance(value, Indirect) or value.offset not in offsets or value.file.path != name:
                continue
            match = _CHUNK_KEY.fullmatch(key)
            leaf = leaves.get(match[1].decode(errors="replace")) if match else None
            if match and leaf is not None:
                place = tuple(map(int, match[2].split(b"/")[1:]))
                if len(place) == leaf.ndim:
                    region = chunk_region(place, leaf.shape, leaf.chunk_shape)
                    owners[value.offset] = f"leaf {leaf.key!r}, region {region}: "
        return owners

    def _done(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            if self._progress is not None:
                self._progress(nbytes)


def _blame(name: str, item: _Range, owner: str) -> str:
    where = f"file {name}, bytes {item.offset} to {item.offset + item.length}"
    if item.crc32c != _OWN_CRC and not owner:
        return f"{where}: dead range: wrong crc32c."
    return f"{owner}{where}: wrong crc32c, or the file ends too early."


def _stretches(rows: Array, dead: list[manifest.DeadRange], length: int) -> Iterator[tuple[int, int, list[_Range]]]:
    """Cut a data file between ranges into stretches for one thread each, in order, to the end of the file."""
    start = end = 0
    job: list[_Range] = []
    for item in _merged(rows, dead):
        if job and item.offset >= end and end - start >= _JOB_BYTES:
            yield start, item.offset, job
            start, job = item.offset, []
        job.append(item)
        end = max(end, item.offset + item.length)
    if job or length > start:
        yield start, length, job


def _merged(rows: Array, dead: list[manifest.DeadRange]) -> Iterator[_Range]:
    pending = sorted(dead, reverse=True)
    for offset, length in rows:  # not tolist: millions of rows stay packed
        while pending and pending[-1].offset <= offset:
            yield _Range(*pending.pop())
        yield _Range(int(offset), int(length), _OWN_CRC)
    while pending:
        yield _Range(*pending.pop())


def _sound(encoded: bytes) -> bool:
    payload, stored = encoded[:-CRC_BYTES], encoded[-CRC_BYTES:]
    return int.from_bytes(stored, "little") == crc32c(payload)


def _ends_in_crc(meta: ArrayMetadata | ForeignArray) -> bool:
    return isinstance(meta, ArrayMetadata) and meta.crc_protected


def _protected(meta: ArrayMetadata) -> bool:
    inner = meta.inner
    return meta.crc_protected or (inner is not None and _protected(inner))
