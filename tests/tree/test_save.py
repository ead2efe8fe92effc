"""save: all of a tree, or nothing."""

from __future__ import annotations

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tailrace.checkpoint import reader
from tailrace.checkpoint.pending import open_pending
from tailrace.errors import CheckpointExistsError, InputError
from tailrace.tree.load import load
from tailrace.tree.save import save


def test_keys_of_any_text_come_back(tmp_path):
    """Keys with '/', '~', spaces, '..' and other scripts are keys like others (google/orbax#422, haiku's names)."""
    tree = {
        name: np.full(2, i) for i, name in enumerate(["a/b", "mlp/~/linear_0", " ", "..", "ключ", "d/zarr.json", "c"])
    }
    save(tmp_path / "checkpoint", tree)
    found = load(tmp_path / "checkpoint")

    assert list(found) == list(tree)
    for name, value in tree.items():
        np.testing.assert_array_equal(found[name], value)


def test_int_keys_and_their_order_come_back(tmp_path):
    """{0: ..., 1: ...} has int keys again without a target (google/orbax#2561, flax#5030), in the order of the dict."""
    save(tmp_path / "checkpoint", {10: np.ones(1), 2: {"b": 1, "a": 2}, "x": 3})
    found = load(tmp_path / "checkpoint")

    assert list(found) == [10, 2, "x"]
    assert list(found[2]) == ["b", "a"]


def test_an_optax_state_comes_back_as_itself(tmp_path):
    """Without a target the tuple of NamedTuples is what it was, so `lax.cond` accepts it (ferminet#105)."""
    state = optax.adam(1e-3).init({"w": np.ones(2, np.float32)})
    save(tmp_path / "checkpoint", state)
    found = load(tmp_path / "checkpoint")

    assert isinstance(found, tuple)
    assert type(found[0]) is type(state[0])
    assert found[1] == state[1] == optax.EmptyState()


def test_an_empty_tree_is_a_checkpoint(tmp_path):
    """{} is saved and loaded; so is a tree of empties alone."""
    save(tmp_path / "nothing", {})
    save(tmp_path / "empties", {"a": {}, "b": [], "c": (), "d": None})

    assert load(tmp_path / "nothing") == {}
    assert load(tmp_path / "empties") == {"a": {}, "b": [], "c": (), "d": None}


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    """Relative paths work, and their parents are made (apax#465: 'Checkpoint path should be absolute')."""
    monkeypatch.chdir(tmp_path)
    save("runs/one/checkpoint", {"x": np.ones(2)})

    assert (tmp_path / "runs" / "one" / "checkpoint" / "_METADATA").is_file()
    np.testing.assert_array_equal(load("runs/one/checkpoint")["x"], np.ones(2))


def test_what_is_there_is_replaced_only_when_asked(tmp_path):
    """Without overwrite=True the first checkpoint stays; with it the second takes its place as a whole."""
    save(tmp_path / "checkpoint", {"x": 1, "old": 2})
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        save(tmp_path / "checkpoint", {"x": 3})
    kept = load(tmp_path / "checkpoint")
    save(tmp_path / "checkpoint", {"x": 3}, overwrite=True)

    assert kept == {"x": 1, "old": 2}
    assert load(tmp_path / "checkpoint") == {"x": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_the_leftovers_of_a_dead_save_are_discarded(tmp_path):
    """What an earlier save left when it died does not stand in the way."""
    pending = open_pending(tmp_path / "checkpoint", resume=False, overwrite=False, takeover=False)
    pending.lock.release()
    save(tmp_path / "checkpoint", {"x": 1})

    assert load(tmp_path / "checkpoint") == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_save_that_fails_leaves_nothing(tmp_path):
    """An error on the way leaves what was there before: here nothing."""

    class Broken:
        shape, dtype = (4,), np.dtype(np.float32)

        def read_into(self, *_):
            raise OSError("the source went away")

    with pytest.raises(OSError, match="the source went away"):
        save(tmp_path / "deep" / "checkpoint", {"good": np.ones(3), "bad": Broken()})

    assert list(tmp_path.iterdir()) == []


def test_metadata_comes_back(tmp_path):
    """JSON given as metadata= is what `open` and Orbax give."""
    save(tmp_path / "checkpoint", {"x": 1}, metadata={"step": 3, "tags": ["a", None]})
    with reader.open(tmp_path / "checkpoint") as checkpoint, ocp.StandardCheckpointer() as checkpointer:
        found = checkpoint.metadata, checkpointer.metadata(tmp_path / "checkpoint").custom_metadata

    assert found == ({"step": 3, "tags": ["a", None]}, {"step": 3, "tags": ["a", None]})


def test_a_leaf_of_another_checkpoint_is_a_leaf(tmp_path):
    """What `open` gives can be saved as it stands, without loading it."""
    save(tmp_path / "first", {"x": np.arange(5), "n": 7})
    with reader.open(tmp_path / "first") as first:
        save(tmp_path / "second", {"y": first["x"], "n": first["n"]})
    found = load(tmp_path / "second")

    np.testing.assert_array_equal(found["y"], np.arange(5))
    assert found["n"] == 7
    assert type(found["n"]) is int


def test_compression_makes_it_smaller_and_changes_nothing(tmp_path):
    """zstd is lossless."""
    zeros = np.zeros(1 << 20, np.float32)
    save(tmp_path / "checkpoint", {"x": zeros}, compression="zstd")

    assert sum(file.stat().st_size for file in (tmp_path / "checkpoint").rglob("*") if file.is_file()) < 100_000
    np.testing.assert_array_equal(load(tmp_path / "checkpoint")["x"], zeros)


@pytest.mark.parametrize("arguments", [{"memory_budget": "1MiB"}, {"memory_budget": "much"}, {"compression": "lz4"}])
def test_arguments_that_cannot_be_are_refused(tmp_path, arguments):
    """A budget too small to work and an unknown compression fail before anything is made."""
    with pytest.raises(InputError):
        save(tmp_path / "checkpoint", {"x": 1}, **arguments)

    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte(tmp_path):
    """The bytes told while saving and loading are those of the arrays."""
    saved, loaded = [], []
    save(tmp_path / "checkpoint", {"x": np.ones(1000), "y": np.ones((1 << 20) + 1, np.int8)}, progress=saved.append)
    load(tmp_path / "checkpoint", progress=loaded.append)

    assert sum(saved) == sum(loaded) == 8000 + (1 << 20) + 1
