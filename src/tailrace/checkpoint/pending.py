"""Opening the pending directory of a transaction: new, resumed, rolled forward or refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace.checkpoint import commit, publish
from tailrace.checkpoint.ledger import PREFIX
from tailrace.errors import CheckpointExistsError, FormatError, PendingError, StorageError
from tailrace.format import journal
from tailrace.format.keys import KeyPath
from tailrace.storage.location import pending_path
from tailrace.storage.lock import Lock
from tailrace.storage.posix import fsync_dir, fsync_file, holding, make_dirs, remove_empty, remove_tree, storage_errors

_log = logging.getLogger("tailrace")
WORK = publish.WORK
ABORTED = ".work-aborted"


@dataclass(slots=True)
class Replayed:
    """What the journals of a transaction say, the newest call on top."""

    declared: dict[KeyPath, journal.Declare] = field(default_factory=dict)
    chunks: list[tuple[KeyPath, str, journal.Chunk | journal.Partial]] = field(default_factory=list)  # leaf, data file
    inherited: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    texts: dict[KeyPath, str] = field(default_factory=dict)
    structures: list[tuple[KeyPath, bytes]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, Any] | None = None
    inherit: journal.Inherit | None = None
    sequence: int = 0


@dataclass(slots=True)
class Pending:
    """A pending directory that is ours to write, and what it holds already (None: nothing)."""

    root: Path
    lock: Lock
    replayed: Replayed | None
    made_parents: list[Path]


def open_pending(final: Path, *, resume: bool, overwrite: bool, takeover: bool) -> Pending:
    """Make or take over the pending directory of a transaction that will publish at `final`.

    Raises CheckpointExistsError, PendingError, LockedError or StorageError; then nothing has changed.
    """
    root = pending_path(final)
    while True:
        publish.recover(final)
        refuse_target(final, overwrite=overwrite)
        _finish_abort(root)
        made: list[Path] = []
        try:
            if not os.path.lexists(root):
                made = _make(root)
            with _at_rest(root) as there:
                if there:
                    return Pending(root, *_take(root, final, resume=resume, takeover=takeover), made)
        except BaseException:
            remove_empty(made)
            raise


def _make(root: Path) -> list[Path]:
    """An empty pending directory; the parents that were made for it."""
    with storage_errors(f"creating {root}"):
        made = make_dirs(root.parent)
        try:
            root.mkdir(exist_ok=True)
        except BaseException:
            remove_empty(made)
            raise
    return made


def _complete(root: Path) -> None:
    """What a pending directory always has; it is new, or its writer was killed between its first system calls."""
    try:
        for directory in (WORK, "d"):
            (root / directory).mkdir(exist_ok=True)
        fsync_dir(root)
        fsync_dir(root.parent)
    except BaseException:
        with suppress(OSError):  # nothing is in them, or they stay
            for directory in (WORK, "d", ""):
                (root / directory).rmdir() if (root / directory).is_dir() else None
        raise


@contextmanager
def _at_rest(root: Path) -> Iterator[bool]:
    """Hold a pending directory while nobody publishes or deletes it; False where that has just been done."""
    with holding(root) as there:
        yield there and not (root / ABORTED).is_dir()


def _take(root: Path, final: Path, *, resume: bool, takeover: bool) -> tuple[Lock, Replayed | None]:
    _refuse_foreign(root)
    with storage_errors(f"locking {root}"):
        _complete(root)
        lock = Lock(root / WORK, takeover=takeover)
    try:
        return lock, _take_stock(root, final, resume=resume)
    except BaseException:
        lock.release()
        raise


def refuse_target(final: Path, *, overwrite: bool) -> None:
    """Refuse a path that holds something, unless it may be replaced: a checkpoint, and only with `overwrite`."""
    if not os.path.lexists(final):
        blocker = next((parent for parent in final.parents if os.path.lexists(parent)), None)
        if blocker is not None and not blocker.is_dir():
            raise StorageError.wrap(NotADirectoryError(20, os.strerror(20)), f"creating {final}: {blocker} is a file")
        return
    if final.is_symlink():
        raise CheckpointExistsError(
            f"{final} is a symbolic link to {final.readlink()}. Name that path, choose another, or remove the link."
        )
    if not final.is_dir():
        raise CheckpointExistsError(f"{final} is a file. Choose another path, or move it away.")
    names = sorted(entry.name for entry in final.iterdir())
    if not names:
        if overwrite:
            return
        raise CheckpointExistsError(
            f"{final} is there already (an empty directory). Remove it, or pass overwrite=True (--overwrite)."
        )
    if not publish.is_checkpoint(final):
        raise CheckpointExistsError(
            f"{final} is a directory that holds no checkpoint, but "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. "
            f"It is not replaced, whatever is asked: choose another path, or move it away."
        )
    if not overwrite:
        raise CheckpointExistsError(
            f"{final} holds a checkpoint already. Choose another path, or pass overwrite=True (--overwrite) to "
            "replace it."
        )


def discard(final: Path) -> bool:
    """Delete the unfinished transaction of a dead writer at `final`; whether there was one.

    Raises LockedError while its writer lives, PendingError for a directory that is not a transaction's.
    """
    root = pending_path(final)
    publish.recover(final)
    _finish_abort(root)
    with _at_rest(root) as there:
        if not there:
            return False
        _refuse_foreign(root)
        with storage_errors(f"discarding {root}"):
            _complete(root)
            _erase(root, Lock(root / WORK))
    return True


def erase(root: Path, lock: Lock) -> None:
    """Delete a pending directory that we hold. A kill on the way leaves one that the next writer finishes deleting."""
    with storage_errors(f"deleting {root}"), holding(root):
        _erase(root, lock)


def _erase(root: Path, lock: Lock) -> None:
    (root / WORK).rename(root / ABORTED)
    fsync_dir(root)
    lock.release()
    remove_tree(root, last=ABORTED)


def _finish_abort(root: Path) -> None:
    if (root / ABORTED).is_dir():
        with storage_errors(f"deleting the aborted transaction {root}"), holding(root) as there:
            if there and (root / ABORTED).is_dir():  # still, now that nobody else deletes it
                remove_tree(root, last=ABORTED)


def _refuse_foreign(root: Path) -> None:
    """Refuse what is no transaction, and a commit that is sealed: it is complete, and only waits for its name."""
    if root.is_symlink() or not root.is_dir():
        what = "a symbolic link" if root.is_symlink() else "a file"
        raise PendingError(f"{root} is in the way: it is {what}, not a transaction of tailrace. Move it away.")
    if publish.is_sealed(root):
        raise PendingError(
            f"{root} is a complete checkpoint that waits for its name: something else was there when it was committed. "
            "Move that away and open or save the path again, or delete the waiting one."
        )
    names = {entry.name for entry in root.iterdir()}
    if WORK not in names and names - {"d"}:
        raise PendingError(
            f"{root} is in the way: it has the name of an unfinished transaction, but holds "
            f"{', '.join(sorted(names)[:5])} and no {WORK}. "
            f"Move it away."
        )


def _take_stock(root: Path, final: Path, *, resume: bool) -> Replayed | None:
    journals = sorted((root / WORK).glob(f"{PREFIX}*"))
    if not journals:
        strays = [entry.name for entry in (root / "d").iterdir() if entry.stat().st_size]
        if strays:
            raise PendingError(
                f"{root} holds {len(strays)} data files and no journal that says what they are. Move it away."
            )
        return None
    if not resume:
        raise PendingError(
            f"an unfinished transaction for {final} is at {root}. Open it with resume=True to go on (rerun the same "
            "command), "
            f"or discard it with Writer({os.fspath(final)!r}, resume=True).abort()."
        )
    try:
        with storage_errors(f"reading the journals of {root}"):
            for path in journals:
                fsync_file(path)  # a kill between a record and its sync leaves it readable, but not durable
            replayed = replay([path.read_bytes() for path in journals])
    except FormatError as error:
        raise PendingError(f"{root}: {error} Move it away to start anew.") from error
    with storage_errors(f"tidying {root}"):
        _drop_lost(root, replayed)
        _remove_unacknowledged(root, replayed.files)
    return replayed


def _remove_unacknowledged(root: Path, files: set[str]) -> None:
    """Delete data files that no record will ever name, and what a commit wrote that was killed before its seal."""
    for entry in [*root.glob("d/*"), *root.glob("ocdbt.process_*/d/*")]:
        if entry.relative_to(root).as_posix() not in files:
            entry.unlink()
    for directory in root.glob("ocdbt.process_*"):
        remove_empty([directory, directory / "d"])
    for name in commit.SMALL_FILES:
        (root / name).unlink(missing_ok=True)


def _drop_lost(root: Path, replayed: Replayed) -> None:
    """Forget records of bytes that are not there: a writer that was taken over may have noted some as it ended."""
    lengths = {file: (root / file).stat().st_size for file in replayed.files if (root / file).exists()}
    there = [entry for entry in replayed.chunks if entry[2].offset + entry[2].length <= lengths.get(entry[1], 0)]
    if len(there) < len(replayed.chunks):
        _log.warning("%s: %d chunks are gone; they count as missing.", root, len(replayed.chunks) - len(there))
        replayed.chunks = there


def replay(journals: list[bytes]) -> Replayed:
    """Put together what journals say; for each thing the record with the highest sequence counts."""
    state = Replayed()
    deleted: dict[KeyPath, int] = {}
    texts: dict[KeyPath, tuple[int, str]] = {}
    structures: list[tuple[int, KeyPath, bytes]] = []
    newest_metadata = newest_fingerprint = 0
    for record in _records(journals):
        if isinstance(record, journal.Declare):
            known = state.declared.get(record.path)
            if known is None or known.sequence < record.sequence:
                state.declared[record.path] = record
        elif isinstance(record, journal.Delete):
            deleted[record.path] = max(deleted.get(record.path, 0), record.sequence)
        elif isinstance(record, journal.DataFile):
            state.files.add(record.path)
            if record.inherited:
                state.inherited.add(record.path)
        elif isinstance(record, journal.Text):
            texts[record.path] = max(texts.get(record.path, (0, "")), (record.sequence, record.value))
        elif isinstance(record, journal.Structure):
            structures.append((record.sequence, record.prefix, record.node))
        elif isinstance(record, journal.Metadata) and record.sequence > newest_metadata:
            newest_metadata, state.metadata = record.sequence, record.value
        elif isinstance(record, journal.Fingerprint) and record.sequence > newest_fingerprint:
            newest_fingerprint, state.fingerprint = record.sequence, record.value
        elif isinstance(record, journal.Inherit) and not (state.inherit and state.inherit.complete):
            state.inherit = record
        state.sequence = max(state.sequence, getattr(record, "sequence", 0))
    state.declared = {path: leaf for path, leaf in state.declared.items() if leaf.sequence > deleted.get(path, 0)}
    state.texts = {path: value for path, (sequence, value) in texts.items() if sequence > deleted.get(path, 0)}
    state.structures = [(prefix, node) for _, prefix, node in sorted(dict.fromkeys(structures))]
    for data in journals:
        state.chunks += _chunks(data, state.declared)
    return state


def _records(journals: list[bytes]) -> Iterator[journal.Record]:
    for data in journals:
        yield from journal.decode(data)


def _chunks(
    data: bytes, declared: dict[KeyPath, journal.Declare]
) -> Iterator[tuple[KeyPath, str, journal.Chunk | journal.Partial]]:
    """The chunk records of one journal that speak of a leaf's current declaration, with leaf and data file by name."""
    leaves: dict[int, KeyPath] = {}
    files: dict[int, str] = {}
    for record in journal.decode(data):
        if isinstance(record, journal.Declare):
            current = declared.get(record.path)
            if current is not None and current.sequence == record.sequence:
                leaves[record.leaf] = record.path
        elif isinstance(record, journal.DataFile):
            files[record.file] = record.path
        elif isinstance(record, journal.Chunk | journal.Partial) and record.leaf in leaves:
            yield leaves[record.leaf], files[record.file], record
