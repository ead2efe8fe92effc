"""Importing a Hugging Face model: every tensor under its own name, streamed through the memory budget.

The plan is made and checked from headers alone, before anything is written. An import that was killed goes on where
its last flush left it, provided that the source is still what it was: that is what the fingerprint is for.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.checkpoint import publish, reader
from tailrace.checkpoint.chunks import default_threads
from tailrace.checkpoint.leafwriter import LeafWriter
from tailrace.checkpoint.registry import SMALL_BYTES
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import (
    CheckpointExistsError,
    InputError,
    KeyPathError,
    NotACheckpointError,
    PendingError,
)
from tailrace.flow import pump
from tailrace.flow.budget import DEFAULT_BUDGET, parse_bytes
from tailrace.flow.regions import Region, split
from tailrace.flow.sources import Array
from tailrace.format.keys import KeyPath, check_path
from tailrace.huggingface.repository import Repository, open_repository
from tailrace.huggingface.safetensors import TensorSource
from tailrace.storage.location import resolve

CHUNK_BYTES = 2 << 20  # spares a host that wants 1/16 of the rows from reading 16 times its share
_BATCH_BYTES = 8 << 20
# What a kill may cost: a quarter of what was done, at least 16 and at most 512 MiB, and at most 10 seconds' work.
_FLUSH_SHARE = 4
_FLUSH_MIN_BYTES, _FLUSH_MAX_BYTES = 16 << 20, 512 << 20
_FLUSH_SECONDS = 10.0

Plan = dict[KeyPath, TensorSource]
ProgressFunction = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import came to."""

    path: Path
    leaves: int
    nbytes: int
    resumed_bytes: int = 0  # of these, what an earlier, unfinished run had written
    already_there: bool = False  # the same import was finished before; nothing was done


def import_model(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    memory_budget: int | str = DEFAULT_BUDGET,
    flat: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    compression: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    takeover: bool = False,
    progress: ProgressFunction | None = None,
) -> ImportReport:
    """Make the safetensors model at `source` a checkpoint at `out`, all at once, in `memory_budget` of host memory.

    Names are split at "." into nested keys, or kept whole with `flat`; on disk they are the same. Killed at any
    moment, it leaves nothing visible at `out`; called again it resumes. Called once more after that, it does nothing.
    `progress` is called with (bytes done, bytes in all), from several threads.

    Raises SourceFormatError, KeyPathError or LeafError for a model that cannot be imported, before anything is written;
    CheckpointExistsError when something else is at `out`; InputError when an unfinished import there has another
    source (`restart` discards it).
    """
    budget_bytes = parse_bytes(memory_budget)
    out = Path(out)
    repository = open_repository(Path(source))
    try:
        plan = _plan(repository, flat=flat)
        nbytes = sum(tensor.tensor.nbytes for tensor in plan.values())
        fingerprint = {
            "kind": "huggingface",
            "recipe": "identity",
            "flat": flat,
            "compression": compression or "none",
            "files": repository.fingerprint(),
        }
        recovered = publish.recover(resolve(out))  # an import killed while it published is done, with `overwrite` too
        if (recovered or not overwrite) and _is_finished(out, fingerprint, overwrite=overwrite):
            return ImportReport(out, len(plan), nbytes, already_there=True)
        options: dict[str, Any] = {"memory_budget": budget_bytes, "overwrite": overwrite, "compression": compression}
        if restart:
            Transaction(out, resume=True, takeover=takeover, **options).abort()
        counter = _Counter(nbytes, progress)
        with Transaction(out, resume=True, takeover=takeover, **options) as transaction:
            _check_same_import(transaction, fingerprint)
            try:
                _write(transaction, plan, chunk_bytes, counter)
            except KeyboardInterrupt:
                transaction.flush()  # whoever asks us to stop loses nothing
                raise
            transaction.finish()
        return ImportReport(out, len(plan), nbytes, resumed_bytes=counter.resumed)
    finally:
        repository.close()


def _plan(repository: Repository, *, flat: bool) -> Plan:
    """Which tensor becomes which leaf, checked: every name usable, none inside another."""
    plan: Plan = {}
    for source in repository.sources():
        name = source.tensor.name
        path: KeyPath = (name,) if flat else tuple(name.split("."))
        check_path(path)
        if not flat and "" in path:
            raise KeyPathError(f"tensor {name!r} has an empty part between its dots. Keep names whole with --flat.")
        plan[path] = source
    for path in plan:
        for length in range(1, len(path)):
            if path[:length] in plan:
                inner, outer = ".".join(map(str, path)), ".".join(map(str, path[:length]))
                raise KeyPathError(
                    f"tensors {outer!r} and {inner!r}: the first would have to be a leaf and a dict. "
                    f"Keep names whole with --flat."
                )
    return plan


def _is_finished(out: Path, fingerprint: dict[str, Any], *, overwrite: bool) -> bool:
    """Whether this very import is at `out`, committed.

    Raises CheckpointExistsError for another checkpoint that is not to be replaced.
    """
    if not os.path.lexists(out):
        return False
    try:
        with reader.open(out) as checkpoint:
            if not checkpoint.path.samefile(out):
                return False  # the only item of a directory, which is not ours to replace
            found = checkpoint.source
    except NotACheckpointError:
        return False  # the transaction says what is in the way
    if found == fingerprint or overwrite:
        return found == fingerprint
    what = "of another origin" if found is None else f"of another source: {_difference(found, fingerprint)}"
    raise CheckpointExistsError(f"{out} holds a checkpoint {what}. Give --overwrite to replace it, or another path.")


def _check_same_import(transaction: Transaction, fingerprint: dict[str, Any]) -> None:
    """Stamp a new transaction; refuse to go on with one that some other import, or program, began."""
    found = transaction.fingerprint
    if found is None:
        if transaction.resumed and transaction.keys():
            raise PendingError(
                f"{transaction.path}: an unfinished transaction is there that no import began. "
                f"Finish it with the program that did, or discard it with --restart."
            )
        transaction.set_fingerprint(fingerprint)
    elif found != fingerprint:
        raise InputError(
            f"{transaction.path}: the unfinished import there is of another source: {_difference(found, fingerprint)}. "
            f"Give --restart to discard what it has written and begin again, or restore the source."
        )


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What changed from one fingerprint to the other, in words."""
    told = [
        f"{name} was {before.get(name)!r}, now {now.get(name)!r}"
        for name in sorted((before.keys() | now.keys()) - {"files"})
        if before.get(name) != now.get(name)
    ]
    old, new = before.get("files", {}), now.get("files", {})
    told += [f"{name} is gone" for name in sorted(old.keys() - new.keys())]
    told += [f"{name} is new" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        fields = [f"{field} {old[name].get(field)} -> {value}" for field, value in new[name].items()]
        changed = [
            text for field, text in zip(new[name], fields, strict=True) if old[name].get(field) != new[name][field]
        ]
        if changed:
            told.append(f"{name} changed ({', '.join(changed)})")
    return "; ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")


def _write(transaction: Transaction, plan: Plan, chunk_bytes: int, counter: _Counter) -> None:
    """Write what is missing of every leaf: small ones many at a time, the others in pieces on several threads."""
    missing = _declare(transaction, plan, chunk_bytes)
    counter.begin(sum(leaf.dtype.itemsize * region.size for leaf, regions in missing for region in regions))
    flusher = _Flusher(transaction, counter)
    small = [leaf for leaf, _ in missing if leaf.chunk_shape == leaf.shape and _nbytes(leaf) <= SMALL_BYTES]
    for batch in _batches(small, min(_BATCH_BYTES, transaction.budget.limit_bytes // 8)):
        # Held for the batch: with compression the arrays of one call are together in memory.
        with transaction.budget.holding(sum(map(_nbytes, batch))):
            transaction.write_arrays(((leaf.path, _read(plan[leaf.path]), "array") for leaf in batch), progress=counter)
        flusher.flush_if_due()

    def move(piece: tuple[LeafWriter, Region]) -> None:
        leaf, region = piece
        leaf.write(region, _Part(plan[leaf.path], region), progress=counter)
        flusher.flush_if_due()

    written = {leaf.path for leaf in small}
    threads = default_threads()
    with ThreadPoolExecutor(threads, thread_name_prefix="tailrace-import") as pool:
        large = ((leaf, regions) for leaf, regions in missing if leaf.path not in written)
        pump.run(_pieces(large, transaction.budget.limit_bytes), move, pool, threads)


def _declare(transaction: Transaction, plan: Plan, chunk_bytes: int) -> list[tuple[LeafWriter, list[Region]]]:
    """Every leaf of the plan that lacks something, with what it lacks."""
    missing = []
    for path, source in plan.items():
        leaf = transaction.declare(path, shape=source.shape, dtype=source.dtype, chunk_bytes=chunk_bytes)
        regions = leaf.missing()
        if regions:
            missing.append((leaf, regions))
    return missing


def _batches(leaves: list[LeafWriter], most_bytes: int) -> Iterator[list[LeafWriter]]:
    batch: list[LeafWriter] = []
    nbytes = 0
    for leaf in leaves:
        if batch and nbytes + _nbytes(leaf) > most_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(leaf)
        nbytes += _nbytes(leaf)
    if batch:
        yield batch


def _pieces(
    missing: Iterable[tuple[LeafWriter, list[Region]]], budget_bytes: int
) -> Iterator[tuple[LeafWriter, Region]]:
    """What is missing, cut so that every thread can have a piece and its encoding in the budget."""
    for leaf, regions in missing:
        chunk_bytes = math.prod(leaf.chunk_shape) * leaf.dtype.itemsize
        most_bytes = max(chunk_bytes, min(pump.PIECE_BYTES, budget_bytes // 8))
        for region in regions:
            for piece in split(region, leaf.chunk_shape, most_bytes // leaf.dtype.itemsize):
                yield leaf, piece


def _nbytes(leaf: LeafWriter) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _read(source: TensorSource) -> Array:
    array: Array = np.empty(source.shape, source.dtype)
    source.read_into(Region.whole(source.shape), array)
    return array


class _Part:
    """A region of a source, as a source of its own."""

    def __init__(self, source: TensorSource, region: Region) -> None:
        self._source, self._start = source, region.start
        self.shape, self.dtype = region.shape, source.dtype

    def read_into(self, region: Region, out: Array) -> None:
        start = tuple(a + b for a, b in zip(region.start, self._start, strict=True))
        self._source.read_into(Region(start, region.shape), out)


class _Counter:
    """Bytes done of bytes in all, told to whoever shows progress. Thread-safe."""

    def __init__(self, total: int, progress: ProgressFunction | None) -> None:
        self.done = self.resumed = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def begin(self, missing_bytes: int) -> None:
        """An earlier run wrote all but so many bytes."""
        self.resumed = self._total - missing_bytes
        self(self.resumed)

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self._total)


class _Flusher:
    """Makes what was done resumable now and then; one thread flushes while the others go on."""

    def __init__(self, transaction: Transaction, counter: _Counter) -> None:
        self._transaction = transaction
        self._counter = counter
        self._bytes, self._time = counter.done, time.monotonic()
        self._flushing = threading.Lock()

    def flush_if_due(self) -> None:
        done = self._counter.done
        enough = min(max(_FLUSH_MIN_BYTES, done // _FLUSH_SHARE), _FLUSH_MAX_BYTES)
        if done - self._bytes < enough and time.monotonic() - self._time < _FLUSH_SECONDS:
            return
        if self._flushing.acquire(blocking=False):
            try:
                done = self._counter.done  # may have grown; all of it is flushed
                self._transaction.flush()
                self._bytes, self._time = done, time.monotonic()
            finally:
                self._flushing.release()
