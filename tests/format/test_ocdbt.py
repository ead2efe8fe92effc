"""OCDBT manifests and nodes: literal bytes, round trips, damage and hostile input."""

import contextlib
import struct

import crc32c
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CorruptionError, FormatError, UnsupportedFormatError
from tailrace.format import ocdbt
from tailrace.format.ocdbt import Child, DataFile, Indirect, Root, Statistics
from tailrace.format.varint import encode_many, encode_one

UUID = bytes(range(16))
FILE = DataFile(b"", b"d/8d70ac2317dd55ebde5460c2125c13b6")
ROOT = Root(Indirect(FILE, 10, 70), 0, Statistics(2, 70, 10))

# Written by TensorStore 0.1.86, uncompressed: {"a": "xy", "ab": "0123456789"}, values above 4 bytes indirect.
TENSORSTORE_MANIFEST = bytes.fromhex(
    "0cdb3a2a86000000000000000000000102030405060708090a0b0c0d0e0f00048080800404000200002200"
    "00642f3864373061633233313764643535656264653534363063323132356331336236"
    "02010200000001ffffffffffffffffff010affffffffffffffffff014600020046000a"
    "aa6d8738d29bec18d308c538d29bec1800580f3a1c"
)
TENSORSTORE_NODE = bytes.fromhex(
    "0cdb20de4600000000000000000000012200642f3864373061633233313764643535656264653534363063323132356331336236"
    "020101016162020a000100007879db86b8e2"
)


def frame(magic: int, body: bytes, *, version: int = 0, compression: int = 0, compressed: bool = False) -> bytes:
    """A manifest or node around a body, made without the code under test."""
    content = zstandard.compress(body) if compression == 1 and not compressed else body
    head = encode_one(version) + encode_one(compression)
    framed = struct.pack(">I", magic) + struct.pack("<Q", 12 + len(head) + len(content) + 4) + head + content
    return framed + struct.pack("<I", crc32c.crc32c(framed))


def node(body: bytes, **options: int) -> bytes:
    """A B+tree node around a body."""
    return frame(0x0CDB20DE, body, **options)


def body_of(encoded: bytes) -> bytes:
    """The body of something we wrote, decompressed by the zstd library itself."""
    return zstandard.ZstdDecompressor().decompress(encoded[14:-4])


def walk(nodes: bytes, root: Root) -> list[ocdbt.Entry]:
    """All entries of a tree whose nodes are the bytes of one file."""
    entries: list[ocdbt.Entry] = []
    pending = [(root.node, root.height, b"")]
    while pending:
        place, height, prefix = pending.pop()
        data = nodes[place.offset : place.offset + place.length]
        decoded = ocdbt.decode_node(data, height=height, base=place.file.base, prefix=prefix)
        if isinstance(decoded, ocdbt.LeafNode):
            entries.extend(decoded.items())
        else:
            pending.extend((child.node, height - 1, child.prefix) for child in reversed(decoded.children))
    return entries


class Appended(bytearray):
    """Bytes with the `append` that write_tree asks for, counting the calls."""

    calls = 0

    def add(self, data: bytes) -> int:
        """Append, and say where."""
        self.calls += 1
        offset = len(self)
        self.extend(data)
        return offset


# Literal bytes


def test_manifest_of_tensorstore():
    """A manifest that TensorStore wrote has its configuration and both versions, the first one empty."""
    manifest = ocdbt.decode_manifest(TENSORSTORE_MANIFEST)

    assert manifest.config == ocdbt.Config(UUID, "single", 4, 8 << 20, 4, None)
    assert [(version.generation, version.root) for version in manifest.versions] == [(1, None), (2, ROOT)]
    assert manifest.newest.commit_time_ns == 0x18EC9BD238C508D3


def test_node_of_tensorstore():
    """A leaf node that TensorStore wrote has its inline and its indirect value."""
    decoded = ocdbt.decode_node(TENSORSTORE_NODE, height=0)

    assert list(decoded.items()) == [(b"a", b"xy"), (b"ab", Indirect(FILE, 0, 10))]
    assert [decoded.value(0), decoded.value(1)] == [b"xy", Indirect(FILE, 0, 10)]


def test_leaf_node_has_the_body_tensorstore_writes():
    """For the same entries the body is TensorStore's, byte for byte."""
    encoded = ocdbt.encode_leaf_node([(b"a", b"xy"), (b"ab", Indirect(FILE, 0, 10))])

    assert body_of(encoded) == TENSORSTORE_NODE[14:-4]


def test_interior_node_body():
    """An interior node's columns stand in the order of the format, file paths share their base only."""
    own, other = DataFile(b"", b"d/1"), DataFile(b"p/", b"d/2")
    encoded = ocdbt.encode_interior_node(
        1,
        [
            Child(b"aa", Indirect(other, 0, 300), Statistics(5, 300, 70)),
            Child(b"ab", Indirect(own, 7, 8), Statistics(1, 8, 0), b"a"),
        ],
    )

    table = bytes([2, 0, 3, 5, 0, 2]) + b"d/1" + b"p/d/2"
    keys = bytes([2, 1, 2, 1, 0, 1]) + b"aab"
    assert body_of(encoded) == b"\x01" + table + keys + bytes.fromhex("0100 0007 ac0208 0501 ac0208 4600")


def test_empty_manifest_body():
    """A database without keys is a version whose root is missing, as TensorStore writes it."""
    encoded = ocdbt.encode_manifest(None, uuid=UUID, commit_time_ns=1)

    config = UUID + bytes.fromhex("00 8008 80808004 04 01 01000000")
    table = bytes([1, 0, 0])
    missing = "ffffffffffffffffff01"
    assert body_of(encoded) == config + table + bytes.fromhex(
        f"01 01 00 00 {missing}{missing} 000000 0100000000000000 00"
    )
    assert ocdbt.decode_manifest(encoded).newest == ocdbt.Version(1, None, 1)


# Round trips

names = st.binary(max_size=12) | st.text("ab/.", max_size=40).map(str.encode)
files = st.builds(
    DataFile,
    st.sampled_from([b"", b"ocdbt.process_1/", b"ocdbt.process_10/", b"x/y/"]),
    st.sampled_from([b"d/1", b"d/12", b"d/2", b"e"]),
)
ranges = st.builds(Indirect, files, st.integers(0, 2**62), st.integers(0, 2**50))
entry_lists = st.dictionaries(names, st.binary(max_size=300) | ranges, min_size=1, max_size=60).map(
    lambda entries: sorted(entries.items(), key=lambda entry: entry[0])
)
totals = st.builds(Statistics, *[st.integers(0, 2**63 - 1)] * 3)
child_lists = st.dictionaries(names, st.tuples(ranges, totals, st.integers(0, 40)), min_size=1, max_size=20).map(
    lambda children: [Child(key, place, total, key[:cut]) for key, (place, total, cut) in sorted(children.items())]
)


@given(entry_lists)
def test_leaf_nodes_round_trip(entries):
    """Any entries come back in order, by item and by index."""
    decoded = ocdbt.decode_node(ocdbt.encode_leaf_node(entries), height=0)

    assert list(decoded.items()) == entries
    assert [decoded.value(index) for index in range(len(entries))] == [value for _, value in entries]


@given(child_lists, st.integers(1, 255))
def test_interior_nodes_round_trip(children, height):
    """Any children come back with first key, prefix, place and totals."""
    decoded = ocdbt.decode_node(ocdbt.encode_interior_node(height, children), height=height)

    assert decoded.children == children


@given(ranges, st.integers(0, 255), totals, st.integers(1, 2**63 - 1), st.integers(0, 2**64 - 1))
def test_manifests_round_trip(place, height, total, generation, time_ns):
    """Any root comes back as the newest version."""
    root = Root(place, height, total)

    manifest = ocdbt.decode_manifest(
        ocdbt.encode_manifest(root, uuid=UUID, generation=generation, commit_time_ns=time_ns)
    )

    assert manifest.newest == ocdbt.Version(generation, root, time_ns)
    assert manifest.config == ocdbt.Config(UUID)


def test_prefix_and_base_of_the_parent_stand_before_keys_and_paths():
    """What the parent names is put before every key and, through the base, every path."""
    encoded = ocdbt.encode_leaf_node([(b"a", Indirect(DataFile(b"q/", b"d/1"), 0, 1)), (b"b", b"")])

    decoded = ocdbt.decode_node(encoded, height=0, base=b"p/", prefix=b"x.")

    assert list(decoded.items()) == [(b"x.a", Indirect(DataFile(b"p/q/", b"d/1"), 0, 1)), (b"x.b", b"")]
    assert decoded.files[0].path == "p/q/d/1"


@given(entry_lists, st.integers(2, 5))
def test_trees_round_trip(entries, entries_per_node):
    """A tree of any height holds every entry in order, and the root's totals are those of the whole tree."""
    nodes = Appended()

    root = ocdbt.write_tree(iter(entries), nodes.add, FILE, entries_per_node=entries_per_node)

    assert walk(bytes(nodes), root) == entries
    indirect_bytes = sum(value.length for _, value in entries if isinstance(value, Indirect))
    assert root.statistics == Statistics(len(entries), len(nodes), indirect_bytes)


@pytest.mark.parametrize(
    ("count", "height", "nodes"), [(1, 0, 1), (3, 0, 1), (4, 1, 3), (9, 1, 4), (10, 2, 7), (28, 3, 17)]
)
def test_height_of_a_tree(count, height, nodes):
    """A tree is as low as its entries per node allow, and no node is written twice."""
    appended = Appended()

    root = ocdbt.write_tree(((b"%03d" % i, b"") for i in range(count)), appended.add, FILE, entries_per_node=3)

    assert (root.height, appended.calls) == (height, nodes)


def test_a_tree_of_nothing_has_no_root():
    """Without entries nothing is appended."""
    nodes = Appended()

    assert ocdbt.write_tree([], nodes.add, FILE) is None
    assert nodes.calls == 0


def test_large_inline_values_end_a_node_early():
    """Nodes stay near 1 MiB before compression, even if a single value is as large."""
    entries = [(b"%d" % i, bytes(400_000 if i < 6 else 1 << 20)) for i in range(9)]
    nodes = Appended()

    root = ocdbt.write_tree(entries, nodes.add, FILE)

    assert nodes.calls == 3 + 3 + 1  # two values of 400,000 bytes a node, one of 1 MiB, and the root
    assert walk(bytes(nodes), root) == entries


def test_entries_out_of_order_are_a_mistake():
    """write_tree does not write an index in which keys would not be found."""
    with pytest.raises(AssertionError, match="entry b'a' after b'b'"):
        ocdbt.write_tree([(b"b", b""), (b"a", b"")], Appended().add, FILE)


def test_newest_numbered_manifest():
    """The highest generation counts; other files are passed over."""
    names = ["manifest.ocdbt", "manifest.0000000000000009", "manifest.000000000000000a", "manifest.ffff", "d"]

    assert ocdbt.newest_numbered_manifest(names) == "manifest.000000000000000a"
    assert ocdbt.newest_numbered_manifest(["manifest.ocdbt"]) is None


# Damage

SMALL_NODES = [
    (ocdbt.encode_leaf_node([(b"a", b"xy"), (b"ab", Indirect(FILE, 0, 10))]), 0),
    (TENSORSTORE_NODE, 0),
    (ocdbt.encode_interior_node(1, [Child(b"a", Indirect(FILE, 0, 10), Statistics(1, 10, 5))]), 1),
]
SMALL_MANIFESTS = [ocdbt.encode_manifest(ROOT, uuid=UUID, commit_time_ns=1), TENSORSTORE_MANIFEST]


def flips(data: bytes):
    """The data with each single bit flipped."""
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


@pytest.mark.parametrize(("data", "height"), SMALL_NODES)
def test_every_flipped_bit_and_cut_of_a_node_is_found(data, height):
    """No single-bit flip and no truncation or extension of a node decodes."""
    damaged = [*flips(data), *(data[:length] for length in range(len(data))), data + b"\0"]

    for bad in damaged:
        with pytest.raises(CorruptionError):
            ocdbt.decode_node(bad, height=height)


@pytest.mark.parametrize("data", SMALL_MANIFESTS)
def test_every_flipped_bit_and_cut_of_a_manifest_is_found(data):
    """No single-bit flip and no truncation or extension of a manifest decodes."""
    damaged = [*flips(data), *(data[:length] for length in range(len(data))), data + b"\0"]

    for bad in damaged:
        with pytest.raises(CorruptionError):
            ocdbt.decode_manifest(bad)


def test_messages_say_what_was_found():
    """A damaged node's error holds both numbers, a foreign one's what it begins with."""
    with pytest.raises(CorruptionError, match="70 bytes long by its header, 69 found"):
        ocdbt.decode_node(TENSORSTORE_NODE[:-1], height=0)
    with pytest.raises(CorruptionError, match="it begins with 0cdb3a2a, this with 0cdb20de"):
        ocdbt.decode_manifest(TENSORSTORE_NODE)
    with pytest.raises(CorruptionError, match="height 1 expected, 0 found"):
        ocdbt.decode_node(TENSORSTORE_NODE, height=1)


# Hostile input: checksums are right, contents are not


@given(st.binary(max_size=300), st.integers(0, 2), st.integers(0, 2))
def test_random_bodies_are_nodes_or_damage(body, compression, height):
    """Random bodies under a right checksum raise nothing but FormatError."""
    data = node(bytes([height]) + body, compression=compression)
    with contextlib.suppress(FormatError):
        ocdbt.decode_node(data, height=height)


valid_bodies = entry_lists.map(ocdbt.encode_leaf_node) | child_lists.map(lambda c: ocdbt.encode_interior_node(1, c))


@given(valid_bodies.map(body_of), st.data())
def test_damaged_bodies_are_nodes_or_damage(valid, data):
    """A valid body with some bytes replaced raises nothing but FormatError; what decodes can be listed."""
    body = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(1, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = ocdbt.decode_node(node(bytes(body)), height=body[0])
    except FormatError:
        return
    if isinstance(decoded, ocdbt.LeafNode):
        assert len(list(decoded.items())) == len(decoded.keys)


@given(st.binary(max_size=200), st.booleans())
def test_random_manifest_bodies_are_manifests_or_damage(body, with_config):
    """Random manifest bodies under a right checksum raise nothing but FormatError."""
    config = UUID + bytes.fromhex("00 04 04 04 00") if with_config else b""
    with contextlib.suppress(FormatError):
        ocdbt.decode_manifest(frame(0x0CDB3A2A, config + body))


@given(st.binary(max_size=100))
def test_random_bytes_are_damage(data):
    """Random bytes are neither a node nor a manifest."""
    with pytest.raises(FormatError):
        ocdbt.decode_node(data, height=0)
    with pytest.raises(FormatError):
        ocdbt.decode_manifest(data)


def test_newer_version_and_compression_are_unsupported():
    """A future version or compression is named, with the way out."""
    with pytest.raises(UnsupportedFormatError, match=r"version 1; this tailrace reads version 0.*newer tailrace"):
        ocdbt.decode_node(node(b"", version=1), height=0)
    with pytest.raises(UnsupportedFormatError, match=r"compression 2; this tailrace reads 0 \(none\) and 1 \(zstd\)"):
        ocdbt.decode_node(node(b"", compression=2), height=0)


def test_a_compression_bomb_is_refused():
    """A frame of a few KB that stands for a gigabyte is given up at the limit."""
    stream = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(stream.compress(bytes(1 << 20)) for _ in range(1024)) + stream.flush()

    with pytest.raises(UnsupportedFormatError, match="larger than 1048576 bytes when decoded"):
        ocdbt.decode_node(node(bomb, compression=1, compressed=True), height=0, limit_bytes=1 << 20)


def test_a_lying_content_size_allocates_nothing():
    """A zstd frame that claims an exabyte but holds nothing is damage, not a MemoryError."""
    empty_frame = bytes.fromhex("28b52ffd") + b"\xe0" + struct.pack("<Q", 1 << 60) + bytes.fromhex("010000")

    with pytest.raises(FormatError):
        ocdbt.decode_node(node(empty_frame, compression=1, compressed=True), height=0)


def test_a_prefix_bomb_is_refused():
    """A million keys that each share 64 KiB with the one before are refused before they are built."""
    count, long = 20_000, 65_000
    suffix_lengths = encode_many([long] + [1] * (count - 1))
    body = b"\0\0" + encode_one(count) + encode_many([long - 1] * (count - 1)) + suffix_lengths

    with pytest.raises(
        CorruptionError, match="keys or paths of 1300000000 bytes in one table, at most 268435456 are read"
    ):
        ocdbt.decode_node(node(body + bytes(long + count)), height=0)


@pytest.mark.parametrize("path", [b"", b"/etc/passwd", b"../d/1", b"d/../../1", b"d/1\0"])
def test_data_files_outside_the_database_are_refused(path):
    """A node cannot make a reader open a file that is not below the database."""
    encoded = ocdbt.encode_leaf_node([(b"a", Indirect(DataFile(b"", path), 0, 1))])

    with pytest.raises(FormatError, match="must name a file below the database's directory"):
        ocdbt.decode_node(encoded, height=0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("00", "without entries"),
        ("ffffff7f", "268435455, at most 1048576 is valid"),
        ("02 00 0101 6261", "keys out of order"),
        ("02 00 0101 6161", "keys out of order"),
        ("02 02 0101 6161", "shares more bytes"),
        ("01 01 61 00 02", "value of kind 2"),
        ("01 01 61 05 00", "inline value of 5 bytes, 0 left"),
        ("01 01 61 00 00 00", "1 bytes left over"),
        ("01 01 61 05 01 00 00", "data file 0 of a table of 0"),
        ("01 01 61 01 01 00 ffffffffffffffff7f", "ends beyond"),
    ],
)
def test_impossible_leaf_columns(columns, message):
    """Each column of a leaf that cannot be is refused for what it is."""
    table = bytes.fromhex("01 01 00 64") if message == "ends beyond" else b"\0"

    with pytest.raises(FormatError, match=message):
        ocdbt.decode_node(node(b"\0" + table + bytes.fromhex(columns)), height=0)
