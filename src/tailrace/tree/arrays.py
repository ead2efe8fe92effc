"""The last step of a load: from stored arrays to numpy and JAX arrays, without holding anything twice."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tailrace.checkpoint.leaf import Leaf
from tailrace.checkpoint.reader import Checkpoint
from tailrace.errors import DtypeError
from tailrace.flow.regions import Region, Shape, split
from tailrace.flow.sources import Array
from tailrace.tree.casts import cast_in_place
from tailrace.tree.match import Wanted

Progress = Callable[[int], None]

_ALIGNMENT = 64  # from here on JAX takes a host buffer on CPU as it is, without a copy
_PIECE_BYTES = 4 << 20  # of a cast


def empty(shape: Shape, dtype: np.dtype[Any], *, aligned: bool = False) -> Array:
    """A new array whose memory is not touched yet; `aligned`: such that JAX on CPU needs no copy of it."""
    if not aligned:
        return np.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def read_all(checkpoint: Checkpoint, leaves: Sequence[Leaf], progress: Progress | None) -> list[Array]:
    """Whole leaves as numpy arrays, read together."""
    arrays = [empty(leaf.shape, leaf.dtype) for leaf in leaves]
    requests = [(leaf, Region.whole(leaf.shape), out) for leaf, out in zip(leaves, arrays, strict=True)]
    checkpoint.read_into(requests, progress=progress)
    return arrays


def read_wanted(checkpoint: Checkpoint, wanted: Sequence[tuple[Leaf, Wanted]], progress: Progress | None) -> list[Any]:
    """Each leaf as what `like` asks for at its place."""
    for leaf, want in wanted:
        _check_jax_has(leaf, want)
    values: list[Any] = []
    limit_bytes = checkpoint.budget.limit_bytes // 4
    for group in _groups(wanted, limit_bytes):
        leaf, want = group[0]
        if want.form == "jax" and _bytes_beside(leaf, want, limit_bytes) > limit_bytes:  # then it is alone
            values.append(put_in_pieces(checkpoint, leaf, want, limit_bytes, progress))
            continue
        arrays = _read_group(checkpoint, group, progress)
        for i, (_, want) in enumerate(group):
            values.append(_handed_over(arrays[i], want))
            arrays[i] = None  # a buffer that went to a device is not kept on the host
        if _on_accelerator(group):
            sys.modules["jax"].block_until_ready(values[-len(group) :])
    return values


def _groups(wanted: Sequence[tuple[Leaf, Wanted]], limit_bytes: int) -> Iterator[Sequence[tuple[Leaf, Wanted]]]:
    """Leaves whose host memory beside the result fits the limit together; where none is needed, all at once."""
    group: list[tuple[Leaf, Wanted]] = []
    held = 0
    for leaf, want in wanted:
        beside = _bytes_beside(leaf, want, limit_bytes)
        if group and held + beside > limit_bytes:
            yield group
            group, held = [], 0
        group.append((leaf, want))
        held += beside
    if group:
        yield group


def _bytes_beside(leaf: Leaf, want: Wanted, limit_bytes: int) -> int:
    """Host bytes that a leaf takes while it is loaded and that are no part of the result."""
    assert want.dtype is not None
    result = leaf.size * want.dtype.itemsize
    narrowing = max(0, leaf.nbytes - result)
    if narrowing > limit_bytes:
        narrowing = 0  # it is read in pieces instead
    return narrowing + (result if _on_accelerator([(leaf, want)]) else 0)


def _on_accelerator(group: Sequence[tuple[Leaf, Wanted]]) -> bool:
    for _, want in group:
        if want.form in ("jax", "prng"):
            devices = want.sharding.device_set if want.sharding is not None else sys.modules["jax"].devices()[:1]
            return any(device.platform != "cpu" for device in devices)
    return False


def _read_group(
    checkpoint: Checkpoint, group: Sequence[tuple[Leaf, Wanted]], progress: Progress | None
) -> list[Array | None]:
    arrays: list[Array | None] = []
    requests: list[tuple[Leaf, Region, Array]] = []
    finish: list[tuple[int, np.ndarray[Any, Any], Leaf, np.dtype[Any]]] = []
    for leaf, want in group:
        dtype = want.dtype
        assert dtype is not None
        if leaf.dtype == dtype or want.form == "number":
            out = empty(leaf.shape, leaf.dtype, aligned=want.form in ("jax", "prng"))
            requests.append((leaf, Region.whole(leaf.shape), out))
            arrays.append(out)
        elif leaf.dtype.itemsize > dtype.itemsize and leaf.nbytes > checkpoint.budget.limit_bytes // 4:
            arrays.append(_cast_in_pieces(checkpoint, leaf, dtype, progress))
        else:
            buffer = empty((leaf.size * max(leaf.dtype.itemsize, dtype.itemsize),), np.dtype(np.uint8), aligned=True)
            stored = buffer[len(buffer) - leaf.nbytes :].view(leaf.dtype).reshape(leaf.shape)
            requests.append((leaf, Region.whole(leaf.shape), stored))
            finish.append((len(arrays), buffer, leaf, dtype))
            arrays.append(None)
    checkpoint.read_into(requests, progress=progress)
    for i, buffer, leaf, dtype in finish:
        cast_in_place(buffer, leaf.dtype, dtype, leaf.size, _PIECE_BYTES)
        result = buffer[: leaf.size * dtype.itemsize].view(dtype).reshape(leaf.shape)
        arrays[i] = result.copy() if leaf.dtype.itemsize > dtype.itemsize else result  # a view would keep the rest
    return arrays


def _cast_in_pieces(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype[Any], progress: Progress | None) -> Array:
    out = empty(leaf.shape, dtype, aligned=True)
    most = max(1, min(checkpoint.budget.limit_bytes // 8, 32 << 20) // leaf.dtype.itemsize)
    for region in split(Region.whole(leaf.shape), leaf.chunk_shape, most):
        piece = np.empty(region.shape, leaf.dtype)
        checkpoint.read_into([(leaf, region, piece)], progress=progress)
        with np.errstate(all="ignore"):  # the caller asked for the cast
            out[region.slices] = piece.astype(dtype)
    return out


def put_in_pieces(checkpoint: Checkpoint, leaf: Leaf, want: Wanted, limit_bytes: int, progress: Progress | None) -> Any:
    """A leaf on its devices, of which the host never holds more than one piece."""
    import jax
    from jax import lax, numpy

    insert = jax.jit(lambda whole, part, start: lax.dynamic_update_slice(whole, part, start), donate_argnums=0)
    most = max(1, limit_bytes // 2 // max(leaf.dtype.itemsize, want.dtype.itemsize if want.dtype is not None else 1))
    whole = Region.whole(leaf.shape)
    homes: dict[Any, Region] = {None: whole}  # None: JAX's default device
    if want.sharding is not None:
        indices = want.sharding.addressable_devices_indices_map(leaf.shape)
        homes = {device: _box(index, leaf.shape) for device, index in indices.items()}
    shards = []
    for device, box in homes.items():
        with jax.default_device(device):
            shard = numpy.zeros(box.shape, want.dtype)
        for region in split(box, leaf.chunk_shape, most):
            piece = np.empty(region.shape, leaf.dtype)
            checkpoint.read_into([(leaf, region, piece)], progress=progress)
            with np.errstate(all="ignore"):  # a lossy cast was asked for
                part = jax.device_put(piece.astype(want.dtype, copy=False), device)
            shard = insert(shard, part, region.relative_to(box.start).start)
        shards.append(jax.device_put(shard, device))
    if want.sharding is None:
        return shards[0]
    return jax.make_array_from_single_device_arrays(leaf.shape, want.sharding, shards)


def _box(index: Sequence[slice], shape: Shape) -> Region:
    bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    return Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


def _handed_over(array: Array | None, want: Wanted) -> Any:
    assert array is not None
    if want.form == "number":
        return want.number(array.item())
    if want.form == "numpy_scalar":
        return array[()]
    if want.form == "numpy":
        return array
    import jax

    if want.form == "prng":
        keys = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=want.implementation)
        return keys if want.sharding is None else jax.device_put(keys, want.sharding)
    return jax.device_put(array, want.sharding)  # on CPU it takes the buffer itself; nobody else holds it


def _check_jax_has(leaf: Leaf, want: Wanted) -> None:
    """Refuse dtypes that JAX would narrow without a word."""
    if want.form != "jax":
        return
    import jax

    if jax.dtypes.canonicalize_dtype(want.dtype) != want.dtype:
        raise DtypeError(
            f"leaf {leaf.key!r}: JAX would narrow {want.dtype}. Set jax.config.update('jax_enable_x64', True), "
            f"or ask for a narrower dtype in `like` with cast=True."
        )
