"""Which chunk shape a new leaf gets when nobody named one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]

DEFAULT_CHUNK_BYTES = 16 << 20  # larger ones were not faster to write, and a quarter of a small budget each
MIN_CHUNK_BYTES = 256 << 10  # below it reading slows: Orbax loads 8 KB chunks at 0.4x of its speed


def choose_chunk_shape(
    shape: Shape,
    dtype: np.dtype[Any],
    *,
    budget_bytes: int,
    stacked_axes: Sequence[int] = (),
    target_bytes: int | None = None,
) -> Shape:
    """The chunk shape for a leaf: at most the target and a quarter of the budget, contiguous in a C-ordered source.

    `target_bytes` is 16 MiB unless given. Along stacked axes a chunk spans 1, so that each of the arrays stacked there
    is whole chunks; only where that leaves less than 256 KiB are several taken together. Then the first axes are cut,
    into pieces as equal as they can be. No extent is 0, and an array of rank 0 has the chunk shape ().
    """
    largest_bytes = max(1, min(DEFAULT_CHUNK_BYTES if target_bytes is None else target_bytes, budget_bytes // 4))
    largest = max(1, largest_bytes // dtype.itemsize)
    stacked = {axis % len(shape) for axis in stacked_axes} if shape else set()
    chunk = [1 if axis in stacked else max(1, extent) for axis, extent in enumerate(shape)]
    for axis in range(len(shape)):
        if math.prod(chunk) <= largest:
            break
        if axis not in stacked:
            chunk[axis] = _cut(chunk[axis], largest // (math.prod(chunk) // chunk[axis]))
    smallest = min(largest, MIN_CHUNK_BYTES // dtype.itemsize)
    for axis in sorted(stacked, reverse=True):
        one = math.prod(chunk)
        if one >= smallest:
            break
        groups = max(1, shape[axis] // -(-smallest // one))
        chunk[axis] = max(1, min(-(-shape[axis] // groups), largest // one))
    return tuple(chunk)


def _cut(extent: int, most: int) -> int:
    """The length of equal pieces of at most `most`, the last one shorter where no near number of pieces divides."""
    if most <= 1:
        return 1
    fewest = -(-extent // most)
    # Pieces that divide the axis also divide most shards of it; twice as many are worth that.
    for pieces in range(fewest, min(2 * fewest, extent) + 1):
        if extent % pieces == 0:
            return extent // pieces
    return -(-extent // fewest)
