"""The journal's bytes: what was written is read back, up to the first damage."""

import struct

import msgspec
import pytest
from crc32c import crc32c

from tailrace.errors import CorruptionError, UnsupportedFormatError
from tailrace.format import journal

RECORDS = [
    journal.Declare(1, 1, ("a", 0), (3, 4), "bfloat16", (1, 4), "zstd", "array"),
    journal.Declare(2, 1, ("b",), (), "int8", (), None, "int", b"{}"),
    journal.DataFile(0, "d/00"),
    journal.DataFile(1, "ocdbt.process_0/d/11", True),
    journal.Chunk(1, 2, 3, 0, 1 << 40, 17),
    journal.Partial(1, 2, 4, 0, 9, 8, 0xFFFFFFFF, (0, 1), (1, 2)),
    journal.Delete(5, ("a", 0)),
    journal.Text(6, ("t",), "häl/lo"),
    journal.Structure(7, (), b"[]"),
    journal.Metadata(8, {"a": [1, None, {"b": 2.5}]}),
    journal.Fingerprint(11, {"sha": "00"}),
    journal.Inherit(9, "/parent", True),
]


def test_every_record_is_read_back():
    """All kinds, with every field."""
    assert list(journal.decode(journal.header() + journal.encode(RECORDS))) == RECORDS


def test_the_bytes_are_as_the_format_says():
    """Magic, version; then length, crc32c, and MessagePack with the type first."""
    data = journal.header() + journal.encode([journal.DataFile(7, "d/x")])
    payload = msgspec.msgpack.encode(["F", 7, "d/x", False])

    assert data == b"tailrace-journal\n\x01\0\0\0" + struct.pack("<II", len(payload), crc32c(payload)) + payload


def test_a_cut_at_any_byte_leaves_a_prefix_of_the_records():
    """A writer killed in the middle of a write loses only what it had not acknowledged."""
    data = journal.header() + journal.encode(RECORDS)
    ends = [len(journal.header() + journal.encode(RECORDS[:count])) for count in range(len(RECORDS) + 1)]
    for cut in range(len(data)):
        whole = sum(end <= cut for end in ends[1:])

        assert list(journal.decode(data[:cut])) == RECORDS[:whole], cut


def test_a_flipped_bit_ends_the_journal_there():
    """Nothing after a damaged record is trusted."""
    first = len(journal.header() + journal.encode(RECORDS[:3]))
    data = bytearray(journal.header() + journal.encode(RECORDS))
    for at in range(first, first + 12):
        data[at] ^= 1

        assert list(journal.decode(bytes(data)))[:4] == RECORDS[:3], at

        data[at] ^= 1


def test_other_files_and_newer_journals_are_refused():
    """By what they begin with, or the version they name."""
    with pytest.raises(CorruptionError, match="it begins"):
        list(journal.decode(b"x" * 40))
    with pytest.raises(UnsupportedFormatError, match="version 2, this tailrace reads 1"):
        list(journal.decode(journal.MAGIC + struct.pack("<I", 2)))
    payload = msgspec.msgpack.encode(["Z", 1])
    with pytest.raises(UnsupportedFormatError, match="does not know"):
        list(journal.decode(journal.header() + struct.pack("<II", len(payload), crc32c(payload)) + payload))


def test_a_chunk_costs_few_bytes():
    """Ten thousand durable writes must not fill the disk with their journal."""
    record = journal.Chunk(100_000, 100_000, 1_000_000, 100, 1 << 40, 1 << 24)

    assert len(journal.encode([record])) <= 60
