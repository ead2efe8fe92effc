"""JSON from strangers: decoded by schema, and refused where one object names a key twice."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from tailrace.errors import SourceFormatError

T = TypeVar("T")

# Strings followed by ":" are keys. Possessive (*+), so that a long hostile string costs no backtracking.
_TOKEN = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*:)?|[{}]', re.DOTALL)


def decode(data: bytes, decoder: msgspec.json.Decoder[T], what: str) -> T:
    """The decoded value. Memory grows with what the schema keeps, not with what the sender nested.

    Raises SourceFormatError, beginning with `what`, for bad UTF-8, bad JSON, a wrong type and a key given twice.
    """
    try:
        data.decode()  # msgspec lets bad UTF-8 pass in values that it skips
        value = decoder.decode(data)
    except UnicodeDecodeError as error:
        raise SourceFormatError(f"{what}: not UTF-8 at byte {error.start}; download the file again.") from error
    except msgspec.ValidationError as error:
        raise SourceFormatError(f"{what}: {error}.") from error
    except msgspec.DecodeError as error:
        raise SourceFormatError(f"{what}: not valid JSON: {error}.") from error
    except RecursionError as error:
        raise SourceFormatError(f"{what}: JSON nested too deeply to be one of these files.") from error
    twice = _repeated_key(data)
    if twice is not None:
        raise SourceFormatError(f"{what}: key {twice!r} appears twice in one object; each may appear once.")
    return value


def _repeated_key(data: bytes) -> str | None:
    """The first key that valid JSON names twice in one object. Every parser at hand keeps the last and says nothing."""
    open_objects: list[set[bytes]] = []
    for token in _TOKEN.finditer(data):
        if token[0] == b"{":
            open_objects.append(set())
        elif token[0] == b"}":
            open_objects.pop()
        elif token[2] is not None:
            key: Any = token[1]
            if b"\\" in key:  # the same key may be spelled with and without escapes
                key = json.loads(b'"' + key + b'"').encode("utf-8", "surrogatepass")
            if key in open_objects[-1]:
                return str(key.decode("utf-8", "replace"))
            open_objects[-1].add(key)
    return None
