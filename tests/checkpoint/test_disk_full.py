"""Disks that are full, refuse, or write less than they were asked to."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import numpy as np
import pytest

import tailrace
from tailrace.errors import CheckpointExistsError, StorageError, TailraceError, WriterClosedError
from tailrace.testing import faults

BUDGET = "8MiB"
OLD = np.arange(1000, dtype=np.int32)
MIB = 1 << 20


def beside(path):
    """Everything in the directory that the checkpoint is in."""
    return sorted(entry.name for entry in path.parent.iterdir())


def arrays(seed):
    """A tree to save."""
    return {"a": np.arange(3000, dtype=np.int32) + seed, "b": np.full((50, 3), seed, np.float64), "c": "text"}


def loaded(path):
    """The tree at a path, all of it verified."""
    with tailrace.open(path, memory_budget=BUDGET) as checkpoint:
        checkpoint.verify()
    return tailrace.load(path)


def same(found, expected):
    """Whether two trees are equal."""
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in expected)


class FailOnce:
    """Makes every call but the durable one numbered `at`, which fails, and so do the syncs after a failed one."""

    def __init__(self, at, code):
        self.calls, self._at, self._code = 0, at, code

    def __call__(self, call):
        """Make the call, or fail."""
        if call.durable:
            self.calls += 1
            if self.calls - 1 == self._at:
                raise OSError(self._code, os.strerror(self._code))
        return None if call.name in faults.SYNCS else call.make()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("this machine may not mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(small_disk):
    """save fails and says so; the old checkpoint is as it was, and what was written of the new one is gone."""
    path = small_disk / "model"
    tailrace.save(path, {"old": OLD})

    with pytest.raises(StorageError, match="No space left on device"):
        tailrace.save(path, {"new": np.ones(8 * MIB, np.uint8)}, overwrite=True)
    assert beside(path) == ["model"]
    assert same(loaded(path), {"old": OLD})


def test_a_full_disk_keeps_what_was_flushed(small_disk):
    """The writer that failed takes no more; with room made, the next one goes on from the last flush."""
    path, filler = small_disk / "model", small_disk / "filler"
    filler.write_bytes(bytes(2 * MIB))
    writer = tailrace.Writer(path, memory_budget=BUDGET)
    leaf = writer.declare("leaf", shape=(3 * MIB,), dtype="uint8", chunk_shape=(MIB // 4,))
    leaf[: MIB // 2] = np.ones(MIB // 2, np.uint8)
    writer.flush()

    def write_on():
        for start in range(MIB // 2, 3 * MIB, MIB // 4):
            leaf[start : start + MIB // 4] = np.full(MIB // 4, 2, np.uint8)
            writer.flush()

    with pytest.raises(StorageError, match="No space left on device"):
        write_on()
    with pytest.raises(WriterClosedError, match="resume=True"):
        leaf[:] = np.zeros(3 * MIB, np.uint8)
    writer.close()
    filler.unlink()
    with tailrace.Writer(path, memory_budget=BUDGET, resume=True) as resumed:
        missing = resumed.missing()["leaf"]
        assert min(region.start[0] for region in missing) >= MIB // 2
        leaf = resumed.declare("leaf", shape=(3 * MIB,), dtype="uint8", chunk_shape=(MIB // 4,))
        for region in missing:
            leaf.write(region, np.full(region.shape, 2, np.uint8))
    found = loaded(path)["leaf"]
    assert found[: MIB // 2].tolist() == [1] * (MIB // 2)
    assert (found[MIB // 2 :] == 2).all()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_save_with_any_call_failing(code, tmp_path):
    """Whichever call fails: the old tree and no debris, or the new one, which the next save finds finished."""
    path = tmp_path / "model"
    counting = FailOnce(-1, code)
    tailrace.save(path, arrays(0))
    shutil.copytree(path, tmp_path / "old" / "model")
    with faults.intercepted(counting):
        tailrace.save(path, arrays(1), overwrite=True, memory_budget=BUDGET)

    for at in range(counting.calls):
        path = tmp_path / str(at) / "model"
        shutil.copytree(tmp_path / "old" / "model", path)
        failed = False
        with faults.intercepted(FailOnce(at, code)):
            try:
                tailrace.save(path, arrays(1), overwrite=True, memory_budget=BUDGET)
            except StorageError:
                failed = True
        assert failed or same(loaded(path), arrays(1)), at
        assert same(loaded(path), arrays(0)) or same(loaded(path), arrays(1)), at
        with faults.intercepted(FailOnce(-1, code)):
            tailrace.save(path, arrays(2), overwrite=True, memory_budget=BUDGET)
        assert same(loaded(path), arrays(2)), at
        assert beside(path) == ["model"], at


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_writer_with_any_call_failing(code, tmp_path):
    """Whichever call fails: what was flushed before is resumed, and the same program then ends well."""

    def run(path, **options):
        acknowledged.clear()
        writer = tailrace.Writer(path, memory_budget=BUDGET, threads=1, **options)
        try:
            leaf = writer.declare("leaf", shape=(40,), dtype="int32", chunk_shape=(16,))
            for start in range(0, 40, 10):
                leaf[start : start + 10] = np.arange(start, start + 10, dtype=np.int32)
                writer.flush()
                acknowledged.append(start)
            writer.finish()
        finally:
            writer.close()

    acknowledged = []
    counting = FailOnce(-1, code)
    with faults.intercepted(counting):
        run(tmp_path / "whole" / "model")

    for at in range(counting.calls):
        path = tmp_path / str(at) / "model"
        path.parent.mkdir()
        with faults.intercepted(FailOnce(at, code)):
            try:
                run(path)
            except StorageError:
                pass
            except TailraceError as error:
                raise AssertionError(f"call {at} failed with {error!r}") from error
        before = list(acknowledged)
        with faults.intercepted(FailOnce(-1, code)):
            if before and not path.exists():
                try:
                    resumed = tailrace.Writer(path, memory_budget=BUDGET, threads=1, resume=True)
                except CheckpointExistsError:  # it was sealed
                    resumed = None
                if resumed is not None:
                    missing = {
                        i
                        for region in resumed.missing().get("leaf", [])
                        for i in range(region.start[0], region.stop[0])
                    }
                    assert all(start >= before[-1] + 10 for start in missing), at
                    resumed.close()
            if not path.exists():
                run(path, resume=True)
        assert loaded(path)["leaf"].tolist() == list(range(40)), at
        assert beside(path) == ["model"], at


def test_a_failed_sync_is_never_asked_again(tmp_path):
    """After a failed fdatasync the pages are gone and the next one would lie: no flush acknowledges anything more."""
    path = tmp_path / "model"
    writer = tailrace.Writer(path, memory_budget=BUDGET)
    leaf = writer.declare("leaf", shape=(4,), dtype="int32", chunk_shape=(1,))
    leaf[0] = 1
    writer.flush()
    leaf[1] = 2
    syncs = []

    def failing(call):
        if call.name == "fdatasync":
            syncs.append(call.args[0])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call.make()

    with faults.intercepted(failing), pytest.raises(StorageError, match="syncing data file"):
        writer.flush()
    for again in (writer.flush, writer.commit, lambda: writer.chunks.lanes.sync()):
        with pytest.raises((WriterClosedError, StorageError), match="Input/output error"):
            again()
    writer.close()

    assert len(syncs) == 1
    with tailrace.Writer(path, memory_budget=BUDGET, resume=True) as resumed:
        assert [str(region) for region in resumed.missing()["leaf"]] == ["[1:4]"]
        resumed.declare("leaf", shape=(4,), dtype="int32", chunk_shape=(1,))[1:] = np.full(3, 5, np.int32)
    assert loaded(path)["leaf"].tolist() == [1, 5, 5, 5]


def test_a_failed_sync_of_the_journal_ends_the_writer(tmp_path):
    """The record may or may not be on the disk: the flush says that it failed, and none after it succeeds."""
    path = tmp_path / "model"
    writer = tailrace.Writer(path, memory_budget=BUDGET)
    leaf = writer.declare("leaf", shape=(4,), dtype="int32", chunk_shape=(1,))
    leaf[0] = 1
    writer.flush()
    leaf[1] = 2
    journal = writer.ledger._descriptor

    def failing(call):
        if call.name == "fdatasync" and call.args[0] == journal:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call.make()

    with faults.intercepted(failing), pytest.raises(StorageError, match="writing journal"):
        writer.flush()
    with pytest.raises(WriterClosedError, match="resume=True"):
        writer.flush()
    writer.close()

    with tailrace.Writer(path, memory_budget=BUDGET, resume=True) as resumed:
        assert [str(region) for region in resumed.missing()["leaf"]] in (["[1:4]"], ["[2:4]"])
        resumed.declare("leaf", shape=(4,), dtype="int32", chunk_shape=(1,))[:] = np.full(4, 5, np.int32)
    assert loaded(path)["leaf"].tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("without", [(), ("o_direct",)], ids=["direct", "buffered"])
def test_short_writes_are_gone_on_with(without, tmp_path):
    """A write that takes only some of the bytes loses none."""
    rng = np.random.default_rng(1)
    tree = {"large": rng.integers(0, 99, 3 * MIB).astype(np.uint8), "small": np.arange(7)}

    def short(call):
        if call.name in faults.WRITES and len(memoryview(call.args[1])) > 1:
            data = memoryview(call.args[1])
            taken = max(1, int(len(data) * rng.uniform(0.2, 1)))
            return call.real(call.args[0], data[:taken], *call.args[2:])
        return call.make()

    with faults.intercepted(faults.unavailable(without, short)):
        tailrace.save(tmp_path / "model", tree, memory_budget=BUDGET)

    assert same(loaded(tmp_path / "model"), tree)


def test_a_file_system_that_takes_o_direct_back(tmp_path):
    """Accepted at open and refused at the write: the same file is written through the cache."""
    tree = {"large": np.arange(MIB, dtype=np.int32)}

    def refusing(call):
        if call.name == "pwrite" and os.O_DIRECT & _flags(call.args[0]):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call.make()

    with faults.intercepted(refusing):
        tailrace.save(tmp_path / "model", tree, memory_budget=BUDGET)

    assert same(loaded(tmp_path / "model"), tree)


def _flags(descriptor):
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)
