"""tailrace.json: what the other files of a checkpoint must look like, byte for byte.

One JSON object whose last member is the crc32c of all bytes before it, in lower-case hex:

    {"format":1, ..., "files":{NAME:[LENGTH,CRC32C],...},
     "data_files":{PATH:[LENGTH,[[OFFSET,LENGTH,CRC32C],...]],...},"crc32c":"89abcdef"}

`files` lists every other small file. `data_files` lists every file whose bytes the OCDBT index points into, with its
dead ranges: bytes that no index entry names, such as a chunk that was written twice. Listed with them are the few
ranges that are named but do not end in a checksum of their own: chunks inherited from another writer's checkpoint.
All that is neither named by the index nor listed is padding, and padding is zero. So each bit of a checkpoint is held
by exactly one checksum or is zero.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
from crc32c import crc32c

from tailrace.errors import CorruptionError, UnsupportedFormatError

FILE_NAME = "tailrace.json"
FORMAT = 1
_TAIL = re.compile(rb'"crc32c":"([0-9a-f]{8})"}\Z')
_TAIL_BYTES = len(b'"crc32c":"00000000"}')


class SmallFile(NamedTuple):
    """Length in bytes and crc32c of a whole file."""

    length: int
    crc32c: int


class DeadRange(NamedTuple):
    """Bytes of a data file that nothing refers to any more."""

    offset: int
    length: int
    crc32c: int


class DataFileInfo(NamedTuple):
    """Length of a data file and its dead ranges, in order of offset."""

    length: int
    dead: list[DeadRange] = []  # noqa: RUF012 (never mutated: msgspec copies defaults)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What tailrace.json says.

    `structure` is the Node of format/structure as JSON: every container, and the place of every leaf, in order.
    `texts` are the str leaves by name on disk; every other leaf is an array.
    `kinds` maps a leaf's name on disk to what it is given back as, where that is not "array".
    `source` is the fingerprint of what was imported, if anything was.
    """

    format: int
    writer: dict[str, str]
    files: dict[str, SmallFile]
    data_files: dict[str, DataFileInfo]
    structure: msgspec.Raw
    texts: dict[str, str] = {}
    kinds: dict[str, str] = {}
    custom_metadata: dict[str, Any] = {}
    source: dict[str, Any] | None = None


def encode(manifest: Manifest) -> bytes:
    """The bytes of tailrace.json."""
    body = msgspec.json.encode(manifest)[:-1] + b","
    return body + b'"crc32c":"%08x"}' % crc32c(body)


def decode(data: bytes) -> Manifest:
    """Read tailrace.json.

    Raises CorruptionError when any bit of it has changed, UnsupportedFormatError when a newer tailrace wrote it.
    """
    tail = _TAIL.search(data, max(0, len(data) - _TAIL_BYTES))
    if tail is None:
        raise CorruptionError(f"{FILE_NAME} does not end in its checksum: it is truncated or damaged.")
    found = crc32c(data[: tail.start()])
    if found != int(tail[1], 16):
        raise CorruptionError(
            f"{FILE_NAME} has crc32c {found:08x}, its last member says {tail[1].decode()}: it is damaged."
        )
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise UnsupportedFormatError(
                f"{FILE_NAME} has format {version}, this tailrace reads format {FORMAT}: read it with a newer tailrace."
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{FILE_NAME} is intact but not what format {FORMAT} holds: {error}") from error


class _Version(msgspec.Struct):
    format: int
