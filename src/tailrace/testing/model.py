"""What a transaction should hold, as plain numpy: the model that tests compare a Writer with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrace.flow.regions import Region

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class ModelLeaf:
    """An array, and which of its elements were written."""

    values: Array
    written: Array
    declaration: tuple[Any, ...]


@dataclass
class Model:
    """Leaves and texts by key. Every call does what the call of that name on a Writer promises."""

    leaves: dict[str, ModelLeaf] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def declare(self, key: str, shape: tuple[int, ...], dtype: str, chunk_shape: tuple[int, ...] | None) -> None:
        """The same declaration again changes nothing, another begins anew."""
        declaration = (shape, dtype, chunk_shape)
        known = self.leaves.get(key)
        if known is None or known.declaration != declaration:
            self.texts.pop(key, None)
            self.leaves[key] = ModelLeaf(np.zeros(shape, dtype), np.zeros(shape, bool), declaration)

    def write(self, key: str, region: Region, value: Array) -> None:
        """The last call wins."""
        leaf = self.leaves[key]
        leaf.values[region.slices] = value
        leaf.written[region.slices] = True

    def set_text(self, key: str, value: str) -> None:
        """A text takes the place of a leaf."""
        self.leaves.pop(key, None)
        self.texts[key] = value

    def delete(self, key: str) -> None:
        """Leaf or text, whichever it is."""
        if self.leaves.pop(key, None) is None:
            del self.texts[key]

    def __contains__(self, key: str) -> bool:
        return key in self.leaves or key in self.texts

    def keys(self) -> list[str]:
        """All keys in order."""
        return sorted([*self.leaves, *self.texts])

    def copy(self) -> Model:
        """The state as it is now."""
        return copy.deepcopy(self)

    def missing(self) -> dict[str, Array]:
        """For each unfinished leaf, which elements were never written."""
        return {key: ~leaf.written for key, leaf in self.leaves.items() if not leaf.written.all()}
