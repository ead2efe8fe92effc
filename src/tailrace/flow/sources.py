"""Everything that can be read: the Source protocol, and the source that a host array is."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from tailrace.flow.regions import Region, Shape

Array = np.ndarray[Any, np.dtype[Any]]


@runtime_checkable
class Source(Protocol):
    """An array that is read by regions: a file's tensor, a leaf of another checkpoint, a step of a recipe."""

    @property
    def shape(self) -> Shape:
        """Extent in each dimension."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type as numpy and ml_dtypes name it."""
        ...

    def read_into(self, region: Region, out: Array) -> None:
        """Fill `out`, a C-contiguous array of the region's shape and the source's dtype.

        Called from several threads at once. Must not hold host memory beyond a few hundred KiB besides `out`.
        """
        ...


class ArraySource:
    """A host array as a source; `view` hands out its memory without a copy."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def shape(self) -> Shape:
        """Extent in each dimension."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.array.dtype

    def view(self, region: Region) -> Array:
        """The region's own memory, not a copy."""
        view: Array = self.array[region.slices] if self.array.ndim else self.array
        return view

    def read_into(self, region: Region, out: Array) -> None:
        """Copy the region."""
        out[...] = self.view(region)
