from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CorruptionError, InputError, UnsupportedFormatError
from tailrace.format import codecs, zarr
from tailrace.format.codecs import Scatter, decode_chunk, decode_stream, encode_chunk, scatter

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}


def metadata(chunk_shape: tuple[int, ...], chain: list[Any], data_type: str = "float32") -> zarr.ArrayMetadata:
    """Parsed metadata of an array of one chunk."""
    fields = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(chunk_shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": chain,
    }
    return zarr.parse(json.dumps(fields).encode(), 3)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    """Ranges of bytes in memory."""
    return lambda offset, length: data[offset : offset + length]


def streamed(data: bytes, meta: zarr.ArrayMetadata) -> bytes:
    """All a stream holds."""
    return b"".join(map(bytes, decode_stream(reader(data), len(data), meta)))


VALUES = np.arange(300, dtype=np.float32).reshape(20, 15)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.ZstdCompressor().compress,
    "gzip": gzip.compress,
}


class Part:
    """A box of a chunk."""

    def __init__(self, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.start, self.shape = start, shape


def test_uncompressed_chunk_is_its_own_memory_and_a_crc32c() -> None:
    """The payload is not copied; the suffix is the checksum RFC 3720 gives for it."""
    chunk = np.zeros(32, np.uint8)
    payload, crc = encode_chunk(chunk, compression=None)

    assert np.shares_memory(np.frombuffer(payload, np.uint8), chunk)
    assert bytes(crc) == (0x8A9136AA).to_bytes(4, "little")


def test_zstd_chunk_is_one_frame_that_says_its_size() -> None:
    """Other readers find a plain zstd frame before the checksum."""
    payload, _ = encode_chunk(VALUES, compression="zstd")

    assert zstandard.frame_content_size(payload) == VALUES.nbytes
    assert zstandard.ZstdDecompressor().decompress(payload) == VALUES.tobytes()


def test_other_compressions_are_refused() -> None:
    """Only what we write can be asked for."""
    with pytest.raises(InputError, match="zstd"):
        encode_chunk(VALUES, compression="gzip")


def test_decoding_without_destination_does_not_copy() -> None:
    """A plain chunk is viewed where it lies."""
    data = VALUES.tobytes()
    chunk = decode_chunk(data, metadata((20, 15), [BYTES]))

    assert np.shares_memory(chunk, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_any_flipped_bit_of_a_chunk_with_crc32c_is_found(compression: str | None, stream: bool) -> None:
    """No bit of a protected chunk can change unseen."""
    chain = [BYTES, *([{"name": "zstd"}] if compression else []), CRC]
    chunk = np.arange(24, dtype=np.float32)
    meta = metadata((24,), chain)
    encoded = bytearray(b"".join(map(bytes, encode_chunk(chunk, compression=compression))))
    found = 0
    for bit in range(8 * len(encoded)):
        encoded[bit // 8] ^= 1 << bit % 8
        try:
            streamed(bytes(encoded), meta) if stream else decode_chunk(encoded, meta)
        except CorruptionError:
            found += 1
        encoded[bit // 8] ^= 1 << bit % 8

    assert found == 8 * len(encoded)


@pytest.mark.parametrize("chain", [[], ["crc32c"], ["zstd"], ["gzip"], ["zstd", "crc32c"]], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_any_truncation_and_any_excess_is_found(chain: list[str], stream: bool) -> None:
    """A chunk cut anywhere, or followed by anything, is damaged, with or without a checksum."""
    chunk = np.arange(40, dtype=np.float32)
    encoded = chunk.tobytes()
    for name in chain:
        encoded = (
            b"".join(map(bytes, encode_chunk(encoded, compression=None)))
            if name == "crc32c"
            else COMPRESS[name](encoded)
        )
    meta = metadata((40,), [BYTES, *({"name": name} for name in chain)])
    decode = streamed if stream else decode_chunk
    wrong = [encoded[:n] for n in range(len(encoded))] + [encoded + bytes(n) for n in (1, 3, 4, 100)]
    for data in wrong:
        with pytest.raises(CorruptionError):
            decode(data, meta)

    assert np.array_equal(np.frombuffer(decode(encoded, meta), np.float32), chunk)


@pytest.mark.parametrize("name", ["zstd", "gzip"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("elements", [299, 301])
def test_content_of_another_length_is_found(name: str, stream: bool, elements: int) -> None:
    """A frame that is whole but holds fewer or more bytes than the chunk."""
    data = COMPRESS[name](np.arange(elements, dtype=np.float32).tobytes())

    with pytest.raises(CorruptionError):
        (streamed if stream else decode_chunk)(data, metadata((20, 15), [BYTES, {"name": name}]))


@pytest.mark.parametrize("name", ["zstd", "gzip"])
def test_a_bomb_yields_no_more_than_the_chunk(name: str) -> None:
    """A chunk of 4 KiB that decompresses to 256 MiB is refused from its first bytes."""
    bomb = COMPRESS[name](bytes(256 << 20))

    with pytest.raises(CorruptionError, match="longer"):
        decode_chunk(bomb, metadata((1024,), [BYTES, {"name": name}]))


@pytest.mark.parametrize("name", ["zstd", "gzip"])
def test_joined_frames_are_one_stream(name: str) -> None:
    """Both formats let a file be several frames one after the other."""
    raw = VALUES.tobytes()
    data = COMPRESS[name](raw[:500]) + COMPRESS[name](raw[500:])

    np.testing.assert_array_equal(decode_chunk(data, metadata((20, 15), [BYTES, {"name": name}])), VALUES)


def test_zlib_of_zarr2_is_read() -> None:
    """zarr2's zlib has no gzip header."""
    fields = {"zarr_format": 2, "shape": [20, 15], "chunks": [20, 15], "dtype": "<f4", "compressor": {"id": "zlib"}}
    meta = zarr.parse(json.dumps(fields | {"fill_value": None, "order": "C", "filters": None}).encode(), 2)

    np.testing.assert_array_equal(decode_chunk(zlib.compress(VALUES.tobytes()), meta), VALUES)


def test_foreign_chunks_name_the_extra_to_install() -> None:
    """Decoding what only TensorStore can is an error that says so."""
    with pytest.raises(UnsupportedFormatError, match=r"blosc.*tailrace\[tensorstore\]"):
        decode_chunk(b"", metadata((4,), [BYTES, {"name": "blosc"}]))


def test_absurd_chunks_are_refused_without_memory() -> None:
    """Metadata may claim exabytes; the first missing byte ends it."""
    huge = metadata((1 << 60,), [BYTES, {"name": "zstd"}])

    with pytest.raises((UnsupportedFormatError, CorruptionError)):
        decode_chunk(b"", huge)
    with pytest.raises(CorruptionError):
        streamed(b"", huge)


@pytest.mark.parametrize("entry", [(10**6, 4), (0, 10**6), (2**64 - 2, 4), (2**64 - 1, 4), (8, 2**64 - 1)])
def test_shard_entries_outside_the_shard_are_found(entry: tuple[int, int]) -> None:
    """An index cannot send a reader elsewhere, nor overflow."""
    shard = bytes(64) + np.array([[0, 8], entry], "<u8").tobytes()
    configuration = {"chunk_shape": [2], "codecs": [BYTES], "index_codecs": [BYTES]}
    meta = metadata((4,), [{"name": "sharding_indexed", "configuration": configuration}])

    with pytest.raises(CorruptionError, match="places an inner chunk"):
        codecs.read_shard_index(reader(shard), len(shard), meta)
    with pytest.raises(CorruptionError, match="places an inner chunk"):
        decode_chunk(shard, meta)


def test_blocks_are_bounded_and_whole_elements() -> None:
    """A stream hands out at most 1 MiB at once, of whole elements."""
    chunk = np.arange(700_001, dtype=np.complex64)
    data = COMPRESS["zstd"](chunk.tobytes())
    sizes = [
        len(b)
        for b in decode_stream(reader(data), len(data), metadata((700_001,), [BYTES, {"name": "zstd"}], "complex64"))
    ]

    assert max(sizes) <= 1 << 20
    assert all(size % 8 == 0 for size in sizes)


def test_stream_decodes_while_another_is_suspended() -> None:
    """Two streams of one thread do not share state."""
    meta = metadata((1 << 19,), [BYTES, {"name": "zstd"}])
    first, second = (np.random.default_rng(seed).random(1 << 19, np.float32) for seed in (1, 2))
    data = [COMPRESS["zstd"](values.tobytes()) for values in (first, second)]
    streams = [decode_stream(reader(d), len(d), meta) for d in data]
    parts: list[list[bytes]] = [[], []]
    for _ in range(2):
        for part, stream in zip(parts, streams, strict=True):
            part.append(bytes(next(stream)))

    assert b"".join(parts[0]) == first.tobytes()
    assert b"".join(parts[1]) == second.tobytes()


@given(data=st.data())
def test_scatter_is_numpy_indexing(data: st.DataObject) -> None:
    """Whatever the blocks, the box and its strides, the destination gets what numpy would put there."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    chunk = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, chunk.size), max_size=5)))
    raw = chunk.tobytes()
    blocks = [raw[2 * a : 2 * b] for a, b in zip([0, *cuts], [*cuts, chunk.size], strict=True)]
    out = np.full(extent[::-1], -1, np.int16).T  # not C-contiguous
    scatter(blocks, metadata(shape, [BYTES], "int16"), Part(start, extent), out)

    np.testing.assert_array_equal(out, chunk[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))])


def test_one_stream_feeds_several_destinations() -> None:
    """A chunk is decoded once for all boxes that need it."""
    meta = metadata((20, 15), [BYTES, CRC])
    data = b"".join(map(bytes, encode_chunk(VALUES, compression=None)))
    left, right = np.zeros((20, 7), np.float32), np.zeros((20, 8), np.float32)
    parts = [Scatter(meta, Part((0, 0), (20, 7)), left), Scatter(meta, Part((0, 7), (20, 8)), right)]
    for block in decode_stream(reader(data), len(data), meta):
        for part in parts:
            part.write(block)

    np.testing.assert_array_equal(np.hstack([left, right]), VALUES)


TURN = {"name": "transpose", "configuration": {"order": [1, 0]}}
SHARD = {"chunk_shape": [5, 5], "codecs": [BYTES, {"name": "zstd"}], "index_codecs": [BYTES, CRC]}
CHAINS = [
    [BYTES],
    [BYTES, CRC],
    [BYTES, {"name": "zstd"}],
    [BYTES, {"name": "gzip"}, CRC],
    [TURN, {"name": "bytes", "configuration": {"endian": "big"}}, CRC, {"name": "gzip"}],
    [{"name": "sharding_indexed", "configuration": SHARD}],
    [{"name": "sharding_indexed", "configuration": SHARD | {"index_location": "start", "index_codecs": [BYTES]}}],
]


@given(
    chain=st.sampled_from(CHAINS),
    compressor=st.sampled_from(["zstd", "gzip", None]),
    junk=st.binary(max_size=80),
    where=st.integers(0, 2000),
    keep=st.integers(0, 2000),
)
def test_fuzzed_chunks_raise_corruption_alone(
    chain: list[Any], compressor: str | None, junk: bytes, where: int, keep: int
) -> None:
    """Junk spliced into a chunk either decodes to the right shape or is a CorruptionError."""
    meta = metadata((20, 15), chain)
    base = COMPRESS[compressor](VALUES.tobytes()) if compressor else VALUES.tobytes()
    data = base[:where] + junk + base[keep:]
    for decode in (decode_chunk, streamed) if meta.streamable else (decode_chunk,):
        try:
            decoded = decode(data, meta)
        except CorruptionError:
            continue

        assert np.frombuffer(decoded, np.uint8).size == 1200
