"""We read what TensorStore writes: dtypes, ranks, edge chunks and codecs, in databases and in plain directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from tailrace.checkpoint.reader import Checkpoint, open
from tailrace.errors import BudgetError, CorruptionError, UnsupportedFormatError

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CRC = {"name": "crc32c"}
ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
ZSTD_CHECKED = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}
GZIP = {"name": "gzip", "configuration": {"level": 5}}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0},
}


def sharded(inner: list[int], codecs: list[Any], **more: Any) -> dict[str, Any]:
    """The sharding codec."""
    configuration = {"chunk_shape": inner, "codecs": codecs, "index_codecs": [BYTES, CRC], **more}
    return {"name": "sharding_indexed", "configuration": configuration}


def transposed(order: list[int]) -> dict[str, Any]:
    """The transpose codec."""
    return {"name": "transpose", "configuration": {"order": order}}


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Small numbers that every dtype has."""
    numbers = np.random.default_rng(len(shape)).integers(-7, 8, shape)
    if np.dtype(dtype) == ml_dtypes.int2:
        numbers %= 2
    if np.dtype(dtype).kind == "u":
        numbers = abs(numbers)
    return np.asarray(
        numbers.astype(np.float32).astype(dtype) if np.dtype(dtype).kind == "V" else numbers.astype(dtype)
    )


def database(root: Path, **config: Any) -> dict[str, Any]:
    """A TensorStore spec of an OCDBT database."""
    return {"driver": "ocdbt", "base": f"file://{root}/", "config": config}


def write_zarr3(store: dict[str, Any], name: str, array: Any, chunk: list[int], codecs: list[Any], **more: Any) -> None:
    """Write an array as TensorStore does."""
    spec = {
        "driver": "zarr3",
        "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"},
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": codecs,
            **more,
        },
        "store_data_equal_to_fill_value": True,
        "create": True,
    }
    ts.open(spec).result().write(array).result()


def checkpoint(root: Path, *names: str, use_ocdbt: bool = True, use_zarr3: bool = True, **options: Any) -> Checkpoint:
    """Opens arrays as a checkpoint, with Orbax's `_METADATA` written beside them by hand."""
    tree = {
        str((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for name in names
    }
    record = {"tree_metadata": tree, "use_ocdbt": use_ocdbt, "use_zarr3": use_zarr3}
    (root / "_METADATA").write_text(json.dumps(record))
    return open(root, **options)


def same(found: Any, expected: Any) -> bool:
    """Equal in shape, dtype and every bit."""
    found, expected = np.asarray(found), np.asarray(expected)
    return found.shape == expected.shape and found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3fn),
    *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_dtype(tmp_path: Path, dtype: Any) -> None:
    """Every dtype that zarr has comes back bit for bit, with edge chunks."""
    array = values((5, 7), dtype)
    write_zarr3(database(tmp_path), "x", array, [2, 3], [{"name": "bytes", "configuration": {"endian": "little"}}, CRC])

    assert same(checkpoint(tmp_path, "x")["x"], array)


SHAPES = [((), []), ((7,), [3]), ((5, 6), [2, 6]), ((3, 4, 5), [2, 4, 2]), ((2, 3, 4, 5), [1, 2, 4, 5])]
SHAPES += [((2, 2, 3, 3, 2), [2, 1, 2, 3, 1]), ((0, 4), [1, 4]), ((300, 1000), [128, 1000])]
CHAINS = {
    "plain": [BYTES],
    "crc": [BYTES, CRC],
    "zstd": [BYTES, ZSTD],
    "zstd-crc": [BYTES, ZSTD, CRC],
    "zstd-checksum": [BYTES, ZSTD_CHECKED],
    "gzip": [BYTES, GZIP],
    "crc-zstd": [BYTES, CRC, ZSTD],
    "big-endian": [BIG, CRC],
    "blosc": [BYTES, BLOSC],
}


@pytest.mark.parametrize(("shape", "chunk"), SHAPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_rank_and_codecs(tmp_path: Path, shape: tuple[int, ...], chunk: list[int], chain: str) -> None:
    """Ranks 0 to 5 and a zero-size array, with edge chunks, under every codec chain."""
    array = values(shape, "int32")
    write_zarr3(database(tmp_path), "x", array, chunk, CHAINS[chain])

    assert same(checkpoint(tmp_path, "x")["x"], array)


@pytest.mark.parametrize("chain", CHAINS)
def test_part(tmp_path: Path, chain: str) -> None:
    """A box that cuts chunks on every side is what numpy slices."""
    array = values((40, 50, 60), "float32")
    write_zarr3(database(tmp_path), "x", array, [16, 32, 32], CHAINS[chain])

    leaf = checkpoint(tmp_path, "x")["x"]

    assert same(leaf[3:37, 31:33, 7], array[3:37, 31:33, 7])
    assert same(leaf[::-7, 5, 1::3], array[::-7, 5, 1::3])


@pytest.mark.parametrize("inner", [[BYTES], [BYTES, CRC], [BYTES, ZSTD, CRC], [BYTES, GZIP]], ids=str)
@pytest.mark.parametrize("location", ["start", "end"])
def test_sharding(tmp_path: Path, inner: list[Any], location: str) -> None:
    """Shards are read by inner chunk, whole and in part."""
    array = values((50, 60), "float32")
    codec = sharded([8, 16], inner, index_location=location)
    write_zarr3(database(tmp_path), "x", array, [16, 32], [codec])

    leaf = checkpoint(tmp_path, "x")["x"]

    assert same(leaf, array)
    assert same(leaf[7:19, 15:50], array[7:19, 15:50])


def test_nested_and_transposed_shards(tmp_path: Path) -> None:
    """Shards within shards, and a transposed shard."""
    array = values((48, 64), "uint16")
    nested = sharded([16, 32], [sharded([8, 8], [BYTES, ZSTD, CRC])])
    write_zarr3(database(tmp_path), "nested", array, [32, 32], [nested])
    write_zarr3(database(tmp_path), "turned", array, [32, 32], [transposed([1, 0]), sharded([8, 16], [BYTES, CRC])])

    found = checkpoint(tmp_path, "nested", "turned")

    assert same(found["nested"], array)
    assert same(found["turned"], array)


@pytest.mark.parametrize(
    "config",
    [
        {"manifest_kind": "numbered"},
        {"max_decoded_node_bytes": 512},
        {"max_inline_value_bytes": 4096},
        {"compression": None},
    ],
    ids=str,
)
def test_database_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    """Numbered manifests, tall trees, inline chunks and uncompressed nodes are all read."""
    store = database(tmp_path, **config)
    arrays = {f"leaf{i}": values((9, 11), "float32") + i for i in range(40)}
    for name, array in arrays.items():
        write_zarr3(store, name, array, [4, 11], [BYTES, CRC])

    found = checkpoint(tmp_path, *arrays)

    assert all(same(found[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("chunk", [[9, 12], [4, 5]], ids=str)
@pytest.mark.parametrize(
    "compressor", [None, {"id": "zstd", "level": 1}, {"id": "zlib", "level": 1}, {"id": "blosc"}], ids=str
)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("where", ["database", "directory"])
def test_zarr2(tmp_path: Path, chunk: list[int], compressor: Any, order: str, where: str) -> None:
    """zarr2 in both orders, in a database and as files."""
    array = values((9, 12), "float32")
    directory = {"driver": "file", "path": f"{tmp_path}/"}
    store = database(tmp_path) if where == "database" else directory
    spec = {
        "driver": "zarr",
        "kvstore": {**store, "path": f"{store.get('path', '')}a.b/"},
        "metadata": {"shape": [9, 12], "chunks": chunk, "dtype": "<f4", "compressor": compressor, "order": order},
        "create": True,
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec).result().write(array).result()

    found = checkpoint(tmp_path, "a.b", use_ocdbt=where == "database", use_zarr3=False)

    assert same(found[("a.b",)], array)


def test_missing_chunk_is_the_fill_value(tmp_path: Path) -> None:
    """A chunk that another writer left out holds the fill value."""
    spec = {
        "driver": "zarr3",
        "kvstore": {**database(tmp_path), "path": "x/"},
        "metadata": {"shape": [4, 4], "data_type": "float32", "fill_value": 2.5,
                     "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 4]}}, "codecs": [BYTES]},
        "create": True,
    }  # fmt: skip
    store = ts.open(spec).result()
    store[0:2].write(np.ones((2, 4), np.float32)).result()

    assert same(checkpoint(tmp_path, "x")["x"], np.repeat(np.float32([1, 2.5]), 8).reshape(4, 4))


@pytest.mark.parametrize("chain", ["crc", "zstd-crc", "crc-zstd", "zstd-checksum"])
def test_flipped_bit_names_leaf_region_and_file(tmp_path: Path, chain: str) -> None:
    """One flipped bit in a chunk is a CorruptionError that says where."""
    array = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    write_zarr3(database(tmp_path), "x", array, [32, 64], CHAINS[chain])
    opened = checkpoint(tmp_path, "x")
    value = opened.index.get(b"x/c/1/0")
    data = bytearray((tmp_path / value.file.path).read_bytes())
    data[value.offset + value.length // 2] ^= 1
    (tmp_path / value.file.path).write_bytes(data)

    with pytest.raises(CorruptionError) as caught:
        opened["x"][...]

    assert "'x'" in str(caught.value)
    assert "[0:64, 0:64]" in str(caught.value)
    assert value.file.path in str(caught.value)


def test_chunk_larger_than_the_budget(tmp_path: Path) -> None:
    """A zstd chunk of 40 MB is read, whole and in part, through a budget of 8 MiB that is never exceeded."""
    array = np.arange(10_000_000, dtype=np.float32).reshape(1000, 10_000)
    write_zarr3(database(tmp_path), "x", array, [1000, 10_000], CHAINS["zstd"])
    opened = checkpoint(tmp_path, "x", memory_budget="8MiB")

    assert same(opened["x"], array)
    assert same(opened["x"][::250, 17:9000:3], array[::250, 17:9000:3])
    assert 0 < opened.budget.peak_bytes <= 8 << 20


def test_foreign_chunk_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A blosc chunk that TensorStore would decode beyond the budget is refused, naming the size."""
    array = np.zeros((1500, 2000), np.float32)
    write_zarr3(database(tmp_path), "x", array, [1500, 2000], CHAINS["blosc"])

    with pytest.raises(BudgetError, match="takes about 37048576 bytes, the memory budget is 8388608"):
        checkpoint(tmp_path, "x", memory_budget="8MiB")["x"][0, 0]


def test_without_tensorstore_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec we do not decode, and no TensorStore: the message says what to install."""
    write_zarr3(database(tmp_path), "x", np.zeros(3, np.float32), [3], CHAINS["blosc"])
    monkeypatch.setitem(__import__("sys").modules, "tensorstore", None)

    with pytest.raises(UnsupportedFormatError, match=r"pip install 'tailrace\[tensorstore\]'"):
        checkpoint(tmp_path, "x")["x"][...]
