"""What each leaf becomes: the table of docs/leaves.md, row by row."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tailrace.errors import InputError, KeyPathError, LeafError
from tailrace.flow.regions import Region
from tailrace.tree.flatten import flatten
from tailrace.tree.leaves import DeviceArray, collect
from tailrace.tree.load import load
from tailrace.tree.save import save


class Mode(enum.Enum):
    """An enum, which is no leaf."""

    TRAIN = 1


ML_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "int2", "float4_e2m1fn"]


def back(tmp_path, value):
    """The value after a save and a load without `like`."""
    save(tmp_path / "checkpoint", {"x": value})
    return load(tmp_path / "checkpoint")["x"]


@pytest.mark.parametrize(
    "value",
    [
        7,
        -1,
        2**63,
        True,
        False,
        1.5,
        float("inf"),
        1 + 2j,
        "",
        "text",
        "snow ☃",
        np.float32(2),
        np.int64(3),
        np.bool_(1),
    ],
    ids=repr,
)
def test_numbers_and_text_come_back_as_they_were(tmp_path, value):
    """Python's numbers, numpy's scalars and str have their type and value again."""
    found = back(tmp_path, value)

    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("name", [*ML_DTYPES, *np.typecodes["All"]])
def test_arrays_of_every_dtype_come_back_or_are_refused_early(tmp_path, name):
    """An array of any dtype that numpy or ml_dtypes has is equal after a round trip, or is refused naming a way out."""
    dtype = np.dtype(getattr(ml_dtypes, str(name), name))
    array = np.arange(3).astype(dtype) if dtype.kind not in "OSUVmM" else np.zeros(3, dtype)
    if name in "OSUVmMgG":  # objects, text, structs, times and long doubles
        with pytest.raises(LeafError, match=r"leaf 'x'.*(store|cast)"):
            back(tmp_path, array)
        assert list(tmp_path.iterdir()) == []
        return
    found = back(tmp_path, array)

    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0), (1, 1, 1, 1, 1)])
def test_odd_shapes_come_back(tmp_path, shape):
    """Rank 0 and extents of zero are shapes like others (google/orbax#1309)."""
    found = back(tmp_path, np.ones(shape, np.float32))

    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.ones(shape, np.float32), strict=True)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(24, dtype=np.int32).reshape(4, 6)[::-2, 1::3],
        np.asfortranarray(np.ones((3, 4))),
        np.broadcast_to(np.float32(3), (4, 5)),
        np.ones((2, 2)).view(np.matrix) if hasattr(np, "matrix") else np.ones((2, 2)),
    ],
    ids=["big-endian", "transposed", "strided", "fortran", "broadcast", "subclass"],
)
def test_memory_layout_does_not_matter(tmp_path, array):
    """Byte order, strides and subclasses change nothing about the values; they come back little-endian."""
    found = back(tmp_path, array)

    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, np.asarray(array))


def test_a_large_array_of_the_other_byte_order_is_swapped_in_pieces(tmp_path):
    """A big-endian array larger than the budget is saved like any other."""
    array = np.arange(4 << 20, dtype=">f4")
    save(tmp_path / "checkpoint", {"x": array}, memory_budget="8MiB")

    np.testing.assert_array_equal(load(tmp_path / "checkpoint")["x"], array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "float8_e4m3fn"])
def test_jax_arrays_come_back_as_numpy(tmp_path, dtype):
    """Without `like` a jax.Array is a numpy array of the same dtype."""
    found = back(tmp_path, jnp.arange(4).astype(dtype))

    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.asarray(jnp.arange(4).astype(dtype)), strict=True)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_prng_keys_come_back_typed(tmp_path, impl):
    """A typed key, alone or split, keeps its implementation (google/orbax#620)."""
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    found = back(tmp_path, keys)

    assert found.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_prng_keys_are_uint32_where_jax_is_not_installed(tmp_path):
    """On a machine without JAX a key is its uint32 data, so the checkpoint loads there too."""
    save(tmp_path / "checkpoint", {"key": jax.random.key(3)})
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from tailrace.tree.load import load\n"
        "found = load(sys.argv[1])['key']\n"
        "print(found.dtype, found.tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "checkpoint")], capture_output=True, text=True, check=True
    )

    assert run.stdout.split(maxsplit=1) == ["uint32", f"{jax.random.key_data(jax.random.key(3)).tolist()}\n"]


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        (b"bytes", r"np\.frombuffer"),
        (bytearray(b"x"), r"np\.frombuffer"),
        (2**64, "has 65 bits, at most 64 .* Store it as a str"),
        (-(2**63) - 1, "Store it as a str"),
        (np.array([object()]), "store its arrays as leaves"),
        (np.array(["a"]), "store a str as a leaf"),
        (np.datetime64("2020-01-01"), "'int64'"),
        (np.zeros(2, [("a", "f4")]), "store each field as a leaf"),
        (np.zeros(2, ml_dtypes.uint4), "cast it to uint8"),
        (np.ma.masked_array([1, 2], [True, False]), ".data and .mask"),
        ({1, 2}, "sorted"),
        (Mode.TRAIN, ".value"),
        (len, "leave it out"),
        (object(), "register it with JAX"),
        ("\ud800", "not valid Unicode"),
        (jax.ShapeDtypeStruct((2,), np.float32), "no values"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_what_cannot_be_stored_is_refused_before_a_byte(tmp_path, value, way_out):
    """The error names the leaf and the way out, and nothing is at the path or beside it."""
    with pytest.raises(LeafError, match=f"leaf 'a/bad'.*{way_out}"):
        save(tmp_path / "checkpoint", {"good": np.ones(3), "a": {"bad": value}})

    assert list(tmp_path.iterdir()) == []


def test_a_donated_array_is_refused(tmp_path):
    """An array whose buffer is gone cannot be saved, and the error says why."""
    array = jnp.ones(3)
    array.delete()

    with pytest.raises(LeafError, match="deleted or donated"):
        save(tmp_path / "checkpoint", {"x": array})


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": np.ones(1), "a": {"b": np.zeros(1)}},
        {1: np.ones(1), "1": np.zeros(1)},
        {"a.b": None, "a": {"b": np.zeros(1)}},
    ],
)
def test_two_keys_of_one_name_are_refused(tmp_path, tree):
    """Orbax saves {'a.b': x, 'a': {'b': y}} and loads y twice; here it is refused, naming both keys."""
    with pytest.raises(KeyPathError, match="would both be stored as"):
        save(tmp_path / "checkpoint", tree)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [{"a": object()}, {1: 2}, {"a": (1, 2)}, {"a": b"x"}, {"a": float("nan")}])
def test_metadata_that_json_would_change_is_refused(tmp_path, metadata):
    """What JSON cannot give back as it was is refused before a byte is written."""
    with pytest.raises(InputError, match="metadata="):
        save(tmp_path / "checkpoint", {"x": np.ones(1)}, metadata=metadata)

    assert list(tmp_path.iterdir()) == []


_SHARDED = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tailrace.tree.load import load
from tailrace.tree.save import save
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
values = {"both": P("x", "y"), "one": P("x"), "none": P(), "other": P(None, "y")}
whole = np.arange(48, dtype=np.float32).reshape(8, 6)
tree = {name: jax.device_put(whole, NamedSharding(mesh, spec)) for name, spec in values.items()}
tree["keys"] = jax.device_put(jax.random.split(jax.random.key(1), 4), NamedSharding(mesh, P("x")))
tree["rank0"] = jax.device_put(np.float32(3), NamedSharding(mesh, P()))
save(sys.argv[1], tree, memory_budget="8MiB")
found = load(sys.argv[1])
assert all(np.array_equal(found[name], whole) for name in values)
assert found["rank0"] == 3
again = load(sys.argv[1], like=tree)
assert all(again[name].sharding == tree[name].sharding for name in tree)
assert all(np.array_equal(again[name], whole) for name in values)
assert np.array_equal(jax.random.key_data(again["keys"]), jax.random.key_data(tree["keys"]))
print("equal")
"""


def test_arrays_on_several_devices_are_read_by_their_shards(tmp_path):
    """Sharded and replicated arrays of one process are saved, and loaded onto their shardings again."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SHARDED, str(tmp_path / "checkpoint")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.stdout.strip() == "equal", run.stderr[-2000:]


def test_a_device_array_is_read_by_regions_and_leaves_no_copy_on_the_host():
    """Reading regions of a packed array, which numpy cannot view, gives its values and no cached host copy."""
    array = jnp.arange(-8, 8).astype(jnp.int4).reshape(4, 4)
    source = DeviceArray(array)
    out = np.empty((2, 3), source.dtype)
    source.read_into(Region((1, 1), (2, 3)), out)

    np.testing.assert_array_equal(out, np.asarray(array)[1:3, 1:4])


def test_arrays_on_the_host_are_viewed():
    """Host arrays and JAX arrays on CPU are viewed: what is collected shares their memory."""
    own, theirs = np.ones(4, np.float32), jnp.ones(16)
    items = collect([(("own",), own), (("theirs",), theirs)])

    assert items[0].value is own
    assert items[1].value.ctypes.data == theirs.unsafe_buffer_pointer()


def test_ten_thousand_leaves_are_checked_in_a_tenth_of_a_second():
    """Taking a tree apart and checking its leaves is no cost beside writing; four times the aim leaves room."""
    array = np.ones((4, 4), np.float32)
    tree = {"params": {f"layer_{i}": {f"w{j}": array for j in range(10)} for i in range(1000)}}
    start = time.process_time()
    items = collect(flatten(tree).leaves)
    seconds = time.process_time() - start

    assert len(items) == 10_000
    assert seconds < 0.4
