"""B+tree nodes: leaves hold keys and values, interior nodes hold children. Layout: the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.errors import CorruptionError, UnsupportedFormatError
from tailrace.format.ocdbt.envelope import MAX_BODY_BYTES, NODE_MAGIC, seal, unseal
from tailrace.format.ocdbt.files import (
    MAX_COUNT,
    MAX_STRING_BYTES,
    DataFile,
    Indirect,
    check_ranges,
    decode_file_table,
    decode_strings,
    encode_file_table,
    shared_prefix_bytes,
)
from tailrace.format.varint import ByteReader, encode_many, encode_one

Entry = tuple[bytes, bytes | Indirect]  # key; inline value, or where the value is
MAX_INLINE_BYTES = 1 << 20  # by the format
MAX_HEIGHT = 255


class Statistics(NamedTuple):
    """Totals of a subtree: its keys, the bytes of its nodes, the bytes of its indirect values."""

    keys: int
    tree_bytes: int
    indirect_bytes: int


class Child(NamedTuple):
    """A subtree as its parent names it; all keys in it begin with `prefix`, which its nodes leave out."""

    first_key: bytes
    node: Indirect
    statistics: Statistics
    prefix: bytes = b""


class Root(NamedTuple):
    """The topmost node of a tree; its keys are whole."""

    node: Indirect
    height: int
    statistics: Statistics


@dataclass(frozen=True, slots=True, eq=False)
class LeafNode:
    """Keys in rising order, and per key where its value is: 20 bytes beside the key, no object.

    `file_ids` index `files`, or are -1 where the value is the range of `inline`.
    """

    keys: list[bytes]
    file_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    files: list[DataFile]
    inline: bytes

    def value(self, index: int) -> bytes | Indirect:
        """The value of `keys[index]`, or where it is."""
        return self._value(int(self.file_ids[index]), int(self.offsets[index]), int(self.lengths[index]))

    def items(self) -> Iterator[Entry]:
        """All entries in key order."""
        places = zip(self.file_ids.tolist(), self.offsets.tolist(), self.lengths.tolist(), strict=True)
        for key, (file_id, offset, length) in zip(self.keys, places, strict=True):
            yield key, self._value(file_id, offset, length)

    def _value(self, file_id: int, offset: int, length: int) -> bytes | Indirect:
        if file_id < 0:
            return self.inline[offset : offset + length]
        return Indirect(self.files[file_id], offset, length)


@dataclass(frozen=True, slots=True)
class InteriorNode:
    """Children in key order; decode each with its own `prefix` and its file's `base`."""

    children: list[Child]


def encode_leaf_node(entries: Sequence[Entry]) -> bytes:
    """A leaf node of entries, whose keys must rise."""
    keys = [key for key, _ in entries]
    values = [value for _, value in entries]
    indirect = [value for value in values if isinstance(value, Indirect)]
    inline = [value for value in values if not isinstance(value, Indirect)]
    assert max(map(len, inline), default=0) <= MAX_INLINE_BYTES, "value too large to be inline"
    table, ids = encode_file_table(value.file for value in indirect)
    body = b"".join(
        (
            b"\0",
            table,
            *_encode_keys(keys),
            encode_many([value.length if isinstance(value, Indirect) else len(value) for value in values]),
            bytes([isinstance(value, Indirect) for value in values]),
            encode_many([ids[value.file] for value in indirect]),
            encode_many([value.offset for value in indirect]),
            *inline,
        )
    )
    return seal(NODE_MAGIC, body)


def encode_interior_node(height: int, children: Sequence[Child]) -> bytes:
    """An interior node, whose children's first keys must rise."""
    assert 1 <= height <= MAX_HEIGHT, f"height {height} of an interior node"
    table, ids = encode_file_table(child.node.file for child in children)
    count, shared, suffix_lengths, text = _encode_keys([child.first_key for child in children])
    body = b"".join(
        (
            bytes([height]),
            table,
            count,
            shared,
            suffix_lengths,
            encode_many([len(child.prefix) for child in children]),
            text,
            encode_many([ids[child.node.file] for child in children]),
            encode_many([child.node.offset for child in children]),
            encode_many([child.node.length for child in children]),
            *(encode_many([child.statistics[field] for child in children]) for field in range(3)),
        )
    )
    return seal(NODE_MAGIC, body)


def decode_node(
    data: bytes, *, height: int, base: bytes = b"", prefix: bytes = b"", limit_bytes: int = MAX_BODY_BYTES
) -> LeafNode | InteriorNode:
    """The node of a known height, its keys made whole with `prefix`, its files' paths with `base`.

    `base` is `DataFile.base` of the file it was read from, `prefix` what its parent names (`Child.prefix`).
    Memory stays within a fixed multiple of `limit_bytes`, whatever the bytes claim. Raises CorruptionError for damage
    and UnsupportedFormatError for what this version does not read.
    """
    limit_bytes = min(limit_bytes, MAX_BODY_BYTES)
    reader = ByteReader(unseal(NODE_MAGIC, data, limit_bytes))
    found = reader.uint8()
    if found != height:
        raise CorruptionError(f"OCDBT node of height {height} expected, {found} found")
    files = decode_file_table(reader, base, limit_bytes=limit_bytes)
    count = reader.varint(MAX_COUNT)
    if count == 0:
        raise CorruptionError("OCDBT node without entries")
    shared, suffixes = reader.varints(count - 1), reader.varints(count)
    prefix_lengths = reader.varints(count, MAX_STRING_BYTES) if height else None
    keys = decode_strings(reader, shared, suffixes, prefix=prefix, limit_bytes=limit_bytes)
    for before, key in pairwise(keys):
        if before >= key:
            raise CorruptionError(f"keys out of order: {key!r} after {before!r}")
    if prefix_lengths is None:
        return _decode_leaf(reader, keys, files)
    return _decode_interior(reader, keys, files, (prefix_lengths + len(prefix)).tolist())


def _decode_leaf(reader: ByteReader, keys: list[bytes], files: list[DataFile]) -> LeafNode:
    count = len(keys)
    lengths = reader.varints(count)
    kinds = np.frombuffer(reader.take(count), np.uint8)
    if int(kinds.max()) > 1:
        raise UnsupportedFormatError(
            f"value of kind {kinds.max()}; this tailrace reads 0 (inline) and 1 (indirect). "
            f"Read it with a newer tailrace."
        )
    indirect = kinds == 1
    ids = reader.varints(int(indirect.sum()))
    indirect_offsets = reader.varints(len(ids))
    check_ranges(files, ids, indirect_offsets, lengths[indirect])
    inline_lengths = lengths[~indirect]
    if int(inline_lengths.max(initial=0)) > reader.remaining:  # before the sum, which could overflow
        raise CorruptionError(f"inline value of {inline_lengths.max()} bytes, {reader.remaining} left in its node")
    inline_ends = np.cumsum(inline_lengths)
    inline = reader.take(int(inline_ends[-1]) if inline_ends.size else 0)
    reader.end()
    file_ids = np.full(count, -1, np.int32)
    file_ids[indirect] = ids
    offsets = np.empty(count, np.int64)
    offsets[indirect] = indirect_offsets
    offsets[~indirect] = inline_ends - inline_lengths
    return LeafNode(keys, file_ids, offsets, lengths, files, inline)


def _decode_interior(
    reader: ByteReader, keys: list[bytes], files: list[DataFile], prefix_lengths: list[int]
) -> InteriorNode:
    count = len(keys)
    ids, offsets, lengths = reader.varints(count), reader.varints(count), reader.varints(count)
    check_ranges(files, ids, offsets, lengths)
    statistics = zip(*(reader.varints(count).tolist() for _ in range(3)), strict=True)
    reader.end()
    children = []
    places = zip(ids.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    for key, prefix_length, (file_id, offset, length), totals in zip(
        keys, prefix_lengths, places, statistics, strict=True
    ):
        if prefix_length > len(key):
            raise CorruptionError(f"child {key!r}: common prefix of {prefix_length} bytes, {len(key)} in its first key")
        node = Indirect(files[file_id], offset, length)
        children.append(Child(key, node, Statistics(*totals), key[:prefix_length]))
    return InteriorNode(children)


def _encode_keys(keys: Sequence[bytes]) -> tuple[bytes, bytes, bytes, bytes]:
    """Count, prefix lengths, suffix lengths, suffixes."""
    assert 1 <= len(keys) <= MAX_COUNT, f"a node of {len(keys)} entries"
    assert max(map(len, keys)) <= MAX_STRING_BYTES, "key too long for the format"
    shared = [shared_prefix_bytes(before, key) for before, key in pairwise(keys)]
    suffixes = [keys[0], *(key[nbytes:] for key, nbytes in zip(keys[1:], shared, strict=True))]
    return encode_one(len(keys)), encode_many(shared), encode_many(list(map(len, suffixes))), b"".join(suffixes)
