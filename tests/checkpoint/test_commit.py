"""What a commit leaves on disk."""

import json
import os

import numpy as np
import pytest

from tailrace.checkpoint import commit
from tailrace.checkpoint.reader import open as open_checkpoint
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import CorruptionError, KeyPathError
from tailrace.format import structure


def files(path):
    """Relative names of all files."""
    return sorted(os.path.relpath(os.path.join(base, name), path) for base, _, names in os.walk(path) for name in names)


def test_a_checkpoint_has_orbaxs_files_and_one_more(tmp_path):
    """No debris."""
    with Transaction(tmp_path / "x") as writer:
        writer.write_arrays([(("a",), np.ones(3), "array")])
        writer.set_text("t", "text")
    named = [name for name in files(tmp_path / "x") if not name.startswith("d/")]

    assert named == [
        *("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0"),
        *("commit_success.txt", "manifest.ocdbt", "tailrace.json"),
    ]
    assert len(files(tmp_path / "x")) == len(named) + 2
    assert os.listdir(tmp_path) == ["x"]


def test_an_empty_checkpoint(tmp_path):
    """A tree without leaves is one, too."""
    with Transaction(tmp_path / "x"):
        pass
    with open_checkpoint(tmp_path / "x") as checkpoint:
        checkpoint.verify()

        assert checkpoint.keys() == []


def test_tailrace_json_lists_every_other_file(tmp_path):
    """And the fingerprint and kinds that were given."""
    with Transaction(tmp_path / "x") as writer:
        writer.declare("n", shape=(), dtype="int64", kind="int")[()] = 1
        writer.set_fingerprint({"sha": "00"})
    found = json.loads((tmp_path / "x" / "tailrace.json").read_text())

    assert sorted([*found["files"], *found["data_files"], "tailrace.json"]) == files(tmp_path / "x")
    assert (found["source"], found["kinds"]) == ({"sha": "00"}, {"n": "int"})
    for name, (length, _) in {**found["files"], **found["data_files"]}.items():
        assert (tmp_path / "x" / name).stat().st_size == length


def test_unknown_files_are_named_by_verify(tmp_path):
    """What tailrace.json does not know it cannot vouch for."""
    with Transaction(tmp_path / "x") as writer:
        writer.write_arrays([(("a",), np.ones(3), "array")])
    (tmp_path / "x" / "d" / "stray").touch()
    with open_checkpoint(tmp_path / "x") as checkpoint, pytest.raises(CorruptionError, match="file d/stray is unknown"):
        checkpoint.verify()


def test_a_commit_that_was_refused_can_be_repeated_and_leaves_nothing_behind(tmp_path):
    """Containers that need a leaf that is gone: nothing was published, and nothing of it stays."""
    writer = Transaction(tmp_path / "x")
    for i in range(2):
        writer.declare(("l", i), shape=(), dtype="int8")[()] = i
    writer.set_structure(("l",), structure.List((structure.Leaf(), structure.Leaf())))
    writer.delete(("l", 0))
    with pytest.raises(KeyPathError):
        writer.commit()
    writer.declare(("l", 0), shape=(), dtype="int8")[()] = 5
    with writer.commit() as checkpoint:
        checkpoint.verify()

        assert [int(leaf[()]) for leaf in checkpoint.tree()["l"]] == [5, 1]


def test_an_index_that_does_not_read_back_is_not_published(tmp_path, monkeypatch):
    """Nor does it stay behind."""
    writer = Transaction(tmp_path / "x")
    writer.write_arrays([(("a",), np.ones(3), "array")])
    real = commit.DatabaseIndex.entries
    with monkeypatch.context() as patch:
        patch.setattr(commit.DatabaseIndex, "entries", lambda self, *args: list(real(self, *args))[1:])
        with pytest.raises(CorruptionError, match="does not read back"):
            writer.commit()
    published = (tmp_path / "x").exists()
    with writer.commit() as checkpoint:
        checkpoint.verify()

    assert not published


def test_chunk_keys_are_in_byte_order(tmp_path, stored):
    """More than ten chunks along an axis, where text and numbers sort differently."""
    with Transaction(tmp_path / "x") as writer:
        writer.declare("a", shape=(23, 12), dtype="int32", chunk_shape=(2, 1))[...] = (
            np.arange(276).reshape(23, 12).astype("int32")
        )

    assert (stored(tmp_path / "x", "a") == np.arange(276).reshape(23, 12)).all()
