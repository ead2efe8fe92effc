"""tailrace.json: every bit of it is held by its own checksum."""

import json

import crc32c
import msgspec
import pytest

from tailrace.errors import CorruptionError, UnsupportedFormatError
from tailrace.format import manifest

WHOLE = manifest.Manifest(
    format=1,
    writer={"name": "tailrace", "version": "1"},
    files={"_METADATA": manifest.SmallFile(10, 0xFFFFFFFF)},
    data_files={"d/0": manifest.DataFileInfo(4096, [manifest.DeadRange(1, 2, 3)]), "d/1": manifest.DataFileInfo(5)},
    structure=msgspec.Raw(b'["dict",["a"],[["leaf"]]]'),
    kinds={"a": "int"},
    custom_metadata={"note": [1, {"x": None}]},
    source={"sha": "00"},
)


def signed(fields: dict) -> bytes:
    """The members as a file with a right checksum."""
    body = json.dumps(fields)[:-1].encode() + b","
    return body + b'"crc32c":"%08x"}' % crc32c.crc32c(body)


def test_everything_is_read_back():
    """All members, also the optional ones."""
    assert manifest.decode(manifest.encode(WHOLE)) == WHOLE


def test_it_is_json_that_others_can_read():
    """Lists and numbers as the module's text says; the checksum is of all bytes before it."""
    data = manifest.encode(WHOLE)
    found = json.loads(data)

    assert found["files"] == {"_METADATA": [10, 0xFFFFFFFF]}
    assert found["data_files"] == {"d/0": [4096, [[1, 2, 3]]], "d/1": [5, []]}
    assert int(found["crc32c"], 16) == crc32c.crc32c(data[: data.rindex(b'"crc32c"')])


def test_any_flipped_bit_is_found():
    """In every byte, the checksum's own included."""
    data = bytearray(manifest.encode(WHOLE))
    for at in range(len(data)):
        for bit in (1, 0x20, 0x80):
            data[at] ^= bit
            with pytest.raises(CorruptionError):
                manifest.decode(bytes(data))
            data[at] ^= bit


@pytest.mark.parametrize("length", [0, 1, 20, -1])
def test_a_cut_file_is_found(length):
    """Truncated anywhere, or with more behind it."""
    with pytest.raises(CorruptionError, match="does not end in its checksum"):
        manifest.decode(manifest.encode(WHOLE)[:length])
    with pytest.raises(CorruptionError, match="does not end in its checksum"):
        manifest.decode(manifest.encode(WHOLE) + b"\n")


def test_a_newer_format_is_named():
    """It is not damage, whatever its members are."""
    with pytest.raises(UnsupportedFormatError, match="format 2, this tailrace reads format 1"):
        manifest.decode(signed({"format": 2, "new": True}))


def test_intact_but_wrong_members_are_damage():
    """A file that lacks what format 1 has."""
    with pytest.raises(CorruptionError, match="intact but not what format 1 holds"):
        manifest.decode(signed({"format": 1}))
