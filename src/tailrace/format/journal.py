"""The journal: what an unfinished transaction has made durable, one checksummed record after another.

A journal file is a header and then records, each `length u32 LE, crc32c u32 LE, payload`, the payload one record as a
MessagePack array whose first item is the record's type. Records are appended after the bytes they speak of are
durable, so a reader may trust every record up to the first one that is cut short or damaged, and nothing after it.

Leaves and data files are numbered within one journal; several journals (one per writer that worked on the
transaction) are read one after the other. `sequence` orders what users asked for: the highest wins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from crc32c import crc32c

from tailrace.errors import CorruptionError, UnsupportedFormatError

MAGIC = b"tailrace-journal\n"
VERSION = 1
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct(f"<{len(MAGIC)}sI")
MAX_RECORD_BYTES = 256 << 20  # a structure record of millions of leaves; more is damage


class Declare(msgspec.Struct, frozen=True, array_like=True, tag="D", gc=False):
    """A leaf, as declared by the call numbered `sequence`; `leaf` is its number in this journal.

    `metadata` is the leaf's own zarr.json where it was inherited from a checkpoint that stores leaves otherwise.
    """

    leaf: int
    sequence: int
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    compression: str | None
    kind: str
    metadata: bytes | None = None


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="X", gc=False):
    """The leaf or text at `path` is gone, with everything declared or written before `sequence`."""

    sequence: int
    path: tuple[str | int, ...]


class DataFile(msgspec.Struct, frozen=True, array_like=True, tag="F", gc=False):
    """A data file; `file` is its number in this journal."""

    file: int
    path: str
    inherited: bool = False


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="C", gc=False):
    """A whole chunk, encoded, at a byte range. `chunk` counts the leaf's grid in C order."""

    leaf: int
    chunk: int
    sequence: int
    file: int
    offset: int
    length: int


class Partial(msgspec.Struct, frozen=True, array_like=True, tag="P", gc=False):
    """A box inside a chunk (start relative to the chunk), as plain C-ordered bytes with their crc32c."""

    leaf: int
    chunk: int
    sequence: int
    file: int
    offset: int
    length: int
    crc32c: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Text(msgspec.Struct, frozen=True, array_like=True, tag="T", gc=False):
    """A str leaf."""

    sequence: int
    path: tuple[str | int, ...]
    value: str


class Structure(msgspec.Struct, frozen=True, array_like=True, tag="S", gc=False):
    """The containers below `prefix`, as JSON of format/structure."""

    sequence: int
    prefix: tuple[str | int, ...]
    node: bytes


class Metadata(msgspec.Struct, frozen=True, array_like=True, tag="M", gc=False):
    """The checkpoint's custom metadata, a JSON object."""

    sequence: int
    value: dict[str, Any]


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, tag="I", gc=False):
    """What the data is taken from, so that a resumed run can tell that it is still the same."""

    sequence: int
    value: dict[str, Any]


class Inherit(msgspec.Struct, frozen=True, array_like=True, tag="H", gc=False):
    """Everything that the checkpoint `parent` holds is being taken over (fork), or, `complete`, has been."""

    sequence: int
    parent: str
    complete: bool


Record = Declare | Delete | DataFile | Chunk | Partial | Text | Structure | Metadata | Fingerprint | Inherit
_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


def header() -> bytes:
    """The first bytes of a journal file."""
    return _HEADER.pack(MAGIC, VERSION)


def encode(records: Iterable[Record]) -> bytes:
    """The bytes that append these records."""
    parts: list[bytes] = []
    for record in records:
        payload = _encoder.encode(record)
        parts += (_FRAME.pack(len(payload), crc32c(payload)), payload)
    return b"".join(parts)


def decode(data: bytes) -> Iterator[Record]:
    """Every record up to the first that is cut short or damaged.

    Raises CorruptionError when the header is not a journal's, UnsupportedFormatError when a newer tailrace wrote it. A
    header cut short reads as a journal without records: its writer died before it acknowledged anything.
    """
    if len(data) < _HEADER.size:
        return
    magic, version = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptionError(f"not a journal: it begins {data[: len(MAGIC)]!r}.")
    if version != VERSION:
        raise UnsupportedFormatError(
            f"the journal has version {version}, this tailrace reads {VERSION}: resume with the one that wrote it."
        )
    at = _HEADER.size
    view = memoryview(data)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        payload = view[at : at + length]
        if length > MAX_RECORD_BYTES or len(payload) < length or crc32c(payload) != checksum:
            return
        try:
            yield _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise UnsupportedFormatError(f"the journal holds a record this tailrace does not know: {error}") from error
        at += length
