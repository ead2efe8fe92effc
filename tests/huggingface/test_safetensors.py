"""Our reader against safetensors' own writer and reader."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import LeafError, SourceFormatError
from tailrace.flow.regions import Region
from tailrace.huggingface.safetensors import SafetensorsFile, TensorSource

NUMPY_DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8"]
FORMATS = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}


def write_raw(path, entries, data):
    """A safetensors file put together by hand: header entries as given, then the data bytes."""
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def read(source: TensorSource, region: Region | None = None) -> np.ndarray:
    """A region of the tensor, all of it by default."""
    region = region or Region.whole(source.shape)
    out = np.empty(region.shape, source.dtype)
    source.read_into(region, out)
    return out


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_reads_what_safetensors_writes(tmp_path, dtype):
    """Every dtype that safetensors' numpy writer knows comes back equal, with its metadata."""
    array = np.frombuffer(np.random.default_rng(0).bytes(240 * np.dtype(dtype).itemsize), np.uint8)
    array = (array % 2).view(dtype).reshape(3, 5, -1) if dtype == "bool" else array.view(dtype).reshape(3, 5, -1)
    tensors = {"a.b": array, "scalar": np.array(array[0, 0, 0]), "empty": array[:0]}
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "np"})

    file = SafetensorsFile(tmp_path / "m.safetensors")

    assert file.metadata == {"format": "np"}
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        got = read(file.source(name))
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    file.close()


@pytest.mark.parametrize("name", FORMATS)
def test_reads_formats_that_numpy_lacks(tmp_path, name):
    """bfloat16 and the 8-bit floats arrive as ml_dtypes, bit for bit."""
    data = bytes(range(64))
    dtype = np.dtype(FORMATS[name])
    entry = {"dtype": name, "shape": [64 // dtype.itemsize], "data_offsets": [0, 64]}
    file = SafetensorsFile(write_raw(tmp_path / "m.safetensors", {"w": entry}, data))

    got = read(file.source("w"))

    assert got.dtype == dtype
    assert got.tobytes() == data
    file.close()


@pytest.mark.parametrize(("name", "elements"), [("F4", 16), ("F6_E2M3", 8), ("F6_E3M2", 8), ("F8_E8M0", 8)])
def test_formats_without_a_zarr_type_are_refused_by_leaf(tmp_path, name, elements):
    """A file may hold them beside others; only asking for such a tensor is an error, which tells the way out."""
    nbytes = {"F4": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8}[name]
    entry = {"dtype": name, "shape": [elements], "data_offsets": [0, nbytes]}
    file = SafetensorsFile(write_raw(tmp_path / "m.safetensors", {"w": entry}, bytes(nbytes)))

    with pytest.raises(LeafError, match=rf"'w': {name} cannot be stored.*Cast it"):
        file.source("w")


def test_unaligned_offsets(tmp_path):
    """Tensors may begin at any byte of the file."""
    values = np.arange(1000, dtype="<f4")
    entries = {
        "pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [10, 100], "data_offsets": [1, 4001]},
    }
    file = SafetensorsFile(write_raw(tmp_path / "m.safetensors", entries, b"\7" + values.tobytes()))

    got = read(file.source("w"), Region((2, 3), (5, 7)))

    np.testing.assert_array_equal(got, values.reshape(10, 100)[2:7, 3:10])
    file.close()


@st.composite
def shapes_and_regions(draw):
    """A shape of up to five dimensions and a box inside it, either may be empty."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=5)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    extent = tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True))
    return shape, Region(start, extent)


@given(shapes_and_regions(), st.sampled_from(["i1", "f4", "i8"]))
def test_any_region(tmp_path_factory, shape_and_region, dtype):
    """Any box of any rank is what numpy slices from the whole."""
    shape, region = shape_and_region
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    path = tmp_path_factory.mktemp("any") / "m.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3, np.uint8), "w": array}, path)
    file = SafetensorsFile(path)

    got = read(file.source("w"), region)

    np.testing.assert_array_equal(got, array[region.slices])
    file.close()


@pytest.mark.parametrize("shape", [(700, 900), (40, 9000), (9, 70, 500)])
def test_regions_larger_than_the_gathering(tmp_path, shape):
    """Rows are gathered in several rounds, or one by one where they lie far apart."""
    array = np.random.default_rng(1).integers(0, 1 << 30, shape, np.int32)
    safetensors.numpy.save_file({"w": array}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    region = Region((1,) * len(shape), tuple(n - 3 for n in shape))

    got = read(file.source("w"), region)

    np.testing.assert_array_equal(got, array[region.slices])
    file.close()


def test_file_cut_while_it_is_read(tmp_path):
    """A file that shrinks after it was opened is an error, never stale or zero bytes."""
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"w": np.ones(5000)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, 1000)

    with pytest.raises(SourceFormatError, match="ends at byte 1000, but had"):
        read(file.source("w"))
    file.close()
