"""The manifest: a database's configuration and its newest versions. Layout: the package's docstring."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tailrace.errors import CorruptionError, UnsupportedFormatError
from tailrace.format.ocdbt.envelope import MANIFEST_MAGIC, ZSTD, seal, unseal
from tailrace.format.ocdbt.files import MAX_COUNT, DataFile, Indirect, decode_file_table, encode_file_table
from tailrace.format.ocdbt.nodes import Root, Statistics
from tailrace.format.varint import MAX_INT64, MAX_UINT64, ByteReader, encode_many, encode_one

MAX_MANIFEST_BYTES = 64 << 20  # TensorStore keeps at most 2**16 inline versions of some 100 bytes
_KINDS: tuple[Literal["single", "numbered"], ...] = ("single", "numbered")
_MISSING = MAX_UINT64  # offset and length of the root of an empty tree
_MISSING_FILE = DataFile(b"", b"")
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Config:
    """How TensorStore is to write to the database; readers need only `kind`. `zstd_level` None: no compression."""

    uuid: bytes
    kind: Literal["single", "numbered"] = "single"
    max_inline_value_bytes: int = 1024
    max_decoded_node_bytes: int = 8 << 20
    version_tree_arity_log2: int = 4
    zstd_level: int | None = 1


@dataclass(frozen=True, slots=True)
class Version:
    """One committed state of the database; `root` is None where it holds no key."""

    generation: int
    root: Root | None
    commit_time_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Configuration and newest versions, oldest first; none where a `numbered` database keeps them in other files."""

    config: Config
    versions: tuple[Version, ...]

    @property
    def newest(self) -> Version | None:
        """The version that readers see; None for a `numbered` manifest, see `newest_numbered_manifest`."""
        return self.versions[-1] if self.versions else None


def newest_numbered_manifest(names: Iterable[str]) -> str | None:
    """Of the file names of a `numbered` database, that of the manifest to read; None if there is none."""
    return max(filter(_NUMBERED.fullmatch, names), default=None)


def encode_manifest(root: Root | None, *, uuid: bytes, generation: int = 1, commit_time_ns: int) -> bytes:
    """A manifest of kind single with one version."""
    assert len(uuid) == 16, f"uuid of {len(uuid)} bytes"
    assert generation >= 1, "generations begin with 1"
    config = Config(uuid)
    if root is None:
        root = Root(Indirect(_MISSING_FILE, _MISSING, _MISSING), 0, Statistics(0, 0, 0))
    table, _ = encode_file_table([root.node.file])
    version = b"".join(
        (
            encode_many([1, generation]),
            bytes([root.height]),
            encode_many([0, root.node.offset, root.node.length, *root.statistics]),
            struct.pack("<Q", commit_time_ns),
        )
    )
    no_older_versions = encode_one(0)
    return seal(MANIFEST_MAGIC, _encode_config(config) + table + version + no_older_versions)


def decode_manifest(data: bytes) -> Manifest:
    """A manifest, or one of a database's numbered manifests.

    Raises CorruptionError for damage and UnsupportedFormatError for what this version does not read.
    """
    reader = ByteReader(unseal(MANIFEST_MAGIC, data, MAX_MANIFEST_BYTES))
    config = _decode_config(reader)
    versions: tuple[Version, ...] = ()
    if config.kind == "single":
        files = decode_file_table(reader, b"", may_be_missing=True)
        versions = _decode_versions(reader, files)
        _skip_older_versions(reader)
    reader.end()
    return Manifest(config, versions)


def _encode_config(config: Config) -> bytes:
    assert config.zstd_level is not None, "we write compressed databases only"
    return b"".join(
        (
            config.uuid,
            encode_many([_KINDS.index(config.kind), config.max_inline_value_bytes, config.max_decoded_node_bytes]),
            bytes([config.version_tree_arity_log2]),
            encode_one(ZSTD),
            struct.pack("<i", config.zstd_level),
        )
    )


def _decode_config(reader: ByteReader) -> Config:
    uuid = reader.take(16)
    kind, max_inline, max_decoded = reader.varint(), reader.varint(), reader.varint()
    arity_log2, compression = reader.uint8(), reader.varint()
    if kind >= len(_KINDS):
        raise UnsupportedFormatError(
            f"OCDBT manifest of kind {kind}; this tailrace reads 0 (single) and 1 (numbered). "
            f"Read it with a newer tailrace."
        )
    if compression > ZSTD:
        raise UnsupportedFormatError(
            f"OCDBT database of compression {compression}; this tailrace reads 0 (none) and 1 (zstd). "
            f"Read it with a newer tailrace."
        )
    level = reader.int32() if compression == ZSTD else None
    return Config(uuid, _KINDS[kind], max_inline, max_decoded, arity_log2, level)


def _decode_versions(reader: ByteReader, files: list[DataFile]) -> tuple[Version, ...]:
    count = reader.varint(MAX_COUNT)
    if count == 0:
        raise CorruptionError("OCDBT manifest without a version")
    generations = reader.varints(count).tolist()
    if generations[0] == 0 or any(after <= before for before, after in pairwise(generations)):
        raise CorruptionError(f"generations must rise from 1, found {generations[:20]}")
    heights = reader.take(count)
    ids = reader.varints(count).tolist()
    places = [[reader.varint(_MISSING) for _ in range(count)] for _ in ("offset", "length")]
    totals = [reader.varints(count).tolist() for _ in Statistics._fields]
    times = [reader.uint64() for _ in range(count)]
    versions = []
    for index, generation in enumerate(generations):
        offset, length = places[0][index], places[1][index]
        statistics = Statistics(*(column[index] for column in totals))
        root = _decode_root(files, ids[index], offset, length, heights[index], statistics)
        versions.append(Version(generation, root, times[index]))
    return tuple(versions)


def _decode_root(
    files: list[DataFile], file_id: int, offset: int, length: int, height: int, statistics: Statistics
) -> Root | None:
    if file_id >= len(files):
        raise CorruptionError(f"data file {file_id} of a table of {len(files)}")
    if offset == length == _MISSING:
        if height or any(statistics):
            raise CorruptionError(f"empty version of height {height} and totals {tuple(statistics)}, all must be 0")
        return None
    if offset + length > MAX_INT64 or files[file_id] == _MISSING_FILE:
        raise CorruptionError(f"root of {length} bytes at {offset} of data file {files[file_id].path!r}")
    return Root(Indirect(files[file_id], offset, length), height, statistics)


def _skip_older_versions(reader: ByteReader) -> None:
    """Read past the references to version tree nodes, which hold what readers of the newest version do not need."""
    count = reader.varint(MAX_COUNT)
    for _ in ("generation", "file id", "offset", "length", "versions"):
        reader.varints(count)
    reader.take(8 * count)  # commit times
    reader.take(count)  # heights
