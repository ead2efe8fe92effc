"""A declared leaf as the user sees it: assign regions, in any order, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.checkpoint.indexing import select
from tailrace.checkpoint.leaves import LeafState
from tailrace.errors import DtypeError, ShapeError
from tailrace.flow.regions import Region, Shape
from tailrace.flow.sources import Array, ArraySource, Source
from tailrace.format.keys import KeyPath

Write = Callable[[LeafState, Region, Source, Callable[[int], None] | None], None]


class LeafWriter:
    """A leaf of an open transaction. Regions may overlap; for each element the last call wins."""

    __slots__ = ("_leaf", "_missing", "_write")

    def __init__(self, leaf: LeafState, write: Write, missing: Callable[[LeafState], list[Region]]) -> None:
        self._leaf, self._write, self._missing = leaf, write, missing

    @property
    def key(self) -> str:
        """The leaf's key, parts joined by "/"."""
        return self._leaf.key

    @property
    def path(self) -> KeyPath:
        """The leaf's key path."""
        return self._leaf.path

    @property
    def shape(self) -> Shape:
        """Extent in each dimension."""
        return self._leaf.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self._leaf.dtype

    @property
    def chunk_shape(self) -> Shape:
        """Extent of a chunk in each dimension. Regions on its borders are written without waiting for others."""
        return self._leaf.chunk_shape

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write a region: ints and slices of step 1, as in numpy. The value may be changed on return."""
        selection = select(index, self.shape)
        if any(step != 1 for step in selection.steps) or any(
            part is None or part == slice(None, None, -1) for part in selection.view
        ):
            raise ShapeError(
                f"leaf {self.key!r}: assignments take ints and slices of step 1, not {index!r}. Assign the parts one "
                "by one."
            )
        kept = [axis for axis, part in enumerate(selection.view) if part != 0]
        wanted = tuple(selection.shape[axis] for axis in kept)
        array = np.asarray(value)
        try:
            array = np.broadcast_to(array, wanted)
        except ValueError:
            raise ShapeError(
                f"leaf {self.key!r}: a value of shape {array.shape} does not fit the region's shape {wanted}. Give "
                "it that shape, or one that "
                f"numpy broadcasts to it."
            ) from None
        if type(value) in (bool, int, float, complex):  # as in numpy, a Python number takes the array's dtype
            array = np.broadcast_to(_exact_scalar(self.key, value, self.dtype), wanted)
        self.write(
            Region(selection.start, selection.shape),
            array[(*(None if part == 0 else slice(None) for part in selection.view), ...)],
        )

    def write(self, region: Region, value: Array | Source, *, progress: Callable[[int], None] | None = None) -> None:
        """Write a region from an array or a Source of the region's shape, in pieces within the budget."""
        source = ArraySource(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value
        if len(region.start) != len(self.shape) or any(
            start < 0 or extent < 0 or start + extent > whole
            for start, extent, whole in zip(region.start, region.shape, self.shape, strict=True)
        ):
            raise ShapeError(
                f"leaf {self.key!r}: region {region} reaches past shape {self.shape}. Declare the leaf with a larger "
                "shape, or write within it."
            )
        region = Region(tuple(map(int, region.start)), tuple(map(int, region.shape)))  # numpy's ints are not recorded
        if tuple(source.shape) != region.shape:
            raise ShapeError(
                f"leaf {self.key!r}: the value has shape {source.shape}, region {region} has {region.shape}."
            )
        self._write(self._leaf, region, fitted(self.key, source, self.dtype), progress)

    def missing(self) -> list[Region]:
        """Regions that were never written."""
        return self._missing(self._leaf)

    def __repr__(self) -> str:
        return f"<LeafWriter {self.key!r} {self.dtype.name}{list(self.shape)} chunks {list(self.chunk_shape)}>"


class _Cast:
    """A source in another dtype that holds every value."""

    def __init__(self, source: Source, dtype: np.dtype[Any]) -> None:
        self._source, self.dtype, self.shape = source, dtype, source.shape
        self.scratch_itemsize = 0 if isinstance(source, ArraySource) else source.dtype.itemsize

    def read_into(self, region: Region, out: Array) -> None:
        if isinstance(self._source, ArraySource):
            out[...] = self._source.view(region)
            return
        data = np.empty(region.shape, self._source.dtype)
        self._source.read_into(region, data)
        out[...] = data


def fitted(key: str, source: Source, dtype: np.dtype[Any]) -> Source:
    """The source in the leaf's dtype. Raises DtypeError where that would change values."""
    if source.dtype == dtype:
        return source
    inexact = source.dtype.kind in "iu" and source.dtype.itemsize == 8 and dtype.kind in "fc"  # numpy calls it safe
    if inexact or not np.can_cast(source.dtype, dtype, "safe"):
        raise DtypeError(
            f"leaf {key!r} has dtype {dtype.name}, the value {source.dtype.name}, and the cast would change values. "
            "Cast it yourself, as in "
            f"value.astype({dtype.name!r}), or declare the leaf with dtype {source.dtype.name}."
        )
    return _Cast(source, dtype)


def _exact_scalar(key: str, value: Any, dtype: np.dtype[Any]) -> Array:
    """A Python number in the leaf's dtype, as numpy assigns it; DtypeError where it would lose its kind or range."""
    inexact = dtype.kind in "fc" or "float" in dtype.name  # the kind of ml_dtypes' own is "V"
    fits = dtype.kind == "c" or not isinstance(value, complex)
    try:
        with np.errstate(all="ignore"):
            array = np.asarray(value if fits else 0).astype(dtype)
            kept = np.isfinite(complex(array)) or not np.isfinite(complex(value)) if inexact else int(array) == value
    except (OverflowError, TypeError):
        kept = False
    if not fits or not kept:
        raise DtypeError(f"leaf {key!r} has dtype {dtype.name}, which does not hold {value!r}.")
    return array
