"""What has happened in a transaction, in order, and how it becomes acknowledged.

Every call that changes something takes a sequence number as it enters. Records wait in memory until `acknowledge`:
data files are synced first, then the records are appended to the journal and synced. Several threads that flush at
once share one sync.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import WriterClosedError
from tailrace.format import journal
from tailrace.storage.lock import Lock
from tailrace.storage.posix import fsync_dir, storage_errors, write_all

PREFIX = "journal."


class Ledger:
    """The records of one writer, and its journal file, made durable at construction."""

    def __init__(self, work: Path, lock: Lock, *, first_sequence: int) -> None:
        self._path = work / f"{PREFIX}{lock.writer_id}"
        self._owner = lock
        self._records: list[journal.Record] = []
        self._taken = self._acknowledged = 0  # records taken from the list, and of those durable
        self._sequence = first_sequence
        self._active: set[int] = set()
        self._alone = False
        self._changed = threading.Condition()
        self._noting = threading.Lock()  # of `_records` and `_taken`, which a flush reads and moves together
        self._flushing = threading.Lock()
        self._broken: BaseException | None = None
        with storage_errors(f"creating journal {self._path}"):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            write_all(self._descriptor, journal.header())
            os.fsync(self._descriptor)
            fsync_dir(work)
        self.acknowledged_any = False

    def enter(self) -> int:
        """A call begins: its sequence number. `leave` it when the call is done. Waits while somebody is `alone`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._sequence += 1
            self._active.add(self._sequence)
            return self._sequence

    def number(self) -> int:
        """The next sequence number, for a change that is ordered by a lock of its own."""
        with self._changed:
            self._sequence += 1
            return self._sequence

    def leave(self, sequence: int) -> None:
        """The call is done, well or not."""
        with self._changed:
            self._active.discard(sequence)
            self._changed.notify_all()

    def older_active(self, sequence: int, *, besides: int) -> bool:
        """Whether a call that entered before `sequence`, other than `besides`, is still at work."""
        with self._changed:
            return any(other < sequence and other != besides for other in self._active)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For the length of a with block no call is at work: those that began end first, those that come wait."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._active)
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def add(self, record: journal.Record) -> None:
        """Note a record, for the next flush to acknowledge. Its bytes must have been appended to a lane already."""
        with self._noting:
            self._records.append(record)

    def acknowledge(self, sync_data: Callable[[], None]) -> None:
        """Make every record noted before this call durable, the bytes it speaks of first.

        A short write or failed sync breaks the journal for good: it acknowledges nothing more.
        """
        with self._noting:
            ticket = self._taken + len(self._records)
        with self._flushing:
            if self._broken is not None:
                raise WriterClosedError(
                    f"an earlier flush failed ({self._broken}); this writer acknowledges nothing more."
                ) from self._broken
            if self._acknowledged >= ticket:
                return  # another thread's flush took our records along
            with self._noting:
                records, self._records = self._records, []
                self._taken += len(records)
            try:
                sync_data()
                self._owner.check()
                with storage_errors(f"writing journal {self._path}"):
                    write_all(self._descriptor, journal.encode(records))
                    os.fdatasync(self._descriptor) if hasattr(os, "fdatasync") else os.fsync(self._descriptor)
                self._owner.check()  # again: who took over since may have read the journal before this record
            except BaseException as error:
                self._broken = error
                raise
            self._acknowledged = self._taken
            self.acknowledged_any = True

    def close(self) -> None:
        """Release the journal file. What was not acknowledged is forgotten."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
