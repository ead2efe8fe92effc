"""The safetensors format: a checked header, and tensors read by regions.

A file is an 8-byte little-endian header length, a JSON header naming each tensor's dtype, shape and byte range,
and the tensors' bytes, which tile the rest of the file without hole or overlap. Only the header is ever held.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import crc32c
import ml_dtypes
import msgspec
import numpy as np

from tailrace.errors import LeafError, SourceFormatError, StorageError
from tailrace.flow.regions import Region, Shape
from tailrace.flow.sources import Array
from tailrace.huggingface import strict_json

T = TypeVar("T")

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_ELEMENTS = 2**63  # no file can hold more; Python's integers would not overflow by themselves
_MAX_RANK = 32  # zarr's readers and numpy 1 stop here
_METADATA = "__metadata__"
_GATHER_BYTES = 256 << 10  # short rows are fetched together, up to this much at a time
_ROW_PITCH_BYTES = 16 << 10  # rows further apart than this are cheaper by one system call each

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
_UNSTORABLE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8}  # valid in a file, without a zarr type
_BITS = {name: np.dtype(dtype).itemsize * 8 for name, dtype in _DTYPES.items()} | _UNSTORABLE_BITS


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_STRINGS = msgspec.json.Decoder(dict[str, str])


class Tensor(NamedTuple):
    """One tensor of a file: what it is called there, what it is, and which bytes of the file it takes."""

    name: str
    format: str
    shape: Shape
    offset: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type. Raises LeafError for the formats that no checkpoint can store."""
        if self.format in _UNSTORABLE_BITS:
            raise LeafError(
                f"tensor {self.name!r}: {self.format} cannot be stored, since zarr has no such type. "
                f"Cast it in the source file first, to BF16 for its values or to U8 for its raw bytes."
            )
        dtype: np.dtype[Any] = np.dtype(_DTYPES[self.format])
        return dtype


class SafetensorsFile:
    """One file, its header read and checked; tensors are read when asked for.

    Raises SourceFormatError naming the file, the tensor and what is wrong with it. Thread-safe.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        try:
            header, status = _read_header(self.path, self._opened())
        finally:
            self.close()  # a model has hundreds of files; only those being read stay open
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
        self.header_crc32c: int = crc32c.crc32c(header)
        self.tensors, self.metadata = _parse_header(header, self.size - 8 - len(header), str(self.path))

    def source(self, name: str) -> TensorSource:
        """The tensor of this name, as a source of regions."""
        return TensorSource(self, self.tensors[name])

    def read_bytes(self, offset: int, out: memoryview) -> None:
        """Fill `out` from the file, whatever the alignment of `offset`."""
        descriptor = self._opened()
        while out:
            try:
                count = os.preadv(descriptor, [out], offset)
            except OSError as error:
                raise StorageError.wrap(error, f"reading {self.path}") from error
            if count == 0:
                raise SourceFormatError(
                    f"{self.path}: ends at byte {offset}, but had {self.size} bytes when it was opened. "
                    f"Something is changing the file; run the import again when it is complete."
                )
            offset, out = offset + count, out[count:]

    def close(self) -> None:
        """Give the file back; the next read opens it again."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _opened(self) -> int:
        with self._lock:
            if self._descriptor is None:
                try:
                    # O_NONBLOCK: a pipe in place of a file must be refused, not waited for
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                except OSError as error:
                    raise StorageError.wrap(error, f"opening {self.path}") from error
            return self._descriptor


class TensorSource:
    """A tensor as a Source: any region of it, read straight into the destination."""

    __slots__ = ("dtype", "file", "shape", "tensor")

    def __init__(self, file: SafetensorsFile, tensor: Tensor) -> None:
        self.file = file
        self.tensor = tensor
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    def read_into(self, region: Region, out: Array) -> None:
        """Fill `out`, a C-contiguous array of the region's shape; rows that lie together are read together."""
        assert out.shape == region.shape
        assert out.flags.c_contiguous
        if out.size:
            offset = self.tensor.offset + sum(
                start * stride for start, stride in zip(region.start, self._strides(), strict=True)
            )
            self._read(offset, out, self.shape, self._strides())

    def _strides(self) -> Shape:
        strides, step = [], self.dtype.itemsize
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent
        return tuple(reversed(strides))

    def _read(self, offset: int, out: Array, extents: Shape, strides: Shape) -> None:
        if out.shape[1:] == extents[1:]:  # whole rows: one run of bytes
            self.file.read_bytes(offset, out.reshape(-1).view(np.uint8).data)
            return
        pitch = strides[0]
        if pitch > _ROW_PITCH_BYTES or out.shape[0] == 1:
            for row in range(out.shape[0]):
                self._read(offset + row * pitch, out[row], extents[1:], strides[1:])
            return
        together = min(out.shape[0], _GATHER_BYTES // pitch)
        scratch = bytearray(together * pitch)
        last = sum((n - 1) * s for n, s in zip(out.shape[1:], strides[1:], strict=True)) + self.dtype.itemsize
        for row in range(0, out.shape[0], together):
            part = out[row : row + together]
            self.file.read_bytes(offset + row * pitch, memoryview(scratch)[: (len(part) - 1) * pitch + last])
            part[...] = np.ndarray(part.shape, self.dtype, scratch, strides=strides)


def _read_header(path: Path, descriptor: int) -> tuple[bytes, os.stat_result]:
    """The header's JSON and the file's status, once the file proves long enough to hold what it promises."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise SourceFormatError(f"{path}: not a regular file, so not a safetensors file.")
    prefix = os.pread(descriptor, 8, 0)
    if prefix == b"version ":
        raise SourceFormatError(
            f"{path}: this is a Git LFS pointer, not the weights. Run `git lfs pull` in its repository, or download it."
        )
    if len(prefix) < 8:
        raise SourceFormatError(f"{path}: {status.st_size} bytes, but a safetensors file has at least 10.")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise SourceFormatError(f"{path}: header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed.")
    if length > status.st_size - 8:
        raise SourceFormatError(
            f"{path}: header of {length} bytes in a file of {status.st_size}. Truncated? Download it again."
        )
    header = bytearray()
    while len(header) < length:  # one call reads at most 2 GiB, and may read less
        part = os.pread(descriptor, length - len(header), 8 + len(header))
        if not part:
            raise SourceFormatError(f"{path}: the file shrank while its header was read.")
        header += part
    return bytes(header), status


def _parse_header(header: bytes, data_bytes: int, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not header.startswith(b"{"):
        raise SourceFormatError(f"{path}: the header begins with {header[:8]!r}, it has to begin with '{{'.")
    raw = strict_json.decode(header, _HEADER, f"{path}: header")
    metadata: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in raw.items():
        if name == _METADATA:
            metadata = _decode_part(_STRINGS, value, f"{path}: {_METADATA}")
        else:
            entry = _decode_part(_ENTRY, value, f"{path}: tensor {name!r}")
            tensors[name] = _checked(name, entry, 8 + len(header), path)
    _check_tiling(tensors.values(), 8 + len(header), data_bytes, path)
    return tensors, metadata


def _decode_part(decoder: msgspec.json.Decoder[T], value: msgspec.Raw, what: str) -> T:
    try:
        return decoder.decode(value)
    except msgspec.DecodeError as error:
        raise SourceFormatError(f"{what}: {error}.") from error


def _checked(name: str, entry: _Entry, data_start: int, path: str) -> Tensor:
    """The tensor, once its dtype, shape and byte range agree."""
    where = f"{path}: tensor {name!r}"
    if entry.dtype not in _BITS:
        raise SourceFormatError(f"{where}: dtype {entry.dtype!r}, allowed are {', '.join(_BITS)}.")
    if any(n < 0 for n in entry.shape):
        raise SourceFormatError(f"{where}: shape {list(entry.shape)} has a negative extent.")
    if len(entry.shape) > _MAX_RANK:
        raise SourceFormatError(f"{where}: {len(entry.shape)} dimensions, at most {_MAX_RANK} are allowed.")
    elements = math.prod(entry.shape)
    if elements >= _MAX_ELEMENTS or max(entry.shape, default=0) >= _MAX_ELEMENTS:
        raise SourceFormatError(f"{where}: shape {list(entry.shape)} has more elements than a file can hold.")
    bits = elements * _BITS[entry.dtype]
    if bits % 8:
        raise SourceFormatError(f"{where}: {elements} elements of {entry.dtype} do not fill whole bytes.")
    begin, end = entry.data_offsets
    if begin < 0 or end < begin:
        raise SourceFormatError(f"{where}: data_offsets [{begin}, {end}] run backwards.")
    if end - begin != bits // 8:
        raise SourceFormatError(
            f"{where}: data_offsets [{begin}, {end}] hold {end - begin} bytes, "
            f"but {entry.dtype} of shape {list(entry.shape)} takes {bits // 8}."
        )
    return Tensor(name, entry.dtype, entry.shape, data_start + begin, end - begin)


def _check_tiling(tensors: Iterable[Tensor], data_start: int, data_bytes: int, path: str) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            fault = "a hole before it" if tensor.offset > position else "an overlap with the tensor before it"
            raise SourceFormatError(
                f"{path}: tensor {tensor.name!r} begins at data byte {tensor.offset - data_start}, "
                f"expected {position - data_start}: {fault}."
            )
        position += tensor.nbytes
    if position != data_start + data_bytes:
        kind = "truncated" if position > data_start + data_bytes else "bytes that belong to no tensor"
        raise SourceFormatError(
            f"{path}: the header describes {position - data_start} bytes of data, the file has {data_bytes}: {kind}. "
            f"Download it again."
        )
