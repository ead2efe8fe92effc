"""Trees taken apart and put together, with and without JAX's help."""

from __future__ import annotations

import collections
import subprocess
import sys
from dataclasses import dataclass, field

import flax.core
import flax.struct
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from tailrace.errors import KeyPathError, LeafError
from tailrace.format import structure
from tailrace.tree.flatten import flatten, rebuild_like

Pair = collections.namedtuple("Pair", "a b")


@dataclass
class Plain:
    """A dataclass that nobody registered."""

    x: object
    y: object = field(default=None)


@flax.struct.dataclass
class Trained:
    """A dataclass of flax, one of whose fields is static."""

    weights: object
    name: str = flax.struct.field(pytree_node=False, default="net")


class Custom:
    """A class registered with JAX."""

    def __init__(self, child):
        self.child = child


jax.tree_util.register_pytree_with_keys(
    Custom, lambda c: (((jax.tree_util.GetAttrKey("child"), c.child),), None), lambda _, children: Custom(*children)
)


def paths(tree):
    """The key paths of all leaves, in order."""
    return [path for path, _ in flatten(tree).leaves]


def test_paths_of_plain_containers():
    """Dict keys keep their type and order; positions are ints, fields their names; None and empties hold no leaf."""
    tree = {"b": [1, (2, 3)], "a": {7: 4, "x": 5}, "p": Pair(6, None), "e": {}, "d": Plain(7)}

    assert paths(tree) == [
        ("b", 0), ("b", 1, 0), ("b", 1, 1), ("a", 7), ("a", "x"), ("p", "a"), ("d", "x"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "tree",
    [
        {"params": {"w": 1}, "step": 2},
        Pair([1], {"x": (2,)}),
        optax.adam(1e-3).init({"w": np.ones(2)}),
        Trained({"w": 1}),
        flax.core.freeze({"a": {"b": 1}}),
        collections.OrderedDict(b=1, a=2),
        [Custom(1), None],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_leaves_have_the_paths_jax_gives_them(tree):
    """For every tree that JAX can flatten, keys are JAX's own."""
    theirs = {
        tuple(getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in way): value
        for way, value in jax.tree_util.tree_flatten_with_path(tree)[0]
    }

    assert dict(flatten(tree).leaves) == theirs


@pytest.mark.parametrize(
    "tree",
    [
        {"b": 1, "a": {7: [2, (3,)]}},
        Pair(1, None),
        Trained({"w": 1}, name="other"),
        Plain(1, Plain(2)),
        flax.core.freeze({"a": 1}),
        collections.OrderedDict(b=1, a=2),
        [],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_rebuild_like_gives_an_equal_tree(tree):
    """Put together with its own leaves a tree equals itself, static fields and container types included."""
    leaves = dict(flatten(tree).leaves) if tree != [] else {}
    again = rebuild_like(tree, leaves.__getitem__)

    assert again == tree
    assert type(again) is type(tree)


def test_a_defaultdict_keeps_its_factory():
    """Subclasses of dict come back with what belongs to them."""
    tree = collections.defaultdict(list, a=1)
    again = rebuild_like(tree, lambda _: 2)

    assert again == {"a": 2}
    assert again["new"] == []


def test_mixed_keys_work_where_jax_refuses():
    """A dict with int and str keys, which JAX cannot sort, is taken apart all the same (google/orbax#2561)."""
    tree = {0: 1, "a": 2}
    with pytest.raises(Exception, match=r"not supported between|Comparator"):
        jax.tree.leaves(tree)

    assert paths(tree) == [(0,), ("a",)]


def test_static_fields_are_no_leaves():
    """A flax dataclass has leaves for its data fields only, and is recorded with them."""
    flat = flatten(Trained({"w": 1}))

    assert [path for path, _ in flat.leaves] == [("weights", "w")]
    assert flat.node.keys == ("weights",)


def test_nnx_state_is_taken_apart_as_registered():
    """A flax nnx.State has the leaves JAX sees, so Orbax names them alike."""
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

    assert set(paths(state)) == {("kernel", "value"), ("bias", "value")}


def test_optax_states_keep_their_types():
    """Optimizer states are NamedTuples in a tuple; they are recorded as such (ferminet#105)."""
    node = flatten(optax.adam(1e-3).init({"w": np.ones(2)})).node

    assert isinstance(node, structure.Tuple)
    assert [child.name for child in node.children] == ["ScaleByAdamState", "EmptyState"]


@pytest.mark.parametrize(
    ("key", "way_out"),
    [(True, "use a str or an int"), (1.5, "use a str or an int"), (("a", 1), "str"), (np.int64(3), "use int")],
)
def test_a_key_that_is_neither_str_nor_int_is_refused(key, way_out):
    """The error names the dict, the key and what to use."""
    with pytest.raises(KeyPathError, match=f"the dict at 'outer' has the key .*{way_out}"):
        flatten({"outer": {key: 1}})


@pytest.mark.parametrize("tree", [np.ones(2), 3, "text", None, jax.numpy.ones(2)], ids=lambda t: type(t).__name__)
def test_a_bare_leaf_is_refused_with_the_way_out(tree):
    """One value alone has no key."""
    with pytest.raises(KeyPathError, match=r"give it one, such as \{'x': value\}"):
        flatten(tree)


def test_a_container_that_holds_itself_is_refused():
    """A cycle is an error of ours, not an exhausted stack."""
    tree = {}
    tree["self"] = tree

    with pytest.raises(LeafError, match="holds itself"):
        flatten(tree)


def test_jax_is_not_imported_for_plain_trees():
    """Where JAX was not imported nothing of a plain tree imports it."""
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from tailrace.tree.flatten import flatten\n"
        "import numpy as np\n"
        "print(len(flatten({'a': [1, np.ones(2)], 3: (None, {})}).leaves))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "2"
