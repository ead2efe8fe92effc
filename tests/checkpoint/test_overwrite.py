"""What may be replaced, how, and what is left alone."""

import os
import threading
from unittest import mock

import numpy as np
import pytest

from tailrace.checkpoint.reader import open as open_checkpoint
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import CheckpointExistsError, NotACheckpointError, PendingError, StorageError
from tailrace.storage import posix


def write(path, value, **options):
    """A checkpoint whose leaf "a" is all `value`."""
    with Transaction(path, **options) as writer:
        writer.write_arrays([(("a",), np.full(1000, value), "array")])


def everything(path):
    """Names and contents of all files below a path."""
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path):
    """The refusal names the argument, and changes nothing."""
    write(tmp_path / "x", 1)
    before = everything(tmp_path)
    with pytest.raises(CheckpointExistsError, match=r"holds a checkpoint already.*overwrite=True"):
        Transaction(tmp_path / "x")
    unchanged = everything(tmp_path) == before
    write(tmp_path / "x", 2, overwrite=True)
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint["a"][0] == 2

        checkpoint.verify()

    assert unchanged
    assert os.listdir(tmp_path) == ["x"]


def test_the_old_checkpoint_is_there_until_the_commit(tmp_path):
    """And after an abort."""
    write(tmp_path / "x", 1)
    writer = Transaction(tmp_path / "x", overwrite=True)
    writer.write_arrays([(("b",), np.ones(3), "array")])
    writer.flush()
    with open_checkpoint(tmp_path / "x") as checkpoint:
        during = checkpoint.keys()
    writer.abort()
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert (during, checkpoint.keys()) == (["a"], ["a"])

    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_reader_that_has_read_the_old_one_keeps_reading_it(tmp_path, can_exchange):
    """Its files stay open; it never sees a mixture."""
    write(tmp_path / "x", 1)
    with open_checkpoint(tmp_path / "x") as old:
        old["a"][0]
        with mock.patch.object(posix, "_renameat2", wraps=posix._renameat2 if can_exchange else lambda *_: False):
            write(tmp_path / "x", 2, overwrite=True)
        with open_checkpoint(tmp_path / "x") as new:
            assert (set(old["a"][...]), set(new["a"][...])) == ({1}, {2})

    assert os.listdir(tmp_path) == ["x"]


def test_at_every_moment_there_is_a_whole_checkpoint(tmp_path):
    """A reader that opens again and again meets the old or the new one, never nothing."""
    write(tmp_path / "x", 0)
    seen, failed, stop = [], [], threading.Event()

    def look():
        while not stop.is_set():
            try:
                with open_checkpoint(tmp_path / "x") as checkpoint:
                    seen.append(checkpoint.index is not None)
            except NotACheckpointError as error:
                failed.append(str(error))
            except Exception:
                continue  # opened the old one as it was being deleted: it says so, and is opened again

    thread = threading.Thread(target=look)
    thread.start()
    for value in range(1, 15):
        write(tmp_path / "x", value, overwrite=True)
    stop.set()
    thread.join()

    assert seen
    assert failed == []


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_not_ours_is_never_replaced(tmp_path, overwrite):
    """A file, a directory of other things, a link: named, and left as they are."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "directory").mkdir()
    for name in ("thesis.tex", "data.csv"):
        (tmp_path / "directory" / name).write_text("precious")
    write(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to("real")
    before = everything(tmp_path)
    with pytest.raises(CheckpointExistsError, match="is a file"):
        Transaction(tmp_path / "file", overwrite=overwrite)
    with pytest.raises(CheckpointExistsError, match=r"holds no checkpoint, but data.csv, thesis.tex"):
        Transaction(tmp_path / "directory", overwrite=overwrite)
    with pytest.raises(CheckpointExistsError, match="is a symbolic link to real"):
        Transaction(tmp_path / "link", overwrite=overwrite)

    assert everything(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["directory", "file", "link", "real"]


def test_an_empty_directory_is_replaced_only_when_asked(tmp_path):
    """Somebody may have made it to claim the name."""
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointExistsError, match="empty directory"):
        Transaction(tmp_path / "x")
    write(tmp_path / "x", 1, overwrite=True)
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint["a"][0] == 1


def test_a_path_below_a_file_cannot_be_made(tmp_path):
    """The file in the way is named."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StorageError, match=rf"{tmp_path}/file is a file"):
        Transaction(tmp_path / "file" / "deep" / "x")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_foreign_thing_with_the_pending_name_is_left_alone(tmp_path, kind):
    """With what it holds named."""
    pending = tmp_path / "x.tailrace-pending"
    if kind == "file":
        pending.write_text("precious")
    else:
        pending.mkdir()
        (pending / "thesis.tex").write_text("precious")
    before = everything(tmp_path)
    with pytest.raises(PendingError, match=r"is in the way: .*(is a file|thesis.tex)"):
        Transaction(tmp_path / "x", resume=True, overwrite=True, takeover=True)

    assert everything(tmp_path) == before


def test_what_appears_at_the_path_meanwhile_is_not_replaced(tmp_path):
    """The new checkpoint waits, whole; when the other is gone, commit or the next open puts it in place."""
    writer = Transaction(tmp_path / "x")
    writer.write_arrays([(("a",), np.ones(3), "array")])
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointExistsError, match="appeared while its checkpoint was being written"):
        writer.commit()
    kept = (tmp_path / "x" / "thesis.tex").read_text()
    (tmp_path / "x").rename(tmp_path / "theirs")
    with writer.commit() as checkpoint:
        assert checkpoint.keys() == ["a"]

    assert kept == "precious"
    assert sorted(os.listdir(tmp_path)) == ["theirs", "x"]
