"""The transaction: declare, write in any order, flush, be killed and resume, commit all at once."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import msgspec

from tailrace._version import __version__
from tailrace.checkpoint import commit, pending, publish
from tailrace.checkpoint.chunks import ChunkWriter, default_threads
from tailrace.checkpoint.leafwriter import LeafWriter, fitted
from tailrace.checkpoint.leaves import LeafState
from tailrace.checkpoint.ledger import Ledger
from tailrace.checkpoint.reader import Checkpoint
from tailrace.checkpoint.reader import open as open_checkpoint
from tailrace.checkpoint.registry import SMALL_BYTES, Registry
from tailrace.errors import IncompleteError, InputError, MissingKeyError, WriterClosedError
from tailrace.flow.budget import DEFAULT_BUDGET, MemoryBudget
from tailrace.flow.regions import Region
from tailrace.flow.sources import Array, ArraySource, Source
from tailrace.format import journal, structure
from tailrace.format.keys import KeyPath, display, parse_key
from tailrace.storage.location import resolve
from tailrace.storage.posix import holding, remove_empty

Key = str | int | KeyPath
Progress = Callable[[int], None]


class Transaction:
    """Everything that becomes one checkpoint at `path`, all at once, or nothing.

    As a context manager a clean exit commits. An exception leaves what was flushed invisible and resumable, and
    deletes the rest. Every method may be called from several threads at once.

    Args:
        path: where the checkpoint will be; parents are made.
        memory_budget: most host bytes in flight, an int or a string such as "512MiB".
        resume: go on with an unfinished transaction for this path; without one, start anew.
        overwrite: replace the checkpoint at the path, at the moment of commit.
        takeover: take an unfinished transaction from a writer that is, or may be, alive.
        compression: "zstd" or None; float weights gain little.
        threads: threads that encode and write; by default as many as there are cores, 2 to 4.

    Raises CheckpointExistsError, PendingError, LockedError, BudgetError or StorageError when it cannot begin; then
    nothing has changed. `root`, `ledger`, `chunks` and `registry` are for the package's own modules.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        memory_budget: int | str = DEFAULT_BUDGET,
        resume: bool = False,
        overwrite: bool = False,
        takeover: bool = False,
        compression: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.path = resolve(path)
        self.budget = MemoryBudget(memory_budget)
        if threads is not None and threads < 1:
            raise InputError(f"threads={threads}: at least 1 is needed, or None for as many as suit this machine.")
        if compression not in (None, "zstd"):
            raise InputError(f"compression={compression!r}: allowed are None and 'zstd'.")
        self._overwrite = overwrite
        found = pending.open_pending(self.path, resume=resume, overwrite=overwrite, takeover=takeover)
        self.root, self._owner, self._made_parents = found.root, found.lock, found.made_parents
        self._release = weakref.finalize(self, found.lock.release)  # a writer that is dropped lets go of its lock
        self.resumed = found.replayed is not None
        replayed = found.replayed or pending.Replayed()
        self._closed: str | None = None  # why nothing more may be written
        self._failure: BaseException | None = None
        self._ending = threading.RLock()
        with ExitStack() as undo:
            undo.callback(self._discard if found.replayed is None else self._release)
            self.ledger = Ledger(found.root / publish.WORK, found.lock, first_sequence=replayed.sequence)
            undo.callback(self.ledger.close)
            self.chunks = ChunkWriter(found.root, self.ledger, self.budget, threads=threads or default_threads())
            undo.callback(self.chunks.close)
            self.registry = Registry(self.ledger, self.chunks, self.budget, compression)
            self.registry.load(replayed)
            self._structures = [(prefix, structure.decode(node)) for prefix, node in replayed.structures]
            self._metadata = replayed.metadata
            self.fingerprint = replayed.fingerprint
            self.inherited = replayed.inherit
            undo.pop_all()  # all went well: nothing is undone
        for close in (self.chunks.lanes.close, self.ledger.close):  # likewise its descriptors
            weakref.finalize(self, close)

    # Leaves

    def declare(
        self,
        key: Key,
        *,
        shape: Sequence[int],
        dtype: Any,
        chunk_shape: Sequence[int] | None = None,
        stacked_axes: Sequence[int] = (),
        chunk_bytes: int | None = None,
        kind: str = "array",
    ) -> LeafWriter:
        """A leaf that will hold an array of this shape and dtype, to be written whole or by regions.

        Declaring it again in the same way returns it as it stands; another shape, dtype or chunk shape voids what was
        written to it. Without `chunk_shape` chunks have up to `chunk_bytes` (16 MiB unless given) and span 1 along
        `stacked_axes`; those of a leaf that is there already stay. Raises KeyPathError, LeafError, ShapeError or
        BudgetError before anything is written.
        """
        with self._call():
            leaf = self.registry.declare(
                parse_key(key),
                shape,
                dtype,
                chunk_shape=chunk_shape,
                stacked_axes=stacked_axes,
                chunk_bytes=chunk_bytes,
                kind=kind,
            )
        return LeafWriter(leaf, self._write, self.chunks.missing)

    def _write(self, leaf: LeafState, region: Region, source: Source, progress: Progress | None) -> None:
        with self._call() as sequence:
            if leaf.void:
                raise InputError(
                    f"leaf {leaf.key!r} was deleted or declared in another way since: write to what declare returned "
                    "last."
                )
            self.chunks.write(leaf, region, source, sequence, progress)

    def write_source(
        self,
        key: Key,
        source: Source,
        *,
        chunk_shape: Sequence[int] | None = None,
        stacked_axes: Sequence[int] = (),
        chunk_bytes: int | None = None,
        kind: str = "array",
        progress: Progress | None = None,
    ) -> None:
        """Write a whole leaf from a source, in pieces within the budget; it replaces what was at the key."""
        leaf = self.declare(
            key,
            shape=source.shape,
            dtype=source.dtype,
            chunk_shape=chunk_shape,
            stacked_axes=stacked_axes,
            chunk_bytes=chunk_bytes,
            kind=kind,
        )
        leaf.write(Region.whole(source.shape), source, progress=progress)

    def write_arrays(self, items: Iterable[tuple[KeyPath, Array, str]], *, progress: Progress | None = None) -> None:
        """Write many whole leaves, each (key path, host array, kind); the arrays may be changed on return.

        Small ones are appended one after the other, large ones side by side on the writer's threads.
        """
        with self._call() as sequence:
            small: list[tuple[LeafState, Array]] = []
            large = []
            for path, given, kind in items:
                swap = not given.dtype.isnative and given.nbytes <= SMALL_BYTES  # large ones are swapped in pieces
                array = given.astype(given.dtype.newbyteorder("=")) if swap else given
                leaf = self.registry.declare(path, array.shape, array.dtype, kind=kind)
                if leaf.chunk_shape == array.shape and array.nbytes <= SMALL_BYTES and leaf.compression is None:
                    small.append((leaf, array))
                    if len(small) == _BATCH_LEAVES:
                        self.chunks.append_small(small, sequence, progress)
                        small.clear()
                elif array.size:
                    source = fitted(leaf.key, ArraySource(array), leaf.dtype)
                    large.append((leaf, Region.whole(array.shape), source, sequence))
            self.chunks.append_small(small, sequence, progress)
            self.chunks.write_many(large, progress)

    def delete(self, key: Key) -> None:
        """Drop a leaf or text from the transaction. Raises MissingKeyError where there is none."""
        path = parse_key(key)
        with self._call():
            if not self.registry.delete(path):
                raise MissingKeyError(f"no leaf {display(path)!r} has been declared.")

    def missing(self) -> dict[str, list[Region]]:
        """What was declared and not written yet: regions by key. Also right after resume."""
        self._check_open()
        unfinished = [leaf for leaf in list(self.registry.leaves.values()) if not leaf.chunks.full]
        missing = {leaf.key: self.chunks.missing(leaf) for leaf in unfinished}
        return {key: regions for key, regions in missing.items() if regions}

    def keys(self) -> list[str]:
        """Keys of all leaves and texts so far, parts joined by "/"."""
        paths = [leaf.path for leaf in list(self.registry.leaves.values())]
        paths += [path for path, _ in list(self.registry.texts.values())]
        return sorted(map(display, paths))

    # What is not an array

    def set_text(self, key: Key, value: str) -> None:
        """Set a str leaf."""
        with self._call():
            self.registry.add_text(parse_key(key), value)

    def set_structure(self, prefix: KeyPath, node: structure.Node) -> None:
        """Say which containers the leaves below `prefix` hang in; `()` is the whole tree."""
        with self._call() as sequence:
            self.ledger.add(journal.Structure(sequence, prefix, structure.encode(node)))
            self._structures.append((prefix, node))

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Set the checkpoint's custom metadata: a dict that JSON can hold. It replaces what was set before."""
        try:
            plain = msgspec.json.decode(msgspec.json.encode(metadata), type=dict[str, Any])
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise InputError(f"metadata must be a dict of what JSON can hold: {error}") from error
        with self._call() as sequence:
            self.ledger.add(journal.Metadata(sequence, plain))
            self._metadata = plain

    def set_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        """Record what the data is taken from, so that a resumed run can compare it."""
        with self._call() as sequence:
            self.ledger.add(journal.Fingerprint(sequence, fingerprint))
            self.fingerprint = fingerprint

    # Ends

    def flush(self) -> None:
        """Make everything written before this call durable and resumable.

        Raises StorageError when the disk refuses; the writer then acknowledges nothing more, and what earlier flushes
        acknowledged is resumable.
        """
        with self._call():
            self.chunks.spill()
            self.chunks.unflushed_bytes = 0
            self.ledger.acknowledge(self.chunks.lanes.sync)

    def commit(self) -> Checkpoint:
        """Make everything written so far visible at the writer's path, all at once.

        A crash before `commit` returns leaves either the previous state or the whole new checkpoint, never a mixture.
        Calling it twice returns the same checkpoint. Raises IncompleteError, naming leaf and regions, when something
        declared was never written; the writer then stays open.
        """
        self.finish()
        return open_checkpoint(self.path, memory_budget=self.budget.limit_bytes)

    def finish(self) -> None:
        """`commit` without opening what was committed."""
        with self._ending, ExitStack() as held:
            if self._closed == "sealed":  # and an earlier call could not publish it
                held.enter_context(holding(self.root))
            elif self._closed != "committed":
                self._seal(held)
            if self._closed == "sealed":
                publish.publish(self.root, self.path, release=self._release)
                self._closed = "committed"

    def _seal(self, held: ExitStack) -> None:
        with self._alone():
            self._refuse_incomplete()
            for leaf in self.registry.leaves.values():
                self.chunks.settle(leaf)
            if self.chunks.unflushed_bytes > _WORTH_KEEPING_BYTES:
                self.ledger.acknowledge(self.chunks.lanes.sync)  # should the index not fit on the disk any more
            else:
                self.chunks.lanes.sync()
            self._owner.check()
            files = self.chunks.files
            contents = commit.Contents(
                leaves=self.registry.sorted(),
                texts=dict(self.registry.texts.values()),
                structures=self._structures,
                custom_metadata=self._metadata,
                fingerprint=self.fingerprint,
                files=files,
                dead=self.chunks.dead,
                trusted=set(files) - self.chunks.untrusted - self.chunks.lanes.interrupted,
            )
            unused = commit.write_files(self.root, contents, version=__version__)
            held.enter_context(holding(self.root))  # else who finds it sealed would publish it before us
            self._owner.check()
            publish.seal(self.root, publish.Seal(self._overwrite, unused))
            self._release_memory("sealed")

    def _refuse_incomplete(self) -> None:
        self.chunks.spill()
        missing = self.missing()
        if missing:
            lines = [
                f"{key}: {', '.join(map(str, regions[:4]))}{' ...' if len(regions) > 4 else ''}"
                for key, regions in missing.items()
            ]
            raise IncompleteError(
                f"{len(missing)} of {len(self.registry.leaves)} leaves are not wholly written: {'; '.join(lines[:10])}"
                f"{'; ...' if len(lines) > 10 else ''}. Write the missing regions, or delete(key) the leaf, then "
                "commit again."
            )

    def abort(self) -> None:
        """Discard the transaction and everything written to it. Nothing happens where it has ended already."""
        with self._ending:
            if self._closed is None:
                self._close("aborted")
                self._discard()

    def _discard(self) -> None:
        if self._owner.held:  # else it is another writer's by now
            pending.erase(self.root, self._owner)
        self._release()
        remove_empty(self._made_parents)

    def close(self) -> None:
        """Leave the transaction as it was last flushed, to be resumed; where nothing was flushed, discard it."""
        with self._ending:
            if self._closed is None:
                if not self.resumed and not self.ledger.acknowledged_any:
                    self.abort()
                    return
                self._close("closed")
                self._release()

    def _close(self, why: str) -> None:
        with self.ledger.alone():  # calls of other threads end first; those that wait find the writer closed
            self._release_memory(why)

    def _release_memory(self, why: str) -> None:
        self._closed = why
        self.chunks.close()
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed is not None:  # committed or aborted inside the block
            return
        if kind is not None:
            self.close()
            return
        try:
            self.finish()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _call(self) -> Iterator[int]:
        """One call that changes something: its sequence number. A failure to store closes the writer for good."""
        sequence = self.ledger.enter()
        try:
            with self._watched():
                yield sequence
        finally:
            self.ledger.leave(sequence)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other call is at work."""
        with self.ledger.alone(), self._watched():
            yield

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._check_open()
        try:
            yield
        except (OSError, KeyboardInterrupt) as error:  # an interrupt may have come in the middle of an append
            self._failure = error
            raise

    def _check_open(self) -> None:
        if self._closed is not None:
            raise WriterClosedError(f"the writer of {self.path} has {_PAST[self._closed]}; open a new one.")
        if self._failure is not None:
            raise WriterClosedError(
                f"the writer of {self.path} failed: {str(self._failure) or 'interrupted'}. What was flushed is kept: "
                "open it again with resume=True."
            ) from self._failure

    def __repr__(self) -> str:
        leaves = len(self.registry.leaves)
        return f"<{type(self).__name__} {os.fspath(self.path)!r} {self._closed or 'open'}, {leaves} leaves>"


_PAST = {"sealed": "been sealed", "committed": "committed", "aborted": "been aborted", "closed": "been closed"}
_WORTH_KEEPING_BYTES = 64 << 20
_BATCH_LEAVES = 256
