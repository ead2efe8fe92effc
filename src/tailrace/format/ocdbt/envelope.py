"""What a manifest and a node have in common: magic, length, version, compression, checksum."""

from __future__ import annotations

import struct

import crc32c
import zstandard

from tailrace.errors import CorruptionError, UnsupportedFormatError
from tailrace.format.varint import ByteReader

MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE
KINDS = {MANIFEST_MAGIC: "OCDBT manifest", NODE_MAGIC: "OCDBT node"}
MIN_BYTES = 4 + 8 + 1 + 1 + 4
MAX_BODY_BYTES = 256 << 20  # Orbax puts a whole index into one node of up to 100 MB; far above is a bomb
ZSTD = 1
_ZSTD_LEVEL = 1  # on an index the higher levels save little and take several times as long
_READ_BYTES = 1 << 20


def seal(magic: int, body: bytes) -> bytes:
    """The body, compressed and framed as a manifest or node."""
    content = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(body)
    length = MIN_BYTES + len(content)
    framed = struct.pack(">I", magic) + struct.pack("<Q", length) + bytes([0, ZSTD]) + content
    return framed + struct.pack("<I", crc32c.crc32c(framed))


def unseal(magic: int, data: bytes, limit_bytes: int) -> bytes:
    """The body of a manifest or node, its checksum verified and at most `limit_bytes` long.

    Raises CorruptionError for damage, UnsupportedFormatError for a newer version or another compression.
    """
    kind = KINDS[magic]
    if len(data) < MIN_BYTES:
        raise CorruptionError(f"truncated {kind}: at least {MIN_BYTES} bytes expected, {len(data)} found")
    if data[:4] != struct.pack(">I", magic):
        raise CorruptionError(f"not an {kind}: it begins with {magic:08x}, this with {data[:4].hex()}")
    (length,) = struct.unpack_from("<Q", data, 4)
    if length != len(data):
        raise CorruptionError(f"damaged {kind}: {length} bytes long by its header, {len(data)} found")
    (stored,) = struct.unpack_from("<I", data, len(data) - 4)
    actual = crc32c.crc32c(memoryview(data)[:-4])
    if stored != actual:
        raise CorruptionError(f"damaged {kind}: crc32c {stored:08x} stored, {actual:08x} found")
    reader = ByteReader(data, 12)
    version, compression = reader.varint(), reader.varint()
    if version != 0:
        raise UnsupportedFormatError(
            f"{kind} of version {version}; this tailrace reads version 0. Read it with a newer tailrace."
        )
    content = data[reader.position : -4]
    if compression == ZSTD:
        return _decompress(content, kind, limit_bytes)
    if compression != 0:
        raise UnsupportedFormatError(
            f"{kind} of compression {compression}; this tailrace reads 0 (none) and 1 (zstd). "
            f"Read it with a newer tailrace."
        )
    if len(content) > limit_bytes:
        raise _too_large(kind, limit_bytes)
    return content


def _decompress(content: bytes, kind: str, limit_bytes: int) -> bytes:
    # Piece by piece: a frame's own word on its size is not trusted with an allocation.
    pieces: list[bytes] = []
    total = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(content) as stream:
            while piece := stream.read(_READ_BYTES):
                pieces.append(piece)
                total += len(piece)
                if total > limit_bytes:
                    raise _too_large(kind, limit_bytes)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"damaged {kind}: its zstd frame does not decode ({error})") from error
    return b"".join(pieces)


def _too_large(kind: str, limit_bytes: int) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{kind} is larger than {limit_bytes} bytes when decoded. Rewrite the database with smaller nodes "
        f"(TensorStore: max_decoded_node_bytes)."
    )
