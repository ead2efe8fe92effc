"""The files of one checkpoint, open for reading."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.errors import CorruptionError, FormatError, StorageError

MAX_DESCRIPTORS = 128  # far below the usual limit of 1,024 for a process; one checkpoint has one data file per 2 GiB
Buffer = Any  # numpy array or memoryview of bytes, contiguous (numpy's stubs hide that an array is a buffer)
IOV_MAX = 1024  # buffers the kernel takes in one call, on Linux and macOS alike


class _Open:
    __slots__ = ("descriptor", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0


class OpenFiles:
    """The files below a directory, by relative name; at most `limit` descriptors stay open, the latest used.

    Every method may be called from several threads at once. A file that is shorter than what is asked of it, or
    missing, is a CorruptionError that names it; any other refusal of the file system is a StorageError.
    """

    def __init__(self, root: Path, *, limit: int = MAX_DESCRIPTORS) -> None:
        self.root = root
        self._root = os.fspath(root)
        self._limit = limit
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def read_ranges(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill the byte buffers, one after the other, from `offset` on."""
        with self._descriptor(name) as descriptor:
            for i in range(0, len(buffers), IOV_MAX):
                offset = self._fill(descriptor, name, offset, buffers[i : i + IOV_MAX])

    def read(self, name: str, offset: int, length: int) -> bytes:
        """The bytes [offset, offset + length) of a file."""
        if offset + length > self.length(name):  # before memory is taken for a hostile length
            raise self._too_short(name, offset + length)
        data = bytearray(length)
        self.read_ranges(name, offset, [memoryview(data)])
        return bytes(data)

    def read_whole(self, name: str) -> bytes | None:
        """All of a small file, or None where there is none."""
        try:
            with open(self._path(name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError.wrap(error, f"reading {self._path(name)}") from error

    def length(self, name: str) -> int:
        """Bytes in a file."""
        with self._descriptor(name) as descriptor:
            return os.fstat(descriptor).st_size

    def close(self) -> None:
        """Close every descriptor; reads in other threads end first."""
        with self._lock:
            self._closed = True
            self._evict(0)

    def __del__(self) -> None:  # a checkpoint that is only dropped gives its descriptors back, too
        self.close()

    def _path(self, name: str) -> str:
        # An index may come from anyone: it must not lead out of its checkpoint.
        if name.startswith("/") or "\0" in name or ".." in name.split("/"):
            raise FormatError(f"the index of {self._root} names the file {name!r}, which is not inside the checkpoint.")
        return f"{self._root}/{name}"

    @contextmanager
    def _descriptor(self, name: str) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise ValueError(f"the checkpoint {self._root} is closed.")
            file = self._open.get(name)
            if file is None:
                file = self._open[name] = _Open(self._open_file(name))
            self._open.move_to_end(name)
            file.users += 1
            self._evict(self._limit)
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.users -= 1
                if self._closed:
                    self._evict(0)

    def _open_file(self, name: str) -> int:
        path = self._path(name)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptionError(f"file {path} is missing; the checkpoint's index refers to it.") from error
        except OSError as error:
            raise StorageError.wrap(error, f"opening {path}") from error

    def _evict(self, keep: int) -> None:
        if len(self._open) <= keep:
            return
        for name in [name for name, file in self._open.items() if not file.users][: len(self._open) - keep]:
            os.close(self._open.pop(name).descriptor)

    def _fill(self, descriptor: int, name: str, offset: int, buffers: Sequence[Buffer]) -> int:
        wanted = sum(map(_nbytes, buffers))
        while wanted:
            try:
                found = os.preadv(descriptor, buffers, offset)
            except OSError as error:
                raise StorageError.wrap(error, f"reading {self._path(name)}") from error
            if not found:
                raise self._too_short(name, offset + wanted)
            offset += found
            wanted -= found
            if wanted:  # a signal, or more than the kernel moves at once
                buffers = list(_after(buffers, found))
        return offset

    def _too_short(self, name: str, needed: int) -> CorruptionError:
        return CorruptionError(
            f"file {self._path(name)} has {self.length(name)} bytes, the checkpoint's index refers to {needed}: "
            f"it is truncated."
        )


def _nbytes(buffer: Buffer) -> int:
    return int(buffer.nbytes)


def _after(buffers: Sequence[Buffer], nbytes: int) -> Iterator[Buffer]:
    """What is left of the buffers once their first `nbytes` are filled."""
    for buffer in buffers:
        if nbytes >= buffer.nbytes:
            nbytes -= buffer.nbytes
        else:
            yield buffer[nbytes:] if nbytes else buffer
            nbytes = 0
