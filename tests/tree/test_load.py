"""load with `like`, `only`, `rename` and casts."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tailrace.errors import DtypeError, InputError, LeafError, MismatchError, MissingKeyError, NotACheckpointError
from tailrace.tree.load import load
from tailrace.tree.save import save

Pair = collections.namedtuple("Pair", "a b")


@flax.struct.dataclass
class State:
    """A training state of flax."""

    params: object
    opt: object
    step: object
    name: str = flax.struct.field(pytree_node=False, default="net")


@pytest.fixture
def saved(tmp_path):
    """A small model with its optimizer."""
    tree = {
        "params": {"dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.zeros(3, np.float32)}},
        "opt": (Pair(np.ones(3, np.float32), None), [np.int32(4)]),
        "step": 7,
    }
    save(tmp_path / "checkpoint", tree)
    return tmp_path / "checkpoint"


def like(**changes):
    """What was saved, as something to load into."""
    tree = {
        "params": {
            "dense": {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32), "bias": np.empty(3, np.float32)},
        },
        "opt": (Pair(jnp.zeros(3), None), [np.int32(0)]),
        "step": 0,
    }
    return {**tree, **changes}


def test_each_leaf_becomes_what_like_has_there(saved):
    """jax.Array for arrays and structs of JAX, numpy for numpy, numbers for numbers; containers are like's."""
    found = load(saved, like())

    assert isinstance(found["params"]["dense"]["kernel"], jax.Array)
    assert isinstance(found["params"]["dense"]["bias"], np.ndarray)
    assert isinstance(found["opt"][0], Pair)
    assert isinstance(found["opt"][0].a, jax.Array)
    assert type(found["opt"][1][0]) is np.int32
    assert (type(found["step"]), found["step"]) == (int, 7)
    np.testing.assert_array_equal(found["params"]["dense"]["kernel"], np.arange(6).reshape(2, 3))


def test_a_flax_state_comes_back_with_its_static_fields(tmp_path):
    """A dataclass of flax, loaded into an abstract one, is equal to what was saved (flax#4521)."""
    state = State({"w": jnp.ones((2, 2))}, (jnp.zeros(2),), 3, name="mine")
    save(tmp_path / "checkpoint", state)
    found = load(tmp_path / "checkpoint", like=jax.eval_shape(lambda: state).replace(step=0))

    assert (found.name, found.step) == ("mine", 3)
    np.testing.assert_array_equal(found.params["w"], np.ones((2, 2)))


def test_int_and_text_keys_match(tmp_path):
    """Orbax makes "7" of the key 7; loaded into a tree with the int key it has its place (google/orbax#2561)."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"m": {7: np.ones(2)}})
    found = load(tmp_path / "theirs", {"m": {7: np.zeros(2)}})

    np.testing.assert_array_equal(found["m"][7], np.ones(2))


def test_a_jax_array_takes_the_buffer_that_was_read(saved):
    """On CPU the host buffer becomes the array itself: aligned, so that JAX needs no second copy."""
    found = load(saved, like())["params"]["dense"]["kernel"]

    assert found.unsafe_buffer_pointer() % 64 == 0


def test_the_whole_difference_is_one_error(saved):
    """Every kind of difference at once, grouped, with what is near and what would accept it."""
    other = like(params={"dense": {"kernal": np.empty((2, 3)), "bias": np.empty(4, np.float32)}}, step="seven")
    other["opt"] = (Pair(jnp.zeros(3, jnp.bfloat16), None), [np.int32(0)])
    with pytest.raises(MismatchError) as caught:
        load(saved, other)

    assert str(caught.value) == (
        f"`like` and the checkpoint at {saved} differ.\n"
        "  1 leaf in `like`, missing in the checkpoint:\n"
        "    params/dense/kernal   (nearest stored: params/dense/kernel)\n"
        "    To keep like's own values there: missing='keep'. To load another key: rename={'stored': 'wanted'}.\n"
        "  1 leaf in the checkpoint, unexpected by `like`:\n"
        "    params/dense/kernel   (nearest wanted: params/dense/kernal)\n"
        "    To leave them out: unexpected='ignore'. To load them to another key: rename={'stored': 'wanted'}.\n"
        "  1 leaf of another shape:\n"
        "    params/dense/bias   stored (3,), wanted (4,)\n"
        "    Shapes must be equal: correct `like`, or leave these leaves out with only= or rename=.\n"
        "  1 leaf of another dtype, which would lose values:\n"
        "    opt/0/a   stored float32, wanted bfloat16 (3,)\n"
        "    To cast all the same: cast=True.\n"
        "  1 leaf of another kind:\n"
        "    step   stored int64 (), wanted a str\n"
        "    Give `like` a leaf of the stored kind there."
    )


def test_another_depth_is_an_error_that_counts(tmp_path):
    """A model of 16 layers does not load into one of 12 without a word (google/orbax#2972); long groups are cut."""
    save(tmp_path / "checkpoint", {f"layer_{i}": {"a": np.ones(1), "b": np.ones(1)} for i in range(40)})
    with pytest.raises(MismatchError, match="56 leaves in the checkpoint, unexpected by `like`") as caught:
        load(tmp_path / "checkpoint", {f"layer_{i}": {"a": np.ones(1), "b": np.ones(1)} for i in range(12)})

    assert "and 36 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 30


def test_missing_keep_and_unexpected_ignore(saved):
    """For fine-tuning: what is not stored stays as it is in `like`, what `like` lacks is left out."""
    head = np.full(2, 9.0)
    found = load(saved, {"params": like()["params"], "head": head}, missing="keep", unexpected="ignore")

    assert found["head"] is head
    assert set(found) == {"params", "head"}


def test_an_abstract_leaf_cannot_be_kept(saved):
    """A ShapeDtypeStruct has no value to keep, so it is missing whatever is asked."""
    with pytest.raises(MismatchError, match="head   \\(like has no value to keep there"):
        load(saved, like(head=jax.ShapeDtypeStruct((2,), jnp.float32)), missing="keep")


def test_rename_moves_a_subtree(saved):
    """Stored keys may become what `like` calls them."""
    wanted = {"model": {"dense": like()["params"]["dense"]}}
    found = load(saved, wanted, only="model/**", rename={"params/**": "model/**"})

    np.testing.assert_array_equal(found["model"]["dense"]["kernel"], np.arange(6).reshape(2, 3))


def test_rename_without_like_moves_it_too(saved):
    """Renamed leaves hang in dicts; the rest stays in its containers."""
    found = load(saved, rename={"params/dense/*": "w_*"})

    assert set(found) == {"w_kernel", "w_bias", "opt", "step"}
    assert isinstance(found["opt"], tuple)


def test_only_params(saved):
    """Loading just the parameters needs one pattern (google/orbax#487, flax#5106)."""
    assert set(load(saved, only="params/**")) == {"params"}
    assert set(load(saved, only=["step", "**/bias"])) == {"params", "step"}
    with pytest.raises(MissingKeyError, match="it holds 2 leaves; write 'params/\\*\\*'"):
        load(saved, only="params")


def test_only_a_part_of_a_tuple_is_a_dict(saved):
    """A container of which some entries are left out is a dict of those that stay, by position."""
    assert load(saved, only="opt/1/**") == {"opt": {1: [4]}}


def test_only_with_like_leaves_the_rest_as_it_is(saved):
    """Leaves of `like` that the pattern does not select are returned as they are, even where shapes differ."""
    tree = like(step="other")
    found = load(saved, tree, only="params/**")

    assert found["step"] == "other"
    assert found["opt"][0].a is tree["opt"][0].a
    np.testing.assert_array_equal(found["params"]["dense"]["kernel"], np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("int32", "int64"),
        ("int4", "int32"),
        ("float8_e4m3fn", "bfloat16"),
    ],
)
def test_widening_without_loss_passes(tmp_path, stored, wanted):
    """A wider dtype of `like` is filled, every value kept."""
    stored, wanted = (np.dtype(getattr(ml_dtypes, name, name)) for name in (stored, wanted))
    values = (np.arange(100) % 8).astype(stored)
    save(tmp_path / "checkpoint", {"x": values})
    found = load(tmp_path / "checkpoint", {"x": np.empty(100, wanted)})["x"]

    np.testing.assert_array_equal(found, values.astype(wanted), strict=True)


@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("int64", "int32"), ("float32", "int8")])
def test_a_lossy_cast_needs_cast_true(tmp_path, stored, wanted):
    """Narrowing is refused, and done as numpy does it when asked for."""
    wanted = np.dtype(getattr(ml_dtypes, wanted, wanted))
    values = (np.arange(3000) % 100).astype(stored) / np.asarray(1, stored)
    values = values.astype(stored)
    save(tmp_path / "checkpoint", {"x": values})
    with pytest.raises(MismatchError, match="cast=True"):
        load(tmp_path / "checkpoint", {"x": np.empty(3000, wanted)})
    found = load(tmp_path / "checkpoint", {"x": np.empty(3000, wanted)}, cast=True)["x"]

    np.testing.assert_array_equal(found, values.astype(wanted), strict=True)


@pytest.mark.parametrize("wanted", ["float16", "float64", "int32"])
def test_a_leaf_above_the_budget_is_cast_in_pieces(tmp_path, wanted):
    """Casting needs no second copy of a leaf, so one of twice the budget is no exception."""
    values = np.arange(4 << 20, dtype=np.float32) % 1000
    save(tmp_path / "checkpoint", {"x": values, "y": values[:5]})
    found = load(
        tmp_path / "checkpoint",
        {"x": np.empty(4 << 20, wanted), "y": np.empty(5, wanted)},
        cast=True,
        memory_budget="8MiB",
    )

    np.testing.assert_array_equal(found["x"], values.astype(wanted), strict=True)
    np.testing.assert_array_equal(found["y"], values[:5].astype(wanted), strict=True)


@pytest.mark.parametrize(
    ("stored", "wanted", "ok"),
    [
        (7, 0, True),
        (7, 0.0, False),
        (1.5, 0.0, True),
        (1.5, 0, False),
        (True, False, True),
        (True, 0, False),
        (2, 0j, False),
    ],
)
def test_python_numbers_keep_their_type(tmp_path, stored, wanted, ok):
    """A number loads into its own type; a float of an int may lose values and is refused."""
    save(tmp_path / "checkpoint", {"x": stored})
    if not ok:
        with pytest.raises(MismatchError):
            load(tmp_path / "checkpoint", {"x": wanted})
        return

    assert load(tmp_path / "checkpoint", {"x": wanted}) == {"x": stored}


def test_prng_keys_match_their_implementation(tmp_path):
    """A key loads into a key of its implementation, concrete or abstract, and into uint32; nothing else."""
    key = jax.random.split(jax.random.key(3), 2)
    save(tmp_path / "checkpoint", {"key": key})
    concrete = load(tmp_path / "checkpoint", {"key": jnp.zeros_like(key)})["key"]
    abstract = load(tmp_path / "checkpoint", {"key": jax.eval_shape(lambda: key)})["key"]
    data = load(tmp_path / "checkpoint", {"key": np.zeros((2, 2), np.uint32)})["key"]
    with pytest.raises(MismatchError, match="stored threefry2x32 keys, wanted rbg keys"):
        load(tmp_path / "checkpoint", {"key": jax.random.split(jax.random.key(3, impl="rbg"), 2)})

    assert concrete.dtype == abstract.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(concrete), jax.random.key_data(key))
    np.testing.assert_array_equal(data, jax.random.key_data(key))


def test_jax_never_narrows_without_a_word(tmp_path):
    """With 64-bit types off JAX would make float32 of float64; that is an error, not a surprise."""
    save(tmp_path / "checkpoint", {"x": np.ones(2)})

    with pytest.raises(DtypeError, match="jax_enable_x64"):
        load(tmp_path / "checkpoint", {"x": jax.ShapeDtypeStruct((2,), np.float64)})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"missing": "skip", "like": {}}, InputError),
        ({"unexpected": "drop", "like": {}}, InputError),
        ({"missing": "keep"}, InputError),
        ({"cast": True}, InputError),
        ({"like": {"x": object()}}, LeafError),
    ],
)
def test_arguments_that_cannot_be_are_refused(saved, arguments, error):
    """An unknown choice, or one that needs `like`, fails before anything is read."""
    with pytest.raises(error):
        load(saved, **arguments)


def test_nothing_there_is_our_error(tmp_path):
    """A path without a checkpoint says so."""
    with pytest.raises(NotACheckpointError):
        load(tmp_path / "nowhere")


def test_orbax_s_own_metadata_is_something_to_load_into(tmp_path):
    """What Orbax says of a checkpoint may be passed as `like`, on any devices (maxdiffusion#379)."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"a": jnp.ones(3), "b": np.arange(2), "c": 3})
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "theirs").item_metadata
    found = load(tmp_path / "theirs", metadata.tree)

    np.testing.assert_array_equal(found["a"], np.ones(3, np.float32), strict=True)
    np.testing.assert_array_equal(found["b"], np.arange(2), strict=True)
    assert found["c"] == 3


_SAVE_ON_EIGHT = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.arange(64, dtype=np.float32), NamedSharding(mesh, P("x")))
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[1], {"x": x})
"""


def test_a_checkpoint_of_eight_devices_loads_on_one(tmp_path):
    """What Orbax saved from 8 devices loads here bare, and into one device (google/orbax#648, #678, #2473)."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SAVE_ON_EIGHT, str(tmp_path / "c")], env=environment, check=True
    )
    bare = load(tmp_path / "c")["x"]
    placed = load(tmp_path / "c", {"x": jax.ShapeDtypeStruct((64,), jnp.float32)})["x"]

    np.testing.assert_array_equal(bare, np.arange(64, dtype=np.float32), strict=True)
    np.testing.assert_array_equal(placed, bare)


def test_without_jax_a_tree_is_saved_and_loaded(tmp_path):
    """Where JAX is not installed save and load work, with and without `like`."""
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import numpy as np\n"
        "from tailrace.tree.save import save\n"
        "from tailrace.tree.load import load\n"
        "tree = {'a': [np.ones(3), 2, 'x'], 'b': {3: (None, {})}}\n"
        "save(sys.argv[1], tree)\n"
        "found = load(sys.argv[1]), load(sys.argv[1], like=tree)\n"
        "assert all(f['b'] == tree['b'] and f['a'][1:] == [2, 'x'] and f['a'][0].sum() == 3 for f in found)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
