"""A Writer against a model of numpy arrays, through any order of calls, crashes and resumes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tailrace
from tailrace.errors import IncompleteError
from tailrace.flow.regions import Region
from tailrace.testing import faults
from tailrace.testing.model import Model

KEYS = ["a", "b/c", "b/d", "e/f/g"]
DTYPES = ["int8", "float32", "bfloat16", "complex128", "bool"]
BUDGET = "8MiB"


@st.composite
def declarations(draw: st.DrawFn) -> tuple[tuple[int, ...], str, tuple[int, ...] | None]:
    """Small shapes, and some of which a few half-written chunks fill a quarter of the budget."""
    if draw(st.integers(0, 4)) == 0:
        return (700, 1100), "float32", draw(st.sampled_from([(250, 1000), (129, 1100), None]))
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    chunks = draw(st.none() | st.tuples(*(st.integers(1, max(1, n)) for n in shape)))
    return shape, draw(st.sampled_from(DTYPES)), chunks


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Any region of a leaf, empty ones too; large leaves by large regions, as they are written."""
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Region(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))


class Transactions(RuleBasedStateMachine):
    """One path: what is being written, what of it is acknowledged, and what was committed last."""

    direct = True

    @initialize(compression=st.sampled_from([None, "zstd"]), threads=st.integers(1, 3))
    def begin(self, compression: str | None, threads: int) -> None:
        """An open writer at a path that holds nothing."""
        without = () if self.direct else ("o_direct",)
        self.faulty = faults.intercepted(faults.unavailable(without, _unsynced))
        self.faulty.__enter__()
        self.base = Path(tempfile.mkdtemp(prefix="tailrace-"))
        self.path = self.base / "model"
        self.options: dict[str, Any] = {"memory_budget": BUDGET, "compression": compression, "threads": threads}
        self.compression = compression
        self.committed: Model | None = None
        self.seed = 0
        self.open()

    def open(self) -> None:
        """A new writer, which replaces whatever is there."""
        self.writer = tailrace.Writer(self.path, overwrite=True, **self.options)
        self.model, self.acknowledged = Model(), Model()
        self.flushed = False
        self.handles: dict[str, tailrace.LeafWriter] = {}

    def teardown(self) -> None:
        """Abort, and nothing is left but what was committed."""
        if not hasattr(self, "writer"):
            return
        self.writer.abort()
        left = sorted(entry.name for entry in self.base.iterdir())
        shutil.rmtree(self.base)
        self.faulty.__exit__(None, None, None)
        assert left == ([] if self.committed is None else ["model"])

    # Writing

    @rule(key=st.sampled_from(KEYS), declaration=declarations())
    def declare(self, key: str, declaration: tuple[tuple[int, ...], str, tuple[int, ...] | None]) -> None:
        """A leaf, as before or anew."""
        shape, dtype, chunk_shape = declaration
        known = self.model.leaves.get(key)
        leaf = self.writer.declare(key, shape=shape, dtype=dtype, chunk_shape=chunk_shape)
        if known is not None and known.declaration == (shape, dtype, leaf.chunk_shape):
            return
        self.model.declare(key, shape, dtype, leaf.chunk_shape)
        self.handles[key] = leaf

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def write_region(self, data: st.DataObject) -> None:
        """Any region of any leaf; the last call wins."""
        key = data.draw(st.sampled_from(sorted(self.handles)))
        leaf = self.model.leaves[key]
        self._write(key, data.draw(boxes(leaf.values.shape)))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def write_rows(self, data: st.DataObject) -> None:
        """Rows one after the other, which leave half-written chunks behind."""
        key = data.draw(st.sampled_from(sorted(self.handles)))
        shape = self.model.leaves[key].values.shape
        if shape:
            first = data.draw(st.integers(0, shape[0]))
            for row in range(first, min(first + 3, shape[0])):
                self._write(key, Region((row, *(0 for _ in shape[1:])), (1, *shape[1:])))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def write_whole(self, data: st.DataObject) -> None:
        """All of a leaf."""
        key = data.draw(st.sampled_from(sorted(self.handles)))
        self._write(key, Region.whole(self.model.leaves[key].values.shape))

    def _write(self, key: str, region: Region) -> None:
        self.seed += 1
        value = (np.arange(region.size).reshape(region.shape) % 7 + self.seed).astype(
            self.model.leaves[key].values.dtype
        )
        self.handles[key].write(region, value)
        self.model.write(key, region, value)

    @rule(key=st.sampled_from(KEYS), value=st.text(max_size=5))
    def set_text(self, key: str, value: str) -> None:
        """A text, also in place of a leaf."""
        self.writer.set_text(key, value)
        self.model.set_text(key, value)
        self.handles.pop(key, None)

    @precondition(lambda self: self.model.keys())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """A leaf or text that is there."""
        key = data.draw(st.sampled_from(self.model.keys()))
        self.writer.delete(key)
        self.model.delete(key)
        self.handles.pop(key, None)

    @rule(value=st.integers())
    def set_metadata(self, value: int) -> None:
        """It replaces what was set."""
        self.writer.set_metadata({"value": value % 2**53})
        self.model.metadata = {"value": value % 2**53}

    # Ends

    @rule()
    def flush(self) -> None:
        """All of it is acknowledged."""
        self.writer.flush()
        self.acknowledged = self.model.copy()
        self.flushed = True

    @rule()
    def crash_and_resume(self) -> None:
        """What was acknowledged is there, exactly: the rest was in no journal."""
        _die(self.writer)
        self.writer = tailrace.Writer(self.path, overwrite=True, resume=True, **self.options)
        assert self.writer.resumed
        self.model = self.acknowledged.copy()
        self.handles = {
            key: self.writer.declare(
                key, shape=leaf.values.shape, dtype=leaf.values.dtype, chunk_shape=leaf.declaration[2]
            )
            for key, leaf in self.model.leaves.items()
        }

    @rule()
    def look_at_what_a_crash_would_leave(self) -> None:
        """A copy of the files as they are: resumed, filled in and committed, it holds what was acknowledged."""
        pending = self.base / "model.tailrace-pending"
        if not self.flushed:
            return
        with tempfile.TemporaryDirectory(prefix="tailrace-") as base:
            path = Path(base) / "model"
            shutil.copytree(pending, path.with_name(pending.name), ignore=shutil.ignore_patterns("owner.json"))
            resumed = tailrace.Writer(path, resume=True, **self.options)
            expected = self.acknowledged.copy()
            for key, regions in resumed.missing().items():
                leaf = expected.leaves[key]
                handle = resumed.declare(
                    key, shape=leaf.values.shape, dtype=leaf.values.dtype, chunk_shape=leaf.declaration[2]
                )
                for region in regions:
                    filler = np.ones(region.shape, leaf.values.dtype)
                    handle.write(region, filler)
                    expected.write(key, region, filler)
            resumed.commit().close()
            _check(path, expected)

    @rule()
    def commit(self) -> None:
        """All or nothing: an incomplete leaf leaves the writer open, a commit is what the model says."""
        if self.model.missing():
            with pytest.raises(IncompleteError):
                self.writer.commit()
            return
        self.writer.commit().close()
        self.committed = self.model
        self._check_committed()
        self.open()

    @rule()
    def abort(self) -> None:
        """Nothing of it is left."""
        self.writer.abort()
        self.open()

    @precondition(lambda self: self.committed is not None)
    @rule()
    def fork(self) -> None:
        """Go on from what was committed last."""
        assert self.committed is not None
        self.writer.abort()
        shutil.rmtree(self.base / "parent", ignore_errors=True)
        shutil.copytree(self.path, self.base / "parent")
        self.writer = tailrace.fork(
            self.base / "parent", self.path, overwrite=True, memory_budget=BUDGET, compression=self.compression
        )
        shutil.rmtree(self.base / "parent")
        self.model = self.committed.copy()
        self.flushed = True
        self.acknowledged = self.model.copy()
        self.handles = {
            key: self.writer.declare(
                key, shape=leaf.values.shape, dtype=leaf.values.dtype, chunk_shape=leaf.declaration[2]
            )
            for key, leaf in self.model.leaves.items()
        }

    # What holds at any time

    @invariant()
    def knows_what_is_missing(self) -> None:
        """`missing` names each element that was not written, once, and no other."""
        if not hasattr(self, "writer"):
            return
        assert self.writer.keys() == self.model.keys()
        missing = self.writer.missing()
        assert missing.keys() == self.model.missing().keys()
        for key, elements in self.model.missing().items():
            counted = np.zeros(elements.shape, int)
            for region in missing[key]:
                counted[region.slices] += 1
            assert np.array_equal(counted, elements)

    def _check_committed(self) -> None:
        assert self.committed is not None
        assert sorted(entry.name for entry in self.base.iterdir()) == ["model"]
        _check(self.path, self.committed)


class BufferedTransactions(Transactions):
    """The same on a file system without O_DIRECT."""

    direct = False


def _check(path: Path, model: Model) -> None:
    with tailrace.open(path, memory_budget=BUDGET) as checkpoint:
        checkpoint.verify()
        assert sorted(checkpoint.keys()) == model.keys()
        assert checkpoint.metadata == model.metadata
        for key in checkpoint:
            leaf = checkpoint[key]
            if isinstance(leaf, str):
                assert leaf == model.texts[key]
            else:
                expected = model.leaves[key].values
                assert leaf.dtype == expected.dtype
                assert leaf[...].tobytes() == expected.tobytes()


def _unsynced(call: faults.Call) -> Any:
    return None if call.name in faults.SYNCS else call.make()


def _die(writer: tailrace.Writer) -> None:
    """Let go of everything as the kernel does when a process dies: nothing more is written."""
    writer.chunks.close()
    writer.ledger.close()
    writer._release()


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestTransactions = Transactions.TestCase
TestTransactions.settings = SETTINGS
TestBufferedTransactions = BufferedTransactions.TestCase
TestBufferedTransactions.settings = SETTINGS


@pytest.mark.long
def test_transactions_for_long() -> None:
    """Some thousands of sequences."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Transactions, settings=settings(SETTINGS, max_examples=3000, stateful_step_count=60))
