"""Leaves whose codecs tailrace does not decode, read by TensorStore. The only module that imports it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.errors import BudgetError, CorruptionError, UnsupportedFormatError


class ForeignArray:
    """One array of a checkpoint, opened by TensorStore.

    Raises UnsupportedFormatError when TensorStore is not installed, or refuses the array too.
    """

    def __init__(self, root: Path, name: str, *, zarr_format: int, in_database: bool, reason: str) -> None:
        self._name = name
        try:
            import tensorstore
        except ImportError as error:
            raise UnsupportedFormatError(
                f"leaf {name!r} of {root}: {reason}. tailrace does not decode it itself, TensorStore may: "
                f"pip install 'tailrace[tensorstore]'."
            ) from error
        if in_database:
            store = {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"}
        else:
            store = {"driver": "file", "path": f"{root}/{name}/"}
        driver = "zarr3" if zarr_format == 3 else "zarr"
        # No cache: what is read once is not kept. One chunk at a time, so that the budget can be reckoned.
        context = {"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 1}}
        try:
            self._array = tensorstore.open(
                {"driver": driver, "kvstore": store, "context": context}, read=True, open=True
            ).result()
        except ValueError as error:
            raise UnsupportedFormatError(f"leaf {name!r} of {root}: {reason}, and TensorStore says: {error}") from error
        self.shape: tuple[int, ...] = tuple(self._array.shape)
        self.dtype: np.dtype[Any] = np.dtype(self._array.dtype.numpy_dtype)
        self.chunk_shape: tuple[int, ...] = tuple(
            int(n or 1) for n in self._array.chunk_layout.read_chunk.shape or self.shape
        )

    def scratch_bytes(self, budget_bytes: int) -> int:
        """Memory that reading one chunk takes: encoded, decoded, and copied.

        Raises BudgetError, naming the size, where that is more than the budget: TensorStore cannot read less.
        """
        needed = 3 * math.prod(self.chunk_shape) * self.dtype.itemsize + (1 << 20)
        if needed > budget_bytes:
            raise BudgetError(
                f"leaf {self._name!r}: reading one of its chunks through TensorStore takes about {needed} bytes, the "
                f"memory budget is {budget_bytes}. Raise memory_budget."
            )
        return needed

    def read_chunk_part(self, slices: tuple[slice, ...], out: np.ndarray[Any, Any]) -> None:
        """Fill `out` with a box that lies in one chunk."""
        try:
            out[...] = self._array[slices].read().result() if slices else self._array.read().result()
        except ValueError as error:  # TensorStore raises it for damaged data, with its own code in front
            raise CorruptionError(f"leaf {self._name!r}: TensorStore says: {error}") from error
