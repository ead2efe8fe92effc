"""Regions in any order, overlapping, from any thread: the leaf holds what numpy would."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailrace
from tailrace.errors import IncompleteError, InputError
from tailrace.flow.regions import Region

BUDGET = "8MiB"
DTYPES = ["int8", "uint16", "float32", "float64", "bfloat16", "bool", "complex64"]


def fresh(shape, dtype, seed):
    """Values that differ from write to write."""
    return (np.arange(int(np.prod(shape))).reshape(shape) * 3 % 11 + seed).astype(dtype)


@st.composite
def scripts(draw):
    """A shape, a chunk shape, and regions to write one after the other, some of them after a flush."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    chunk_shape = tuple(draw(st.integers(1, n)) for n in shape)
    writes = []
    for _ in range(draw(st.integers(1, 12))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        extent = tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
        writes.append((Region(start, extent), draw(st.booleans())))
    return shape, chunk_shape, writes, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, "zstd"]))


@given(scripts())
def test_overlapping_regions_are_what_numpy_makes_of_them(script):
    """Any regions over a first whole write or none, flushed in between or not."""
    shape, chunk_shape, writes, dtype, compression = script
    expected, written = np.zeros(shape, dtype), np.zeros(shape, bool)
    with tempfile.TemporaryDirectory() as base:
        writer = tailrace.Writer(Path(base) / "model", memory_budget=BUDGET, compression=compression)
        leaf = writer.declare("leaf", shape=shape, dtype=dtype, chunk_shape=chunk_shape)
        for number, (region, flush) in enumerate(writes):
            value = np.asarray(fresh(region.shape, dtype, number))
            leaf.write(region, value)
            expected[region.slices], written[region.slices] = value, True
            if flush:
                writer.flush()
        for region in leaf.missing():
            leaf.write(region, np.full(region.shape, 1, dtype))
            assert not written[region.slices].any()
            expected[region.slices] = 1
        with writer.commit() as checkpoint:
            checkpoint.verify()
            found = checkpoint["leaf"][...]

    assert np.asarray(found).tobytes() == expected.tobytes()


def test_threads_that_write_disjoint_regions_of_the_same_chunks(tmp_path):
    """Rows, three columns of chunks wide, from eight threads that flush now and then: none is lost or torn."""
    expected = fresh((120, 3001), "float32", 1)
    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET) as writer:
        leaf = writer.declare("leaf", shape=expected.shape, dtype="float32", chunk_shape=(7, 1001))

        def work(mine):
            for row in range(mine, 120, 8):
                leaf[row] = expected[row]
                if row % 11 == 0:
                    writer.flush()

        in_threads(work, 8)

    assert np.array_equal(tailrace.load(tmp_path / "model")["leaf"], expected)


def test_threads_that_write_more_half_written_chunks_than_fit(tmp_path):
    """Columns of a leaf whose every chunk is half-written, four times their share of the budget."""
    expected = fresh((2048, 1024), "float32", 2)
    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET) as writer:
        leaf = writer.declare("leaf", shape=expected.shape, dtype="float32", chunk_shape=(256, 1024))

        def work(mine):
            for start in range(mine * 32, 1024, 4 * 32):
                leaf[:, start : start + 32] = expected[:, start : start + 32]

        in_threads(work, 4)

    assert np.array_equal(tailrace.load(tmp_path / "model")["leaf"], expected)


@pytest.mark.parametrize("chunk_shape", [(64, 64), (9, 50), (1, 64)])
def test_the_last_call_wins_across_threads(chunk_shape, tmp_path):
    """Two threads take turns with overlapping regions: each sees to it that it writes after the other has returned."""
    rng = np.random.default_rng(3)
    expected = np.zeros((64, 64), np.int32)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET) as writer:
        leaf = writer.declare("leaf", shape=(64, 64), dtype="int32", chunk_shape=chunk_shape)
        leaf[...] = expected

        def work(mine):
            for _ in range(60):
                turns[mine].acquire()
                top, left = rng.integers(0, 63, 2)
                height, width = rng.integers(1, 65 - top), rng.integers(1, 65 - left)
                value = rng.integers(0, 1 << 30, (height, width), np.int32)
                leaf[top : top + height, left : left + width] = value
                expected[top : top + height, left : left + width] = value
                if rng.random() < 0.1:
                    writer.flush()
                turns[1 - mine].release()

        in_threads(work, 2)

    assert np.array_equal(tailrace.load(tmp_path / "model")["leaf"], expected)


def test_a_slow_call_does_not_hide_what_was_written_after_it_began_and_ended(tmp_path):
    """A chunk that was completed while an older call was at work does not bury what that call still writes."""

    class Slow:
        shape, dtype = (10,), np.dtype("int32")

        def read_into(self, _, out):
            started.set()
            go_on.wait(10)
            out[...] = 2

    started, go_on = threading.Event(), threading.Event()
    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET) as writer:
        leaf = writer.declare("leaf", shape=(20,), dtype="int32", chunk_shape=(20,))
        leaf[0:15] = np.full(15, 1, np.int32)
        slow = threading.Thread(target=leaf.write, args=(Region((0,), (10,)), Slow()))
        slow.start()
        started.wait(10)
        leaf[12:20] = np.full(8, 3, np.int32)
        go_on.set()
        slow.join()

    assert tailrace.load(tmp_path / "model")["leaf"].tolist() == [2] * 10 + [1, 1] + [3] * 8


def test_commit_waits_for_calls_of_other_threads(tmp_path):
    """A write that has begun is in the checkpoint; one that comes after the commit finds the writer closed."""

    class Slow:
        shape, dtype = (10,), np.dtype("int32")

        def read_into(self, _, out):
            started.set()
            go_on.wait(10)
            out[...] = 2

    started, go_on = threading.Event(), threading.Event()
    writer = tailrace.Writer(tmp_path / "model", memory_budget=BUDGET)
    leaf = writer.declare("leaf", shape=(10,), dtype="int32")
    slow = threading.Thread(target=leaf.write, args=(Region((0,), (10,)), Slow()))
    slow.start()
    started.wait(10)
    threading.Timer(0.1, go_on.set).start()
    writer.commit().close()
    slow.join()

    assert tailrace.load(tmp_path / "model")["leaf"].tolist() == [2] * 10


def test_threads_that_flush_while_others_declare(tmp_path):
    """A flush never acknowledges a chunk of a leaf whose declaration it leaves out."""
    writer = tailrace.Writer(tmp_path / "model", memory_budget=BUDGET)

    def work(mine):
        for number in range(60):
            leaf = writer.declare(f"leaf{number}", shape=(4,), dtype="int32", chunk_shape=(1,))
            leaf[mine] = mine + number
            writer.flush()

    in_threads(work, 4)
    writer.chunks.close()
    writer.ledger.close()
    writer._release()

    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET, resume=True) as resumed:
        assert resumed.missing() == {}
    with tailrace.open(tmp_path / "model") as checkpoint:
        for number in range(60):
            assert checkpoint[f"leaf{number}"][...].tolist() == [number, number + 1, number + 2, number + 3]


def test_an_old_handle_of_a_leaf_declared_anew_is_refused(tmp_path):
    """It would write into nothing."""
    writer = tailrace.Writer(tmp_path / "model", memory_budget=BUDGET)
    old = writer.declare("leaf", shape=(4,), dtype="int32")
    new = writer.declare("leaf", shape=(5,), dtype="int32")

    with pytest.raises(InputError, match="declared in another way"):
        old[...] = 1
    new[...] = np.arange(5, dtype=np.int32)
    with writer.commit() as checkpoint:
        checkpoint.verify()
        assert checkpoint["leaf"][...].tolist() == [0, 1, 2, 3, 4]


def test_a_leaf_below_a_list_is_gone_after_delete_and_resume(tmp_path):
    """Deleting "layers/0" drops the leaf at ("layers", 0), in the journal, too."""
    writer = tailrace.Writer(tmp_path / "model", memory_budget=BUDGET)
    writer.declare(("layers", 0), shape=(4,), dtype="int32")
    writer.declare(("layers", 1), shape=(4,), dtype="int32")
    writer.delete("layers/0")
    writer.flush()
    writer.close()

    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET, resume=True) as resumed:
        assert resumed.keys() == ["layers/1"]
        resumed.delete("layers/1")


def test_a_key_below_a_leaf_is_refused_each_time(tmp_path):
    """A refused key leaves nothing behind that lets the next one pass."""
    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET) as writer:
        writer.declare("a", shape=(0,), dtype="int32")
        for key in ("a/b/c", "a/b/d", "a/b"):
            with pytest.raises(InputError, match="below"):
                writer.declare(key, shape=(0,), dtype="int32")
        writer.delete("a")
        writer.declare("a/b/c", shape=(0,), dtype="int32")
        with pytest.raises(InputError, match="below"):
            writer.declare("a/b", shape=(0,), dtype="int32")
        writer.delete("a/b/c")
        writer.declare("a/b", shape=(0,), dtype="int32")

        assert writer.keys() == ["a/b"]


def test_commit_with_holes_leaves_the_writer_open(tmp_path):
    """It names the leaf and the region; written then, the commit succeeds."""
    writer = tailrace.Writer(tmp_path / "model", memory_budget=BUDGET)
    leaf = writer.declare("leaf", shape=(10, 4), dtype="int32", chunk_shape=(3, 3))
    leaf[0:7] = np.ones((7, 4), np.int32)

    with pytest.raises(IncompleteError, match=r"leaf: \[7:"):
        writer.commit()
    leaf[7:] = np.full((3, 4), 2, np.int32)
    with writer.commit() as checkpoint:
        checkpoint.verify()
        assert checkpoint["leaf"][...].tolist() == [[1] * 4] * 7 + [[2] * 4] * 3


@pytest.mark.parametrize("attempt", range(6))
def test_the_newest_writer_wins_whatever_its_journal_is_called(attempt, tmp_path):
    """Whole chunks over parts over whole chunks, each by a writer of its own: journals are read in any order."""
    expected = np.zeros(12, np.int32)
    for number, region in enumerate([(0, 12), (2, 5), (0, 4), (1, 9), (8, 12), (0, 4), (3, 6)], 1):
        writer = tailrace.Writer(tmp_path / "model", memory_budget=BUDGET, resume=True)
        leaf = writer.declare("leaf", shape=(12,), dtype="int32", chunk_shape=(4,))
        expected[slice(*region)] = number
        leaf[slice(*region)] = np.full(region[1] - region[0], number, np.int32)
        writer.flush()
        writer.close()
    with tailrace.Writer(tmp_path / "model", memory_budget=BUDGET, resume=True):
        pass
    with tailrace.open(tmp_path / "model") as checkpoint:
        checkpoint.verify()

        assert checkpoint["leaf"][...].tolist() == expected.tolist()


def in_threads(work, count):
    """Run `work(number)` on several threads, and raise what they raise."""
    errors = []

    def watched(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watched, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
