"""Chunks: elements <-> encoded bytes, whole or as a stream of bounded blocks.

Lengths found in data are never trusted: whatever a compressor claims, no more than the chunk's own bytes come out,
and a chunk that is longer, shorter or checked wrong is a CorruptionError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import crc32c
import numpy as np

from tailrace.errors import CorruptionError, InputError, UnsupportedFormatError
from tailrace.format.compression import Decompressed, compress, decompress_into
from tailrace.format.zarr import CRC_BYTES, ArrayMetadata, Chain, Shape, Sharding

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | bytearray | memoryview | Array
Read = Callable[[int, int], Buffer]  # (offset, length) within an encoded chunk

BLOCK_BYTES = 1 << 20  # a multiple of every element size, so that blocks hold whole elements
ABSENT = 2**64 - 1  # offset and length of an inner chunk that is not stored


class Box(Protocol):
    """Start and shape of a part of a chunk; a Region is one."""

    @property
    def start(self) -> Shape:
        """First index in each dimension."""
        ...

    @property
    def shape(self) -> Shape:
        """Extent in each dimension."""
        ...


# Encoding


def encode_chunk(chunk: Buffer, *, compression: str | None) -> list[Buffer]:
    """The parts of an encoded chunk, to be stored one after the other: its payload and the payload's crc32c.

    `chunk` is one full C-contiguous chunk in little-endian order. Without compression the payload is its own memory.
    """
    payload: bytes | memoryview = _bytes_of(chunk)
    if compression == "zstd":
        payload = compress(payload)
    elif compression is not None:
        raise InputError(f"compression={compression!r}: allowed are None and 'zstd'.")
    return [payload, crc32c.crc32c(payload).to_bytes(CRC_BYTES, "little")]


# Decoding whole chunks


def decode_chunk(data: Buffer, meta: ArrayMetadata, out: Array | None = None) -> Array:
    """The whole chunk that `data` encodes, in `out` where that is given.

    `out` must be C-contiguous, of the chunk's shape and dtype. Without it, the result may be a read-only view of
    `data`. Raises CorruptionError for any data that is not exactly one chunk.
    """
    chain = _chain(meta)
    encoded = _bytes_of(data)
    for _ in range(chain.outer_crcs):
        encoded = _checked(encoded)
    if chain.sharding is not None:
        shard = _decode_shard(encoded, chain.sharding)
        return _delivered(_transposed_back(shard, chain.order), out)
    direct = out is not None and chain.inner_crcs == 0 and _as_in_memory(chain, meta)
    if chain.compressor is not None:
        length = meta.chunk_bytes + CRC_BYTES * chain.inner_crcs
        target = _bytes_of(out if direct and out is not None else _room((length,), np.dtype(np.uint8)))
        decompress_into(target, encoded, chain.compressor)
        if direct and out is not None:
            return out
        encoded = target
    for _ in range(chain.inner_crcs):
        encoded = _checked(encoded)
    if len(encoded) != meta.chunk_bytes:
        raise CorruptionError(f"a chunk of {meta.chunk_bytes} bytes holds {len(encoded)}.")
    elements = np.frombuffer(encoded, np.uint8)
    if not chain.little_endian and meta.dtype.itemsize > 1:
        unit = meta.dtype.itemsize // (2 if meta.dtype.kind == "c" else 1)  # each half of a complex for itself
        elements = elements.view(f"u{unit}").byteswap().view(np.uint8)
    shape = tuple(meta.chunk_shape[axis] for axis in chain.order)
    return _delivered(_transposed_back(elements.view(meta.dtype).reshape(shape), chain.order), out)


def _decode_shard(encoded: memoryview, sharding: Sharding) -> Array:
    """The (transposed) chunk of a shard whose checksums are off already."""
    inner = sharding.inner
    index = _shard_index(lambda offset, length: encoded[offset : offset + length], len(encoded), sharding)
    shard = _room(inner.shape, inner.dtype)
    for place in np.ndindex(index.shape[:-1]):
        offset, length = map(int, index[place])
        index_of: tuple[Any, ...] = tuple(
            slice(i * n, i * n + n) for i, n in zip(place, inner.chunk_shape, strict=True)
        )
        part = shard[(..., *index_of)]  # with `...` rank 0 gives an array, too
        part[...] = inner.fill_value if offset == ABSENT else decode_chunk(encoded[offset : offset + length], inner)
    return shard


def _delivered(chunk: Array, out: Array | None) -> Array:
    if out is None:
        return np.ascontiguousarray(chunk).reshape(chunk.shape)
    out[...] = chunk
    return out


def _transposed_back(encoded: Array, order: Shape) -> Array:
    return encoded.transpose(np.argsort(order)) if order else encoded


def _as_in_memory(chain: Chain, meta: ArrayMetadata) -> bool:
    return chain.c_order and (chain.little_endian or meta.dtype.itemsize == 1)


def _checked(encoded: memoryview) -> memoryview:
    """The bytes before a crc32c, once it agrees with them."""
    if len(encoded) < CRC_BYTES:
        raise CorruptionError(f"an encoded chunk of {len(encoded)} bytes is too short to end in a crc32c.")
    payload = encoded[:-CRC_BYTES]
    _compare(int.from_bytes(encoded[-CRC_BYTES:], "little"), crc32c.crc32c(payload))
    return payload


def _compare(stored: int, computed: int) -> None:
    if stored != computed:
        raise CorruptionError(f"crc32c of a chunk is {computed:#010x}, stored was {stored:#010x}.")


# Shards, part by part


def read_shard_index(read: Read, length: int, meta: ArrayMetadata) -> Array:
    """Where the inner chunks of a shard of `length` encoded bytes lie, for metadata that has `inner`.

    A uint64 array of the shape (*inner grid, 2): offset in the shard and length of each inner chunk, both ABSENT where
    none is stored. Every other entry lies within the shard. Inner chunks are decoded with `meta.inner`.
    """
    chain = _chain(meta)
    assert meta.inner is not None, "ask meta.inner first"
    assert chain.sharding is not None
    return _shard_index(read, length - CRC_BYTES * chain.outer_crcs, chain.sharding)


def _shard_index(read: Read, length: int, sharding: Sharding) -> Array:
    nbytes = sharding.index_bytes
    if nbytes > length:
        raise CorruptionError(f"a shard of {length} bytes is too short for its index of {nbytes}.")
    index = decode_chunk(_exactly(read, length - nbytes if sharding.index_at_end else 0, nbytes), sharding.index)
    offsets, lengths = index[..., 0], index[..., 1]
    absent = (offsets == ABSENT) & (lengths == ABSENT)
    outside = ~absent & ((lengths > length) | (offsets > length - np.minimum(lengths, length)))
    if outside.any():
        offset, size = index[tuple(np.argwhere(outside)[0])]
        raise CorruptionError(f"a shard of {length} bytes places an inner chunk at {offset} with {size} bytes.")
    return index


# Streams


def supports_streaming(meta: ArrayMetadata) -> bool:
    """Whether `decode_stream` can read such chunks: bytes in C order, at most one compressor and a crc32c around it."""
    return meta.streamable


def decode_stream(read: Read, length: int, meta: ArrayMetadata) -> Iterator[memoryview]:
    """The elements of a chunk of `length` encoded bytes, in C order, as blocks of at most 1 MiB and whole elements.

    A block is valid until the next is taken. Only after the last one is the chunk known to be sound: then a
    CorruptionError is raised instead of the end where a checksum or length is wrong. Holds about 2 MiB beside the
    window of the compressor.
    """
    chain = _chain(meta)
    if not meta.streamable:
        raise UnsupportedFormatError(f"chunks with codecs {[c.name for c in meta.codecs]} are not read as a stream.")
    pieces = _payload(read, length, chain.outer_crcs > 0)
    if chain.compressor is None:
        stored = length - CRC_BYTES * chain.outer_crcs
        if stored != meta.chunk_bytes:
            raise CorruptionError(f"a chunk of {meta.chunk_bytes} bytes holds {stored}.")
        yield from pieces
        return
    source = Decompressed(chain.compressor, pieces)
    block = memoryview(bytearray(min(BLOCK_BYTES, meta.chunk_bytes)))
    for start in range(0, meta.chunk_bytes, BLOCK_BYTES):
        part = block[: meta.chunk_bytes - start]
        source.fill(part)
        yield part
    source.finish()


def scatter(blocks: Iterable[Buffer], meta: ArrayMetadata, region: Box, out: Array) -> None:
    """Write the parts of a chunk, coming as C-ordered blocks of whole elements, that lie in a box of it into `out`.

    `out` has the box's shape, the chunk's dtype and any strides. All blocks are taken, so that a stream is checked.
    """
    part = Scatter(meta, region, out)
    for block in blocks:
        part.write(block)


class Scatter:
    """One destination of a chunk's stream; several may be fed with the same blocks."""

    __slots__ = ("_dtype", "_out", "_position", "_shape", "_start")

    def __init__(self, meta: ArrayMetadata, region: Box, out: Array) -> None:
        assert out.shape == tuple(region.shape), f"destination {out.shape} for a box of {region.shape}"
        assert out.dtype == meta.dtype, f"destination {out.dtype} for chunks of {meta.dtype}"
        self._dtype, self._shape = meta.dtype, meta.chunk_shape
        self._start, self._out = region.start, out
        self._position = 0  # elements seen

    def write(self, block: Buffer) -> None:
        """Take the next block of the stream."""
        elements = np.frombuffer(block, np.uint8).view(self._dtype)
        first, self._position = self._position, self._position + len(elements)
        for start, shape in _runs(first, self._position, self._shape):
            n = math.prod(shape)
            self._copy(elements[:n].reshape(shape), start)
            elements = elements[n:]

    def _copy(self, part: Array, start: Shape) -> None:
        """Copy what of `part`, which stands at `start` in the chunk, lies in the destination's box."""
        source, target = [], []
        for a, n, b, m in zip(start, part.shape, self._start, self._out.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return
            source.append(slice(low - a, high - a))
            target.append(slice(low - b, high - b))
        self._out[tuple(target)] = part[tuple(source)]


def _runs(first: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Boxes (start, shape) that the elements `first` to `stop` of a C-ordered array fill, in order."""
    if first >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while first < stop:
        index, inside = divmod(first, row)
        if inside or stop - first < row:  # part of one row
            end = min(stop, (index + 1) * row)
            for start, extent in _runs(inside, inside + end - first, shape[1:]):
                yield (index, *start), (1, *extent)
            first = end
        else:
            count = (stop - first) // row
            yield (index, *(0,) * len(shape[1:])), (count, *shape[1:])
            first += count * row


def _payload(read: Read, length: int, crc: bool) -> Iterator[memoryview]:
    """An encoded chunk in pieces of at most 1 MiB, less its crc32c, which is compared after the last."""
    end = length - CRC_BYTES * crc
    if end < 0:
        raise CorruptionError(f"an encoded chunk of {length} bytes is too short to end in a crc32c.")
    computed = 0
    for offset in range(0, end, BLOCK_BYTES):
        piece = _exactly(read, offset, min(BLOCK_BYTES, end - offset))
        if crc:
            computed = crc32c.crc32c(piece, computed)
        yield piece
    if crc:
        _compare(int.from_bytes(_exactly(read, end, CRC_BYTES), "little"), computed)


def _exactly(read: Read, offset: int, length: int) -> memoryview:
    data = _bytes_of(read(offset, length))
    if len(data) != length:
        raise CorruptionError(f"a chunk ends early: {len(data)} of {length} bytes at offset {offset} are there.")
    return data


def _bytes_of(buffer: Buffer) -> memoryview:
    """The memory of a C-contiguous buffer, byte by byte."""
    if isinstance(buffer, np.ndarray):
        assert buffer.flags.c_contiguous, "chunks are contiguous"  # else reshape would copy
        return memoryview(buffer.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # typed as a buffer from 3.12 on
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _room(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Memory for a chunk, whose size is foreign metadata's word."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise UnsupportedFormatError(f"a chunk of shape {list(shape)} and {dtype} does not fit in memory.") from error


def _chain(meta: ArrayMetadata) -> Chain:
    if meta.chain is None:
        raise UnsupportedFormatError(
            f"chunks of this array need TensorStore to be decoded ({meta.foreign}): install tailrace[tensorstore]."
        )
    return meta.chain
