"""TensorStore's zarr drivers as the oracle of array metadata and chunks, both ways."""

from __future__ import annotations

import itertools
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from tailrace.format import codecs, zarr

DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float4_e2m1fn", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]
SHAPES = [((), ()), ((7,), (3,)), ((5, 6), (5, 4)), ((3, 4, 5), (2, 3, 5)), ((2, 3, 2, 3), (1, 2, 2, 2))]
SHAPES += [((2, 1, 3, 2, 3), (2, 1, 2, 1, 2))]
ZSTD = {"name": "zstd", "configuration": {"level": 1}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
TURN = {"name": "transpose", "configuration": {"order": [1, 0]}}


def sharded(chunk_shape: list[int], inner: list[Any], **more: Any) -> dict[str, Any]:
    """A sharding codec."""
    return {"name": "sharding_indexed", "configuration": {"chunk_shape": chunk_shape, "codecs": inner, **more}}


CHAINS: dict[str, list[Any]] = {
    "none": ["bytes"],
    "crc32c": ["bytes", "crc32c"],
    "zstd": ["bytes", ZSTD],
    "zstd with content checksum": ["bytes", {"name": "zstd", "configuration": {"level": 1, "checksum": True}}],
    "zstd, crc32c": ["bytes", ZSTD, "crc32c"],
    "crc32c, zstd": ["bytes", "crc32c", ZSTD],
    "gzip": ["bytes", GZIP],
    "gzip, crc32c": ["bytes", GZIP, "crc32c"],
    "big endian": [BIG],
    "big endian, zstd": [BIG, ZSTD],
    "transpose": [TURN, "bytes"],
    "two transposes": [TURN, TURN, "bytes", "crc32c"],
    "transpose, big endian, gzip": [TURN, BIG, GZIP],
    "sharding": [sharded([2, 3], ["bytes"])],
    "sharding, index at start": [sharded([2, 3], ["bytes", ZSTD, "crc32c"], index_location="start")],
    "sharding, bare big endian index": [sharded([2, 3], ["bytes"], index_codecs=[BIG])],
    "transpose, sharding of transposed": [TURN, sharded([3, 2], [TURN, "bytes", GZIP])],
    "nested sharding": [sharded([4, 3], [sharded([2, 3], ["bytes", "crc32c"], index_location="start")])],
}


def sample(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Values all over the dtype, without NaN, so that they compare."""
    rng = np.random.default_rng(7)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    if dtype.name in ("int2", "int4"):
        limits = ml_dtypes.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, np.int8, endpoint=True).astype(dtype)
    return rng.uniform(-3, 3, shape).astype(dtype)


def written_by_tensorstore(
    driver: str, values: Any, metadata: dict[str, Any]
) -> tuple[zarr.ArrayMetadata, dict[str, bytes]]:
    """What TensorStore stores for the array: its metadata as we parse it, and every chunk by key."""
    context = ts.Context()
    spec = {"driver": driver, "kvstore": "memory://a/", "metadata": metadata, "store_data_equal_to_fill_value": True}
    dtype = ts.dtype(values.dtype.type)
    array = ts.open(spec, dtype=dtype, shape=values.shape, create=True, context=context).result()
    array.write(values).result()
    store = ts.KvStore.open("memory://a/", context=context).result()
    stored = {key.decode(): store.read(key).result().value for key in store.list().result()}
    text = stored.pop("zarr.json" if driver == "zarr3" else ".zarray")
    return zarr.parse(text, 3 if driver == "zarr3" else 2), stored


def grid_places(meta: zarr.ArrayMetadata) -> list[tuple[int, ...]]:
    """Every grid index of an array."""
    return list(itertools.product(*(range(-(-n // c)) for n, c in zip(meta.shape, meta.chunk_shape, strict=True))))


def assembled(meta: zarr.ArrayMetadata, stored: dict[str, bytes], *, into: bool = False, stream: bool = False) -> Any:
    """The array as our decoder reads it."""
    padded = np.zeros([-(-n // c) * c for n, c in zip(meta.shape, meta.chunk_shape, strict=True)], meta.dtype)
    for place in grid_places(meta):
        data = stored[meta.chunk_key("", place)]
        part = tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, meta.chunk_shape, strict=True))
        if stream:
            whole = Part((0,) * len(place), meta.chunk_shape)
            blocks = codecs.decode_stream(lambda at, n, data=data: data[at : at + n], len(data), meta)
            codecs.scatter(blocks, meta, whole, padded[(*part, ...)])
        elif into:
            out = np.empty(meta.chunk_shape, meta.dtype)
            padded[part] = codecs.decode_chunk(data, meta, out)
        else:
            padded[part] = codecs.decode_chunk(data, meta)
    return padded[tuple(slice(0, n) for n in meta.shape)]


class Part:
    """A box of a chunk."""

    def __init__(self, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.start, self.shape = start, shape


def regular(chunk_shape: tuple[int, ...], chain: list[Any], **more: Any) -> dict[str, Any]:
    """zarr3 metadata constraints."""
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}}
    return {"chunk_grid": grid, "codecs": chain, **more}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("chain", ["none", "zstd, crc32c", "big endian"])
def test_every_dtype_of_zarr3_reads_equal(name: str, chain: str) -> None:
    """What TensorStore stores in zarr3 decodes to the same elements and dtype."""
    values = sample(zarr.dtype_from_name(name), (5, 6))
    meta, stored = written_by_tensorstore("zarr3", values, regular((2, 4), CHAINS[chain]))

    assert meta.dtype == values.dtype
    np.testing.assert_array_equal(assembled(meta, stored), values)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}, {"id": "zlib", "level": 1}])
def test_every_dtype_of_zarr2_reads_equal(name: str, compressor: dict[str, Any] | None) -> None:
    """What TensorStore stores in zarr2 decodes to the same elements and dtype."""
    values = sample(zarr.dtype_from_name(name), (5, 6))
    meta, stored = written_by_tensorstore("zarr", values, {"chunks": [2, 4], "compressor": compressor})

    assert meta.dtype == values.dtype
    np.testing.assert_array_equal(assembled(meta, stored), values)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", ["float32", "complex64", "bfloat16", "int4"])
def test_every_codec_chain_reads_equal(chain: str, into: bool, name: str) -> None:
    """Every chain we call native decodes what TensorStore encodes, into memory of ours or of the caller."""
    values = sample(zarr.dtype_from_name(name), (7, 11))
    meta, stored = written_by_tensorstore("zarr3", values, regular((4, 6), CHAINS[chain]))

    assert meta.native
    np.testing.assert_array_equal(assembled(meta, stored, into=into), values)


@pytest.mark.parametrize("chain", ["none", "crc32c", "zstd", "zstd, crc32c", "gzip", "gzip, crc32c"])
def test_streams_read_equal(chain: str) -> None:
    """Chains that can be streamed give the same elements as a stream; chunks of several blocks are among them."""
    values = sample(np.dtype(np.float32), (701, 999))
    meta, stored = written_by_tensorstore("zarr3", values, regular((500, 999), CHAINS[chain]))

    assert codecs.supports_streaming(meta)
    np.testing.assert_array_equal(assembled(meta, stored, stream=True), values)


@pytest.mark.parametrize(("shape", "chunk_shape"), SHAPES, ids=str)
@pytest.mark.parametrize("driver", ["zarr3", "zarr"])
def test_every_rank_reads_equal(driver: str, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> None:
    """Ranks 0 to 5 with clipped edge chunks, whole and streamed."""
    values = sample(np.dtype(np.float32), shape)
    constraints = regular(chunk_shape, ["bytes", ZSTD]) if driver == "zarr3" else {"chunks": list(chunk_shape)}
    constraints |= {} if driver == "zarr3" else {"compressor": {"id": "gzip", "level": 1}}
    meta, stored = written_by_tensorstore(driver, values, constraints)

    np.testing.assert_array_equal(assembled(meta, stored), values)
    np.testing.assert_array_equal(assembled(meta, stored, stream=True), values)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i4", ">i4", ">c8", ">f2", "|b1"])
@pytest.mark.parametrize("separator", [".", "/"])
def test_zarr2_orders_read_equal(order: str, dtype: str, separator: str) -> None:
    """zarr2 arrays in C and F order, of either byte order and separator."""
    values = sample(np.dtype(dtype).newbyteorder("="), (4, 5, 3))
    constraints = {"chunks": [3, 2, 2], "compressor": None, "order": order, "dtype": dtype}
    meta, stored = written_by_tensorstore("zarr", values, constraints | {"dimension_separator": separator})

    np.testing.assert_array_equal(assembled(meta, stored), values)


@pytest.mark.parametrize("encoding", ["default", "v2"])
@pytest.mark.parametrize("separator", [".", "/", None])
@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_chunk_keys_are_tensorstores(encoding: str, separator: str | None, shape: tuple[int, ...]) -> None:
    """Both key encodings with either separator name exactly the chunks TensorStore stored."""
    configuration = {} if separator is None else {"configuration": {"separator": separator}}
    values = np.ones(shape, np.float32)
    constraints = regular((2, 1)[: len(shape)], ["bytes"], chunk_key_encoding={"name": encoding, **configuration})
    meta, stored = written_by_tensorstore("zarr3", values, constraints)

    assert {meta.chunk_key("", place) for place in grid_places(meta)} == set(stored)


@pytest.mark.parametrize("chain", ["sharding", "sharding, index at start", "nested sharding"])
def test_inner_chunks_of_a_shard_are_found_by_its_index(chain: str) -> None:
    """Each inner chunk decodes alone, from the range the shard's index gives."""
    values = sample(np.dtype(np.float32), (4, 6))
    meta, stored = written_by_tensorstore("zarr3", values, regular((4, 6), CHAINS[chain]))
    shard = stored["c/0/0"]
    index = codecs.read_shard_index(lambda at, n: shard[at : at + n], len(shard), meta)
    inner = meta.inner
    assert inner is not None
    found = np.empty_like(values)
    for place in np.ndindex(*index.shape[:-1]):
        at, length = map(int, index[place])
        part = tuple(slice(i * n, i * n + n) for i, n in zip(place, inner.chunk_shape, strict=True))
        found[part] = codecs.decode_chunk(shard[at : at + length], inner)

    np.testing.assert_array_equal(found, values)


def test_inner_chunks_that_are_not_stored_hold_the_fill_value() -> None:
    """A shard of which TensorStore stored one corner reads as the fill value elsewhere."""
    context = ts.Context()
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": regular((4, 4), [sharded([2, 2], ["bytes"])])}
    array = ts.open(spec, dtype=ts.float32, shape=[4, 4], fill_value=7, create=True, context=context).result()
    array[:2, :2] = np.ones((2, 2), np.float32)
    store = ts.KvStore.open("memory://", context=context).result()
    meta = zarr.parse(store.read("zarr.json").result().value, 3)
    data = store.read("c/0/0").result().value
    index = codecs.read_shard_index(lambda at, n: data[at : at + n], len(data), meta)

    np.testing.assert_array_equal(codecs.decode_chunk(data, meta), array.read().result())
    assert np.count_nonzero(index[..., 0] == codecs.ABSENT) == 3


FILLS: list[tuple[str, Any]] = [
    *[("float32", x) for x in (np.nan, np.inf, -np.inf, 1.5, np.uint32(0x7FC00001).view(np.float32))],
    *[("float64", np.nan), ("float16", np.float16(1.1)), ("bfloat16", ml_dtypes.bfloat16(-2.5))],
    *[("float8_e4m3fn", ml_dtypes.float8_e4m3fn("nan")), ("float8_e3m4", ml_dtypes.float8_e3m4("-inf"))],
    *[("float4_e2m1fn", ml_dtypes.float4_e2m1fn(0.5)), ("int4", ml_dtypes.int4(-3)), ("bool", True)],
    *[
        ("int64", -(2**63)),
        ("uint64", 2**64 - 1),
        ("complex64", complex(1, np.nan)),
        ("complex128", complex(-np.inf, 2)),
    ],
]


@pytest.mark.parametrize(("name", "value"), FILLS, ids=str)
@pytest.mark.parametrize("driver", ["zarr3", "zarr"])
def test_fill_values_are_tensorstores(driver: str, name: str, value: Any) -> None:
    """Every form of fill value TensorStore writes is read back to the same element, NaN for NaN."""
    context = ts.Context()
    spec = {"driver": driver, "kvstore": "memory://"}
    array = ts.open(spec, dtype=ts.dtype(name), shape=[2], fill_value=value, create=True, context=context).result()
    store = ts.KvStore.open("memory://", context=context).result()
    text = store.read("zarr.json" if driver == "zarr3" else ".zarray").result().value
    meta = zarr.parse(text, 3 if driver == "zarr3" else 2)
    expected = np.broadcast_to(array.fill_value, ()).astype(meta.dtype)

    # As complex128, since numpy does not take the NaNs of small floats for equal.
    np.testing.assert_array_equal(np.asarray(meta.fill_value).astype("c16"), expected.astype("c16"))
    assert np.asarray(meta.fill_value).dtype == meta.dtype


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_tensorstore_reads_every_dtype_of_ours(name: str, compression: str | None) -> None:
    """Metadata we render and chunks we encode are a zarr3 array to TensorStore, equal in every element."""
    values = sample(zarr.dtype_from_name(name), (5, 6))

    np.testing.assert_array_equal(read_by_tensorstore(values, (2, 4), compression), values)


@pytest.mark.parametrize(("shape", "chunk_shape"), [*SHAPES, ((0, 3), (1, 3))], ids=str)
def test_tensorstore_reads_every_rank_of_ours(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> None:
    """Ranks 0 to 5 and an empty array."""
    values = sample(np.dtype(np.float32), shape)

    np.testing.assert_array_equal(read_by_tensorstore(values, chunk_shape, None), values)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rendered_metadata_is_what_tensorstore_would_write(name: str, compression: str | None) -> None:
    """Our zarr.json has the very fields TensorStore writes for the same array."""
    chain = ["bytes", *([ZSTD] if compression else []), "crc32c"]
    context = ts.Context()
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": regular((2, 4), chain)}
    ts.open(spec, dtype=ts.dtype(name), shape=[5, 6], create=True, context=context).result()
    theirs = ts.KvStore.open("memory://", context=context).result().read("zarr.json").result().value
    ours = zarr.render((5, 6), zarr.dtype_from_name(name), (2, 4), compression=compression)

    assert json.loads(ours) == json.loads(theirs)


def read_by_tensorstore(values: Any, chunk_shape: tuple[int, ...], compression: str | None) -> Any:
    """The array as TensorStore reads it from chunks and metadata of ours."""
    text = zarr.render(values.shape, values.dtype, chunk_shape, compression=compression)
    meta = zarr.parse(text, 3)
    context = ts.Context()
    store = ts.KvStore.open("memory://", context=context).result()
    store.write("zarr.json", text).result()
    for place in grid_places(meta):
        chunk = np.zeros(chunk_shape, values.dtype)
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunk_shape, strict=True))]
        chunk[tuple(slice(0, n) for n in part.shape)] = part
        encoded = b"".join(map(bytes, codecs.encode_chunk(chunk, compression=compression)))
        store.write(meta.chunk_key("", place), encoded).result()
    spec = {"driver": "zarr3", "kvstore": "memory://", "fill_missing_data_reads": False}
    return ts.open(spec, open=True, context=context).result().read().result()
