"""Compressed bytes -> exactly as many bytes as were asked for, and the proof that nothing follows."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import IO, cast

import zstandard

from tailrace.errors import CorruptionError

Bytes = bytes | bytearray | memoryview

PIECE_BYTES = 1 << 20  # compressed bytes taken at once, and the most zlib hands out at once

_DAMAGE = (zstandard.ZstdError, zlib.error)
_local = threading.local()  # zstandard's objects are reusable, but by one thread at a time
# A frame of its own that follows every zstd chunk we read. It comes out whole only where the chunk's frames were whole
# too, which zstandard's stream reader does not tell: a cut frame merely ends early there.
_TRAILER = b"end of chunk"
_TRAILER_FRAME = zstandard.ZstdCompressor(level=1).compress(_TRAILER)


def compress(data: Bytes) -> bytes:
    """One zstd frame of level 1, which says how much it holds."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=1)
    frame: bytes = _local.compressor.compress(data)
    return frame


def decompress_into(target: memoryview, encoded: memoryview, compressor: str) -> None:
    """Fill all of `target`; CorruptionError where `encoded` holds less, more or damage."""
    pieces = (encoded[start : start + PIECE_BYTES] for start in range(0, len(encoded), PIECE_BYTES))
    source = Decompressed(compressor, pieces)
    source.fill(target)
    source.finish()


class Decompressed:
    """What compressed pieces (zstd, gzip or zlib) hold, taken in order; never more than asked for."""

    def __init__(self, compressor: str, pieces: Iterator[memoryview]) -> None:
        self._stream: _Zstd | _Zlib = _Zstd(pieces) if compressor == "zstd" else _Zlib(pieces, compressor)

    def fill(self, target: memoryview) -> None:
        """Fill all of `target`."""
        done = 0
        try:
            while done < len(target):
                count = self._stream.readinto(target[done:])
                if count == 0:
                    raise CorruptionError(f"a compressed chunk ends {len(target) - done} bytes early.")
                done += count
        except _DAMAGE as error:
            raise CorruptionError(f"a compressed chunk is damaged: {error}.") from error

    def finish(self) -> None:
        """Check that nothing is left and nothing was cut off."""
        try:
            whole = self._stream.ended()
        except _DAMAGE as error:
            raise CorruptionError(f"a compressed chunk is damaged at its end: {error}.") from error
        if not whole:
            raise CorruptionError("a compressed chunk is longer than its array says, or its end is missing.")


class _Feed:
    """The file that zstandard's stream reader reads: pieces, then the trailer."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._parts: Iterator[Bytes] = chain(pieces, (_TRAILER_FRAME,))

    def read(self, _size: int = -1) -> Bytes:
        """The next part, never longer than PIECE_BYTES."""
        return next(self._parts, b"")


class _Zstd:
    """zstd frames as a stream."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        # An object of its own: streams are suspended halfway, and others may be read meanwhile.
        self._reader = zstandard.ZstdDecompressor().stream_reader(
            cast(IO[bytes], _Feed(pieces)), read_size=PIECE_BYTES, read_across_frames=True
        )

    def readinto(self, target: memoryview) -> int:
        """Some of the following bytes; 0 at the end."""
        return self._reader.readinto(target)

    def ended(self) -> bool:
        """Whether what follows is the trailer and nothing else."""
        found = b""
        while len(found) <= len(_TRAILER) and (more := self._reader.read(len(_TRAILER) + 1 - len(found))):
            found += more
        return found == _TRAILER


class _Zlib:
    """gzip members, or one zlib stream."""

    def __init__(self, pieces: Iterator[memoryview], compressor: str) -> None:
        self._pieces = pieces
        self._wbits = 31 if compressor == "gzip" else 15
        self._members = compressor == "gzip"  # gzip files may be joined, zlib streams not
        self._inflater = zlib.decompressobj(self._wbits)
        self._input: Bytes = b""

    def readinto(self, target: memoryview) -> int:
        """Some of the following bytes; 0 at the end."""
        while True:
            if self._inflater.eof and not self._next_member():
                return 0
            if not len(self._input):
                self._input = next(self._pieces, b"")
            # Without input there may still be output that an earlier, full target left inside.
            starved = not len(self._input)
            data = self._inflater.decompress(self._input, min(len(target), PIECE_BYTES))
            self._input = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            if data:
                target[: len(data)] = data
                return len(data)
            if starved and not self._inflater.eof:
                return 0

    def ended(self) -> bool:
        """Whether nothing follows and the last checksum was there."""
        return self.readinto(memoryview(bytearray(1))) == 0 and self._inflater.eof and not len(self._input)

    def _next_member(self) -> bool:
        if not self._members:
            return False
        if not len(self._input):
            self._input = next(self._pieces, b"")
        if not len(self._input):
            return False
        self._inflater = zlib.decompressobj(self._wbits)
        return True
