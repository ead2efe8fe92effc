"""Which keys may be together, and which chunks a leaf gets."""

import math

import numpy as np
import pytest

from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import BudgetError, KeyPathError, LeafError, ShapeError
from tailrace.flow.regions import Region

MIB = 1 << 20


@pytest.fixture
def writer(tmp_path):
    """A transaction that is discarded."""
    writer = Transaction(tmp_path / "x", memory_budget="64MiB")
    yield writer
    writer.abort()


def put(writer, key, what="leaf"):
    """A small leaf or text."""
    if what == "text":
        writer.set_text(key, "text")
    else:
        writer.declare(key, shape=(), dtype="int8")[()] = 1


@pytest.mark.parametrize("first", ["leaf", "text"])
@pytest.mark.parametrize("second", ["leaf", "text"])
def test_two_keys_with_one_name_are_refused(writer, first, second):
    """'a.b' and a/b are the same on disk; both are named, and the first one stays."""
    put(writer, ("a.b",), first)
    with pytest.raises(KeyPathError, match=r"keys \('a.b',\) and \('a', 'b'\) would both be stored as 'a.b'"):
        put(writer, ("a", "b"), second)

    assert writer.keys() == ["a.b"]


@pytest.mark.parametrize("first", ["leaf", "text"])
@pytest.mark.parametrize("second", ["leaf", "text"])
def test_a_leaf_below_a_leaf_is_refused(writer, first, second):
    """However deep below."""
    put(writer, "a/b", first)
    with pytest.raises(KeyPathError, match="'a/b/c/d' would be below 'a/b', which is a leaf already"):
        put(writer, "a/b/c/d", second)

    assert writer.keys() == ["a/b"]


@pytest.mark.parametrize("first", ["leaf", "text"])
@pytest.mark.parametrize("second", ["leaf", "text"])
def test_a_leaf_above_others_is_refused(writer, first, second):
    """Also above names with dots in them."""
    put(writer, "a/b/c", first)
    for above in ("a", "a/b"):
        with pytest.raises(KeyPathError, match=f"'{above}' would be a leaf, but there are leaves below it"):
            put(writer, above, second)
    put(writer, ("x.y", "z"))
    put(writer, ("x", "y", "w"))
    with pytest.raises(KeyPathError, match="leaves below it"):
        put(writer, "x")


def test_a_container_whose_leaves_were_deleted_may_become_a_leaf_and_back(writer):
    """What is gone is not in the way."""
    put(writer, "a/b/c")
    writer.delete("a/b/c")
    put(writer, "a")
    writer.delete("a")
    put(writer, "a/b/c")
    with pytest.raises(KeyPathError, match="leaves below it"):
        put(writer, "a")
    with writer.commit() as checkpoint:
        assert checkpoint.keys() == ["a/b/c"]

        checkpoint.verify()


def test_an_int_and_its_str_are_one_key(writer):
    """As text keys can only say it so; the leaf is the same."""
    writer.declare(("a", 0), shape=(2,), dtype="int8")[0] = 1

    assert writer.declare("a/0", shape=(2,), dtype="int8").missing() != []
    assert len(writer.keys()) == 1


def test_names_that_interleave_are_indexed_right(writer, stored):
    """A key that holds "/" may sort among the chunks of another."""
    for key in (("a",), ("a/c",), ("a/c/0",), ("a/zarr.json",), ("a-b",), ("a0",)):
        writer.declare(key, shape=(2,), dtype="int8", chunk_shape=(1,))[...] = len(key[0])
    with writer.commit() as checkpoint:
        checkpoint.verify()

        assert [int(checkpoint[key][0]) for key in (("a",), ("a/c",), ("a0",))] == [1, 3, 2]


@pytest.mark.parametrize(
    ("chunk_shape", "words"),
    [((2,), "one extent >= 1 for each axis"), ((0, 1), "one extent >= 1"), ((-1, 1), "one extent >= 1")],
)
def test_chunk_shapes_that_do_not_fit_are_refused(writer, chunk_shape, words):
    """Naming both shapes."""
    with pytest.raises(ShapeError, match=words) as caught:
        writer.declare("a", shape=(3, 4), dtype="int8", chunk_shape=chunk_shape)

    assert "(3, 4)" in str(caught.value)
    assert writer.keys() == []


def test_chunks_beyond_the_leaf_are_clipped_to_it(writer):
    """A chunk is never larger than what it holds; an empty axis has chunk 1."""
    assert writer.declare("a", shape=(3, 0), dtype="int8", chunk_shape=(5, 5)).chunk_shape == (3, 1)


@pytest.mark.parametrize(("compression", "most"), [(None, 16 * MIB), ("zstd", 8 * MIB)])
def test_chunks_that_the_budget_cannot_hold_are_refused(tmp_path, compression, most):
    """With both numbers and three ways out; the largest allowed one works."""
    writer = Transaction(tmp_path / "x", memory_budget="64MiB", compression=compression)
    with pytest.raises(
        BudgetError, match=f"chunks of {most + 1} bytes, a memory_budget of {64 * MIB} bytes allows {most}"
    ):
        writer.declare("a", shape=(most + 1,), dtype="int8", chunk_shape=(most + 1,))
    leaf = writer.declare("a", shape=(most + 1,), dtype="int8", chunk_shape=(most,))
    leaf[5:] = np.ones(most - 4, "int8")
    leaf[:5] = 2
    with writer.commit() as checkpoint:
        assert checkpoint["a"][3:7].tolist() == [2, 2, 1, 1]
    assert writer.budget.peak_bytes <= 64 * MIB


@pytest.mark.parametrize(
    "shape", [(), (3,), (100, 100), (4096, 4096), (7, 3_000_000), (2, 0, 5), (1, 1, 1, 50_000_000)]
)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_default_chunks(tmp_path, shape, compression):
    """At most 16 MiB and the budget's share, one chunk for small leaves, last axes whole where possible."""
    writer = Transaction(tmp_path / "x", memory_budget="64MiB", compression=compression)
    chunks = writer.declare("a", shape=shape, dtype="float32").chunk_shape
    writer.abort()
    nbytes = 4 * math.prod(chunks)
    cut = [axis for axis, (c, n) in enumerate(zip(chunks, shape, strict=True)) if c < n]

    assert len(chunks) == len(shape)
    assert nbytes <= (8 if compression else 16) * MIB
    if 0 < 4 * math.prod(shape) <= 256 << 10:
        assert chunks == shape
    assert all(chunks[axis] == 1 for axis in range(cut[-1] if cut else 0))


def test_stacked_axes_and_chunk_bytes(writer):
    """One source tensor is whole chunks."""
    leaf = writer.declare("a", shape=(4, 8, 1024, 1024), dtype="bfloat16", stacked_axes=(0, 1), chunk_bytes=1 * MIB)

    assert leaf.chunk_shape == (1, 1, 512, 1024)


@pytest.mark.parametrize("dtype", ["object", "U5", "M8[s]", [("a", "i4")]])
def test_dtypes_without_a_name_on_disk_are_refused(writer, dtype):
    """Before anything is written."""
    with pytest.raises(LeafError):
        writer.declare("a", shape=(3,), dtype=dtype)

    assert writer.keys() == []


def test_a_negative_extent_is_refused(writer):
    """With the leaf's name."""
    with pytest.raises(ShapeError, match=r"'a': shape .* negative extent"):
        writer.declare("a", shape=(3, -1), dtype="int8")


def test_big_endian_declarations_are_stored_native(writer, stored, tmp_path):
    """On disk there is one byte order."""
    writer.declare("a", shape=(3,), dtype=">i4")[...] = np.array([1, 2, 3], ">i4")
    writer.write_arrays([(("b",), np.array([4, 5], ">f8"), "array")])
    writer.commit().close()

    assert stored(tmp_path / "x", "a").tolist() == [1, 2, 3]
    assert stored(tmp_path / "x", "b").tolist() == [4, 5]


def test_numpys_numbers_and_texts_are_taken_as_pythons(writer):
    """In shapes, chunk shapes, regions and keys; a journal holds neither."""
    key = (np.str_("a"), 0)
    leaf = writer.declare(key, shape=np.array([3, 4]), dtype="int8", chunk_shape=np.array([2, 2]))
    leaf.write(Region((np.int64(1), np.int64(1)), (np.int64(1), np.int64(2))), np.ones((1, 2), "int8"))
    writer.set_text((np.str_("t"),), "text")
    writer.flush()
    leaf[...] = 1
    with writer.commit() as checkpoint:
        assert checkpoint.paths() == [("a", 0), ("t",)]


@pytest.mark.parametrize(
    ("shape", "dtype"), [(3, "int8"), ((2.5,), "int8"), (("3",), "int8"), ((3,), "bf16"), ((3,), 7)]
)
def test_what_describes_no_array_is_refused(writer, shape, dtype):
    """With an error of ours, and the writer goes on."""
    with pytest.raises(LeafError, match="'a': shape"):
        writer.declare("a", shape=shape, dtype=dtype)
    with pytest.raises(ShapeError, match="is no shape"):
        writer.declare("a", shape=(3,), dtype="int8", chunk_shape=(1.5,))
    writer.flush()

    assert writer.keys() == []
