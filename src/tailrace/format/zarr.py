"""Array metadata as zarr3 (`zarr.json`) and zarr2 (`.zarray`) write it, and the keys of chunks.

Both are read into one form, the zarr3 one: a zarr2 array in F order has a transpose, its compressor is a codec.
What a chunk's bytes mean is a `Chain`; metadata without one is valid but needs TensorStore to read (`foreign`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.errors import FormatError, InputError, UnsupportedFormatError
from tailrace.format.chunks import Shape, choose_chunk_shape
from tailrace.format.dtypes import Dtype, dtype_from_name, dtype_from_zarr2, dtype_name, fill_text, parse_fill

__all__ = [
    "ArrayMetadata",
    "Chain",
    "Codec",
    "Shape",
    "Sharding",
    "choose_chunk_shape",
    "dtype_from_name",
    "dtype_name",
    "parse",
    "render",
]

MAX_RANK = 32  # TensorStore's limit
COMPRESSORS = ("zstd", "gzip", "zlib")
CRC_BYTES = 4
MAX_NESTED_SHARDS = 8  # nobody nests more than one in another; decoding is a recursion


class Codec(NamedTuple):
    """One step of how chunks are encoded, as it stands in the metadata."""

    name: str
    configuration: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """How a chunk becomes bytes: transpose, then elements or inner chunks, checksums, a compressor, checksums."""

    order: Shape  # axis i of the encoded array is axis order[i] of the chunk
    little_endian: bool = True
    sharding: Sharding | None = None
    inner_crcs: int = 0  # crc32c suffixes before compression
    compressor: str | None = None  # one of COMPRESSORS
    outer_crcs: int = 0  # crc32c suffixes around everything

    @property
    def c_order(self) -> bool:
        """Whether elements stand in the chunk's own C order."""
        return self.order == tuple(range(len(self.order)))


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A chunk made of independently encoded inner chunks and an index of where each lies."""

    inner: ArrayMetadata  # its shape is the (transposed) chunk that it divides
    index: ArrayMetadata  # uint64, one (offset, length) per inner chunk
    index_at_end: bool

    @property
    def index_bytes(self) -> int:
        """Encoded length of the index."""
        chain = self.index.chain
        assert chain is not None
        return self.index.chunk_bytes + CRC_BYTES * (chain.inner_crcs + chain.outer_crcs)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayMetadata:
    """Everything the metadata of one stored array says. Compared by identity; `parse` of equal bytes is one object."""

    zarr_format: int
    shape: Shape
    dtype: Dtype  # in host byte order, whatever is on disk
    chunk_shape: Shape
    codecs: tuple[Codec, ...]
    fill_value: Any  # what a chunk that is not stored holds; a scalar of dtype
    key_encoding: str  # "default" ("c/0/1") or "v2" ("0.1")
    separator: str
    chain: Chain | None  # None: only TensorStore can decode
    foreign: str | None = None  # why `chain` is None

    @property
    def native(self) -> bool:
        """Whether tailrace decodes the chunks itself."""
        return self.chain is not None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one whole decoded chunk."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def crc_protected(self) -> bool:
        """Whether a crc32c over each whole encoded chunk ends it."""
        return self.chain is not None and self.chain.outer_crcs > 0

    @property
    def plain(self) -> bool:
        """Whether an encoded chunk is its C-ordered little-endian elements, followed by at most one crc32c."""
        chain = self.chain
        return chain is not None and self.streamable and chain.compressor is None

    @property
    def streamable(self) -> bool:
        """Whether a chunk decodes front to back into its C-ordered elements."""
        chain = self.chain
        if chain is None or chain.sharding is not None or chain.inner_crcs or chain.outer_crcs > 1:
            return False
        return chain.c_order and (chain.little_endian or self.dtype.itemsize == 1)

    @property
    def inner(self) -> ArrayMetadata | None:
        """Metadata of the inner chunks of a shard, where they can be found by `codecs.read_shard_index`."""
        chain = self.chain
        if chain is None or chain.sharding is None or not chain.c_order:
            return None
        return chain.sharding.inner

    def metadata_key(self, name: str) -> str:
        """Key under which this metadata is stored for an array of this name."""
        file = "zarr.json" if self.zarr_format == 3 else ".zarray"
        return f"{name}/{file}" if name else file

    def chunk_key(self, name: str, index: Shape) -> str:
        """Key under which the chunk at a grid index is stored for an array of this name."""
        if self.key_encoding == "default":
            key = self.separator.join(("c", *map(str, index)))
        else:
            key = self.separator.join(map(str, index)) if index else "0"
        return f"{name}/{key}" if name else key


_COMPRESSION_TEXT = {None: "", "zstd": '{"configuration":{"checksum":false,"level":1},"name":"zstd"},'}


def render(shape: Shape, dtype: Dtype, chunk_shape: Shape, *, compression: str | None) -> bytes:
    """The zarr.json of an array we write: codecs bytes, zstd where `compression` asks for it, crc32c.

    Raises LeafError for a dtype that zarr has no type for, and InputError for another compression.
    """
    if compression not in _COMPRESSION_TEXT:
        raise InputError(f"compression={compression!r}: allowed are None and 'zstd'.")
    return (
        f'{{"chunk_grid":{{"configuration":{{"chunk_shape":[{",".join(map(str, chunk_shape))}]}},"name":"regular"}},'
        f'{_middle(dtype, compression)}"shape":[{",".join(map(str, shape))}],"zarr_format":3}}'
    ).encode()


@functools.cache
def _middle(dtype: Dtype, compression: str | None) -> str:
    endian = '"configuration":{"endian":"little"},' if dtype.itemsize > 1 else ""
    return (
        f'"chunk_key_encoding":{{"name":"default"}},"codecs":[{{{endian}"name":"bytes"}},'
        f'{_COMPRESSION_TEXT[compression]}{{"name":"crc32c"}}],"data_type":"{dtype_name(dtype)}",'
        f'"fill_value":{fill_text(dtype)},"node_type":"array",'
    )


def with_default_keys(data: bytes) -> bytes:
    """The same zarr.json for chunks under the default keys, "c/0/1", whatever encoding it names."""
    fields = msgspec.json.decode(data)
    return msgspec.json.encode({**fields, "chunk_key_encoding": {"name": "default"}})


@functools.lru_cache(maxsize=4096)
def parse(data: bytes, zarr_format: int) -> ArrayMetadata:
    """Read the bytes of a `zarr.json` (format 3) or `.zarray` (format 2).

    Codecs that only TensorStore decodes give metadata with `native` False. Raises FormatError for bytes that are no
    array metadata, and UnsupportedFormatError for grids and data types that tailrace has no form for.
    """
    file = "zarr.json" if zarr_format == 3 else ".zarray"
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FormatError(f"{file} is not JSON: {error}.") from error
    if not isinstance(fields, dict) or fields.get("zarr_format") != zarr_format:
        found = fields.get("zarr_format") if isinstance(fields, dict) else type(fields).__name__
        raise FormatError(f"{file} must be an object with zarr_format {zarr_format}, found {found!r}.")
    try:
        return _parse3(fields) if zarr_format == 3 else _parse2(fields)
    except FormatError as error:
        raise type(error)(f"{file}: {error}") from error
    except RecursionError as error:
        raise UnsupportedFormatError(f"{file}: codecs are nested too deeply.") from error


def _parse3(fields: dict[str, Any]) -> ArrayMetadata:
    if fields.get("node_type") != "array":
        raise FormatError(f"node_type is {fields.get('node_type')!r}, an array has 'array'.")
    shape = _extents(fields.get("shape"), "shape", least=0)
    grid = _named(fields.get("chunk_grid"), "chunk_grid")
    if grid.name != "regular":
        raise UnsupportedFormatError(f"chunk grid {grid.name!r}: only 'regular' grids can be read.")
    chunk_shape = _extents(grid.configuration.get("chunk_shape"), "chunk_shape", least=1, rank=len(shape))
    data_type = fields.get("data_type")
    dtype = dtype_from_name(data_type if isinstance(data_type, str) else str(data_type)[:80])
    encoding = _named(fields.get("chunk_key_encoding"), "chunk_key_encoding")
    if encoding.name not in ("default", "v2"):
        raise UnsupportedFormatError(f"chunk key encoding {encoding.name!r}: 'default' and 'v2' can be read.")
    separator = encoding.configuration.get("separator", "/" if encoding.name == "default" else ".")
    codecs = _codec_list(fields.get("codecs"), "codecs")
    for transformer in _list(fields.get("storage_transformers", []), "storage_transformers"):
        raise UnsupportedFormatError(f"storage transformer {str(transformer)[:80]!r}: none can be read.")
    if "fill_value" not in fields:
        raise FormatError("fill_value is missing.")
    fill_value = parse_fill(fields["fill_value"], dtype)
    return _metadata(3, shape, dtype, chunk_shape, codecs, fill_value, encoding.name, _separator(separator))


def _parse2(fields: dict[str, Any]) -> ArrayMetadata:
    shape = _extents(fields.get("shape"), "shape", least=0)
    chunk_shape = _extents(fields.get("chunks"), "chunks", least=1, rank=len(shape))
    dtype, endian = dtype_from_zarr2(fields.get("dtype"))
    order = fields.get("order", "C")
    if order not in ("C", "F"):
        raise FormatError(f"order is {order!r}, allowed are 'C' and 'F'.")
    codecs = [Codec("bytes", {"endian": endian})]
    if order == "F":
        codecs.insert(0, Codec("transpose", {"order": list(reversed(range(len(shape))))}))
    compressor = fields.get("compressor")
    if compressor is not None:
        if not isinstance(compressor, dict) or not isinstance(compressor.get("id"), str):
            raise FormatError(f"compressor is {str(compressor)[:80]!r}, an object with an id or null is allowed.")
        codecs.append(Codec(compressor["id"], {key: value for key, value in compressor.items() if key != "id"}))
    filters = _list(fields.get("filters") or [], "filters")
    codecs += [Codec(f"filter {str(filter_)[:80]}", {}) for filter_ in filters]  # no chain knows such a codec
    fill_value = parse_fill(fields.get("fill_value"), dtype)
    separator = _separator(fields.get("dimension_separator", "."))
    return _metadata(2, shape, dtype, chunk_shape, tuple(codecs), fill_value, "v2", separator)


class _ForeignError(Exception):
    """The chain is beyond us; the message says what in it."""


def _metadata(
    zarr_format: int,
    shape: Shape,
    dtype: Dtype,
    chunk_shape: Shape,
    codecs: tuple[Codec, ...],
    fill_value: Any,
    key_encoding: str,
    separator: str,
) -> ArrayMetadata:
    chain: Chain | None = None
    foreign: str | None = None
    try:
        chain = _chain(codecs, dtype, chunk_shape, fill_value)
    except _ForeignError as reason:
        foreign = str(reason)
    return ArrayMetadata(
        zarr_format, shape, dtype, chunk_shape, codecs, fill_value, key_encoding, separator, chain, foreign
    )


def _chain(codecs: tuple[Codec, ...], dtype: Dtype, chunk_shape: Shape, fill_value: Any) -> Chain:
    rank = len(chunk_shape)
    order = tuple(range(rank))
    steps = list(codecs)
    while steps and steps[0].name == "transpose":
        by = _permutation(steps.pop(0).configuration.get("order"), rank)
        order = tuple(order[axis] for axis in by)
    if not steps:
        raise FormatError(
            "the codecs never turn the array into bytes; a 'bytes' or 'sharding_indexed' codec is missing."
        )
    little_endian, sharding = True, None
    to_bytes = steps.pop(0)
    if to_bytes.name == "bytes":
        little_endian = _little_endian(to_bytes.configuration.get("endian"), dtype)
    elif to_bytes.name == "sharding_indexed":
        encoded_shape = tuple(chunk_shape[axis] for axis in order)
        sharding = _sharding(to_bytes.configuration, dtype, encoded_shape, fill_value)
    else:
        raise _ForeignError(f"codec {to_bytes.name!r}")
    crcs, compressor = [0, 0], None
    for step in steps:
        if step.name == "crc32c":
            crcs[compressor is not None] += 1
        elif step.name in COMPRESSORS and compressor is None and sharding is None:
            compressor = step.name
        else:
            raise _ForeignError(f"codec {step.name!r}" + (" after another compressor" if compressor else ""))
    inner_crcs, outer_crcs = crcs if compressor else (0, crcs[0])
    return Chain(order, little_endian, sharding, inner_crcs, compressor, outer_crcs)


def _sharding(configuration: dict[str, Any], dtype: Dtype, shape: Shape, fill_value: Any) -> Sharding:
    inner_shape = _extents(configuration.get("chunk_shape"), "sharding chunk_shape", least=1, rank=len(shape))
    if any(n % c for n, c in zip(shape, inner_shape, strict=True)):
        raise FormatError(f"inner chunks {list(inner_shape)} do not divide their shard {list(shape)}.")
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise FormatError(f"index_location is {location!r}, allowed are 'start' and 'end'.")
    inner_codecs = _codec_list(configuration.get("codecs"), "sharding codecs")
    index_codecs = _codec_list(configuration.get("index_codecs"), "sharding index_codecs")
    inner = _metadata(3, shape, dtype, inner_shape, inner_codecs, fill_value, "default", "/")
    uint64 = np.dtype(np.uint64)
    entries = (*(n // c for n, c in zip(shape, inner_shape, strict=True)), 2)
    index = _metadata(3, entries, uint64, entries, index_codecs, uint64.type(0), "default", "/")
    for part in (inner, index):
        if part.chain is None:
            raise _ForeignError(f"{part.foreign} inside sharding_indexed")
    assert index.chain is not None
    depth, below = 1, inner.chain
    while below is not None and below.sharding is not None:
        depth, below = depth + 1, below.sharding.inner.chain
    if depth > MAX_NESTED_SHARDS:
        raise _ForeignError(f"sharding_indexed nested {depth} deep")
    if index.chain.compressor is not None or index.chain.sharding is not None:
        raise _ForeignError("a shard index of variable length")
    return Sharding(inner, index, location == "end")


def _little_endian(endian: Any, dtype: Dtype) -> bool:
    if endian is None and dtype.itemsize == 1:
        return True
    if endian not in ("little", "big"):
        raise FormatError(f"the bytes codec has endian {endian!r}, {dtype} needs 'little' or 'big'.")
    return bool(endian == "little")


def _permutation(order: Any, rank: int) -> Shape:
    if order == "C":
        return tuple(range(rank))
    if order == "F":
        return tuple(reversed(range(rank)))
    axes = _extents(order, "transpose order", least=0, rank=rank)
    if sorted(axes) != list(range(rank)):
        raise FormatError(f"transpose order {list(axes)} is no permutation of {rank} axes.")
    return axes


def _extents(value: Any, what: str, *, least: int, rank: int | None = None) -> Shape:
    items = _list(value, what)
    if any(isinstance(n, bool) or not isinstance(n, int) or not least <= n < 2**63 for n in items):
        raise FormatError(f"{what} is {str(items)[:80]}, each extent is an integer of at least {least}.")
    if len(items) > MAX_RANK or (rank is not None and len(items) != rank):
        raise FormatError(
            f"{what} has {len(items)} entries, allowed {f'are {rank}' if rank is not None else 'at most 32'}."
        )
    return tuple(items)


def _separator(value: Any) -> str:
    if value not in (".", "/"):
        raise FormatError(f"chunk key separator is {str(value)[:80]!r}, allowed are '.' and '/'.")
    return str(value)


def _codec_list(value: Any, what: str) -> tuple[Codec, ...]:
    return tuple(_named(item, what) for item in _list(value, what))


def _named(value: Any, what: str) -> Codec:
    """A name with its configuration, written as an object or as the name alone."""
    if isinstance(value, str):
        return Codec(value, {})
    if isinstance(value, dict):
        name, configuration = value.get("name"), value.get("configuration", {})
        if isinstance(name, str) and isinstance(configuration, dict):
            return Codec(name, configuration)
    raise FormatError(f"{what} holds {str(value)[:80]!r}, an object with name and configuration is allowed.")


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{what} is {str(value)[:80]!r}, a list is allowed.")
    return value
