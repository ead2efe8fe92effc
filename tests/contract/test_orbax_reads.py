"""Orbax reads what tailrace saved: four ways of loading, bare and with targets, on one device and on a mesh."""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest

from tailrace.tree.save import save

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax warns of every load without shardings

Pair = collections.namedtuple("Pair", "a b")


def arrays():
    """Leaves of every kind that Orbax can target: arrays, numbers and empties in every container."""
    return {
        "dense": {"kernel": np.arange(32, dtype=np.float32).reshape(8, 4), "bias": np.arange(4, dtype=np.float16)},
        "bf16": np.arange(8).astype(ml_dtypes.bfloat16),
        "fp8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        "int4": np.arange(-4, 4).astype(ml_dtypes.int4),
        "list": [np.ones(2, np.int32), {"deep": np.zeros((2, 2), np.uint8)}],
        "tuple": (np.ones(3, np.float32),),
        "pair": Pair(np.ones(2, np.float32), None),
        "zero_size": np.zeros((0, 4), np.float32),
        "scalar_array": np.asarray(3, np.int32),
        "ints": {"7": np.ones(1, np.float32)},
        "int": 7,
        "float": 1.5,
        "bool": True,
        "none": None,
        "empty": {},
        "empty_list": [],
        "key": jax.random.key(3),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The tree saved by tailrace, with a str beside it."""
    path = tmp_path_factory.mktemp("ours") / "checkpoint"
    save(path, {**arrays(), "text": "hello"}, metadata={"run": 5})
    return path


@pytest.fixture(scope="module")
def saved_without_text(tmp_path_factory):
    """The tree without the str: StandardCheckpointer takes no target with one."""
    path = tmp_path_factory.mktemp("ours") / "checkpoint"
    save(path, arrays())
    return path


def manager_root(saved: Path, tmp_path: Path) -> Path:
    """A CheckpointManager's folder with ours as the item of step 3."""
    shutil.copytree(saved, tmp_path / "steps" / "3" / "default")
    return tmp_path / "steps"


def standard(path, target, _):
    """StandardCheckpointer."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def pytree(path, target, _):
    """PyTreeCheckpointer."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        if target is None:
            return checkpointer.restore(path)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))


def manager(path, target, tmp_path):
    """CheckpointManager."""
    with ocp.CheckpointManager(manager_root(path, tmp_path)) as steps:
        assert steps.latest_step() == 3
        return steps.restore(3, args=ocp.args.StandardRestore(target))


def v1(path, target, _):
    """The v1 API."""
    return ocp_v1.load(path) if target is None else ocp_v1.load(path, target)


WAYS = [standard, pytree, manager, v1]


def is_key(value) -> bool:
    """Whether this is a typed PRNG key."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def check(found, expected, path="") -> None:
    """Equal values, dtypes and types of numbers; Orbax gives back a tuple as a list, a NamedTuple as a dict."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), path
        for name in expected:
            check(found[name], expected[name], f"{path}/{name}")
    elif isinstance(expected, Pair):
        check(found._asdict() if hasattr(found, "_asdict") else found, expected._asdict(), path)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            check(a, b, f"{path}/{i}")
    elif is_key(expected):
        data = jax.random.key_data(found) if is_key(found) else found
        np.testing.assert_array_equal(data, jax.random.key_data(expected))
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        np.testing.assert_array_equal(np.asarray(found), expected, err_msg=path)
    else:
        assert (type(found), found) == (type(expected), expected), path


@pytest.mark.parametrize("way", WAYS)
def test_orbax_loads_ours_bare(way, saved, tmp_path):
    """Without a target every way gives values, dtypes, numbers, str and empty containers as saved, keys typed."""
    found = way(saved, None, tmp_path)

    check(found, {**arrays(), "text": "hello"})
    assert is_key(found["key"])


def target(sharding=None):
    """The tree as Orbax wants a target: abstract arrays, numbers, empties."""

    def abstract(value):
        if isinstance(value, bool | int | float):
            return type(value)(0)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    return jax.tree.map(abstract, arrays())


@pytest.mark.parametrize("sharded", [False, True], ids=["no sharding", "with sharding"])
@pytest.mark.parametrize("way", WAYS)
def test_orbax_loads_ours_into_a_target(way, sharded, saved_without_text, tmp_path):
    """Into ShapeDtypeStructs, with and without a sharding, every way gives the target's containers and dtypes."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if sharded else None
    found = way(saved_without_text, target(sharding), tmp_path)

    check(found, arrays())
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["tuple"], tuple)
    assert is_key(found["key"]) or way is pytree  # construct_restore_args asks for the data of a key
    if sharded:
        assert found["dense"]["kernel"].sharding == sharding


def test_orbax_loads_a_str_into_a_target(saved, tmp_path):
    """Through PyTreeCheckpointer and v1 a str may be in the target."""
    for way in (pytree, v1):
        assert way(saved, {**target(), "text": ""}, tmp_path)["text"] == "hello"


def test_orbax_reads_our_metadata(saved, tmp_path):
    """Shapes and dtypes, and the user's own metadata, without reading an array."""
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(saved)

    assert (found.item_metadata["dense"]["kernel"].shape, found.custom_metadata) == ((8, 4), {"run": 5})


_ON_A_MESH = """
import json, sys
import jax, numpy as np, orbax.checkpoint as ocp, orbax.checkpoint.experimental.v1 as ocp_v1
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
path, steps = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
spec = lambda value: P("x", "y") if value.shape == (8, 4) else P()
tree = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.ones(3, np.float16)}
target = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, spec(v))) for k, v in tree.items()}
bare = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in tree.items()}
restore_args = ocp.checkpoint_utils.construct_restore_args(target)
loads = {
    "standard": lambda: ocp.StandardCheckpointer().restore(path, target),
    "pytree": lambda: ocp.PyTreeCheckpointer().restore(
        path, args=ocp.args.PyTreeRestore(target, restore_args=restore_args)),
    "manager": lambda: ocp.CheckpointManager(steps).restore(3, args=ocp.args.StandardRestore(target)),
    "v1": lambda: ocp_v1.load(path, target),
    "standard bare": lambda: ocp.StandardCheckpointer().restore(path),
    "pytree bare": lambda: ocp.PyTreeCheckpointer().restore(path),
    "v1 bare": lambda: ocp_v1.load(path),
    "v1 without shardings": lambda: ocp_v1.load(path, bare),
}
report = {}
for name, load in loads.items():
    found = load()
    equal = all(np.array_equal(np.asarray(found[k]), tree[k]) and found[k].dtype == tree[k].dtype for k in tree)
    shards = len(found["w"].sharding.device_set) if isinstance(found["w"], jax.Array) else 1
    report[name] = [equal, shards]
print(json.dumps(report))
"""


def test_orbax_loads_ours_onto_a_mesh(tmp_path):
    """On four devices in a 2x2 mesh every way reshards into its target, and loads bare too."""
    tree = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.ones(3, np.float16)}
    save(tmp_path / "checkpoint", tree)
    steps = manager_root(tmp_path / "checkpoint", tmp_path)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ON_A_MESH, str(tmp_path / "checkpoint"), str(steps)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert {name: equal for name, (equal, _) in report.items()} == dict.fromkeys(report, True)
    assert {report[name][1] for name in ("standard", "pytree", "manager", "v1")} == {4}


def test_nothing_of_the_load_warns_of_our_files(saved):
    """Orbax warns only of missing shardings, never of a file it does not understand."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        standard(saved, None, None)

    assert not [str(w.message) for w in caught if "harding" not in str(w.message) and "orbax" in str(w.filename)]
