"""We open what Orbax 0.12.8 writes, in every variant, and find every value it was given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax.checkpoint.experimental import v1

from tailrace.checkpoint.reader import Checkpoint, open
from tailrace.errors import CorruptionError, FormatError, InputError, MissingKeyError, NotACheckpointError
from tailrace.format import structure


def state() -> dict[str, Any]:
    """Arrays in dicts and a list, and scalars."""
    return {
        "params": {"w": jnp.arange(12, dtype=jnp.float32).reshape(3, 4), "b": jnp.ones((4,), jnp.bfloat16)},
        "layers": [np.arange(6, dtype=np.int8).reshape(2, 3), {"scale": np.float16(1.5) * np.ones((1, 5), np.float16)}],
        "step": 7,
        "rate": 0.25,
        "scalar": np.float32(3.0),
    }


def odd_state() -> dict[str, Any]:
    """The same with a text and things without elements."""
    return {**state(), "nothing": None, "empty": {}, "none": [], "name": "tail"}


def assert_holds(found: Checkpoint) -> None:
    """Every value of `state` is in the checkpoint, bit for bit."""
    params = state()
    assert {key for key in found if key not in ("nothing", "empty", "none", "name")} == {
        *("params/w", "params/b", "layers/0", "layers/1/scale", "step", "rate", "scalar")
    }
    for key, expected in {
        "params/w": params["params"]["w"],
        "params/b": params["params"]["b"],
        "layers/0": params["layers"][0],
        "layers/1/scale": params["layers"][1]["scale"],
    }.items():
        got = np.asarray(found[key])
        assert got.dtype == np.asarray(expected).dtype
        assert got.tobytes() == np.asarray(expected).tobytes()
    assert found["step"][()] == 7
    assert found["rate"][()] == 0.25
    assert found["scalar"][()] == 3.0


@pytest.mark.parametrize("use_zarr3", [True, False])
@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_compression", [True, False])
def test_pytree_checkpointer(tmp_path: Path, use_zarr3: bool, use_ocdbt: bool, use_compression: bool) -> None:
    """Both zarr formats, a database or plain directories, compressed or not."""
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3, use_ocdbt=use_ocdbt, use_compression=use_compression)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "ck", args=ocp.args.PyTreeSave(odd_state()))

    found = open(tmp_path / "ck")

    assert_holds(found)
    assert found["name"] == "tail"
    assert isinstance(found.tree()["layers"], list)


def test_standard_checkpointer(tmp_path: Path) -> None:
    """StandardCheckpointer's output, with the containers it records."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", state())

    found = open(str(tmp_path / "ck"))

    assert_holds(found)
    assert isinstance(found.root, structure.Dict)
    assert found.verify().leaves == 7


@pytest.mark.parametrize("at", ["7", "7/default"])
def test_checkpoint_manager_step(tmp_path: Path, at: str) -> None:
    """A step directory is opened through its only item."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave(state()))
        manager.wait_until_finished()

    assert_holds(open(tmp_path / at))


def test_several_items_are_listed(tmp_path: Path) -> None:
    """Where a step has several items, the error names them."""
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.Composite(a=ocp.args.StandardSave(state()), b=ocp.args.StandardSave(state()))
        manager.save(1, args=args)
        manager.wait_until_finished()

    with pytest.raises(NotACheckpointError, match=r"holds several checkpoints: a, b\. Open one of them"):
        open(tmp_path / "1")


def test_v1(tmp_path: Path) -> None:
    """The experimental v1 API, whose tree is an item of its own."""
    v1.save(tmp_path / "ck", {**state(), "scalar": jnp.float32(3.0)})  # v1 has no handler for numpy's scalars

    assert_holds(open(tmp_path / "ck"))


def test_v1_custom_metadata(tmp_path: Path) -> None:
    """v1 keeps custom metadata beside the item; it is found there."""
    v1.save(tmp_path / "ck", {"x": jnp.zeros(3)}, custom_metadata={"origin": "there"})

    assert open(tmp_path / "ck").metadata == {"origin": "there"}


def test_databases_of_several_processes(tmp_path: Path) -> None:
    """Databases merged by reference, as Orbax merges those of its processes, are read through their base paths."""
    arrays = {f"leaf{i}": np.full((300, 50), i, np.float32) for i in range(4)}
    context = ts.Context()  # a copy by reference needs both databases in one
    top = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}, context=context).result()
    for process in range(2):
        base = f"file://{tmp_path}/ocdbt.process_{process}/"
        for name in list(arrays)[process::2]:
            write_zarr3({"driver": "ocdbt", "base": base}, name, arrays[name])
        below = ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()
        below.experimental_copy_range_to(top).result()
    tree = {
        str((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for name in arrays
    }
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True}))
    found = open(tmp_path)

    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    assert found.verify().unprotected == list(arrays)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_prng_keys_are_their_words(tmp_path: Path, implementation: str) -> None:
    """A typed PRNG key is read as its uint32 words, and its implementation is known."""
    key = jax.random.key(5, impl=implementation)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", {"key": key})

    found = open(tmp_path / "ck")

    assert np.array_equal(found["key"], jax.random.key_data(key))
    assert found["key"].dtype == np.uint32
    assert found["key"].kind == f"prng:{implementation}"


def test_custom_metadata(tmp_path: Path) -> None:
    """Custom metadata is found."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeSave(state(), custom_metadata={"origin": "here"})
        checkpointer.save(tmp_path / "ck", args=args)

    assert open(tmp_path / "ck").metadata == {"origin": "here"}


def test_sharded_leaf_of_one_chunk_per_shard(tmp_path: Path) -> None:
    """Orbax's one compressed chunk per shard goes through the smallest budget, verified or not."""
    array = jnp.asarray(np.random.default_rng(0).standard_normal((1500, 2000)).astype(np.float32))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", {"x": array})

    found = open(tmp_path / "ck", memory_budget="8MiB")

    assert np.array_equal(found["x"], array)
    assert found.budget.peak_bytes <= 8 << 20
    assert found.verify().unprotected == ["x"]


def write_zarr3(store: dict[str, Any], name: str, array: Any) -> None:
    """Write an array as TensorStore does."""
    metadata = {"shape": array.shape, "data_type": array.dtype.name}
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {**store, "path": f"{name}/"}, "metadata": metadata}
    spec |= {"create": True, "store_data_equal_to_fill_value": True}
    ts.open(spec).result().write(array).result()


def saved(tmp_path: Path) -> Path:
    """A checkpoint of StandardCheckpointer."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", state())
    return tmp_path / "ck"


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged_small_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    """A small file that is cut short or overwritten makes open fail, naming it."""
    file = saved(tmp_path) / name
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\xff" * len(data))

    with pytest.raises(FormatError, match=name):
        open(tmp_path / "ck")


def test_missing_data_file_is_named(tmp_path: Path) -> None:
    """A data file that is gone is a CorruptionError with its name."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ck", {"x": np.random.default_rng(0).standard_normal(10_000)})
    shutil.rmtree(tmp_path / "ck" / "ocdbt.process_0" / "d")

    with pytest.raises(CorruptionError, match=r"leaf 'x'.*ocdbt.process_0/d/[0-9a-f]{32} is missing"):
        open(tmp_path / "ck")["x"][...]


def test_missing_metadata_of_a_database_is_damage(tmp_path: Path) -> None:
    """A database without `_METADATA` is a damaged checkpoint, not something else."""
    (saved(tmp_path) / "_METADATA").unlink()

    with pytest.raises(CorruptionError, match="_METADATA is missing"):
        open(tmp_path / "ck")


def test_save_that_was_not_finalized(tmp_path: Path) -> None:
    """Process directories without a manifest are an unfinished Orbax save."""
    (saved(tmp_path) / "manifest.ocdbt").unlink()

    with pytest.raises(NotACheckpointError, match="Orbax save that was not finalized"):
        open(tmp_path / "ck")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    """A missing path, a file, an empty and a foreign directory, each told apart."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.bin").write_text("x")
    (tmp_path / "begun.tailrace-pending").mkdir()

    for name, words in {
        "missing": "does not exist",
        "file": "is a file; a checkpoint is a directory",
        "empty": "is not a checkpoint.*it is empty",
        "other": "is not a checkpoint.*it holds model.bin",
        "begun": "does not exist.*unfinished transaction is beside it.*resume=True",
    }.items():
        with pytest.raises(NotACheckpointError, match=words):
            open(tmp_path / name)


def test_bucket_is_refused() -> None:
    """A URL is an InputError, not a strange relative path."""
    with pytest.raises(InputError, match="s3"):
        open("s3://bucket/ck")


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "~" and relative paths are resolved."""
    saved(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert_holds(open("~/ck"))
    assert_holds(open("ck"))


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    """A prefix names what is below it, a typo the nearest keys."""
    found = open(saved(tmp_path))

    with pytest.raises(MissingKeyError, match=r"'params' is not a leaf but holds 2: 'params/.', 'params/.'"):
        found["params"]
    with pytest.raises(MissingKeyError, match=r"no leaf 'params/ww'.*nearest keys: 'params/w'"):
        found["params/ww"]
    assert "params/w" in found
    assert "params" not in found
    assert ("layers", 0) in found
