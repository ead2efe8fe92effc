"""Boxes in a leaf's index space, and how they are cut along chunk borders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box: where it starts in each dimension and how many elements it spans there."""

    start: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        """The region that is all of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> Shape:
        """One past the last index in each dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The numpy index that selects this region."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def relative_to(self, origin: Shape) -> Region:
        """The same box counted from `origin`."""
        return Region(tuple(a - o for a, o in zip(self.start, origin, strict=True)), self.shape)

    def intersection(self, other: Region) -> Region | None:
        """The box inside both, or None where they share no element."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a, b) - s for a, b, s in zip(self.stop, other.stop, start, strict=True))
        return Region(start, shape) if all(n > 0 for n in shape) else None

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)) + "]"


def grid_shape(shape: Shape, chunk_shape: Shape) -> Shape:
    """Chunks in each dimension."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))


def chunk_region(index: Shape, shape: Shape, chunk_shape: Shape) -> Region:
    """The part of a leaf that the chunk at this grid index holds; edge chunks are clipped to the leaf."""
    start = tuple(i * c for i, c in zip(index, chunk_shape, strict=True))
    return Region(start, tuple(min(c, n - a) for a, c, n in zip(start, chunk_shape, shape, strict=True)))


def chunks_touching(region: Region, chunk_shape: Shape) -> Iterator[Shape]:
    """Grid indices of the chunks that share an element with the region, in C order."""
    if region.size == 0:
        return iter(())
    return itertools.product(
        *(range(a // c, -(-(a + n) // c)) for a, n, c in zip(region.start, region.shape, chunk_shape, strict=True))
    )


def split(region: Region, chunk_shape: Shape, max_elements: int) -> Iterator[Region]:
    """Cut a region into pieces of at most `max_elements`, on chunk borders wherever a whole chunk fits.

    Pieces come in C order, cover the region exactly once, and grow along the last axes first, so that they stay
    contiguous in a C-contiguous source. A chunk larger than `max_elements` is cut inside, along its first axes.
    """
    if region.size == 0:
        return iter(())
    steps = list(chunk_shape)

    def held(axis: int) -> int:  # elements of a piece, not counting this axis
        return math.prod(min(s, n) for i, (s, n) in enumerate(zip(steps, region.shape, strict=True)) if i != axis)

    for axis, chunk in enumerate(chunk_shape):  # one chunk may be too much
        if held(axis) * min(steps[axis], region.shape[axis]) <= max_elements:
            break
        steps[axis] = min(chunk, max(1, max_elements // held(axis)))
    for axis in reversed(range(len(steps))):  # several chunks may fit
        if steps[axis] < chunk_shape[axis]:
            break
        steps[axis] = max(steps[axis], max_elements // held(axis) // chunk_shape[axis] * chunk_shape[axis])
        if steps[axis] < region.shape[axis]:
            break
    cuts = [
        list(_intervals(start, extent, chunk, step))
        for start, extent, chunk, step in zip(region.start, region.shape, chunk_shape, steps, strict=True)
    ]
    return (Region(tuple(a for a, _ in piece), tuple(n for _, n in piece)) for piece in itertools.product(*cuts))


def _intervals(start: int, extent: int, chunk: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [start, start + extent) at multiples of a step of whole chunks, or every `step` inside each chunk."""
    while extent:
        end = (start // step + 1) * step if step >= chunk else min(start + step, (start // chunk + 1) * chunk)
        length = min(extent, end - start)
        yield start, length
        start, extent = start + length, extent - length


def missing_regions(covered: list[Region], whole: Region) -> list[Region]:
    """What of `whole` no covered region touches, as disjoint boxes in C order of their starts."""
    left = [whole] if whole.size else []
    for box in sorted(covered, key=lambda region: region.start):  # from one corner: what is left stays in few boxes
        left = [part for region in left for part in _without(region, box)]
        if not left:
            break
    return sorted(left, key=lambda region: region.start)


def _without(region: Region, hole: Region) -> Iterator[Region]:
    common = region.intersection(hole)
    if common is None:
        yield region
        return
    start, shape = list(region.start), list(region.shape)
    for axis in range(len(start)):
        low, high = common.start[axis], common.start[axis] + common.shape[axis]
        end = start[axis] + shape[axis]
        if start[axis] < low:
            yield Region(tuple(start), (*shape[:axis], low - start[axis], *shape[axis + 1 :]))
        if high < end:
            yield Region((*start[:axis], high, *start[axis + 1 :]), (*shape[:axis], end - high, *shape[axis + 1 :]))
        start[axis], shape[axis] = low, high - low
