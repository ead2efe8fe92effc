"""What `like` asks for held against what is stored: one plan, or one grouped diff."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tailrace.checkpoint.leaf import Leaf
from tailrace.errors import LeafError, MismatchError
from tailrace.format.keys import KeyPath, display
from tailrace.format.orbax import PRNG
from tailrace.tree.casts import is_lossless, is_possible
from tailrace.tree.globs import nearest
from tailrace.tree.leaves import is_jax_array, is_prng_dtype

_SHOWN = 20  # lines of a group; what follows is counted


class Wanted(NamedTuple):
    """What one leaf of `like` asks for."""

    form: str  # what the result is: "numpy", "numpy_scalar", "number", "text", "jax" or "prng"
    shape: tuple[int, ...]  # of the stored array; of a PRNG key, of its data
    dtype: np.dtype[Any] | None  # None: any, as for text
    sharding: Any = None  # where JAX is to put it; None for its default device
    implementation: str = ""  # of a PRNG key
    number: type = object  # of a Python number

    def __str__(self) -> str:
        if self.form == "text":
            return "a str"
        if self.form == "number":
            return f"a Python {self.number.__name__}"
        if self.form == "prng":
            return f"{self.implementation} keys of shape {self.shape}"
        return f"{self.dtype} {self.shape}"


def wanted(path: KeyPath, value: Any) -> Wanted:
    """What a leaf of `like` asks for: its own type, shape and dtype. LeafError for a value that asks for nothing."""
    if isinstance(value, str):
        return Wanted("text", (), None)
    if isinstance(value, np.generic):
        return Wanted("numpy_scalar", (), value.dtype)
    if isinstance(value, bool | int | float | complex):
        kind = next(kind for kind in (bool, int, float, complex) if isinstance(value, kind))
        return Wanted("number", (), np.dtype(kind), number=kind)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise LeafError(
            f"like: leaf {display(path)!r} is a {type(value).__module__}.{type(value).__qualname__}, which says no "
            f"shape and dtype: put an array, a jax.ShapeDtypeStruct, a number or a str there."
        )
    if is_prng_dtype(dtype):
        return _wanted_prng(value)
    dtype = np.dtype(dtype).newbyteorder("=")
    jax = sys.modules.get("jax")
    if is_jax_array(value) or (jax is not None and isinstance(value, jax.ShapeDtypeStruct)):
        return Wanted("jax", tuple(shape), dtype, _sharding(value))
    return Wanted("numpy", tuple(shape), dtype)


def _wanted_prng(value: Any) -> Wanted:
    import jax

    implementations: list[str] = []

    def data_of(keys: Any) -> Any:
        implementations.append(str(jax.random.key_impl(keys)))  # of an abstract key only a trace can tell it
        return jax.random.key_data(keys)

    data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(value.shape, value.dtype))  # type: ignore[no-untyped-call]
    return Wanted("prng", tuple(data.shape), np.dtype(np.uint32), _sharding(value), implementations[0])


def _sharding(value: Any) -> Any:
    """Where the array is, unless that is only where JAX puts arrays by default."""
    if is_jax_array(value) and not value.committed:
        return None
    return getattr(value, "sharding", None)


@dataclass(slots=True)
class Diff:
    """How `like` and the checkpoint differ, one group per kind of difference."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    lossy: list[str] = field(default_factory=list)  # cast=True would accept them
    kinds: list[str] = field(default_factory=list)  # nothing would

    def __bool__(self) -> bool:
        return any((self.missing, self.unexpected, self.shapes, self.lossy, self.kinds))

    def error(self, path: object, wanted_keys: Sequence[str], stored_keys: Sequence[str]) -> MismatchError:
        """The whole diff as one error."""
        spare = [key for key in stored_keys if key in set(self.unexpected)] or list(stored_keys)
        asked = [key for key in wanted_keys if key in set(self.missing)] or list(wanted_keys)
        groups = [
            _group(
                "in `like`, missing in the checkpoint",
                _with_nearest(self.missing, spare, "stored"),
                "To keep like's own values there: missing='keep'. To load another key: rename={'stored': 'wanted'}.",
            ),
            _group(
                "in the checkpoint, unexpected by `like`",
                _with_nearest(self.unexpected, asked, "wanted"),
                "To leave them out: unexpected='ignore'. To load them to another key: rename={'stored': 'wanted'}.",
            ),
            _group(
                "of another shape",
                self.shapes,
                "Shapes must be equal: correct `like`, or leave these leaves out with only= or rename=.",
            ),
            _group("of another dtype, which would lose values", self.lossy, "To cast all the same: cast=True."),
            _group("of another kind", self.kinds, "Give `like` a leaf of the stored kind there."),
        ]
        return MismatchError(f"`like` and the checkpoint at {path} differ.\n" + "\n".join(filter(None, groups)))


def _with_nearest(keys: Sequence[str], others: Sequence[str], what: str) -> list[str]:
    lines = []
    for key in keys[:_SHOWN]:
        near = nearest(key, others, 1)
        lines.append(f"{key}   (nearest {what}: {near[0]})" if near and near[0] != key else key)
    return [*lines, *keys[_SHOWN:]]


def _group(title: str, lines: Sequence[str], way_out: str) -> str:
    if not lines:
        return ""
    shown = [f"    {line}" for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"    and {len(lines) - _SHOWN} more")
    count = "1 leaf" if len(lines) == 1 else f"{len(lines)} leaves"
    return "\n".join([f"  {count} {title}:", *shown, f"    {way_out}"])


def compare(diff: Diff, key: str, want: Wanted, have: Leaf | str, *, cast: bool) -> None:
    """Note in `diff` how a stored leaf differs from what is wanted at its place."""
    if isinstance(have, str) or want.form == "text":
        if not (isinstance(have, str) and want.form == "text"):
            diff.kinds.append(f"{key}   stored {'a str' if isinstance(have, str) else _told(have)}, wanted {want}")
        return
    is_keys = have.kind.startswith(PRNG) and want.dtype != np.dtype(np.uint32)  # as uint32 their data may be had
    if is_keys or (want.form == "prng" and have.kind != PRNG + want.implementation):
        diff.kinds.append(f"{key}   stored {_told(have)}, wanted {want}")
        return
    shape, dtype = have.shape, have.dtype
    if shape != want.shape:
        diff.shapes.append(f"{key}   stored {shape}, wanted {want.shape}")
        return
    assert want.dtype is not None
    fits = _number_fits(dtype, want.number) if want.form == "number" else is_lossless(dtype, want.dtype)
    if not fits and not is_possible(dtype, want.dtype):
        diff.kinds.append(f"{key}   stored {dtype}, wanted {want}")
    elif not fits and not cast:
        diff.lossy.append(f"{key}   stored {dtype}, wanted {want}")


def _number_fits(dtype: np.dtype[Any], number: type) -> bool:
    """Whether every value of the dtype is a Python number of this type; a Python int has no largest value."""
    if number is int:
        return dtype.kind in "iu" or dtype.name.startswith(("int", "uint"))
    return is_lossless(dtype, np.dtype(number))


def _told(have: Leaf) -> str:
    return f"{have.kind[len(PRNG) :]} keys" if have.kind.startswith(PRNG) else f"{have.dtype} {have.shape}"
