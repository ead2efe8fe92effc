"""The transaction: what its verbs promise, one by one."""

import contextlib
import gc
import os
import threading
import tracemalloc

import numpy as np
import pytest

from tailrace.checkpoint.reader import open as open_checkpoint
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import (
    BudgetError,
    IncompleteError,
    InputError,
    MissingKeyError,
    PendingError,
    StorageError,
    WriterClosedError,
)
from tailrace.flow.regions import Region
from tailrace.format import structure

MIB = 1 << 20


class Counting:
    """A source that makes its values: element i holds i."""

    def __init__(self, shape, dtype="<f4"):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    def read_into(self, region, out):
        """Fill it."""
        numbers = np.zeros(region.shape, np.int64)
        for axis, (start, extent) in enumerate(zip(region.start, region.shape, strict=True)):
            weight = int(np.prod(self.shape[axis + 1 :]))
            numbers += (np.arange(start, start + extent) * weight).reshape(
                [-1 if a == axis else 1 for a in range(out.ndim)]
            )
        out[...] = numbers


def test_declaring_again_returns_the_leaf_as_it_stands(tmp_path, stored):
    """So that a resumed program just runs again."""
    with Transaction(tmp_path / "x") as writer:
        writer.declare("a", shape=(4,), dtype="int32")[:2] = np.int32([1, 2])
        again = writer.declare("a", shape=(4,), dtype="int32")
        missing = again.missing()
        again[2:] = np.int32([3, 4])

    assert missing == [Region((2,), (2,))]
    assert stored(tmp_path / "x", "a").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("other", [{"shape": (5,)}, {"dtype": "int64"}, {"chunk_shape": (2,)}, {"kind": "int"}])
def test_another_declaration_voids_what_was_written(tmp_path, other):
    """In shape, dtype, chunks or kind; what the old one wrote counts as dead."""
    declaration = {"shape": (4,), "dtype": "int32"}
    writer = Transaction(tmp_path / "x")
    writer.declare("a", **declaration)[...] = 1
    leaf = writer.declare("a", **{**declaration, **other})
    missing = leaf.missing()
    leaf[...] = 2
    checkpoint = writer.commit()

    assert missing == [Region((0,), leaf.shape)]
    assert (checkpoint["a"][...] == 2).all()

    checkpoint.verify()
    checkpoint.close()


def test_resuming_with_another_budget_keeps_what_was_written(tmp_path):
    """The chunks one would choose now are others, but nobody asked for others."""
    shape = (2048, 4096)
    with Transaction(tmp_path / "x", memory_budget="16MiB") as writer:
        chunks = writer.declare("a", shape=shape, dtype="float32").chunk_shape
        writer.declare("a", shape=shape, dtype="float32")[: chunks[0]] = 1
        writer.flush()
        writer.close()
    with Transaction(tmp_path / "x", memory_budget="256MiB", resume=True) as writer:
        leaf = writer.declare("a", shape=shape, dtype="float32")
        missing, other = leaf.missing(), writer.declare("b", shape=shape, dtype="float32").chunk_shape
        writer.abort()

    assert other != chunks == leaf.chunk_shape
    assert missing == [Region((chunks[0], 0), (2048 - chunks[0], 4096))]


def test_a_chunk_that_a_smaller_budget_cannot_assemble_is_refused_at_resume(tmp_path):
    """Not at commit, after hours; and the transaction stays resumable."""
    writer = Transaction(tmp_path / "x", memory_budget="64MiB")
    writer.declare("a", shape=(2048, 1024), dtype="float32", chunk_shape=(2048, 1024))[0] = 1
    writer.flush()
    writer.close()
    with pytest.raises(BudgetError, match=r"'a'.*8388608 bytes.*raise memory_budget"):
        Transaction(tmp_path / "x", memory_budget="8MiB", resume=True)
    Transaction(tmp_path / "x", memory_budget="64MiB", resume=True).abort()


def test_a_deleted_or_redeclared_leaf_takes_no_more_writes(tmp_path):
    """They would be lost without a word."""
    writer = Transaction(tmp_path / "x")
    deleted = writer.declare("a", shape=(4,), dtype="int32")
    writer.delete("a")
    old = writer.declare("b", shape=(4,), dtype="int32")
    writer.declare("b", shape=(5,), dtype="int32")
    for leaf in (deleted, old):
        with pytest.raises(InputError, match="was deleted or declared in another way since"):
            leaf[...] = 1
    writer.abort()


def test_delete(tmp_path):
    """A leaf or a text goes, with everything of it; what is not there cannot."""
    with Transaction(tmp_path / "x") as writer:
        writer.declare("a", shape=(4,), dtype="int32")[:3] = 1
        writer.set_text("t", "text")
        writer.declare("b", shape=(), dtype="int32")[()] = 1
        writer.delete("a")
        writer.delete("t")
        with pytest.raises(MissingKeyError, match="no leaf 'a' has been declared"):
            writer.delete("a")
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint.keys() == ["b"]

        checkpoint.verify()


def test_texts_and_leaves_replace_each_other(tmp_path):
    """Whatever is written last is at the key."""
    with Transaction(tmp_path / "x") as writer:
        writer.set_text("a", "one")
        writer.declare("a", shape=(), dtype="int32")[()] = 1
        writer.declare("b", shape=(), dtype="int32")[()] = 1
        writer.set_text("b", "two")
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint["b"] == "two"
        assert checkpoint["a"][()] == 1

        checkpoint.verify()


def test_missing_merges_neighbours(tmp_path):
    """A million chunks that were not written are a few boxes, not a million lines."""
    writer = Transaction(tmp_path / "x")
    leaf = writer.declare("a", shape=(6, 100), dtype="int8", chunk_shape=(1, 10))
    writer.declare("whole", shape=(3,), dtype="int8")[...] = 1
    writer.declare("empty", shape=(0, 3), dtype="int8")
    leaf[2] = 1
    leaf[4, 15:25] = 1
    found = writer.missing()
    writer.abort()
    left = np.ones((6, 100), bool)
    left[2] = left[4, 15:25] = False
    for region in found["a"]:
        assert left[region.slices].all()

        left[region.slices] = False

    assert list(found) == ["a"]
    assert not left.any()
    assert len(found["a"]) <= 8


def test_commit_names_what_is_missing_and_stays_open(tmp_path):
    """Leaf and regions; once they are written, it commits."""
    writer = Transaction(tmp_path / "x")
    leaf = writer.declare("deep/a", shape=(4, 2), dtype="int32")
    leaf[:1] = 1
    with pytest.raises(IncompleteError, match=r"1 of 1 leaves .*deep/a: \[1:4, 0:2\].*delete\(key\)"):
        writer.commit()
    leaf[1:] = 2
    with writer.commit() as checkpoint:
        assert checkpoint["deep/a"][:, 0].tolist() == [1, 2, 2, 2]


def test_commit_twice_is_one_commit(tmp_path):
    """The same checkpoint; and nothing may be written any more."""
    writer = Transaction(tmp_path / "x")
    leaf = writer.declare("a", shape=(), dtype="int32")
    leaf[()] = 1
    writer.commit().close()
    before = sorted(os.listdir(tmp_path / "x"))
    with writer.commit() as checkpoint:
        assert checkpoint["a"][()] == 1
    with pytest.raises(WriterClosedError, match="has committed; open a new one"):
        leaf[()] = 2
    writer.abort()

    assert sorted(os.listdir(tmp_path / "x")) == before


def test_abort_leaves_nothing(tmp_path, same_files):
    """Not even the parents that were made; and using it afterwards is an error."""
    writer = Transaction(tmp_path / "made" / "by" / "us" / "x")
    writer.declare("a", shape=(4,), dtype="int32")[...] = 1
    writer.flush()
    writer.abort()
    writer.abort()
    with pytest.raises(WriterClosedError, match="has been aborted"):
        writer.flush()

    assert os.listdir(tmp_path) == []


def test_an_exception_keeps_what_was_flushed_and_only_that(tmp_path):
    """It can be resumed; without a flush there is nothing to resume."""
    for name in ("flushed", "not"):
        with contextlib.suppress(ZeroDivisionError), Transaction(tmp_path / name) as writer:
            writer.declare("a", shape=(2,), dtype="int32")[0] = 1
            if name == "flushed":
                writer.flush()
            writer.declare("a", shape=(2,), dtype="int32")[1] = 1
            raise ZeroDivisionError
    with Transaction(tmp_path / "flushed", resume=True) as writer:
        missing = writer.missing()
        writer.abort()

    assert missing == {"a": [Region((1,), (1,))]}
    assert os.listdir(tmp_path) == []


def test_pending_state_is_refused_with_both_ways_out(tmp_path):
    """Somebody's half-written checkpoint is neither resumed nor deleted by accident."""
    writer = Transaction(tmp_path / "x")
    writer.set_text("t", "text")
    writer.flush()
    writer.close()
    with pytest.raises(
        PendingError, match=r"resume=True to go on .*, or discard it with Writer\(.*resume=True\).abort"
    ):
        Transaction(tmp_path / "x")
    Transaction(tmp_path / "x", resume=True).abort()
    Transaction(tmp_path / "x").abort()


def test_resume_on_nothing_begins_anew(tmp_path):
    """The same program starts and resumes."""
    with Transaction(tmp_path / "x", resume=True) as writer:
        writer.set_text("t", "text")

    assert not writer.resumed


def test_everything_that_was_flushed_is_there_after_resume(tmp_path, stored):
    """Chunks, boxes of chunks, texts, containers, metadata, fingerprint, kinds."""
    first = Transaction(tmp_path / "x")
    leaf = first.declare("a", shape=(4, 4), dtype="int32", chunk_shape=(2, 4), kind="array")
    leaf[:2] = 1
    leaf[2, :3] = 2
    first.declare("n", shape=(), dtype="int64", kind="int")[()] = 7
    first.set_text("t", "text")
    first.set_structure(("l",), structure.List(()))
    first.set_metadata({"step": 3})
    first.set_fingerprint({"sha": "00"})
    first.flush()
    first.close()
    second = Transaction(tmp_path / "x", resume=True)
    missing, fingerprint = second.missing(), second.fingerprint
    again = second.declare("a", shape=(4, 4), dtype="int32", chunk_shape=(2, 4))
    again[2:, 3] = 3
    again[3] = 4
    with second.commit() as checkpoint:
        checkpoint.verify()

        assert checkpoint["t"] == "text"
        assert checkpoint["n"].kind == "int"
        assert checkpoint.metadata == {"step": 3}
        assert checkpoint.source == {"sha": "00"}
        assert checkpoint.tree()["l"] == []

    assert sorted(missing) == ["a"]
    assert fingerprint == {"sha": "00"}
    assert stored(tmp_path / "x", "a").tolist() == [[1] * 4, [1] * 4, [2, 2, 2, 3], [4] * 4]


def test_data_files_that_lost_every_chunk_are_gone_after_a_resumed_commit(tmp_path):
    """A file whose leaf was declared anew is nobody's: it must not stay as debris."""
    first = Transaction(tmp_path / "x")
    first.declare("a", shape=(3,), dtype="int32")[...] = 1
    first.flush()
    first.declare("a", shape=(5,), dtype="int32")
    first.flush()
    first.close()
    second = Transaction(tmp_path / "x", resume=True)
    second.declare("a", shape=(5,), dtype="int32")[...] = 2
    with second.commit() as checkpoint:
        checkpoint.verify()

    assert len(os.listdir(tmp_path / "x" / "d")) == 2  # one of chunks, one of the index


def test_records_of_bytes_that_are_gone_count_as_missing(tmp_path, caplog):
    """After a takeover at a bad moment, or on a disk that lied; never a commit that cannot be read."""
    writer = Transaction(tmp_path / "x")
    writer.declare("a", shape=(3,), dtype="int32")[...] = 1
    writer.flush()
    writer.close()
    (data,) = (tmp_path / "x.tailrace-pending" / "d").iterdir()
    data.write_bytes(b"")
    with Transaction(tmp_path / "x", resume=True) as writer:
        missing = writer.missing()
        writer.abort()

    assert missing == {"a": [Region((0,), (3,))]}
    assert "1 chunks are gone" in caplog.text


def test_replaced_chunks_are_accounted_for(tmp_path):
    """Every byte of every data file is a chunk, listed as dead, or zero: verify reads them all."""
    with Transaction(tmp_path / "x") as writer:
        leaf = writer.declare("a", shape=(4, 100), dtype="int32", chunk_shape=(2, 100))
        leaf[...] = 1
        leaf[1:3] = 2
        leaf[...] = 3
        writer.flush()
        leaf[0, 5] = 4
        leaf[1] = 5
        writer.flush()
        leaf[0, 5:9] = 6
    with open_checkpoint(tmp_path / "x") as checkpoint:
        report = checkpoint.verify()

        assert checkpoint["a"][0, 4:10].tolist() == [3, 6, 6, 6, 6, 3]
        assert sum(len(info.dead) for info in checkpoint.manifest.data_files.values()) >= 4
        assert report.bytes == sum(
            os.path.getsize(os.path.join(base, name)) for base, _, names in os.walk(tmp_path / "x") for name in names
        )


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_budget_holds_and_is_given_back(tmp_path, stored, threads, compression):
    """The least budget, one thread or far too many, whole leaves and regions off the chunks' borders."""
    writer = Transaction(tmp_path / "x", memory_budget="8MiB", threads=threads, compression=compression)
    source = Counting((1000, 5000))
    writer.write_source("a", source)
    leaf = writer.declare("b", shape=(1000, 5000), dtype="float64")
    for start in range(0, 1000, 300):
        part = Counting((min(300, 1000 - start), 5000))
        leaf.write(Region((start, 0), part.shape), part)  # float32 into float64: read, then cast
    checkpoint = writer.commit()
    checkpoint.close()

    assert writer.budget.peak_bytes <= 8 * MIB
    assert writer.budget.used_bytes == 0
    assert (stored(tmp_path / "x", "a") == np.arange(5_000_000, dtype="<f4").reshape(1000, 5000)).all()
    assert stored(tmp_path / "x", "b")[300:303, 0].tolist() == [0, 5000, 10000]


def test_many_threads_write_one_leaf(tmp_path, stored):
    """Rows from eight threads, flushes between them."""
    writer = Transaction(tmp_path / "x", memory_budget="16MiB")
    leaf = writer.declare("a", shape=(64, 1000), dtype="int64", chunk_shape=(7, 300))

    def work(number):
        for row in range(number, 64, 8):
            leaf[row] = np.arange(1000) + row
            if row % 16 == number:
                writer.flush()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with writer.commit() as checkpoint:
        checkpoint.verify()

    assert (stored(tmp_path / "x", "a") == np.arange(1000) + np.arange(64)[:, None]).all()


def test_a_write_beside_a_commit_is_in_it_or_refused(tmp_path, stored):
    """Never accepted and lost."""
    writer = Transaction(tmp_path / "x")
    leaf = writer.declare("a", shape=(1000,), dtype="int64", chunk_shape=(1,))
    leaf[...] = 0
    accepted, started = [], threading.Event()

    def work():
        for i in range(1000):
            try:
                leaf[i] = i + 1
            except WriterClosedError:
                return
            accepted.append(i)
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    writer.finish()
    thread.join()
    found = stored(tmp_path / "x", "a")

    assert [i for i in accepted if found[i] != i + 1] == []


def test_a_source_that_fails_leaves_the_writer_open(tmp_path):
    """Its own error comes out; other pieces are kept, what is missing is known."""

    class Broken(Counting):
        def read_into(self, region, out):
            if region.start[0] >= 4:
                raise ZeroDivisionError
            super().read_into(region, out)

    writer = Transaction(tmp_path / "x", memory_budget="8MiB")
    with pytest.raises(ZeroDivisionError):
        writer.write_source("a", Broken((8, 500_000)), chunk_shape=(1, 500_000))
    missing = writer.missing()["a"]
    writer.write_source("a", Counting((8, 500_000)), chunk_shape=(1, 500_000))
    with writer.commit() as checkpoint:
        checkpoint.verify()

    assert missing[-1].stop == (8, 500_000)
    assert writer.budget.used_bytes == 0


def test_an_interrupted_append_closes_the_writer(tmp_path):
    """Ctrl-C may come between two instructions of it; what was flushed is resumable."""

    class Interrupted(Counting):
        def read_into(self, region, out):  # noqa: ARG002
            raise KeyboardInterrupt

    writer = Transaction(tmp_path / "x")
    writer.set_text("t", "text")
    writer.flush()
    with pytest.raises(KeyboardInterrupt):
        writer.write_source("a", Interrupted((3,)))
    with pytest.raises(WriterClosedError, match=r"failed: interrupted\. What was flushed is kept"):
        writer.flush()
    writer.close()
    Transaction(tmp_path / "x", resume=True).abort()


def test_a_disk_that_fails_closes_the_writer(tmp_path, monkeypatch):
    """A failed sync is never retried: the pages may be gone. What was acknowledged before is resumable."""
    writer = Transaction(tmp_path / "x")
    leaf = writer.declare("a", shape=(2,), dtype="int32", chunk_shape=(1,))
    leaf[0] = 1
    writer.flush()
    leaf[1] = 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StorageError, match=r"syncing data file .*Input/output error"):
            writer.flush()
    with pytest.raises(WriterClosedError, match=r"failed: syncing data file .*resume=True"):
        writer.flush()
    writer.close()
    with Transaction(tmp_path / "x", resume=True) as writer:
        missing = writer.missing()
        writer.abort()

    assert missing == {"a": [Region((1,), (1,))]}


@pytest.mark.parametrize(
    "arguments", [{"memory_budget": "7MiB"}, {"compression": "gzip"}, {"threads": 0}, {"memory_budget": "x"}]
)
def test_bad_arguments_change_nothing(tmp_path, arguments, same_files):
    """They are refused before a directory is made."""
    with pytest.raises(InputError):
        Transaction(tmp_path / "new" / "x", **arguments)

    assert os.listdir(tmp_path) == []


def test_a_writer_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch, same_files):
    """An error after the directory was made: it goes again, with its parents, lock and descriptors."""
    from tailrace.checkpoint import transaction

    def refuse(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transaction, "ChunkWriter", refuse)
    with pytest.raises(OSError, match="No space"):
        Transaction(tmp_path / "new" / "x")

    assert os.listdir(tmp_path) == []


def test_metadata_must_be_json(tmp_path):
    """Refused where it enters."""
    with Transaction(tmp_path / "x") as writer:
        for bad in ({"a": object()}, [1], {1: {2: 3j}}):
            with pytest.raises(InputError, match="metadata must be a dict of what JSON can hold"):
                writer.set_metadata(bad)
        writer.set_metadata({"a": [1, None, "x"]})
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint.metadata == {"a": [1, None, "x"]}


def test_a_writer_that_is_dropped_gives_everything_back(tmp_path, same_files):
    """Lock and descriptors; what it had flushed is resumable at once."""
    writer = Transaction(tmp_path / "x")
    writer.write_arrays([(("a",), np.ones(3), "array")])
    writer.flush()
    del writer
    gc.collect()
    with Transaction(tmp_path / "x", resume=True) as writer:
        keys = writer.keys()

    assert keys == ["a"]


def test_large_arrays_of_another_byte_order_are_swapped_in_pieces(tmp_path, stored):
    """Never copied whole; small ones neither change nor linger."""
    tracemalloc.start()
    array = np.arange(4_000_000, dtype=">f8")
    small = np.arange(5, dtype=">i4")
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    with Transaction(tmp_path / "x", memory_budget="8MiB") as writer:
        writer.write_arrays([(("a",), array, "array"), (("b",), small, "array")])
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()

    assert peak < 12 * MIB
    assert (stored(tmp_path / "x", "a") == array).all()
    assert stored(tmp_path / "x", "b").tolist() == [0, 1, 2, 3, 4]
