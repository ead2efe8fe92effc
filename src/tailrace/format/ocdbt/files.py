"""Data files and byte ranges in them; prefix-compressed strings, which the file table and the keys share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.errors import CorruptionError, FormatError
from tailrace.format.ocdbt.envelope import MAX_BODY_BYTES
from tailrace.format.varint import MAX_INT64, ByteReader, encode_many, encode_one

MAX_STRING_BYTES = 65535  # of a key or path, by the format
MAX_COUNT = 1 << 20  # of entries in a node or files in a table; TensorStore's limit for nodes


class DataFile(NamedTuple):
    """A file of the database by its path from the database's directory, base + relative."""

    base: bytes
    relative: bytes

    @property
    def path(self) -> str:
        """The whole path, as the file system calls take it."""
        return os.fsdecode(self.base + self.relative)


class Indirect(NamedTuple):
    """A byte range of a data file."""

    file: DataFile
    offset: int
    length: int


def shared_prefix_bytes(a: bytes, b: bytes) -> int:
    """How many leading bytes two strings share."""
    shorter = min(len(a), len(b))  # as integers: one XOR instead of a loop over bytes
    difference = int.from_bytes(a[:shorter], "big") ^ int.from_bytes(b[:shorter], "big")
    return shorter - (difference.bit_length() + 7) // 8


def encode_file_table(files: Iterable[DataFile]) -> tuple[bytes, dict[DataFile, int]]:
    """The table of the distinct files, and each one's id in it."""
    table = sorted(set(files))
    if not table:
        return encode_one(0), {}
    paths = [file.base + file.relative for file in table]
    assert max(map(len, paths)) <= MAX_STRING_BYTES, "data file path too long for the format"
    shared = [0]
    for before, file in pairwise(table):
        nbytes = shared_prefix_bytes(before.base + before.relative, file.base + file.relative)
        if before.base != file.base:  # so the format asks, to keep each base one string
            nbytes = min(nbytes, len(before.base), len(file.base))
        shared.append(nbytes)
    suffixes = [path[nbytes:] for path, nbytes in zip(paths, shared, strict=True)]
    encoded = (
        encode_one(len(table))
        + encode_many(shared[1:])
        + encode_many([len(suffix) for suffix in suffixes])
        + encode_many([len(file.base) for file in table])
        + b"".join(suffixes)
    )
    return encoded, {file: index for index, file in enumerate(table)}


def decode_file_table(
    reader: ByteReader, base: bytes, *, may_be_missing: bool = False, limit_bytes: int = MAX_BODY_BYTES
) -> list[DataFile]:
    """The files of a table whose own base paths stand below `base`.

    A path that would leave the database's directory is refused. `may_be_missing` admits the empty path, which
    stands for the file of an empty tree's root.
    """
    count = reader.varint(MAX_COUNT)
    if count == 0:
        return []
    shared, suffixes = reader.varints(count - 1), reader.varints(count)
    base_lengths = reader.varints(count).tolist()
    files = []
    for path, base_length in zip(
        decode_strings(reader, shared, suffixes, limit_bytes=limit_bytes), base_lengths, strict=True
    ):
        if base_length > len(path):
            raise CorruptionError(
                f"data file {path!r}: base path of {base_length} bytes, {len(path)} in the whole path"
            )
        file = DataFile(base + path[:base_length], path[base_length:])
        _check_path(file.base + file.relative, may_be_missing)
        files.append(file)
    return files


def decode_strings(
    reader: ByteReader,
    shared: npt.NDArray[np.int64],
    suffixes: npt.NDArray[np.int64],
    *,
    prefix: bytes = b"",
    limit_bytes: int,
) -> list[bytes]:
    """Prefix-compressed strings, each behind `prefix`; `shared` lacks the first string, which shares nothing.

    All together may have at most `limit_bytes`, since a few bytes can stand for 64 KiB each.
    """
    count = len(suffixes)
    if max(int(suffixes.max()), int(shared.max(initial=0))) > MAX_STRING_BYTES:
        raise CorruptionError(f"a key or path of more than {MAX_STRING_BYTES} bytes")
    lengths = suffixes.copy()
    lengths[1:] += shared
    if bool((shared > lengths[:-1]).any()):
        raise CorruptionError("a key or path shares more bytes with the one before it than that one has")
    total = int(lengths.sum()) + count * len(prefix)
    if total > limit_bytes:
        raise CorruptionError(f"keys or paths of {total} bytes in one table, at most {limit_bytes} are read")
    text = reader.take(int(suffixes.sum()))
    strings = []
    string, start = prefix, 0
    ends = np.cumsum(suffixes).tolist()
    keep = [len(prefix), *(shared + len(prefix)).tolist()]
    for nbytes, end in zip(keep, ends, strict=True):
        string = string[:nbytes] + text[start:end]
        start = end
        strings.append(string)
    return strings


def check_ranges(
    files: Sequence[DataFile],
    ids: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    """Refuse ranges of files that are not in the table, or beyond what a file can hold."""
    if ids.size and int(ids.max()) >= len(files):
        raise CorruptionError(f"data file {int(ids.max())} of a table of {len(files)}")
    if bool((offsets > MAX_INT64 - lengths).any()):
        raise CorruptionError("a byte range ends beyond 2**63")


def _check_path(path: bytes, may_be_missing: bool) -> None:
    if not path and may_be_missing:
        return
    if not path or path.startswith(b"/") or b"\0" in path or b".." in path.split(b"/"):
        raise FormatError(
            f"data file path {path!r}: a path must name a file below the database's directory. Do not trust its source."
        )
