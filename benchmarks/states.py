"""The states that are saved: made from a seed, so that what was loaded is checked without keeping a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

Spec = dict[str, tuple[tuple[int, ...], str]]  # leaf name, levels joined by "/", to shape and dtype
State = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]

_NOISE_ELEMENTS = 1 << 22
_BITS = {"float32": np.dtype(np.uint32), "bfloat16": np.dtype(np.uint16)}
_noise: dict[str, Array] = {}


def large(scale: int) -> Spec:
    """One float32 leaf of 2 GB."""
    return {"w": ((max(1, 31250 // scale), 16000), "float32")}


def transformer(scale: int) -> Spec:
    """291 bfloat16 leaves as a decoder has them, 2 GB in all: three huge, most of some MB, 65 of a few KB."""
    shrink = math.sqrt(scale)
    model, hidden, words = (max(8, round(n / shrink)) for n in (1536, 4224, 32000))
    layer = dict.fromkeys(("query", "key", "value", "out"), (model, model))
    layer |= {"gate": (model, hidden), "up": (model, hidden), "down": (hidden, model)}
    shapes: dict[str, tuple[int, ...]] = {"embed/table": (words, model)}
    for i in range(32):
        shapes |= {f"layer{i}/{name}": shape for name, shape in layer.items()}
        shapes |= {f"layer{i}/norm1": (model,), f"layer{i}/norm2": (model,)}
    shapes |= {"norm/scale": (model,), "head/w": (model, words)}
    return {name: (shape, "bfloat16") for name, shape in shapes.items()}


def small(scale: int) -> Spec:
    """10,000 float32 leaves of 4 KB."""
    return {f"block{i // 100}/w{i % 100}": ((32, 32), "float32") for i in range(max(2, 10_000 // scale))}


SPECS: dict[str, Callable[[int], Spec]] = {"large": large, "transformer": transformer, "small": small}


def leaf_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _BITS[dtype].itemsize


def total_bytes(spec: Spec) -> int:
    return sum(leaf_bytes(*leaf) for leaf in spec.values())


def build(spec: Spec) -> Iterator[tuple[str, Array]]:
    """Leaf by leaf; nothing but the leaf yielded last is held here."""
    for number, (name, (shape, dtype)) in enumerate(spec.items()):
        bits = np.empty(math.prod(shape), _BITS[dtype])
        for start, block in _blocks(number, bits.size, dtype):
            bits[start : start + block.size] = block
        yield name, bits.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(shape)


def differences(spec: Spec, loaded: State) -> list[str]:
    """Names of the leaves that are not, bit for bit, what `build` made."""
    return [
        name
        for number, (name, (shape, dtype)) in enumerate(spec.items())
        if name not in loaded or not _same(np.asarray(loaded[name]), number, shape, dtype)
    ]


def nest(flat: State) -> dict[str, Any]:
    """{"a/b": x} to {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *levels, last = name.split("/")
        node = tree
        for level in levels:
            node = node.setdefault(level, {})
        node[last] = value
    return tree


def flatten(tree: dict[str, Any], prefix: str = "") -> State:
    """The inverse of `nest`."""
    flat: State = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value
    return flat


def _same(value: Array, number: int, shape: tuple[int, ...], dtype: str) -> bool:
    if value.shape != shape or value.dtype.name != dtype:
        return False
    bits = np.ascontiguousarray(value).reshape(-1).view(_BITS[dtype])
    return all(np.array_equal(bits[at : at + block.size], block) for at, block in _blocks(number, bits.size, dtype))


def _blocks(number: int, size: int, dtype: str) -> Iterator[tuple[int, Array]]:
    """Normal noise, which compresses as badly as weights do; low mantissa bits tell leaves and blocks apart."""
    if not _noise:
        noise = np.random.default_rng(0).standard_normal(_NOISE_ELEMENTS, dtype=np.float32).view(np.uint32)
        _noise.update(float32=noise, bfloat16=(noise >> 16).astype(np.uint16))
    noise = _noise[dtype]
    marks = 8 if dtype == "bfloat16" else 65536
    block = np.empty(min(size, noise.size), noise.dtype)
    for count, start in enumerate(range(0, size, noise.size)):
        length = min(noise.size, size - start)
        shift = (number * 7919 + count * 104_729) % (noise.size - length + 1)
        mark = noise.dtype.type((number * 31 + count) % marks)
        yield start, np.bitwise_xor(noise[shift : shift + length], mark, out=block[:length])
