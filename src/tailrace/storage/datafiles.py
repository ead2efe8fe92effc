"""Appending chunk bytes to data files, each byte checksummed while it is copied.

A `Lane` is one data file being written by one thread at a time, through one aligned buffer. With O_DIRECT the buffer
goes to the disk past the page cache: on the machines measured a save of large leaves is 1.6-2 times as fast so, and
the training host keeps its cache. Where the file system refuses O_DIRECT (tmpfs, FUSE, macOS) the same buffer is
written through the cache, with write-back started early.

Bytes become durable at `sync`. With O_DIRECT `sync` pads the file with zeros to the next block, so a range never
shares a block with a range that was durable before it.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from tailrace.errors import StorageError
from tailrace.storage.posix import fsync_dir, storage_errors

BLOCK_BYTES = 4096  # what O_DIRECT asks of offsets, lengths and addresses; the largest in common use
ROLL_BYTES = 2 << 30
_COPY_BYTES = 1 << 20  # copied and then checksummed while still in the core's cache
_Array = np.ndarray[Any, np.dtype[Any]]


class Lane:
    """One append-only data file and the buffer in front of it. Not thread-safe: one holder at a time."""

    def __init__(self, root: Path, buffer_bytes: int, *, direct: bool = True) -> None:
        self.root = root
        self.relative = f"d/{uuid.uuid4().hex}"
        self.path = os.fspath(root / self.relative)
        self.offset = 0  # where the next byte goes, the buffered ones included
        self.dirty = False
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._descriptor = self._create()
        self._memory = mmap.mmap(-1, buffer_bytes)  # page-aligned
        self._buffer: _Array = np.frombuffer(self._memory, np.uint8)
        self._bytes = memoryview(self._memory)
        self._filled = 0
        self._broken: BaseException | None = None  # a failed fsync may have dropped pages, and the next not say so

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        with storage_errors(f"creating data file {self.path}"):
            if self.direct:
                try:
                    return os.open(self.path, flags | os.O_DIRECT, 0o666)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.direct = False  # the file system has no O_DIRECT, but may have created the file
                    flags &= ~os.O_EXCL
            return os.open(self.path, flags, 0o666)

    def append(self, blocks: Iterable[_Array]) -> tuple[int, int, int]:
        """Append blocks of bytes, which may be changed on return: (offset, length, their crc32c)."""
        start, checksum = self.offset, 0
        for block in blocks:
            if block.flags.c_contiguous:
                flat = block.reshape(-1).view(np.uint8)
                for at in range(0, flat.size, _COPY_BYTES):
                    checksum = self._copy(flat[at : at + _COPY_BYTES], checksum)
            else:
                checksum = self._copy_strided(block, checksum)
        return start, self.offset - start, checksum

    def append_checksummed(self, blocks: Iterable[_Array]) -> tuple[int, int]:
        """Append blocks and then their crc32c, as zarr's crc32c codec lays it out: (offset, length)."""
        start, length, checksum = self.append(blocks)
        self._copy(np.frombuffer(struct.pack("<I", checksum), np.uint8), 0)
        return start, length + 4

    def append_small(self, data: _Array) -> tuple[int, int]:
        """`append_checksummed` for one contiguous array that is small beside the buffer, in half the time."""
        start, end = self._filled, self._filled + data.nbytes
        if end + 4 > self._buffer.size or not data.flags.c_contiguous:
            return self.append_checksummed((data,))
        self._buffer[start:end] = data.reshape(-1).view(np.uint8)
        struct.pack_into("<I", self._memory, end, crc32c(self._bytes[start:end]))
        offset = self.offset
        self._advance(end + 4 - start)
        return offset, end + 4 - start

    def _copy(self, flat: _Array, checksum: int) -> int:
        at = 0
        while at < flat.size:
            room = min(flat.size - at, self._buffer.size - self._filled)
            end = self._filled + room
            self._buffer[self._filled : end] = flat[at : at + room]
            checksum = crc32c(self._bytes[self._filled : end], checksum)
            self._advance(room)
            at += room
        return checksum

    def _copy_strided(self, block: _Array, checksum: int) -> int:
        if block.nbytes > self._buffer.size - self._filled:  # blocks are small: a copy of its own is cheaper than cases
            return self._copy(np.ascontiguousarray(block).reshape(-1).view(np.uint8), checksum)
        end = self._filled + block.nbytes
        self._buffer[self._filled : end].view(block.dtype).reshape(block.shape)[...] = block
        checksum = crc32c(self._bytes[self._filled : end], checksum)
        self._advance(block.nbytes)
        return checksum

    def _advance(self, nbytes: int) -> None:
        self._filled += nbytes
        self.offset += nbytes
        self.dirty = True
        if self._filled == self._buffer.size:
            self._write_out(self._filled)

    def _write_out(self, nbytes: int) -> None:
        """Write the first `nbytes` of the buffer, which then starts anew."""
        start, at = self.offset - self._filled, 0
        self._refuse_broken()
        with self._breaking(), storage_errors(f"writing data file {self.path}"):
            while at < nbytes:
                try:
                    at += os.pwrite(self._descriptor, self._bytes[at:nbytes], start + at)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self.direct:
                        raise
                    self._leave_direct()  # accepted O_DIRECT at open, refuses it now
            if not self.direct and nbytes >= _COPY_BYTES and hasattr(os, "posix_fadvise"):
                # starts write-back without waiting for it, so that the fsync at the end finds little to do
                os.posix_fadvise(self._descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)
        self._filled = 0

    def _leave_direct(self) -> None:
        os.close(self._descriptor)
        self._descriptor = os.open(self.path, os.O_WRONLY)
        self.direct = False

    def write_through(self) -> None:
        """Hand every byte to the file system, so that others may read them; not durable yet."""
        if self._filled:
            padding = -self._filled % BLOCK_BYTES if self.direct else 0
            self._buffer[self._filled : self._filled + padding] = 0
            self._filled += padding
            self.offset += padding
            self._write_out(self._filled)

    def sync(self) -> None:
        """Make every byte appended so far durable.

        Raises StorageError, and from then on every time: a second fsync would not say that the first dropped pages.
        """
        if self.dirty:
            self._refuse_broken()
            self.write_through()
            with self._breaking(), storage_errors(f"syncing data file {self.path}"):
                _sync_data(self._descriptor)
            self.dirty = False

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Whatever is raised inside breaks the lane for good."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise StorageError(errno.EIO, f"{self._broken}; nothing more is written to that file") from self._broken

    def close(self) -> None:
        """Release file and buffer without syncing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._buffer = np.empty(0, np.uint8)
            with suppress(BufferError):  # the traceback of a failed write may hold a view: then it goes with that
                self._bytes.release()
                self._memory.close()


def _sync_data(descriptor: int) -> None:
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        import fcntl  # macOS: fsync leaves bytes in the drive's cache, F_FULLFSYNC does not

        fcntl.fcntl(descriptor, getattr(fcntl, "F_FULLFSYNC", 51))


class Lanes:
    """The data files of one writer: as many lanes as threads, handed out one thread at a time."""

    def __init__(
        self, root: Path, *, lanes: int, buffer_bytes: int, direct: bool = True, roll_bytes: int = ROLL_BYTES
    ) -> None:
        self.lengths: dict[str, int] = {}  # relative path -> length, of closed files
        self.interrupted: set[str] = set()  # files in which an append failed half-way: not all between ranges is zero
        self._root, self._buffer_bytes, self._direct, self._roll_bytes = root, buffer_bytes, direct, roll_bytes
        self._idle: list[Lane] = []
        self._all: list[Lane] = []
        self._may_open = lanes
        self._new_names = False
        self._changed = threading.Condition()
        self._sync_lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[Lane]:
        """Hold a lane for one or more appends. The last one used comes first, so a single writer fills one file."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._may_open)
            lane = self._idle.pop() if self._idle else None
            if lane is None:
                self._may_open -= 1
        full = None
        if lane is not None and lane.offset >= self._roll_bytes:
            full, lane = lane, None
        try:
            if lane is None:
                lane = self._next(full)
            yield lane
        except BaseException:
            if lane is not None:  # it may end in half an append
                self.interrupted.add(lane.relative)
            raise
        finally:
            with self._changed:
                if lane is None:
                    self._may_open += 1
                else:
                    self._idle.append(lane)
                self._changed.notify_all()  # who waits for one certain lane must not swallow it

    def _next(self, full: Lane | None) -> Lane:
        if full is not None:
            try:
                full.sync()
            finally:
                self._forget(full)
        lane = Lane(self._root, self._buffer_bytes, direct=self._direct)
        with self._changed:
            self._all.append(lane)
            self._new_names = True
        return lane

    def _forget(self, lane: Lane) -> None:
        with self._changed:
            self._all.remove(lane)
            self.lengths[lane.relative] = lane.offset
        lane.close()

    def sync(self) -> None:
        """Make everything appended before this call durable, new files' names included."""
        with self._sync_lock:
            for lane in self._held():
                lane.sync()
            if self._new_names:
                self._new_names = False
                with storage_errors(f"syncing {self._root / 'd'}"):
                    fsync_dir(self._root / "d")

    def write_through(self) -> None:
        """Hand everything appended before this call to the file system, so that it can be read back."""
        for lane in self._held():
            lane.write_through()

    def _held(self) -> Iterator[Lane]:
        """Every open lane in turn, held while the caller works on it."""
        with self._changed:
            lanes = list(self._all)
        for lane in lanes:
            with self._changed:
                self._changed.wait_for(lambda lane=lane: lane in self._idle or lane not in self._all)  # type: ignore[misc]
                if lane not in self._all:
                    continue
                self._idle.remove(lane)
            try:
                yield lane
            finally:
                with self._changed:
                    self._idle.append(lane)
                    self._changed.notify_all()

    def close(self) -> None:
        """Release every lane without syncing; `lengths` then holds every file."""
        with self._changed:
            lanes, self._all, self._idle = self._all, [], []
            self._may_open = 0
        for lane in lanes:
            self.lengths[lane.relative] = lane.offset
            lane.close()
