"""Variable-length integers, one or a column at a time, and a reader that never runs past its bytes.

A varint (uleb128) holds 7 bits a byte, lowest first; every byte but the last has its top bit set. Columns of
hundreds are the common case, so they are coded with numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tailrace.errors import CorruptionError

MAX_INT64 = 2**63 - 1  # file offsets are signed, so anything above is no place in a file
MAX_UINT64 = 2**64 - 1
MAX_VARINT_BYTES = 10


def encode_one(number: int) -> bytes:
    """The varint of a number in [0, 2**64)."""
    assert 0 <= number <= MAX_UINT64, f"{number} is no 64-bit unsigned integer"
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode_many(numbers: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """The varints of many numbers in [0, 2**64), one after the other."""
    column = np.asarray(numbers, dtype=np.uint64)
    if column.size == 0:
        return b""
    largest = int(column.max())
    if largest < 128:
        return column.astype(np.uint8).tobytes()
    width = (largest.bit_length() + 6) // 7
    rest = column[:, None] >> (np.arange(width, dtype=np.uint64) * np.uint64(7))  # what is left before each byte
    grid = (rest & np.uint64(127)).astype(np.uint8) | ((rest > 127).astype(np.uint8) << 7)
    used = rest > 0
    used[:, 0] = True  # zero takes one byte
    return grid[used].tobytes()


class ByteReader:
    """Reads fields in order; one that does not fit in the bytes left raises CorruptionError before any allocation."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data = data
        self.position = position

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return len(self.data) - self.position

    def take(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes."""
        self._need(nbytes)
        start = self.position
        self.position = start + nbytes
        return self.data[start : self.position]

    def uint8(self) -> int:
        """The next byte as a number."""
        return self.take(1)[0]

    def uint64(self) -> int:
        """The next 8 bytes as a little-endian number."""
        return int.from_bytes(self.take(8), "little")

    def int32(self) -> int:
        """The next 4 bytes as a little-endian signed number."""
        return int(struct.unpack("<i", self.take(4))[0])

    def varint(self, limit: int = MAX_INT64) -> int:
        """The next varint; above `limit` it is damage."""
        number = 0
        for place in range(MAX_VARINT_BYTES):
            byte = self.uint8()
            number |= (byte & 127) << (7 * place)
            if byte < 128:
                break
        else:
            raise CorruptionError(f"varint before byte {self.position} is longer than {MAX_VARINT_BYTES} bytes")
        if number > limit:
            raise CorruptionError(f"number before byte {self.position} is {number}, at most {limit} is valid")
        return number

    def varints(self, count: int, limit: int = MAX_INT64) -> npt.NDArray[np.int64]:
        """The next `count` varints; one above `limit` is damage."""
        assert limit <= MAX_INT64, "a column is signed"
        self._need(count)  # a varint has at least one byte
        if count == 0:
            return np.empty(0, dtype=np.int64)
        window = np.frombuffer(self.data, np.uint8, min(MAX_VARINT_BYTES * count, self.remaining), offset=self.position)
        if bool((window[:count] < 128).all()):  # one byte each: most columns of most nodes
            column = window[:count].astype(np.int64)
            self.position += count
        else:
            column = self._long_varints(window, count)
        largest = int(column.max())
        if largest > limit:
            raise CorruptionError(f"number before byte {self.position} is {largest}, at most {limit} is valid")
        return column

    def _long_varints(self, window: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
        ends = np.flatnonzero(window < 128)[:count] + 1
        if len(ends) < count:  # ended early, or some varint is longer than the window allows for
            raise CorruptionError(f"{count} varints expected from byte {self.position}, {len(ends)} found")
        starts = np.concatenate(([0], ends[:-1]))
        widths = ends - starts
        if int(widths.max()) >= MAX_VARINT_BYTES:  # its last byte would be bit 63 and above
            raise CorruptionError(f"varint after byte {self.position} has {widths.max()} bytes, at most 9 are valid")
        window = window[: ends[-1]]
        places = np.arange(len(window)) - np.repeat(starts, widths)
        parts = (window & 127).astype(np.int64) << (7 * places)
        self.position += int(ends[-1])
        return np.add.reduceat(parts, starts)

    def end(self) -> None:
        """Raise CorruptionError if bytes are left."""
        if self.remaining:
            raise CorruptionError(f"{self.remaining} bytes left over after byte {self.position}")

    def _need(self, nbytes: int) -> None:
        if nbytes > self.remaining:
            raise CorruptionError(f"truncated: {nbytes} bytes expected at byte {self.position}, {self.remaining} found")
