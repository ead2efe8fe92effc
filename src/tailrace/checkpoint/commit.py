"""Turning what a transaction wrote into the files of a checkpoint: index, Orbax's JSON, tailrace.json."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from crc32c import crc32c

from tailrace.checkpoint import publish
from tailrace.checkpoint.index import MANIFEST, DatabaseIndex
from tailrace.checkpoint.leaves import LeafState
from tailrace.errors import CorruptionError
from tailrace.flow.regions import Shape
from tailrace.format import manifest, ocdbt, orbax, structure, zarr
from tailrace.format.keys import KeyPath, disk_name
from tailrace.format.manifest import DataFileInfo, DeadRange, SmallFile
from tailrace.format.ocdbt import DataFile, Entry, Indirect
from tailrace.storage.posix import fsync_dir, storage_errors, write_durably
from tailrace.storage.reading import OpenFiles

SMALL_FILES = (  # all that a commit may write beside data files
    *(orbax.METADATA, orbax.CHECKPOINT_METADATA, orbax.SHARDING, orbax.ARRAY_METADATAS, orbax.STRINGS),
    *(MANIFEST, manifest.FILE_NAME),
)
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a commit puts into files. `files` are the data files that chunks count, by relative path.

    `dead` maps a file to ranges (offset, length, crc32c) known to be dead, or to hold chunks without a checksum of
    their own; `trusted` are the files written by this very writer, in which all else between chunks is padding.
    """

    leaves: list[LeafState]  # sorted by name and a following "/", so that their keys are sorted
    texts: Mapping[KeyPath, str]
    structures: list[tuple[KeyPath, structure.Node]]
    custom_metadata: dict[str, Any]
    fingerprint: dict[str, Any] | None
    files: list[str]
    dead: Mapping[int, list[tuple[int, int, int]]]
    trusted: set[str]


def write_files(root: Path, contents: Contents, *, version: str) -> list[str]:
    """Write and sync every file but the data files, and compare the index, read back, with what it should say.

    Afterwards the directory is a complete checkpoint but for `commit_success.txt` and the data files returned, which
    no chunk is in. Raises CorruptionError when the index does not read back as it was meant, StorageError when the
    file system refuses.
    """
    tree = structure.assemble(contents.structures, _paths(contents))
    records = [orbax.ArrayRecord(leaf.path, leaf.shape, leaf.chunk_shape, leaf.kind) for leaf in contents.leaves]
    small = orbax.render(tree, records, contents.texts, custom_metadata=contents.custom_metadata, now_ns=time.time_ns())
    with storage_errors(f"writing the index of {root}"):
        index_file, described = _write_index(root, contents)
    with storage_errors(f"reading the data files of {root}"):
        data_files, unused = _data_files(root, contents)
    data_files[index_file] = described
    listed = {name: SmallFile(len(data), crc32c(data)) for name, data in small.items()}
    listed[MANIFEST] = _small_file((root / MANIFEST).read_bytes())
    listed[publish.SUCCESS] = _small_file(publish.SUCCESS_TEXT)
    small[manifest.FILE_NAME] = manifest.encode(
        manifest.Manifest(
            format=manifest.FORMAT,
            writer={"name": "tailrace", "version": version},
            files=dict(sorted(listed.items())),
            data_files=dict(sorted(data_files.items())),
            structure=msgspec.Raw(structure.encode(tree)),
            texts={disk_name(path): text for path, text in contents.texts.items()},
            kinds={leaf.name: leaf.kind for leaf in contents.leaves if leaf.kind != "array"},
            custom_metadata=contents.custom_metadata,
            source=contents.fingerprint,
        )
    )
    with storage_errors(f"writing the metadata of {root}"):
        for name, data in small.items():
            path = root / name
            if path.parent != root:
                path.parent.mkdir(exist_ok=True)
            write_durably(path, data)
        for directory in {(root / name).parent for name in [*small, *data_files]}:
            fsync_dir(directory)
    return unused


def _paths(contents: Contents) -> Iterator[KeyPath]:
    yield from (leaf.path for leaf in contents.leaves)
    yield from contents.texts


def _small_file(data: bytes) -> SmallFile:
    return SmallFile(len(data), crc32c(data))


# The index


def _write_index(root: Path, contents: Contents) -> tuple[str, DataFileInfo]:
    """Write the B+tree and manifest.ocdbt and read them back; the index file's relative path and description."""
    relative = f"d/{uuid.uuid4().hex}"
    try:
        described = _write_nodes(root, relative, contents)
        fsync_dir(root / "d")
        _compare_index(root, contents)
    except BaseException:
        (root / relative).unlink(missing_ok=True)  # the writer may go on, and commit again
        raise
    return relative, described


def _write_nodes(root: Path, relative: str, contents: Contents) -> DataFileInfo:
    file = DataFile(b"", relative.encode())
    with (root / relative).open("xb") as nodes:

        def append(node: bytes) -> int:
            offset = nodes.tell()
            nodes.write(node)
            return offset

        tree = ocdbt.write_tree(_entries(contents), append, file)
        nodes.flush()
        os.fsync(nodes.fileno())
        length = nodes.tell()
    encoded = ocdbt.encode_manifest(tree, uuid=uuid.uuid4().bytes, commit_time_ns=time.time_ns())
    write_durably(root / MANIFEST, encoded)
    return DataFileInfo(length)


def _entries(contents: Contents) -> Iterator[Entry]:
    """Every key of the checkpoint with its value, in byte order."""
    files = [DataFile(b"", relative.encode()) for relative in contents.files]
    entries = (entry for leaf in contents.leaves for entry in _leaf_entries(leaf, files))
    if _nested(contents.leaves):  # a name such as "a/c" may sort among the keys of "a": rare enough to sort them all
        yield from sorted(entries)
    else:
        yield from entries


def _nested(leaves: list[LeafState]) -> bool:
    """Whether one leaf's name followed by "/" begins another's, so that their keys interleave."""
    return any(later.name.startswith(f"{leaf.name}/") for leaf, later in itertools.pairwise(leaves))


@lru_cache(maxsize=4096)  # the layers of a model have few shapes between them
def _metadata(shape: Shape, dtype: np.dtype[Any], chunk_shape: Shape, compression: str | None) -> bytes:
    return zarr.render(shape, dtype, chunk_shape, compression=compression)


def _leaf_entries(leaf: LeafState, files: list[DataFile]) -> Iterator[Entry]:
    metadata = leaf.metadata or _metadata(leaf.shape, leaf.dtype, leaf.chunk_shape, leaf.compression)
    prefix = leaf.name.encode()
    yield from _chunk_entries(leaf, prefix + b"/c", files)
    yield prefix + b"/zarr.json", metadata


def _chunk_entries(leaf: LeafState, prefix: bytes, files: list[DataFile]) -> Iterator[Entry]:
    """A leaf's chunks in byte order of their keys: along each axis the order of the numbers as text."""
    if leaf.chunks.chunks == 1:
        place = leaf.chunks.get(0)
        assert place is not None
        yield prefix + b"/0" * len(leaf.grid), Indirect(files[place.file], place.offset, place.length)
        return
    axes = [sorted((b"/%d" % i, i) for i in range(n)) for n in leaf.grid]
    for index in itertools.product(*axes):
        place = leaf.chunks.get(leaf.chunk_number(tuple(i for _, i in index)))
        assert place is not None
        yield b"".join((prefix, *(text for text, _ in index))), Indirect(files[place.file], place.offset, place.length)


def _compare_index(root: Path, contents: Contents) -> None:
    files = OpenFiles(root)
    try:
        index = DatabaseIndex(files)
        for wanted, found in itertools.zip_longest(_entries(contents), index.entries()):
            if wanted != found:
                raise CorruptionError(
                    f"the index of {root} does not read back as it was written: it has {found!r} "
                    f"where {wanted!r} should be. Nothing was published."
                )
    finally:
        files.close()


# Data files


def _data_files(root: Path, contents: Contents) -> tuple[dict[str, DataFileInfo], list[str]]:
    """Every data file that a chunk is in, described, and the files that none is in."""
    unknown = {number for number, relative in enumerate(contents.files) if relative not in contents.trusted}
    used: dict[int, list[tuple[int, int]]] = {number: [] for number in unknown}
    bare: dict[int, set[tuple[int, int]]] = {}  # chunks that end in no crc32c of their own
    live = set()
    for leaf in contents.leaves:
        protected = leaf.metadata is None or zarr.parse(leaf.metadata, 3).crc_protected
        for place in leaf.chunks.places():
            live.add(place.file)
            if place.file in unknown:
                used[place.file].append((place.offset, place.length))
            if not protected:
                bare.setdefault(place.file, set()).add((place.offset, place.length))
    described = {}
    for number, relative in enumerate(contents.files):
        path = root / relative
        if number not in live:
            continue
        length = path.stat().st_size
        known = contents.dead.get(number, [])
        dead = [DeadRange(*entry) for entry in known]
        dead += _checksums(path, sorted(bare.get(number, set()) - {entry[:2] for entry in known}))
        if number in unknown:
            dead += _dead_gaps(path, sorted(used[number] + [entry[:2] for entry in known]), length)
        described[relative] = DataFileInfo(length, sorted(dead))
    return described, [relative for number, relative in enumerate(contents.files) if number not in live]


def _checksums(path: Path, ranges: list[tuple[int, int]]) -> Iterator[DeadRange]:
    if not ranges:
        return
    with path.open("rb") as file:
        for offset, length in ranges:
            yield DeadRange(offset, length, _read_range(file, offset, length)[0])


def _dead_gaps(path: Path, used: list[tuple[int, int]], length: int) -> Iterator[DeadRange]:
    """What lies between used ranges and is not zero: left by writers that died before they could note it."""
    at = 0
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what a dead writer appended last may not be on the disk; its checksum is to stay true
        for start, nbytes in [*used, (length, 0)]:
            if start > at:
                checksum, zero = _read_range(file, at, start - at)
                if not zero:
                    yield DeadRange(at, start - at, checksum)
            at = max(at, start + nbytes)


def _read_range(file: BinaryIO, offset: int, length: int) -> tuple[int, bool]:
    """The crc32c of a range, and whether it is all zeros."""
    file.seek(offset)
    checksum, zero = 0, True
    while length and (block := file.read(min(_READ_BYTES, length))):
        checksum, length = crc32c(block, checksum), length - len(block)
        zero = zero and block.count(0) == len(block)
    return checksum, zero
