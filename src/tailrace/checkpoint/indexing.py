"""numpy's basic indexing on a leaf: from an index to the elements that have to be read."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, SupportsIndex

from tailrace.errors import InputError, RegionIndexError
from tailrace.flow.regions import Region, Shape
from tailrace.flow.sources import Array

Index = SupportsIndex | slice | EllipsisType | None | tuple[SupportsIndex | slice | EllipsisType | None, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The elements an index selects: in each axis `shape` of them, every `steps`-th, from `start` upwards.

    `view` is the numpy index that turns an array of those elements, in upward order, into what numpy would return:
    it turns reversed axes around, drops those indexed by an int, and adds new ones.
    """

    start: Shape
    shape: Shape
    steps: Shape
    view: tuple[slice | int | None, ...]
    ellipsis: bool = False

    @property
    def size(self) -> int:
        """Elements selected."""
        return math.prod(self.shape)

    def shaped(self, elements: Array) -> Any:
        """What numpy returns, from an array of the selected elements; with `...` never a scalar."""
        return elements[(*self.view, ...)] if self.ellipsis else elements[self.view]

    def boxes(self, chunk_shape: Shape) -> Iterator[tuple[Region, tuple[slice, ...]]]:
        """Boxes of the leaf that hold every selected element, each with its place among the selected elements.

        An axis whose step passes over whole chunks is cut at every element, so that no chunk is read in vain.
        """
        if not self.size:
            return iter(())
        axes = []
        for start, count, step, chunk in zip(self.start, self.shape, self.steps, chunk_shape, strict=True):
            if step > chunk:
                axes.append([(start + i * step, 1, slice(i, i + 1)) for i in range(count)])
            else:
                axes.append([(start, (count - 1) * step + 1, slice(0, count))])
        return (
            (Region(tuple(a for a, _, _ in box), tuple(n for _, n, _ in box)), tuple(place for _, _, place in box))
            for box in itertools.product(*axes)
        )

    def inside(self, part: Region, box: Region) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Where `part` of a box holds selected elements: the index into the part, and into the box's place.

        None where it holds none.
        """
        source, target = [], []
        for start, extent, origin, step in zip(part.start, part.shape, box.start, self.steps, strict=True):
            first = -(-(start - origin) // step)
            count = -(-(start + extent - origin) // step) - first
            if count <= 0:
                return None
            source.append(slice(origin + first * step - start, None, step))
            target.append(slice(first, first + count))
        return tuple(source), tuple(target)


def select(index: Any, shape: Shape) -> Selection:
    """What `index` selects of an array of this shape: ints, slices with any step, `...` and None, as numpy has them.

    Raises RegionIndexError, worded as numpy words it, for an index outside the shape, and for an array, list or bool:
    those copy element by element, which is a job for numpy once the leaf is read.
    """
    given = index if isinstance(index, tuple) else (index,)
    start, count, steps = [], [], []
    view: list[slice | int | None] = []
    axis = 0
    for part in _expand(given, len(shape)):
        if part is None:
            view.append(None)
            continue
        extent = shape[axis]
        if isinstance(part, slice):
            low, number, step = _interval(part, extent)
            view.append(slice(None, None, -1) if step < 0 else slice(None))
        else:
            low, number, step = _position(part, extent, axis), 1, 1
            view.append(0)
        start.append(low)
        count.append(number)
        steps.append(abs(step))
        axis += 1
    return Selection(tuple(start), tuple(count), tuple(steps), tuple(view), any(part is Ellipsis for part in given))


def _expand(parts: tuple[Any, ...], ndim: int) -> list[Any]:
    """One part for each axis, and the Nones between them."""
    for part in parts:
        if isinstance(part, slice) or part is None or part is Ellipsis:
            continue
        if isinstance(part, bool) or not hasattr(part, "__index__") or getattr(part, "shape", ()) != ():
            raise RegionIndexError(
                "only integers, slices (`:`), ellipsis (`...`) and numpy.newaxis (`None`) are valid indices of a leaf, "
                f"not {type(part).__name__}: read the part you need, then index that array, as in leaf[...][index]."
            )
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if used > ndim:
        raise RegionIndexError(f"too many indices for array: array is {ndim}-dimensional, but {used} were indexed")
    ellipses = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise RegionIndexError("an index can only have a single ellipsis ('...')")
    at = ellipses[0] if ellipses else len(parts)
    return [*parts[:at], *[slice(None)] * (ndim - used), *parts[at + 1 :]]


def _interval(part: slice, extent: int) -> tuple[int, int, int]:
    """The lowest element of a slice, how many it selects, and its step."""
    try:
        start, stop, step = part.indices(extent)
    except (ValueError, TypeError) as error:  # numpy's own words: a zero step, a part that is no int
        raise (InputError if isinstance(error, ValueError) else RegionIndexError)(str(error)) from None
    number = len(range(start, stop, step))
    if step < 0 and number:
        start += (number - 1) * step
    return (start if number else 0), number, step


def _position(part: SupportsIndex, extent: int, axis: int) -> int:
    try:
        position = operator.index(part)
    except TypeError as error:  # np.bool_ and float arrays of no dimension
        raise RegionIndexError(f"an index of a leaf must be an integer: {error}") from None
    if not -extent <= position < extent:
        raise RegionIndexError(f"index {position} is out of bounds for axis {axis} with size {extent}")
    return position % extent
