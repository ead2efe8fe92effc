"""Which dtype may become which: every value kept, or only when asked for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

Dtype = np.dtype[Any]

# Of at most 16 bits every value is tried; of more, these keep every value.
_WIDER: dict[str, tuple[str, ...]] = {
    "int32": ("int64", "float64", "complex128"),
    "uint32": ("int64", "uint64", "float64", "complex128"),
    "float32": ("float64", "complex64", "complex128"),
    "float64": ("complex128",),
    "complex64": ("complex128",),
}


@lru_cache(maxsize=4096)
def is_lossless(source: Dtype, target: Dtype) -> bool:
    """Whether every value of `source` is a value of `target`. A bool is no number, and only like itself."""
    if source == target:
        return True
    if source.kind == "b" or target.kind == "b":
        return False
    if source.itemsize > 2:
        return target.name in _WIDER.get(source.name, ())
    values = _every_value(source)
    wide = np.complex128 if target.kind == "c" else np.float64  # 16 bits fit both
    with np.errstate(all="ignore"):
        kept = values.astype(target)
        if target.itemsize > 2 and target.kind in "iu":
            return bool(np.array_equal(kept.astype(np.float64), values.astype(np.float64)))
        return bool(np.array_equal(kept.astype(wide), values.astype(wide), equal_nan=True))


def is_possible(source: Dtype, target: Dtype) -> bool:
    """Whether numpy can cast at all without leaving a part of the number out, as complex to real would."""
    return source.kind != "c" or target.kind == "c"


def _every_value(dtype: Dtype) -> np.ndarray[Any, Dtype]:
    if dtype.kind in "iu" or dtype.name.startswith(("int", "uint")):
        limits: Any = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        return np.arange(int(limits.min), int(limits.max) + 1).astype(dtype)
    bits = 4 if dtype.name.startswith("float4") else 6 if dtype.name.startswith("float6") else 8 * dtype.itemsize
    return np.arange(1 << bits).astype(f"uint{8 * dtype.itemsize}").view(dtype)


def cast_in_place(buffer: np.ndarray[Any, Any], source: Dtype, target: Dtype, size: int, piece_bytes: int) -> None:
    """Turn `size` elements of `source` at the end of a byte buffer into as many of `target`, at its start.

    The buffer is as long as the wider of the two. Goes from the front in pieces, so that what is written never
    reaches what is still to be read; inside a piece numpy copies where the two overlap.
    """
    read = buffer[len(buffer) - size * source.itemsize :].view(source)
    written = buffer[: size * target.itemsize].view(target)
    step = max(1, piece_bytes // max(source.itemsize, target.itemsize))
    with np.errstate(all="ignore"):  # the caller asked for the cast
        for start in range(0, size, step):
            written[start : start + step] = read[start : start + step].astype(target)
