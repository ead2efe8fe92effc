"""Publishing beside others: readers that poll, writers that race, and what must never be replaced."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

import tailrace
from tailrace.checkpoint import publish
from tailrace.errors import CheckpointExistsError, LockedError, NotACheckpointError, PendingError, StorageError
from tailrace.storage import posix

BUDGET = "8MiB"


def beside(path):
    """Everything in the directory that the checkpoint is in."""
    return sorted(entry.name for entry in path.parent.iterdir())


@pytest.fixture(params=["renameat2", "fallback"])
def renames(request, monkeypatch):
    """With and without a file system that swaps names."""
    if request.param == "fallback":
        monkeypatch.setattr(posix, "_renameat2", lambda *_: False)


def test_readers_that_poll_while_a_writer_commits(tmp_path, renames):
    """A reader that finds a sealed commit leaves it to the living writer: neither of them fails."""
    errors = []

    def poll(path):
        try:
            while True:
                try:
                    with tailrace.open(path, memory_budget=BUDGET) as checkpoint:
                        checkpoint.verify()
                    return
                except NotACheckpointError:
                    time.sleep(0)
        except BaseException as error:
            errors.append(error)

    for number in range(15):
        path = tmp_path / str(number) / "model"
        readers = [threading.Thread(target=poll, args=(path,)) for _ in range(3)]
        for reader in readers:
            reader.start()
        tailrace.save(path, {"a": np.arange(100)}, memory_budget=BUDGET)
        for reader in readers:
            reader.join()
        assert errors == []
        assert beside(path) == ["model"]


def _save_over_and_over(path, mine, times):
    for number in range(times):
        while True:
            try:
                tailrace.save(path, {"a": np.full(50, 100 * mine + number)}, overwrite=True, memory_budget=BUDGET)
                break
            except (LockedError, PendingError):  # another is at it
                time.sleep(0.001)


def test_processes_that_replace_the_same_checkpoint(tmp_path):
    """Each save succeeds or says that another writer is at it; one whole checkpoint is left, and nothing else."""
    path = tmp_path / "model"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_save_over_and_over, args=(path, mine, 15)) for mine in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert beside(path) == ["model"]
    with tailrace.open(path) as checkpoint:
        checkpoint.verify()
        assert checkpoint["a"][0] % 100 == 14


def test_threads_that_replace_the_same_checkpoint(tmp_path, renames):
    """The same inside one process."""
    path = tmp_path / "model"
    errors = []

    def work(mine):
        try:
            _save_over_and_over(path, mine, 10)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert beside(path) == ["model"]
    with tailrace.open(path) as checkpoint:
        checkpoint.verify()


def test_a_directory_of_the_users_that_appears_is_never_replaced(tmp_path, renames):
    """Not even with overwrite=True: the new checkpoint waits, and a second commit puts it in place when it can."""
    path = tmp_path / "model"
    tailrace.save(path, {"a": np.arange(3)})
    writer = tailrace.Writer(path, memory_budget=BUDGET, overwrite=True)
    writer.write("a", np.arange(5))
    path.rename(tmp_path / "elsewhere")
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")

    with pytest.raises(CheckpointExistsError, match="waits at"):
        writer.commit()
    assert (path / "thesis.txt").read_text() == "years of work"
    assert not publish.recover(path)
    with pytest.raises(PendingError, match="complete checkpoint that waits"):
        tailrace.save(path, {"a": np.arange(9)}, overwrite=True)
    assert beside(path) == ["elsewhere", "model", "model.tailrace-pending"]
    path.rename(tmp_path / "thesis")
    with writer.commit() as checkpoint:
        assert checkpoint["a"][...].tolist() == [0, 1, 2, 3, 4]
    assert beside(path) == ["elsewhere", "model", "thesis"]


def test_a_checkpoint_that_appears_is_not_replaced_without_overwrite(tmp_path, renames):
    """Whoever was first stays; the second one's commit waits beside it until the name is free."""
    path = tmp_path / "model"
    writer = tailrace.Writer(path, memory_budget=BUDGET)
    writer.write("a", np.arange(5))
    tailrace.save(tmp_path / "other", {"a": np.arange(3)})
    (tmp_path / "other").rename(path)

    with pytest.raises(CheckpointExistsError, match="waits at"):
        writer.commit()
    assert tailrace.load(path)["a"].tolist() == [0, 1, 2]
    with pytest.raises(PendingError, match="complete checkpoint that waits"):
        tailrace.save(path, {"a": np.arange(9)}, overwrite=True)
    path.rename(tmp_path / "first")
    assert tailrace.load(path)["a"].tolist() == [0, 1, 2, 3, 4]
    assert beside(path) == ["first", "model"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_symbolic_link_is_not_replaced(overwrite, tmp_path):
    """It is refused before anything is written, with the name of what it points to."""
    tailrace.save(tmp_path / "step7", {"a": np.arange(3)})
    (tmp_path / "latest").symlink_to("step7")

    with pytest.raises(CheckpointExistsError, match="symbolic link"):
        tailrace.save(tmp_path / "latest", {"a": np.arange(5)}, overwrite=overwrite)
    assert beside(tmp_path / "latest") == ["latest", "step7"]
    assert tailrace.load(tmp_path / "latest")["a"].tolist() == [0, 1, 2]


def test_a_commit_that_another_process_finished_is_a_commit(tmp_path, monkeypatch):
    """It could not be published at first; when it is tried again the next transaction has the pending name already."""
    path = tmp_path / "model"
    writer = tailrace.Writer(path, memory_budget=BUDGET)
    writer.write("a", np.arange(5))

    def fail(root, final):
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patched:
        patched.setattr(publish, "rename_noreplace", fail)
        with pytest.raises(StorageError, match="Input/output"):
            writer.commit()
    assert publish.recover(path)
    later = tailrace.Writer(path, memory_budget=BUDGET, overwrite=True)
    with writer.commit() as checkpoint:
        assert checkpoint["a"][...].tolist() == [0, 1, 2, 3, 4]
    later.abort()
    assert beside(path) == ["model"]


def test_an_abort_that_another_writer_finishes(tmp_path, monkeypatch):
    """What is left of a killed abort never stands in the way, in whichever order its files went."""
    path = tmp_path / "model"
    root = tmp_path / "model.tailrace-pending"
    for files in ([], ["d/x"], ["d/x", ".work-aborted/journal.1"], [".work-aborted/journal.1"]):
        (root / ".work-aborted").mkdir(parents=True)
        (root / "d").mkdir()
        for file in files:
            (root / file).write_bytes(b"something")
        tailrace.save(path, {"a": np.arange(3)}, overwrite=True)
        assert beside(path) == ["model"]


def test_files_of_a_commit_that_was_not_sealed_do_not_stay(tmp_path, monkeypatch):
    """Texts that were there in the first attempt and not in the second leave no _strings.json behind."""
    path = tmp_path / "model"
    writer = tailrace.Writer(path, memory_budget=BUDGET)
    writer.set_text("note", "gone")
    writer.write("a", np.arange(3))
    writer.flush()

    def fail(root, contents):
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patched:
        patched.setattr(publish, "seal", fail)
        with pytest.raises(OSError, match="Input/output"):
            writer.commit()
    writer.close()
    with tailrace.Writer(path, memory_budget=BUDGET, resume=True) as resumed:
        resumed.delete("note")

    with tailrace.open(path) as checkpoint:
        checkpoint.verify()
        assert checkpoint.keys() == ["a"]
    assert not (path / "_strings.json").exists()


def test_parts_outlive_a_commit_that_was_killed_before_its_seal(tmp_path, monkeypatch):
    """Their data file goes only after the seal: a commit assembles chunks from it, and may have to do it again."""
    path = tmp_path / "model"
    first = tailrace.Writer(path, memory_budget=BUDGET)
    first.declare("a", shape=(10,), dtype="int32")[0:5] = np.ones(5, np.int32)
    first.flush()
    first.close()
    second = tailrace.Writer(path, memory_budget=BUDGET, resume=True)
    second.declare("a", shape=(10,), dtype="int32")[5:10] = np.full(5, 2, np.int32)

    def die(root, contents):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(publish, "seal", die)
        with pytest.raises(KeyboardInterrupt):
            second.commit()
    second.close()
    third = tailrace.Writer(path, memory_budget=BUDGET, resume=True)
    leaf = third.declare("a", shape=(10,), dtype="int32")
    for region in third.missing().get("a", []):
        leaf.write(region, np.full(region.shape, 2, np.int32))
    with third.commit() as checkpoint:
        checkpoint.verify()
        assert checkpoint["a"][...].tolist() == [1] * 5 + [2] * 5
