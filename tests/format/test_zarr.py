from __future__ import annotations

import itertools
import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import FormatError, InputError, LeafError, UnsupportedFormatError
from tailrace.format import zarr

MIB = 1 << 20


def array3(**changes: Any) -> bytes:
    """A zarr.json by hand, with fields replaced; None takes a field away."""
    fields: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [6, 8],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 4]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    fields |= changes
    return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()


def array2(**changes: Any) -> bytes:
    """A .zarray by hand, with fields replaced."""
    fields = {"zarr_format": 2, "shape": [6, 8], "chunks": [3, 4], "dtype": "<f4", "compressor": None}
    return json.dumps(fields | {"fill_value": 0, "order": "C", "filters": None} | changes).encode()


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def test_parse_tells_what_the_metadata_says() -> None:
    """Shape, dtype, chunks and codecs come back as written."""
    meta = zarr.parse(array3(codecs=[BYTES, {"name": "crc32c"}], fill_value=1.5), 3)

    assert (meta.shape, meta.chunk_shape, meta.dtype) == ((6, 8), (3, 4), np.dtype(np.float32))
    assert meta.codecs == (zarr.Codec("bytes", {"endian": "little"}), zarr.Codec("crc32c", {}))
    assert (meta.fill_value, meta.native, meta.crc_protected, meta.chunk_bytes) == (1.5, True, True, 48)


def test_equal_bytes_parse_to_one_object() -> None:
    """Thousands of leaves of one shape share their metadata."""
    assert zarr.parse(array3(), 3) is zarr.parse(array3(), 3)


@pytest.mark.parametrize(
    ("codecs", "plain", "streamable", "crc"),
    [
        ([BYTES], True, True, False),
        ([BYTES, {"name": "crc32c"}], True, True, True),
        ([BYTES, {"name": "zstd"}, {"name": "crc32c"}], False, True, True),
        ([BYTES, {"name": "crc32c"}, {"name": "zstd"}], False, False, False),
        ([{"name": "transpose", "configuration": {"order": [0, 1]}}, BYTES], True, True, False),
        ([{"name": "transpose", "configuration": {"order": [1, 0]}}, BYTES], False, False, False),
        ([{"name": "bytes", "configuration": {"endian": "big"}}], False, False, False),
    ],
)
def test_properties_of_chains(codecs: list[Any], plain: bool, streamable: bool, crc: bool) -> None:
    """What a reader may do with a chunk follows from its codecs."""
    meta = zarr.parse(array3(codecs=codecs), 3)

    assert (meta.plain, meta.streamable, meta.crc_protected) == (plain, streamable, crc)


@pytest.mark.parametrize(
    ("codecs", "reason"),
    [
        ([BYTES, {"name": "blosc", "configuration": {"cname": "lz4"}}], "blosc"),
        ([{"name": "packbits"}], "packbits"),
        ([BYTES, {"name": "zstd"}, {"name": "gzip"}], "gzip"),
        ([{"name": "sharding_indexed", "configuration": {"chunk_shape": [3, 2], "codecs": [{"name": "vlen"}],
          "index_codecs": [BYTES]}}], "vlen"),
    ],
)  # fmt: skip
def test_codecs_beyond_us_are_foreign(codecs: list[Any], reason: str) -> None:
    """Metadata with codecs only TensorStore knows is read, and says why it is foreign."""
    meta = zarr.parse(array3(codecs=codecs), 3)

    assert not meta.native
    assert reason in str(meta.foreign)
    assert meta.shape == (6, 8)


@pytest.mark.parametrize(
    "changes", [{"compressor": {"id": "blosc"}}, {"compressor": {"id": "bz2"}}, {"filters": [{"id": "delta"}]}]
)
def test_zarr2_codecs_beyond_us_are_foreign(changes: dict[str, Any]) -> None:
    """zarr2 filters and other compressors are read by TensorStore alone."""
    assert not zarr.parse(array2(**changes), 2).native


def test_zarr2_f_order_is_a_transpose() -> None:
    """Both formats are read into one form."""
    meta = zarr.parse(array2(order="F", compressor={"id": "zstd", "level": 1}), 2)

    assert [codec.name for codec in meta.codecs] == ["transpose", "bytes", "zstd"]
    assert not meta.streamable


@pytest.mark.parametrize(
    ("name", "index", "fields", "key"),
    [
        ("a.b", (0, 1), {}, "a.b/c/0/1"),
        ("a.b", (), {"shape": [], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": []}}}, "a.b/c"),
        ("", (2, 3), {"chunk_key_encoding": {"name": "v2"}}, "2.3"),
        ("x", (2, 3), {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}}}, "x/c.2.3"),
    ],
)
def test_chunk_keys(name: str, index: tuple[int, ...], fields: dict[str, Any], key: str) -> None:
    """Keys as the zarr3 specification spells them."""
    assert zarr.parse(array3(**fields), 3).chunk_key(name, index) == key


def test_metadata_keys() -> None:
    """The metadata's own key is its format's file below the array's name."""
    assert zarr.parse(array3(), 3).metadata_key("a.b") == "a.b/zarr.json"
    assert zarr.parse(array2(), 2).metadata_key("a.b") == "a.b/.zarray"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        array2(),
        array3(node_type="group"),
        array3(shape=None),
        array3(shape=[6, -1]),
        array3(shape=[6, True]),
        array3(shape=[6, 2**63]),
        array3(shape=[1] * 33),
        array3(shape=[6]),
        array3(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [3, 0]}}),
        array3(chunk_grid={"name": "rectangular"}),
        array3(chunk_grid=3),
        array3(data_type="float6_e2m3fn"),
        array3(data_type={"name": "struct"}),
        array3(chunk_key_encoding={"name": "default", "configuration": {"separator": "-"}}),
        array3(chunk_key_encoding={"name": "md5"}),
        array3(codecs=[]),
        array3(codecs=["transpose"]),
        array3(codecs=["bytes"]),
        array3(codecs=[{"name": "transpose", "configuration": {"order": [0, 0]}}, BYTES]),
        array3(codecs=[{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 4]}}]),
        array3(fill_value="zero"),
        array3(fill_value=[1, 2]),
        array3(fill_value=None),
        array3(data_type="uint8", fill_value=256),
        array3(data_type="int4", fill_value=8),
        array3(data_type="bool", fill_value=2),
        array3(storage_transformers=[{"name": "x"}]),
    ],
    ids=lambda data: str(data[-40:]),
)
def test_broken_metadata_is_a_format_error(data: bytes) -> None:
    """Whatever stands in a zarr.json, the error is ours and names the file."""
    with pytest.raises(FormatError, match=r"zarr\.json"):
        zarr.parse(data, 3)


@pytest.mark.parametrize(("depth", "native"), [(2, True), (20, False), (100, False)])
def test_shards_nested_deeply_are_foreign(depth: int, native: bool) -> None:
    """Shards in shards are decoded a few levels down, never to the end of the stack."""
    inner: list[Any] = [BYTES]
    for _ in range(depth):
        configuration = {"chunk_shape": [3, 4], "codecs": inner, "index_codecs": [BYTES]}
        inner = [{"name": "sharding_indexed", "configuration": configuration}]

    assert zarr.parse(array3(codecs=inner), 3).native == native


@pytest.mark.parametrize("dtype", ["<U4", "|S3", "|O", "<M8[ns]", [["a", "<f4"]], "<f3", "<f16", "|f4", 7])
def test_zarr2_dtypes_that_are_no_numbers_are_unsupported(dtype: object) -> None:
    """Strings, objects, dates and records name what is read instead."""
    with pytest.raises(UnsupportedFormatError, match="dtype"):
        zarr.parse(array2(dtype=dtype), 2)


@given(data=st.binary(max_size=200), where=st.integers(0, 10**6), zarr_format=st.sampled_from([2, 3]))
def test_fuzzed_metadata_raises_format_errors_alone(data: bytes, where: int, zarr_format: int) -> None:
    """Bytes spliced into good metadata either parse or raise FormatError."""
    good = array3() if zarr_format == 3 else array2()
    at = where % len(good)
    try:
        meta = zarr.parse(good[:at] + data + good[at + len(data) // 2 :], zarr_format)
    except FormatError:
        return

    assert meta.chunk_bytes > 0


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["bytes", "C", "NaN"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(["name", "order"]), children),
    max_leaves=6,
)


@given(
    field=st.sampled_from(sorted(json.loads(array3()))),
    value=JSON,
    data_type=st.sampled_from(["bool", "int4", "uint8", "float32", "complex64", "bfloat16"]),
)
def test_any_json_in_a_field_raises_format_errors_alone(field: str, value: Any, data_type: str) -> None:
    """A field of the wrong type or value never escapes as another error."""
    text = array3(**({"data_type": data_type} | {field: value}))
    try:
        meta = zarr.parse(text, 3)
    except FormatError:
        return

    assert len(meta.shape) == len(meta.chunk_shape)


@pytest.mark.parametrize("name", ["bool", "uint64", "complex128", "bfloat16", "int2", "float4_e2m1fn"])
def test_dtype_names_come_back(name: str) -> None:
    """A name stands for the dtype that numpy or ml_dtypes gives that name."""
    expected = np.dtype(getattr(ml_dtypes, name, None) or name)

    assert zarr.dtype_from_name(name) == expected
    assert zarr.dtype_name(expected) == name


def test_equal_dtypes_have_one_name() -> None:
    """C types of one size are one dtype to zarr."""
    assert zarr.dtype_name(np.dtype("longlong")) == zarr.dtype_name(np.dtype("int64")) == "int64"


@pytest.mark.parametrize(
    ("dtype", "way_out"),
    [
        (np.dtype(ml_dtypes.uint4), "uint8"),
        (np.dtype(ml_dtypes.uint2), "uint8"),
        (np.dtype(ml_dtypes.float8_e4m3), "float8_e4m3fn"),
        (np.dtype(ml_dtypes.float6_e2m3fn), "view"),
        (np.dtype(ml_dtypes.float8_e8m0fnu), "view"),
        (np.dtype(np.longdouble), "float64"),
        (np.dtype(object), "leaves of their own"),
        (np.dtype("U3"), "leaf of its own"),
        (np.dtype("S3"), "view"),
        (np.dtype("M8[s]"), "int64"),
        (np.dtype([("a", "f4")]), "each field"),
        (np.dtype("V3"), "leaf of its own"),
        (np.dtype(">f4"), "float32"),
    ],
    ids=str,
)
def test_dtypes_without_a_zarr_type_name_the_way_out(dtype: np.dtype[Any], way_out: str) -> None:
    """A leaf that cannot be stored is refused with what to do instead."""
    with pytest.raises(LeafError, match=way_out):
        zarr.dtype_name(dtype)


def test_render_refuses_other_compressions() -> None:
    """Only what we write can be asked for."""
    with pytest.raises(InputError, match="zstd"):
        zarr.render((1,), np.dtype("f4"), (1,), compression="lz4")


def chunk_bytes(chunk: tuple[int, ...], dtype: str) -> int:
    """Bytes of a chunk."""
    return math.prod(chunk) * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("shape", "stacked", "target", "chunk"),
    [
        ((), (), None, ()),
        ((0, 5), (), None, (1, 5)),
        ((7, 9), (), None, (7, 9)),
        ((384, 60, 7168, 2048), (0, 1), 2 * MIB, (1, 1, 512, 2048)),
        ((32, 4096, 14336), (0,), 2 * MIB, (1, 64, 14336)),
        ((4, 40 * MIB), (), None, (1, 8 * MIB)),
        ((60, 7168), (-2,), 2 * MIB, (20, 7168)),
    ],
)
def test_chunk_choice_by_example(
    shape: tuple[int, ...], stacked: tuple[int, ...], target: int | None, chunk: tuple[int, ...]
) -> None:
    """16-bit leaves as models have them, under the default budget."""
    found = zarr.choose_chunk_shape(
        shape, np.dtype("uint16"), budget_bytes=256 * MIB, stacked_axes=stacked, target_bytes=target
    )

    assert found == chunk


@given(
    shape=st.lists(st.integers(0, 5000), max_size=4).map(tuple),
    dtype=st.sampled_from(["u1", "u2", "f4", "c16"]),
    budget=st.integers(8 * MIB, 1 << 40),
    target=st.none() | st.integers(2 * MIB, 64 * MIB),
    data=st.data(),
)
def test_chunk_choice_invariants(
    shape: tuple[int, ...], dtype: str, budget: int, target: int | None, data: st.DataObject
) -> None:
    """Within target and budget, contiguous, balanced, and not small unless the leaf is."""
    axes = st.lists(st.sampled_from(range(len(shape))), unique=True) if shape else st.just([])
    stacked = data.draw(axes)
    chunk = zarr.choose_chunk_shape(
        shape, np.dtype(dtype), budget_bytes=budget, stacked_axes=stacked, target_bytes=target
    )
    limit = min(target or 16 * MIB, budget // 4)
    leaf = chunk_bytes(tuple(max(1, n) for n in shape), dtype)

    assert all(1 <= c <= max(1, n) for c, n in zip(chunk, shape, strict=True))
    assert chunk_bytes(chunk, dtype) <= limit
    assert chunk_bytes(chunk, dtype) >= min(leaf, 256 << 10)
    cut = [c < n for i, (c, n) in enumerate(zip(chunk, shape, strict=True)) if i not in stacked]
    assert all(
        not later or c == 1 for (c, _), later in zip(_unstacked(chunk, shape, stacked), _later(cut), strict=True)
    )
    assert all(c == -(-n // -(-n // c)) for c, n in zip(chunk, shape, strict=True) if n)


def _unstacked(chunk: tuple[int, ...], shape: tuple[int, ...], stacked: list[int]) -> list[tuple[int, int]]:
    return [(c, n) for i, (c, n) in enumerate(zip(chunk, shape, strict=True)) if i not in stacked]


def _later(cut: list[bool]) -> list[bool]:
    """For each axis, whether an axis after it is cut."""
    return list(itertools.accumulate(reversed([*cut[1:], False]), lambda a, b: a or b))[::-1] if cut else []
