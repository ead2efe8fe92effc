"""File system calls that must survive a power cut, and renames that must not replace by accident."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailrace.errors import StorageError, TailraceError

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn OSError inside the block into StorageError that says what tailrace was doing."""
    try:
        yield
    except TailraceError:  # said already; some of ours are OSErrors too, as LockedError is
        raise
    except OSError as error:
        raise StorageError.wrap(error, doing) from error


def fsync_dir(path: str | Path) -> None:
    """Make creates, renames and removals inside the directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some FUSE file systems have no fsync for directories
            raise
    finally:
        os.close(descriptor)


def fsync_file(path: str | Path) -> None:
    """Make the bytes of a file durable, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: str | Path, data: bytes) -> None:
    """Create or truncate a small file and fsync it. Its directory entry is the caller's to sync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte at the descriptor's position; a short write goes on."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a small file by rename, so that readers see the old or the new bytes, and sync both."""
    temporary = path.with_name(path.name + ".new")
    write_durably(temporary, data)
    temporary.replace(path)
    fsync_dir(path.parent)


def rename_noreplace(source: Path, target: Path) -> None:
    """Rename a directory; FileExistsError when anything, even an empty directory, is at the target.

    A plain rename would silently replace an empty directory. Where the file system has no such rename, the check
    comes first and leaves a window in which another program could create the target.
    """
    if not _renameat2(source, target, _NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
        source.rename(target)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names at once. False, and nothing done, where the file system cannot."""
    return _renameat2(first, second, _EXCHANGE)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Whether the call is there and did it; raises OSError for what the call itself refuses."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fspath(source), None, os.fspath(target))


def make_dirs(path: Path) -> list[Path]:
    """Create a directory and its parents, each entry synced; returns what was made, outermost first."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    made = missing[::-1]
    for directory in made:
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)
    return made


def remove_tree(path: Path, *, last: str = "") -> None:
    """Delete a directory of ours and everything in it; what is already gone is fine.

    The entry named `last` goes when all others are gone, durably: it says what the directory is, should we be killed.
    """
    try:
        with os.scandir(path) as found:
            entries = list(found)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name != last:
            _remove(entry)
    marks = [entry for entry in entries if entry.name == last]
    if marks:
        fsync_dir(path)
        _remove(marks[0])
    with suppress(FileNotFoundError):
        path.rmdir()


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        remove_tree(Path(entry.path))
        return
    with suppress(FileNotFoundError):
        Path(entry.path).unlink()


@contextmanager
def holding(directory: Path) -> Iterator[bool]:
    """Work on a directory alone for the length of the block; wait for who does now.

    False where there is no such directory, or none any more: then nothing is held, whatever appears there meanwhile.
    The lock is on the directory itself, so it stays with it when it is renamed, and ends with the process. Where a
    directory cannot be locked (NFS), nobody waits.
    """
    descriptor = _locked(directory)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None and descriptor >= 0:
            with suppress(OSError):  # explicitly: a child forked meanwhile holds the same open file
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _locked(directory: Path) -> int | None:
    """A descriptor that holds the lock; -1 for what is no directory, None for what is not there."""
    while True:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError:
            return -1
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.lstat(directory)):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # while we waited, the name went to another directory


def remove_empty(directories: list[Path]) -> None:
    """Remove directories made by `make_dirs`, innermost first, as far as they are empty."""
    for directory in reversed(directories):
        try:
            directory.rmdir()
        except OSError:  # somebody else uses it by now: it stays
            return


def link_or_copy(source: Path, target: Path) -> str:
    """Give a file a second name: "linked", "cloned" (sharing blocks) or "copied", durably but for the name itself.

    What a killed attempt left at the target is replaced.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    else:
        return "linked"
    with source.open("rb") as old, target.open("xb") as new:
        how = "cloned" if _clone(old.fileno(), new.fileno()) else "copied"
        if how == "copied":
            shutil.copyfileobj(old, new, 1 << 20)
        new.flush()
        os.fsync(new.fileno())
    return how


_NO_LINK = _UNSUPPORTED | {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES}
_FICLONE = 0x40049409  # linux/fs.h


def _clone(source: int, target: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True
