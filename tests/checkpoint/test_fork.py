"""fork: copy on write, from ours and from Orbax's."""

import os
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from tailrace.checkpoint.inherit import inherit
from tailrace.checkpoint.ledger import PREFIX
from tailrace.checkpoint.reader import open as open_checkpoint
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import InputError, NotACheckpointError
from tailrace.format import journal
from tailrace.tree.fork import fork
from tailrace.tree.load import load
from tailrace.tree.save import save
from tailrace.tree.writer import Writer

TREE = {"w": np.arange(600.0).reshape(20, 30), "step": 7, "name": "net", "list": [np.ones(3), (np.float32(2), None)]}


@pytest.fixture
def base(tmp_path):
    """A checkpoint of ours, in which a chunk was written twice."""
    with Writer(tmp_path / "base") as writer:
        writer.write("w", np.zeros((20, 30)))
        writer.write_tree(TREE)
        writer.set_metadata({"note": "base"})
    return tmp_path / "base"


def orbax_checkpoint(path, *, compression=True, tree=None):
    """A checkpoint as Orbax writes it, OCDBT and zarr3."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=compression)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, tree or {"big": jnp.arange(4000.0).reshape(40, 100), "small": jnp.arange(5)})
    return path


def inodes(path):
    """The files of chunks, as the file system knows them."""
    return {entry.stat().st_ino for entry in path.glob("**/d/*")}


def test_unchanged_data_is_linked_and_the_parent_may_go(tmp_path, base):
    """The same inodes; containers, kinds, texts and metadata are the parent's; what is written anew is new."""
    before = inodes(base)
    with fork(base, tmp_path / "new") as writer:
        writer.write("w", np.ones((20, 30)))
        writer.write("more", 1)
    shared = before & inodes(tmp_path / "new")
    parent = load(base)
    shutil.rmtree(base)
    found = load(tmp_path / "new")
    with open_checkpoint(tmp_path / "new") as checkpoint:
        checkpoint.verify()

        assert checkpoint.metadata == {"note": "base"}

    assert shared
    assert (parent["w"] == TREE["w"]).all()
    assert (found["w"] == 1).all()
    assert (found["step"], found["name"], found["more"]) == (7, "net", 1)
    assert isinstance(found["list"][1], tuple)
    assert found["list"][1][1] is None


def test_a_region_of_an_inherited_leaf_is_written(tmp_path, base, stored):
    """The rest of the chunk is the parent's, which does not change."""
    with fork(base, tmp_path / "new") as writer:
        writer.declare("w", shape=(20, 30), dtype="float64")[3, 5:7] = -1
    expected = TREE["w"].copy()
    expected[3, 5:7] = -1
    with open_checkpoint(tmp_path / "new") as checkpoint:
        checkpoint.verify()

    assert (stored(tmp_path / "new", "w") == expected).all()
    assert (stored(base, "w") == TREE["w"]).all()


def test_deleted_leaves_and_data_files_without_chunks_are_gone(tmp_path, base):
    """A fork of which everything was replaced shares nothing."""
    with fork(base, tmp_path / "new") as writer:
        for key in list(writer.keys()):
            writer.delete(key)
        writer.set_structure((), type(open_checkpoint(base).root)(("x",), (_leaf(),)))
        writer.write("x", 1)
    with open_checkpoint(tmp_path / "new") as checkpoint:
        checkpoint.verify()

        assert checkpoint.keys() == ["x"]

    assert not inodes(base) & inodes(tmp_path / "new")


def _leaf():
    from tailrace.format import structure

    return structure.Leaf()


@pytest.mark.parametrize("compression", [True, False])
@pytest.mark.parametrize("ours", [None, "zstd"])
def test_a_fork_of_orbaxs_checkpoint(tmp_path, stored, compression, ours):
    """Whatever its codecs: leaves are kept as they are, replaced whole, and every byte can be verified."""
    base = orbax_checkpoint(tmp_path / "base", compression=compression)
    for number in range(2):  # also a fork of the fork
        with fork(base, tmp_path / f"new{number}", compression=ours) as writer:
            writer.write("small", np.arange(5, dtype=np.int32) + number)
        with open_checkpoint(tmp_path / f"new{number}") as checkpoint:
            checkpoint.verify()
        base = tmp_path / f"new{number}"
    shutil.rmtree(tmp_path / "base")

    assert (stored(base, "big") == np.arange(4000.0, dtype="float32").reshape(40, 100)).all()
    assert stored(base, "small").tolist() == [1, 2, 3, 4, 5]


def test_every_byte_of_a_fork_of_orbaxs_checkpoint_is_held(tmp_path):
    """Its chunks have no checksum of their own: tailrace.json has them, and names the leaf."""
    with fork(orbax_checkpoint(tmp_path / "base", compression=False), tmp_path / "new") as writer:
        writer.write("x", 1)
    (data,) = [file for file in (tmp_path / "new").glob("ocdbt.process_0/d/*") if file.stat().st_size > 16000]
    content = bytearray(data.read_bytes())
    at = content.index(np.arange(100, 110, dtype="<f4").tobytes())
    content[at] ^= 1
    data.unlink()
    data.write_bytes(content)
    with open_checkpoint(tmp_path / "new") as checkpoint, pytest.raises(ValueError, match=r"leaf 'big', region \[0:40"):
        checkpoint.verify()


def test_a_killed_fork_is_done_again(tmp_path, base):
    """A journal that was cut in the middle of what the parent holds must not pass for all of it."""
    first = fork(base, tmp_path / "new")
    first.close()
    (path,) = (tmp_path / "new.tailrace-pending" / ".work").glob(f"{PREFIX}*")
    data = path.read_bytes()
    records = list(journal.decode(data))
    for count in range(len(records)):
        path.write_bytes(journal.header() + journal.encode(records[:count]))
        shutil.copytree(tmp_path / "new.tailrace-pending", tmp_path / f"n{count}.tailrace-pending")
        with fork(base, tmp_path / f"n{count}", resume=True):
            pass
        with open_checkpoint(tmp_path / f"n{count}") as checkpoint:
            checkpoint.verify()

            assert checkpoint.keys() == open_checkpoint(base).keys()


def test_a_resumed_fork_keeps_what_was_written_to_it(tmp_path, base):
    """Deleted and replaced leaves are not inherited again."""
    writer = fork(base, tmp_path / "new")
    writer.write("step", 8)
    writer.delete("name")
    writer.flush()
    writer.close()
    with fork(base, tmp_path / "new", resume=True):
        pass
    found = load(tmp_path / "new")

    assert found["step"] == 8
    assert "name" not in found


def test_resuming_what_is_no_fork_of_that_parent_is_refused(tmp_path, base):
    """It would be a mixture, or lack everything; and it stays resumable."""
    save(tmp_path / "other", {"a": 1})
    fork(tmp_path / "other", tmp_path / "x").close()
    with pytest.raises(InputError, match=f"is a fork of {tmp_path}/other, not of {base}"):
        fork(base, tmp_path / "x", resume=True)
    plain = Writer(tmp_path / "y")
    plain.write("a", 1, durable=True)
    plain.close()
    with pytest.raises(InputError, match="did not begin as a fork"):
        fork(base, tmp_path / "y", resume=True)
    for name in "xy":
        Writer(tmp_path / name, resume=True).abort()


def test_what_cannot_be_forked_is_refused_and_leaves_nothing(tmp_path, base):
    """Itself, nothing, and formats whose chunks cannot be taken over."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "old", {"a": jnp.ones(3)})
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InputError, match="needs a path of its own"):
        fork(base, base)
    with pytest.raises(NotACheckpointError):
        fork(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(InputError, match="cannot be forked: only OCDBT checkpoints with zarr3"):
        fork(tmp_path / "old", tmp_path / "new")

    assert sorted(os.listdir(tmp_path)) == before


def test_where_links_do_not_work_files_are_copied_and_it_is_said(tmp_path, base, monkeypatch, caplog):
    """Across file systems."""
    from tailrace.storage import posix

    def refuse(*_args, **_kwargs):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(posix, "_clone", lambda *_: False)
    with fork(base, tmp_path / "new"):
        pass
    with open_checkpoint(tmp_path / "new") as checkpoint:
        checkpoint.verify()

    assert "was copied" in caplog.text
    assert not inodes(base) & inodes(tmp_path / "new")


def test_inheriting_is_bounded_by_the_budget(tmp_path, base):
    """Nothing of the data is read."""
    with open_checkpoint(base) as parent, Transaction(tmp_path / "new", memory_budget="8MiB") as transaction:
        inherit(transaction, parent)

    assert transaction.budget.used_bytes == 0


@pytest.mark.parametrize("encoding", [("v2", "."), ("v2", "/"), ("default", ".")])
def test_chunks_of_others_keep_their_keys(tmp_path, stored, encoding):
    """zarr3 allows other chunk keys than Orbax's; a fork keeps those that the inherited metadata names."""
    array = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    other = tmp_path / "other"
    save(tmp_path / "ours", {"w": array})  # Orbax's JSON files, for the same tree
    other.mkdir()
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding"):
        shutil.copy(tmp_path / "ours" / name, other)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{other}/", "path": "w/"},
        "metadata": {
            "shape": [200, 200],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [100, 15]}},
            "chunk_key_encoding": {"name": encoding[0], "configuration": {"separator": encoding[1]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
    }
    ts.open(spec, create=True).result().write(array).result()
    with fork(other, tmp_path / "new") as writer:
        writer.write("more", 1)
    with open_checkpoint(tmp_path / "new") as checkpoint:
        checkpoint.verify()
        found = checkpoint["w"][...]

    assert (found == array).all()
    assert (stored(tmp_path / "new", "w") == array).all()
