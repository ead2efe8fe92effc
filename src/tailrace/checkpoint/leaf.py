"""One array of an open checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.checkpoint.indexing import Selection, select
from tailrace.errors import CorruptionError, DtypeError, FormatError, ShapeError, UnsupportedFormatError
from tailrace.flow.budget import MIN_BUDGET_BYTES, MemoryBudget
from tailrace.flow.regions import Region, Shape, split
from tailrace.flow.sources import Array
from tailrace.format import zarr
from tailrace.format.keys import KeyPath, display
from tailrace.format.zarr import ArrayMetadata, Codec
from tailrace.storage.foreign import ForeignArray

if TYPE_CHECKING:
    from tailrace.checkpoint.reader import Checkpoint


class Leaf:
    """An array of a checkpoint, read when it is indexed as numpy is: `leaf[17, 3, :8]`, `leaf[...]`.

    Its shape and dtype are read when first asked for. It is a Source: a writer takes it as it stands.
    """

    __slots__ = ("_checkpoint", "_metadata", "kind", "name", "path")

    def __init__(self, checkpoint: Checkpoint, path: KeyPath, name: str, kind: str) -> None:
        self._checkpoint = checkpoint
        self._metadata: ArrayMetadata | ForeignArray | None = None
        self.path = path
        self.name = name
        self.kind = kind

    @property
    def key(self) -> str:
        """The path as a string joined by "/"."""
        return display(self.path)

    @property
    def metadata(self) -> ArrayMetadata | ForeignArray:
        """What is recorded about the array as it is stored."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    @property
    def shape(self) -> Shape:
        """Extent in each dimension."""
        return self.metadata.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type as numpy and ml_dtypes name it."""
        return self.metadata.dtype

    @property
    def chunk_shape(self) -> Shape:
        """Extent of the chunks it is stored in."""
        return self.metadata.chunk_shape

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """How its chunks are encoded; empty where only TensorStore knows."""
        return self.metadata.codecs if isinstance(self.metadata, ArrayMetadata) else ()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def read_into(self, region: Region, out: Array) -> None:
        """Fill `out`, of the region's shape and the leaf's dtype, with a region of the leaf."""
        reaches_past = any(
            a < 0 or a + n > extent for a, n, extent in zip(region.start, region.shape, self.shape, strict=True)
        )
        if reaches_past or out.shape != region.shape:
            raise ShapeError(
                f"leaf {self.key!r}: region {region} of shape {self.shape} into an array of shape {out.shape}. "
                f"The region must lie in the leaf and have the array's shape."
            )
        if out.dtype != self.dtype:
            raise DtypeError(f"leaf {self.key!r} has dtype {self.dtype}, the destination {out.dtype}: make them equal.")
        self._checkpoint.read_into([(self, region, out)])

    def __getitem__(self, index: Any) -> Any:
        """The selected elements as a new array, or a scalar: ints, slices with any step, `...` and None.

        Only the chunks that hold them are read. Of a large uncompressed chunk less than an eighth is read alone,
        and then not verified, since the checksum covers the chunk; everything else is verified on the way.
        """
        selection = select(index, self.shape)
        out: Array = np.empty(selection.shape, self.dtype)
        requests = []
        for box, place in selection.boxes(self.chunk_shape):
            target = out[place] if place else out
            if target.shape == box.shape:
                requests.append((self, box, target))
            else:
                self._read_stepped(selection, box, target)
        self._checkpoint.read(requests, self._checkpoint.budget, sparing=True)
        return selection.shaped(out)

    def _read_stepped(self, selection: Selection, box: Region, target: Array) -> None:
        """Every n-th element of a box, by way of pieces that hold them all."""
        budget = self._checkpoint.budget
        piece_bytes = budget.limit_bytes // 4
        # One request for the piece and for what reading it takes, which then has a budget of its own.
        reading = MemoryBudget(max(MIN_BUDGET_BYTES, budget.limit_bytes // 2))
        with budget.holding(min(budget.limit_bytes, piece_bytes + reading.limit_bytes)):
            for piece in split(box, self.chunk_shape, piece_bytes // self.dtype.itemsize):
                taken = selection.inside(piece, box)
                if taken is None:
                    continue
                source, place = taken
                elements: Array = np.empty(piece.shape, self.dtype)
                self._checkpoint.read([(self, piece, elements)], reading, sparing=True)
                target[place] = elements[source]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The whole leaf, as numpy asks for it in np.asarray(leaf)."""
        if copy is False:
            raise ValueError("a leaf is read from disk, so an array of it is always a copy: copy=False cannot be had.")
        array: Array = np.asarray(self[...])
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<Leaf {self.key!r} {self.dtype} {self.shape}>"

    def _read_metadata(self) -> ArrayMetadata | ForeignArray:
        checkpoint = self._checkpoint
        zarr_format = checkpoint.zarr_format
        file = "zarr.json" if zarr_format == 3 else ".zarray"
        data = checkpoint.index.read(f"{self.name}/{file}".encode())
        if data is None:
            raise CorruptionError(
                f"leaf {self.key!r} of {checkpoint.path} is listed, but the index has no {self.name}/{file}."
            )
        try:
            metadata = zarr.parse(data, zarr_format)
            reason = metadata.foreign
        except UnsupportedFormatError as error:
            metadata, reason = None, str(error)
        except FormatError as error:
            raise type(error)(f"leaf {self.key!r} of {checkpoint.path}: {error}") from error
        if metadata is not None and metadata.native:
            return metadata
        return ForeignArray(
            checkpoint.path,
            self.name,
            zarr_format=zarr_format,
            in_database=checkpoint.in_database,
            reason=reason or "its codecs are foreign",
        )
