"""An open checkpoint: its keys, containers and leaves, and reading many of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.extra.numpy import basic_indices

from tailrace.checkpoint.reader import Checkpoint, open
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import DtypeError, MissingKeyError, NotACheckpointError, RegionIndexError, ShapeError
from tailrace.flow.regions import Region
from tailrace.format import structure

ARRAY = np.arange(30 * 20 * 10, dtype=np.int32).reshape(30, 20, 10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of ours with nested keys, a list, a scalar, a text and a zero-size leaf."""
    path = tmp_path_factory.mktemp("reader") / "ck"
    with Transaction(path) as transaction:
        transaction.declare("a/x", shape=ARRAY.shape, dtype=ARRAY.dtype, chunk_shape=(7, 20, 4))[...] = ARRAY
        for i in range(3):
            transaction.declare(("layers", i), shape=(4,), dtype="float32")[...] = np.full(4, i, np.float32)
        leaf = structure.LEAF
        transaction.set_structure(("layers",), structure.List((leaf, leaf, leaf)))
        transaction.declare("zero", shape=(0, 5), dtype="uint8")
        transaction.declare("scalar", shape=(), dtype="float64", kind="float")[...] = 2.5
        transaction.set_text("name", "")
        transaction.set_metadata({"origin": {"step": 3}})
    return open(path)


def test_keys_paths_and_length(checkpoint: Checkpoint) -> None:
    """It is a mapping of keys; ints in paths are ints."""
    assert set(checkpoint) == {"a/x", "layers/0", "layers/1", "layers/2", "zero", "scalar", "name"}
    assert ("layers", 2) in checkpoint.paths()
    assert len(checkpoint) == 7
    assert "layers/1" in checkpoint
    assert ("layers", 1) in checkpoint
    assert "layers" not in checkpoint
    assert checkpoint.metadata == {"origin": {"step": 3}}


def test_tree_has_the_containers(checkpoint: Checkpoint) -> None:
    """Lists are lists, texts are texts, empty ones too."""
    tree = checkpoint.tree()

    assert isinstance(tree["layers"], list)
    assert np.asarray(tree["layers"][2]).tolist() == [2, 2, 2, 2]
    assert tree["name"] == ""


def test_leaf_describes_itself(checkpoint: Checkpoint) -> None:
    """Shape, dtype, sizes, chunks, kind and repr, without reading a chunk."""
    leaf: Any = checkpoint["a/x"]

    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.size, leaf.nbytes) == ((30, 20, 10), np.int32, 3, 6000, 24000)
    assert (leaf.chunk_shape, leaf.kind, leaf.key, leaf.path, leaf.name) == (
        (7, 20, 4),
        "array",
        "a/x",
        ("a", "x"),
        "a.x",
    )
    assert [codec.name for codec in leaf.codecs] == ["bytes", "crc32c"]
    assert repr(leaf) == "<Leaf 'a/x' int32 (30, 20, 10)>"
    assert len(leaf) == 30
    assert checkpoint["scalar"].kind == "float"  # type: ignore[union-attr]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=basic_indices(ARRAY.shape, allow_newaxis=True, allow_ellipsis=True, max_dims=6))
def test_indexing_is_numpys(checkpoint: Checkpoint, index: Any) -> None:
    """Any basic index gives what numpy gives."""
    found = checkpoint["a/x"][index]  # type: ignore[index]

    assert np.array_equal(found, ARRAY[index])
    assert np.shape(found) == np.shape(ARRAY[index])


def test_scalar_and_zero_size_leaves(checkpoint: Checkpoint) -> None:
    """Rank 0 gives a scalar for (), a zero-size leaf an empty array."""
    scalar: Any = checkpoint["scalar"]
    zero: Any = checkpoint["zero"]

    assert scalar[()] == 2.5
    assert float(np.asarray(scalar)) == 2.5
    assert zero[...].shape == (0, 5)
    assert zero[:, 1:3].shape == (0, 2)
    with pytest.raises(TypeError, match="unsized"):
        len(scalar)
    with pytest.raises(RegionIndexError, match="index 0 is out of bounds for axis 0 with size 0"):
        zero[0]


def test_numpy_takes_a_leaf_as_an_array(checkpoint: Checkpoint) -> None:
    """np.asarray reads it, with another dtype if asked; a view cannot be had."""
    leaf = checkpoint["a/x"]

    assert np.array_equal(np.asarray(leaf), ARRAY)
    assert np.asarray(leaf, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy=False"):
        leaf.__array__(copy=False)  # type: ignore[union-attr]


def test_many_regions_at_once(checkpoint: Checkpoint) -> None:
    """read_into fills destinations of several leaves, strided ones too, and tells its progress."""
    x: Any = checkpoint["a/x"]
    first, second = np.empty((5, 20, 10), np.int32), np.empty((30, 10, 2), np.int32).transpose(0, 2, 1)
    layer = np.empty(4, np.float32)
    told: list[int] = []
    requests = [
        (x, Region((3, 0, 0), (5, 20, 10)), first),
        (x, Region((0, 1, 0), (30, 2, 10)), second),
        (checkpoint["layers/1"], Region.whole((4,)), layer),
    ]
    checkpoint.read_into(requests, progress=told.append)  # type: ignore[arg-type]

    assert np.array_equal(first, ARRAY[3:8])
    assert np.array_equal(second, ARRAY[:, 1:3])
    assert layer.tolist() == [1] * 4
    assert sum(told) == first.nbytes + second.nbytes + layer.nbytes


def test_wrong_destination_is_refused(checkpoint: Checkpoint) -> None:
    """A destination of another shape or dtype, or a region that reaches past, is refused before reading."""
    leaf: Any = checkpoint["a/x"]

    with pytest.raises(ShapeError, match=r"region \[25:35, 0:20, 0:10\]"):
        leaf.read_into(Region((25, 0, 0), (10, 20, 10)), np.empty((10, 20, 10), np.int32))
    with pytest.raises(DtypeError, match=r"int32.*float32"):
        leaf.read_into(Region.whole(leaf.shape), np.empty(leaf.shape, np.float32))


def test_missing_keys(checkpoint: Checkpoint) -> None:
    """A prefix names the keys below, a typo the nearest."""
    with pytest.raises(MissingKeyError, match="'layers' is not a leaf but holds 3: 'layers/0'"):
        checkpoint["layers"]
    with pytest.raises(MissingKeyError, match="nearest keys: 'scalar'"):
        checkpoint["scaler"]


def test_pending_transaction_is_no_checkpoint(tmp_path: Path) -> None:
    """Before commit nothing is visible; the error says that something is under way and how to go on."""
    transaction = Transaction(tmp_path / "ck")
    transaction.declare("x", shape=(3,), dtype="int8")[...] = np.zeros(3, np.int8)
    transaction.flush()

    with pytest.raises(NotACheckpointError, match=r"unfinished transaction.*resume=True"):
        open(tmp_path / "ck")
    transaction.abort()


def test_reading_after_close(tmp_path: Path) -> None:
    """A closed checkpoint says so."""
    with Transaction(tmp_path / "ck") as transaction:
        transaction.declare("x", shape=(3,), dtype="int8")[...] = np.zeros(3, np.int8)
    with open(tmp_path / "ck") as checkpoint:
        leaf = checkpoint["x"]

    with pytest.raises(ValueError, match="is closed"):
        np.asarray(leaf)
