"""Element types: the names zarr gives them, and the fill values written beside them.

TensorStore and Orbax name the small floats and ints as ml_dtypes does; each element takes whole bytes on disk, so
int2, int4 and float4 take one byte, as in host memory.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Any

import ml_dtypes
import numpy as np

from tailrace.errors import FormatError, LeafError, UnsupportedFormatError

Dtype = np.dtype[Any]

_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_NAMES = (
    *("int2", "int4", "float4_e2m1fn", "bfloat16", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
_DTYPES: dict[str, Dtype] = {name: np.dtype(name) for name in _NUMPY_NAMES}
_DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES}
_NAMES: dict[Dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
_INT_BITS = {np.dtype(ml_dtypes.int2): 2, np.dtype(ml_dtypes.int4): 4}
_WAYS_OUT = {
    "uint2": "cast it to uint8",
    "uint4": "cast it to uint8",
    "int1": "cast it to int8",
    "uint1": "cast it to uint8",
    "float8_e4m3": "cast it to float8_e4m3fn, or store its bits with .view('uint8')",
    "float8_e8m0fnu": "cast it to float32, or store its bits with .view('uint8')",
    "float6_e2m3fn": "cast it to float8_e3m4, or store its bits with .view('uint8')",
    "float6_e3m2fn": "cast it to float8_e4m3fn, or store its bits with .view('uint8')",
    "longdouble": "cast it to float64",
    "clongdouble": "cast it to complex128",
    "object": "store its arrays as leaves of their own",
    "str": "store a str as a leaf of its own, not as an array",
    "bytes": "store its bytes with .view('uint8')",
    "datetime64": "store its ticks with .view('int64')",
    "timedelta64": "store its ticks with .view('int64')",
    "void": "store each field as a leaf of its own",
}


def dtype_name(dtype: Dtype) -> str:
    """The zarr3 data type of a dtype, such as "float32" or "float8_e4m3fn".

    Raises LeafError, naming the way out, for dtypes that zarr has no type for and for foreign byte orders.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise _no_name(dtype) from None


def dtype_from_name(name: str) -> Dtype:
    """The dtype of a zarr3 data type; UnsupportedFormatError for names numpy and ml_dtypes have no dtype for."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise UnsupportedFormatError(f"data type {name!r} is none of those tailrace reads: {', '.join(_DTYPES)}.")
    return dtype


def dtype_from_zarr2(text: object) -> tuple[Dtype, str]:
    """The dtype and byte order ("little" or "big") of a zarr2 dtype: "<f4", "|b1", or a zarr3 name as Orbax writes."""
    if isinstance(text, str):
        if text in _DTYPES:
            return _DTYPES[text], "little"
        match = re.fullmatch(r"([<>|])([biufc])(\d{1,2})", text)
        if match is not None:
            order, kind, size = match.groups()
            dtype = next((d for d in map(np.dtype, _NUMPY_NAMES) if d.kind == kind and d.itemsize == int(size)), None)
            if dtype is not None and (dtype.itemsize == 1 or order != "|"):
                return dtype, "big" if order == ">" and dtype.itemsize > 1 else "little"
    raise UnsupportedFormatError(
        f"zarr2 dtype {str(text)[:80]!r} is none tailrace reads: numbers such as '<f4', '>i8' or '|b1', "
        f"or a name of {', '.join(_ML_NAMES)}."
    )


def fill_text(dtype: Dtype) -> str:
    """The JSON of zero as TensorStore writes it for this dtype."""
    if dtype == np.bool_:
        return "false"
    if dtype.kind == "c":
        return "[0.0,0.0]"
    return "0" if dtype.kind in "iu" or dtype in _INT_BITS else "0.0"


def parse_fill(value: Any, dtype: Dtype) -> Any:
    """The scalar a JSON fill value stands for, zero for null; FormatError where it fits no form or not the dtype."""
    if value is None:
        return dtype.type(0)
    try:
        scalar = _scalar(value, dtype)
    except (ValueError, OverflowError, TypeError, binascii.Error):
        scalar = None
    if scalar is None:
        raise FormatError(
            f"fill value {str(value)[:80]!r} does not fit {_NAMES[dtype]}; "
            "numbers, booleans, 'NaN', 'Infinity', '-Infinity', hex bits and pairs of these for complex are allowed."
        )
    return scalar


def _scalar(value: Any, dtype: Dtype) -> Any:
    if dtype.kind == "c":
        part: Dtype = np.dtype(f"f{dtype.itemsize // 2}")
        if isinstance(value, list) and len(value) == 2:
            parts = [_float(x, part) for x in value]
            return None if None in parts else np.array(parts, part).view(dtype)[0]
        if isinstance(value, str):
            return _raw(value, dtype)
        return None if (real := _float(value, part)) is None else dtype.type(real)
    if dtype == np.bool_:
        return np.bool_(value) if isinstance(value, bool) or value in (0, 1) else None
    if dtype.kind in "iu" or dtype in _INT_BITS:
        return _int(value, dtype)
    scalar = _float(value, dtype)
    return _raw(value, dtype) if scalar is None and isinstance(value, str) else scalar


def _int(value: Any, dtype: Dtype) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    bits = _INT_BITS.get(dtype, 8 * dtype.itemsize)
    low, high = (0, 2**bits) if dtype.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return dtype.type(value) if low <= value < high else None


def _float(value: Any, dtype: Dtype) -> Any:
    if isinstance(value, str):
        if value in ("NaN", "Infinity", "-Infinity"):
            value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}[value]
        elif re.fullmatch(r"0x[0-9a-fA-F]{1,16}", value):  # the bits themselves, most significant first
            return np.frombuffer(int(value, 16).to_bytes(dtype.itemsize, "little"), dtype)[0]
        else:
            return None
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with np.errstate(all="ignore"):  # a value past the type's range becomes its infinity, as TensorStore reads it
        return np.array(float(value)).astype(dtype)[()]


def _raw(value: str, dtype: Dtype) -> Any:
    """The element whose bytes are given in base64, as zarr2 writes types it has no number for."""
    data = base64.b64decode(value, validate=True)
    return np.frombuffer(data, dtype)[0] if len(data) == dtype.itemsize else None


def _no_name(dtype: Dtype) -> LeafError:
    if dtype.fields is None and not dtype.isnative and dtype.newbyteorder("=") in _NAMES:
        native = _NAMES[dtype.newbyteorder("=")]
        return LeafError(
            f"dtype {dtype} has a foreign byte order and cannot be stored as it is: cast it to {native!r}."
        )
    kinds = {"O": "object", "U": "str", "T": "str", "S": "bytes", "M": "datetime64", "m": "timedelta64"}
    kinds |= {"g": "longdouble", "G": "clongdouble"}
    known = dtype.name if dtype.name in _WAYS_OUT else kinds.get(dtype.char, "void")
    return LeafError(
        f"dtype {dtype} cannot be stored, zarr has no type for it: {_WAYS_OUT[known]}. "
        f"Allowed are {', '.join(_DTYPES)}."
    )
