"""docs/format.md is enough to read a checkpoint: a reader written from that page alone, with no code of tailrace."""

import json
import re
import struct

import crc32c
import msgspec
import numpy as np
import pages
import pytest
import zstandard

import tailrace

PAGE = (pages.ROOT / "docs" / "format.md").read_text()
MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


class Bytes:
    """A body that is read front to back."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        """The next bytes."""
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self):
        """One unsigned LEB128 number."""
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def varints(self, count):
        """A column of numbers."""
        return [self.varint() for _ in range(count)]


def body(magic, data):
    """The body of a manifest or node."""
    assert struct.unpack(">I", data[:4])[0] == magic
    assert struct.unpack("<Q", data[4:12])[0] == len(data)
    assert struct.unpack("<I", data[-4:])[0] == crc32c.crc32c(data[:-4])
    assert data[12:14] == b"\x00\x01"
    return Bytes(zstandard.ZstdDecompressor().decompressobj().decompress(data[14:-4]))


def strings(read, prefixes, suffixes):
    """Prefix-compressed strings; the first shares nothing."""
    found, before = [], b""
    for prefix, suffix in zip([0, *prefixes], suffixes, strict=True):
        before = before[:prefix] + read.take(suffix)
        found.append(before)
    return found


def file_table(read):
    """The paths of a data file table."""
    count = read.varint()
    prefixes, suffixes = read.varints(max(0, count - 1)), read.varints(count)
    read.varints(count)  # base path lengths
    return strings(read, prefixes, suffixes) if count else []


def read_range(root, path, offset, length):
    """Bytes of a data file."""
    with (root / path.decode()).open("rb") as file:
        file.seek(offset)
        return file.read(length)


def root_of(root):
    """Path, offset and length of the root node."""
    read = body(MANIFEST, (root / "manifest.ocdbt").read_bytes())
    read.take(16)
    assert read.varints(3) == [0, 1024, 8388608]
    assert read.take(1) == b"\x04"
    assert read.varint() == 1
    assert read.take(4) == struct.pack("<i", 1)
    files = file_table(read)
    assert read.varints(2) == [1, 1]  # one version, generation 1
    read.take(1)
    return files[read.varint()], read.varint(), read.varint()


def entries(root, place):
    """All keys and values below a node."""
    read = body(NODE, read_range(root, *place))
    height = read.take(1)[0]
    files = file_table(read)
    count = read.varint()
    prefixes, suffixes = read.varints(count - 1), read.varints(count)
    if height:
        assert read.varints(count) == [0] * count
        strings(read, prefixes, suffixes)
        ids, offsets, lengths = (read.varints(count) for _ in range(3))
        return [
            entry
            for file, offset, length in zip(ids, offsets, lengths, strict=True)
            for entry in entries(root, (files[file], offset, length))
        ]
    keys = strings(read, prefixes, suffixes)
    lengths, kinds = read.varints(count), read.take(count)
    ids, offsets = (read.varints(sum(kinds)) for _ in range(2))
    places = iter(zip(ids, offsets, strict=True))
    found = []
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        if kind:
            file, offset = next(places)
            found.append((key, read_range(root, files[file], offset, length)))
        else:
            found.append((key, read.take(length)))
    return found


def read_leaf(values, name):
    """An array, chunk by chunk."""
    meta = json.loads(values[f"{name}/zarr.json".encode()])
    array = np.zeros(meta["shape"], meta["data_type"])
    chunk_shape = meta["chunk_grid"]["configuration"]["chunk_shape"]
    compressed = [codec["name"] for codec in meta["codecs"]] == ["bytes", "zstd", "crc32c"]
    for index in np.ndindex(*(-(-n // c) for n, c in zip(meta["shape"], chunk_shape, strict=True))):
        encoded = values["/".join([f"{name}/c", *map(str, index)]).encode()]
        payload, checksum = encoded[:-4], struct.unpack("<I", encoded[-4:])[0]
        assert crc32c.crc32c(payload) == checksum
        data = zstandard.ZstdDecompressor().decompressobj().decompress(payload) if compressed else payload
        chunk = np.frombuffer(data, meta["data_type"]).reshape(chunk_shape)
        start = [i * c for i, c in zip(index, chunk_shape, strict=True)]
        box = tuple(slice(a, min(a + c, n)) for a, c, n in zip(start, chunk_shape, meta["shape"], strict=True))
        array[box] = chunk[tuple(slice(0, part.stop - part.start) for part in box)]
    return array


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_reader_written_from_the_page_reads_every_leaf(compression, tmp_path):
    """Index of two levels, edge chunks, a scalar: read by the page alone, equal to what was written."""
    rng = np.random.default_rng(0)
    expected = {f"many.{i}": np.full(3, i, np.float32) for i in range(600)}
    expected |= {"cut": rng.standard_normal((5, 7)), "scalar": np.array(7, np.int16)}
    with tailrace.Writer(tmp_path / "ck", compression=compression) as writer:
        for name, array in expected.items():
            writer.declare(
                tuple(name.split(".")), shape=array.shape, dtype=array.dtype, chunk_shape=[3, 4][: array.ndim]
            )[...] = array

    values = dict(entries(tmp_path / "ck", root_of(tmp_path / "ck")))

    assert [key for key in values if key.endswith(b"/zarr.json")] == sorted(f"{n}/zarr.json".encode() for n in expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(read_leaf(values, name), array, strict=True)


def test_the_metadata_on_the_page_is_what_is_written(tmp_path):
    """The page's zarr.json and _METADATA are those of {"a": {"w": float32 of shape (2, 3)}}, to the byte."""
    tailrace.save(tmp_path / "ck", {"a": {"w": np.zeros((2, 3), np.float32)}})
    values = dict(entries(tmp_path / "ck", root_of(tmp_path / "ck")))

    assert values[b"a.w/zarr.json"].decode() in PAGE.splitlines()
    assert (tmp_path / "ck" / "_METADATA").read_text() in PAGE.splitlines()


def test_the_directory_holds_what_the_page_lists(tmp_path):
    """Every file is on the page, and tailrace.json vouches for all but itself as the page says."""
    tailrace.save(tmp_path / "ck", {"w": np.zeros(3), "name": "run", "step": 1})
    root = tmp_path / "ck"
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    text = (root / "tailrace.json").read_bytes()
    said = json.loads(text)

    small = {name for name in files if not name.startswith("d/")}
    assert all(re.search(rf"^  {re.escape(name)}\s", PAGE, re.MULTILINE) for name in small)
    assert crc32c.crc32c(text[: text.rindex(b'"crc32c"')]) == int(said["crc32c"], 16)
    for name, (length, checksum) in said["files"].items():
        data = (root / name).read_bytes()
        assert (len(data), crc32c.crc32c(data)) == (length, checksum)
    assert {*said["files"], *said["data_files"], "tailrace.json"} == files
    members = re.findall(r"^\| `(\w+)` \|", PAGE[PAGE.index("## tailrace.json") : PAGE.index("## A transaction")], re.M)
    assert [*members, "crc32c"] == list(said)


def test_the_example_of_tailrace_json_is_sound():
    """The checksum in the page's example is that of its bytes."""
    line = next(line for line in PAGE.splitlines() if line.startswith('{"format":1'))
    held = line[: line.rindex('"crc32c"')].encode()

    assert json.loads(line)["crc32c"] == f"{crc32c.crc32c(held):08x}"


def test_the_journal_is_as_the_page_says(tmp_path):
    """Header, frames and item counts of a journal, read by the page alone."""
    writer = tailrace.Writer(tmp_path / "ck")
    leaf = writer.declare("w", shape=(4, 4), dtype="float32")
    leaf[:] = np.ones((4, 4), np.float32)
    half = writer.declare("half", shape=(4,), dtype="float32")
    half[1:3] = np.ones(2, np.float32)
    writer.set_text("name", "run")
    writer.set_metadata({"x": 1})
    writer.flush()
    (path,) = (tmp_path / "ck.tailrace-pending" / ".work").glob("journal.*")
    data = path.read_bytes()
    writer.abort()

    assert data.startswith(b"tailrace-journal\n" + struct.pack("<I", 1))
    at, records = len(b"tailrace-journal\n") + 4, []
    while at < len(data):
        length, checksum = struct.unpack_from("<II", data, at)
        payload = data[at + 8 : at + 8 + length]
        assert crc32c.crc32c(payload) == checksum
        records.append(msgspec.msgpack.decode(payload))
        at += 8 + length
    described = dict(re.findall(r"^\| `([A-Z])` [\w ]+ \| (.+) \|$", PAGE, re.MULTILINE))
    for kind, *items in records:
        assert len(items) == len(described[kind].split(":")[0].split(", ")), kind
    assert {record[0] for record in records} >= set("DFCPTM")
