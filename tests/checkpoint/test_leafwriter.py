"""Assigning regions: what numpy allows, less what would lose values."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import DtypeError, RegionIndexError, ShapeError
from tailrace.flow.regions import Region
from tailrace.flow.sources import ArraySource


@pytest.fixture
def writer(tmp_path):
    """A transaction that is discarded."""
    writer = Transaction(tmp_path / "x", memory_budget="8MiB")
    yield writer
    writer.abort()


def written(writer, dtype, value, shape=(3,)):
    """What is stored after assigning a value to a whole leaf."""
    writer.declare("a", shape=shape, dtype=dtype)[...] = value
    with writer.commit() as checkpoint:
        return checkpoint["a"][...]


@given(data=st.data())
def test_assignments_are_numpys(tmp_path_factory, data):
    """Any ints and slices of step 1, any order, any overlap: the last one wins for each element."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    expected = np.zeros(shape, "int32")
    writer = Transaction(tmp_path_factory.mktemp("t") / "x", memory_budget="8MiB", threads=2)
    leaf = writer.declare("a", shape=shape, dtype="int32", chunk_shape=chunk)
    if data.draw(st.booleans()):
        leaf[...] = expected
    for number in range(1, data.draw(st.integers(1, 6))):
        index = data.draw(hnp.basic_indices(shape, allow_newaxis=False).filter(_steps_of_one))
        extent = expected[index].shape
        value = (np.arange(np.prod(extent, dtype=int)).reshape(extent) + number).astype("int32")
        leaf[index] = value
        expected[index] = value
        if data.draw(st.booleans()):
            writer.flush()
    missing = leaf.missing()
    for region in missing:
        leaf.write(region, np.full(region.shape, 0, "int32"))
    with writer.commit() as checkpoint:
        checkpoint.verify()

        assert (checkpoint["a"][...] == expected).all()
    writer.abort()


def _steps_of_one(index):
    parts = index if isinstance(index, tuple) else (index,)
    return all(part.step in (None, 1) for part in parts if isinstance(part, slice))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", np.float16([1, 2, 3])),
        ("float64", np.float32([1, 2, 3])),
        ("float64", np.int32([1, 2, 3])),
        ("int64", np.uint32([1, 2, 2**32 - 1])),
        ("float32", np.array([1, 2, 3], ml_dtypes.bfloat16)),
        ("int16", np.array([1, 2, 3], ">i2")),
        ("float64", np.array([1, 2, 3], ">f4")),
        ("complex64", np.float32([1, 2, 3])),
        ("int32", np.arange(6, dtype="int32")[::2]),
        ("int32", np.arange(3, dtype="int32")[::-1]),
        ("int32", np.int32(4)),
        ("int32", np.int32([4])),
        ("int32", [1, 2, 3] if np.dtype(int) == np.int32 else np.int32([1, 2, 3])),
    ],
)
def test_values_that_the_leaf_holds_are_taken(writer, dtype, value):
    """Widened, swapped, broadcast, from any strides."""
    expected = np.zeros(3, dtype)
    expected[...] = value

    assert (written(writer, dtype, value) == expected).all()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", np.float64([1, 2, 3])),
        ("float64", np.int64([1, 2, 2**53 + 1])),
        ("float64", np.uint64([1, 2, 3])),
        ("float32", np.float64(0.1)),
        ("int32", np.float32([1, 2, 3])),
        ("int32", np.int64([1, 2, 3])),
        ("uint8", np.int8([1, 2, 3])),
        ("float32", np.complex64([1, 2, 3])),
        ("bfloat16", np.float32([1, 2, 3])),
        ("int32", np.array(["a", "b", "c"])),
        ("int32", np.array([None, 1, 2])),
    ],
)
def test_values_that_a_cast_would_change_are_refused(writer, dtype, value):
    """Naming both dtypes and the way out."""
    leaf = writer.declare("a", shape=(3,), dtype=dtype)
    with pytest.raises(DtypeError, match=f"'a' has dtype {dtype}.*astype"):
        leaf[...] = value


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[("float32", 0.1), ("bfloat16", 0.1), ("float16", 3), ("int64", 2**60 + 1), ("uint8", 255), ("int4", -8)],
        *[("bool", True), ("int8", True), ("complex64", 1j), ("float32", float("inf")), ("float16", float("nan"))],
        ("int32", 2.0),
    ],
)
def test_python_numbers_take_the_leafs_dtype(writer, dtype, value):
    """As numpy assigns them."""
    expected = np.zeros((), dtype if not hasattr(ml_dtypes, dtype) else getattr(ml_dtypes, dtype))
    expected[...] = value

    np.testing.assert_array_equal(written(writer, expected.dtype, value), np.broadcast_to(expected, 3))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[("int32", 1.5), ("int32", float("nan")), ("uint8", 256), ("uint8", -1), ("int4", 8), ("int4", 1.5)],
        *[("float32", 1e300), ("float16", 70_000), ("float8_e4m3fn", 1e4), ("float32", 1j), ("bool", 2)],
        ("int64", 2**70),
    ],
)
def test_python_numbers_that_do_not_fit_are_refused(writer, dtype, value):
    """Whatever numpy would make of them, with no more than a warning."""
    leaf = writer.declare("a", shape=(3,), dtype=getattr(ml_dtypes, dtype, dtype))
    with pytest.raises(DtypeError, match=f"has dtype {dtype}, which does not hold"):
        leaf[...] = value


def test_the_value_may_be_changed_on_return(writer):
    """Whole chunks, boxes, and large arrays on threads."""
    value = np.ones((700, 1000), "float64")
    leaf = writer.declare("a", shape=(1400, 1000), dtype="float64")
    leaf[:700] = value
    value[...] = 2
    leaf[700:] = value
    value[...] = 3
    with writer.commit() as checkpoint:
        assert [checkpoint["a"][0, 0], checkpoint["a"][699, 999], checkpoint["a"][700, 0]] == [1, 1, 2]


def test_rank_zero(writer):
    """By every index that numpy has for it."""
    leaf = writer.declare("a", shape=(), dtype="float32")
    leaf[()] = 1
    leaf[...] = np.float32(2)
    leaf.write(Region((), ()), np.array(3, "float32"))
    with writer.commit() as checkpoint:
        assert checkpoint["a"][()] == 3


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (slice(None, None, 2), ShapeError, "slices of step 1"),
        (slice(None, None, -1), ShapeError, "slices of step 1"),
        ((None, 0), ShapeError, "slices of step 1"),
        ([0, 1], RegionIndexError, "only integers, slices"),
        (4, RegionIndexError, "index 4 is out of bounds for axis 0 with size 4"),
        (-5, RegionIndexError, "out of bounds"),
        ((0, 0, 0), RegionIndexError, "too many indices"),
        (True, RegionIndexError, "only integers"),
    ],
)
def test_other_indices_are_refused(writer, index, error, words):
    """In numpy's words where numpy has some."""
    leaf = writer.declare("a", shape=(4, 5), dtype="int32")
    with pytest.raises(error, match=words):
        leaf[index] = 1


def test_shapes_that_do_not_fit_are_refused(writer):
    """Both shapes are named."""
    leaf = writer.declare("a", shape=(4, 5), dtype="int32")
    with pytest.raises(ShapeError, match=r"value of shape \(4,\) does not fit the region's shape \(4, 5\)"):
        leaf[...] = np.arange(4, dtype="int32")
    with pytest.raises(ShapeError, match=r"region \[2:5, 0:5\] reaches past shape \(4, 5\)"):
        leaf.write(Region((2, 0), (3, 5)), np.zeros((3, 5), "int32"))
    with pytest.raises(ShapeError, match="reaches past"):
        leaf.write(Region((-1, 0), (1, 5)), np.zeros((1, 5), "int32"))
    with pytest.raises(ShapeError, match=r"value has shape \(2, 5\), region \[0:1, 0:5\] has \(1, 5\)"):
        leaf.write(Region((0, 0), (1, 5)), ArraySource(np.zeros((2, 5), "int32")))


def test_an_empty_region_is_nothing(writer):
    """It neither fails nor counts as written."""
    leaf = writer.declare("a", shape=(4, 5), dtype="int32")
    leaf[2:2] = np.zeros((0, 5), "int32")

    assert leaf.missing() == [Region((0, 0), (4, 5))]


def test_rows_of_one_chunk_cost_the_same_each(writer, monkeypatch):
    """Thousands of small boxes in a chunk are not compared with each other at every write."""
    calls = 0
    real = Region.intersection

    def counted(self, other):
        nonlocal calls
        calls += 1
        return real(self, other)

    leaf = writer.declare("a", shape=(2000, 100), dtype="float32", chunk_shape=(2000, 100))
    monkeypatch.setattr(Region, "intersection", counted)
    for row in range(2000):
        leaf[row] = np.float32(row)

    assert leaf.missing() == []
    assert calls <= 10 * 2000


def test_zstd_chunks_are_smaller_and_the_same(tmp_path, stored):
    """Every chunk, edges too."""
    with Transaction(tmp_path / "x", compression="zstd") as writer:
        writer.declare("a", shape=(1000, 1000), dtype="int64", chunk_shape=(300, 300))[...] = np.arange(1000)
    nbytes = sum(file.stat().st_size for file in (tmp_path / "x" / "d").iterdir())

    assert (stored(tmp_path / "x", "a") == np.arange(1000)).all()
    assert nbytes < 1_000_000
