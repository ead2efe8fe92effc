"""Every error tailrace raises, by what the caller can do next.

TailraceError
├── InputError(ValueError)              the call cannot be done as asked; nothing was written
│   ├── KeyPathError                      a key that cannot be a leaf's name, or two keys with one name
│   ├── LeafError                         a value or dtype that cannot be stored
│   ├── ShapeError                        a shape or region that does not fit
│   ├── DtypeError                        a dtype that does not fit, or a lossy cast
│   └── BudgetError                       a memory budget too small for the work
├── MissingKeyError(KeyError)           no such leaf
├── RegionIndexError(IndexError)        an index outside a leaf, worded as numpy words it
├── MismatchError(ValueError)           `like` and the checkpoint differ; holds the whole diff
├── FormatError(ValueError)             bytes that are not what their format says
│   ├── CorruptionError                   a checksum, length or padding is wrong: damaged since written
│   ├── UnsupportedFormatError            valid perhaps, but newer or rarer than this tailrace reads
│   └── SourceFormatError                 a foreign file to import (safetensors, index) is broken
├── NotACheckpointError(FileNotFoundError)  nothing committed at the path
├── CheckpointExistsError(FileExistsError)  something is at the path already
├── PendingError(FileExistsError)       an unfinished transaction is at the path: resume or abort it
├── LockedError(BlockingIOError)        another writer holds the path
├── IncompleteError(RuntimeError)       commit found declared regions that were never written
├── WriterClosedError(RuntimeError)     the writer has committed, aborted, failed or lost its lock
└── StorageError(OSError)               the file system refused: full, read-only, unreachable
"""

from __future__ import annotations

import os


class TailraceError(Exception):
    """Base of everything tailrace raises on purpose."""


class InputError(TailraceError, ValueError):
    """The call cannot be done as asked. Nothing was written."""


class KeyPathError(InputError):
    """A key that cannot name a leaf, or two keys that share one name on disk."""


class LeafError(InputError):
    """A value or dtype that cannot be stored as a leaf."""


class ShapeError(InputError):
    """A shape or region that does not fit the leaf."""


class DtypeError(InputError):
    """A dtype that does not fit, or a cast that would lose values."""


class BudgetError(InputError):
    """The memory budget is malformed or too small for the work."""


class MissingKeyError(TailraceError, KeyError):
    """The checkpoint holds no such leaf."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class RegionIndexError(TailraceError, IndexError):
    """An index outside the leaf, worded as numpy words it."""


class MismatchError(TailraceError, ValueError):
    """What is stored and what was asked for differ; the message is one grouped diff."""


class FormatError(TailraceError, ValueError):
    """Bytes that are not what their format says."""


class CorruptionError(FormatError):
    """Damaged since it was written: a checksum, length or padding is wrong."""


class UnsupportedFormatError(FormatError):
    """Perhaps valid, but newer or rarer than this tailrace reads; the message names the way out."""


class SourceFormatError(FormatError):
    """A foreign file to import is broken."""


class NotACheckpointError(TailraceError, FileNotFoundError):
    """Nothing committed is at the path."""


class CheckpointExistsError(TailraceError, FileExistsError):
    """Something is at the path already, and the call may not replace it."""


class PendingError(TailraceError, FileExistsError):
    """An unfinished transaction is at the path; resume or abort it."""


class LockedError(TailraceError, BlockingIOError):
    """Another writer holds the path."""


class IncompleteError(TailraceError, RuntimeError):
    """Commit found declared regions that were never written."""


class WriterClosedError(TailraceError, RuntimeError):
    """The writer has committed, aborted, failed or lost its lock."""


class StorageError(TailraceError, OSError):
    """The file system refused: full, read-only, unreachable."""

    @classmethod
    def wrap(cls, error: OSError, doing: str) -> StorageError:
        """The same errno and reason, told as what tailrace was doing: `writing /a/b: No space left on device`."""
        reason = error.strerror or str(error)
        wrapped = cls(error.errno or 0, f"{doing}: {reason}")
        wrapped.filename = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else None
        return wrapped

    def __str__(self) -> str:  # OSError would show [Errno N] and the filename once more
        return str(self.args[1]) if len(self.args) > 1 else super().__str__()
