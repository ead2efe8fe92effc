"""Which Python and JAX values are leaves, and how each is stored; the table is in docs/leaves.md.

On disk a leaf is an array or a text. Its *kind* says what it was: "array", "int", "float", "bool" and "complex"
(Python's), "numpy_scalar", or "prng:<implementation>", a typed PRNG key whose data are uint32. "scalar" is what Orbax
records of any number.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tailrace.errors import LeafError
from tailrace.flow.regions import Region, Shape
from tailrace.flow.sources import Array, Source
from tailrace.format import dtypes
from tailrace.format.keys import KeyPath, check_path, collision, disk_name, display
from tailrace.format.orbax import PRNG

SCALAR_KINDS = frozenset({"int", "float", "bool", "complex", "scalar"})  # a load gives Python's own number


class Item(NamedTuple):
    """One leaf, ready to be stored: an array, a text, or a source that is read in pieces."""

    path: KeyPath
    value: Array | Source | str
    kind: str


def collect(leaves: Iterable[tuple[KeyPath, Any]], places: Iterable[KeyPath] = ()) -> list[Item]:
    """What is stored for each leaf. Nothing is copied but Python's own numbers.

    Raises LeafError for a value that cannot be stored and KeyPathError for a key that cannot name a leaf, or for two
    that share one name on disk; `places` are further paths that take a name: None and empty containers.
    """
    items: list[Item] = []
    names: dict[str, KeyPath] = {}

    def take_name(path: KeyPath) -> None:
        check_path(path)
        name = disk_name(path)
        if (other := names.setdefault(name, path)) is not path:
            raise collision(name, other, path)

    for path, value in leaves:
        take_name(path)
        items.append(Item(path, *stored(path, value)))
    for path in places:
        take_name(path)
    return items


def stored(path: KeyPath, value: Any) -> tuple[Array | Source | str, str]:
    """What is stored of a leaf's value, and its kind. Raises LeafError, naming the key and the way out."""
    kind = type(value)
    if kind is np.ndarray:
        return _array(path, value), "array"
    if is_jax_array(value):
        return _jax_array(path, value)
    if isinstance(value, enum.Enum):
        raise _refused(path, value, "store its value, .value")
    if isinstance(value, str):
        return _text(path, str.__str__(value)), "text"
    if isinstance(value, np.generic):
        return _array(path, np.asarray(value)), "numpy_scalar"
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise _refused(path, value, "store .data and .mask as two leaves")
        return _array(path, np.asarray(value)), "array"
    if isinstance(value, bool | int | float | complex):
        return _number(path, value)
    if hasattr(kind, "read_into") and isinstance(value, Source):
        _check_dtype(path, value.dtype)
        return value, str(getattr(value, "kind", "array"))
    raise _refused(path, value, _way_out(value))


def is_jax_array(value: Any) -> bool:
    """Whether this is a jax.Array; never imports JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def is_prng_dtype(dtype: Any) -> bool:
    """Whether this is the dtype of typed PRNG keys; never imports JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and not isinstance(dtype, np.dtype) and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def loaded(array: Array, kind: str) -> Any:
    """The value a load without `like` gives for a stored array of this kind.

    Python's numbers as they were saved, numpy scalars and arrays as numpy; a PRNG key typed where JAX can be imported,
    else its uint32 data.
    """
    if kind in SCALAR_KINDS:
        return array.item() if array.ndim == 0 else array
    if kind == "numpy_scalar" and array.ndim == 0:
        return array[()]
    if kind.startswith(PRNG):
        try:
            import jax
        except ImportError:
            return array
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=kind[len(PRNG) :])
    return array


class OtherOrder:
    """An array in the other byte order, as a source in this machine's: swapped piece by piece as it is read."""

    __slots__ = ("array", "dtype", "shape")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape: Shape = array.shape
        self.dtype: np.dtype[Any] = array.dtype.newbyteorder("=")

    def read_into(self, region: Region, out: Array) -> None:
        """Copy the region, bytes swapped."""
        out[...] = self.array[region.slices]


class DeviceArray:
    """A jax.Array as a source: each region is fetched from the shards that hold it; nothing of it stays on the host.

    Every shard is read through a fresh view, since JAX keeps the host copy of an array that was once asked for it.
    """

    __slots__ = ("_array", "_shards", "dtype", "shape")

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape: Shape = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        boxes: dict[Region, int] = {}  # replicas hold the same box: the first of them is read
        for i, shard in enumerate(array.addressable_shards):
            bounds = [part.indices(n)[:2] for part, n in zip(shard.index, self.shape, strict=True)]
            box = Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
            boxes.setdefault(box, i)
        self._shards = list(boxes.items())

    def read_into(self, region: Region, out: Array) -> None:
        """Fetch the region."""
        for box, i in self._shards:
            if not self.shape:
                out[...] = np.asarray(self._array.addressable_data(i))
            elif (common := box.intersection(region)) is not None:
                out[common.relative_to(region.start).slices] = self._fetch(i, common.relative_to(box.start))

    def _fetch(self, i: int, region: Region) -> Array:
        from jax import lax

        data = self._array.addressable_data(i)
        if next(iter(data.devices())).platform == "cpu" and _is_whole_bytes(self.dtype):
            return np.asarray(data)[region.slices]  # a view of JAX's own buffer
        if region.shape == data.shape:
            return np.asarray(data)
        return np.asarray(lax.dynamic_slice(data, region.start, region.shape))  # compiled once per shape


def _array(path: KeyPath, array: Array) -> Array | Source:
    if array.dtype.isnative:
        _check_dtype(path, array.dtype)
        return array
    _check_dtype(path, array.dtype.newbyteorder("="))
    return OtherOrder(array)


def _jax_array(path: KeyPath, value: Any) -> tuple[Array | Source, str]:
    import jax

    if isinstance(value, jax.core.Tracer):
        raise _refused(path, value, "save outside of jit and grad")
    if value.is_deleted():
        raise LeafError(f"leaf {display(path)!r}: the jax.Array was deleted or donated. Save before it is donated.")
    if not value.is_fully_addressable:
        raise LeafError(
            f"leaf {display(path)!r}: the jax.Array has shards on other processes' devices. "
            f"Gather it to this process first (jax.experimental.multihost_utils.process_allgather)."
        )
    kind = "array"
    if is_prng_dtype(value.dtype):
        kind = PRNG + str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
    dtype = np.dtype(value.dtype)
    _check_dtype(path, dtype)
    devices = value.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "cpu" and _is_whole_bytes(dtype):
        return np.asarray(value), kind  # a view of JAX's own buffer
    return DeviceArray(value), kind


def _number(path: KeyPath, value: complex) -> tuple[Array, str]:
    if isinstance(value, bool):
        return np.asarray(value), "bool"
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return np.asarray(int(value), np.int64 if value < 1 << 63 else np.uint64), "int"
        raise LeafError(
            f"leaf {display(path)!r}: the int has {value.bit_length()} bits, at most 64 can be stored. "
            f"Store it as a str."
        )
    if isinstance(value, float):
        return np.asarray(float(value), np.float64), "float"
    return np.asarray(complex(value), np.complex128), "complex"


def _text(path: KeyPath, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise LeafError(
            f"leaf {display(path)!r}: the str is not valid Unicode ({error.reason} at {error.start}). "
            f"Store its bytes: np.frombuffer(data, np.uint8)."
        ) from None
    return value


def _is_whole_bytes(dtype: np.dtype[Any]) -> bool:
    """Whether JAX and numpy hold it alike; of packed elements numpy sees a copy, never JAX's buffer."""
    return dtype.name not in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")


def _check_dtype(path: KeyPath, dtype: np.dtype[Any]) -> None:
    try:
        dtypes.dtype_name(dtype)
    except LeafError as error:
        raise LeafError(f"leaf {display(path)!r}: {error}") from None


def _refused(path: KeyPath, value: Any, way_out: str) -> LeafError:
    return LeafError(
        f"leaf {display(path)!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored: "
        f"{way_out}."
    )


def _way_out(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "store it as an array, np.frombuffer(value, np.uint8)"
    if isinstance(value, set | frozenset):
        return "store it as a list, sorted(value)"
    if type(value).__name__ == "ShapeDtypeStruct":
        return "it has a shape but no values; save the arrays themselves"
    if callable(value):
        return "leave it out of the tree, it has no values"
    if hasattr(value, "__array__"):
        return "convert it first, np.asarray(value)"
    return "leaves are arrays, numbers and str; if it is a container, register it with JAX as a pytree node"
