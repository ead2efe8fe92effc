"""Which casts keep every value, held against numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.tree.casts import cast_in_place, is_lossless, is_possible


@pytest.mark.parametrize(
    ("source", "target", "lossless"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("int32", "int64", True),
        ("int32", "float32", False),
        ("int32", "float64", True),
        ("int64", "float64", False),  # numpy calls it safe; 2**53 + 1 is lost
        ("int16", "float32", True),
        ("uint8", "int8", False),
        ("float32", "float64", True),
        ("float64", "float32", False),
        ("float32", "complex64", True),
        ("float8_e4m3fn", "bfloat16", True),
        ("float8_e5m2", "float16", True),
        ("float8_e4m3fn", "float8_e5m2", False),
        ("int4", "int8", True),
        ("int4", "float32", True),
        ("int8", "int4", False),
        ("bool", "int32", False),
        ("float32", "float32", True),
    ],
)
def test_lossless(source, target, lossless):
    """Widening that keeps every value is told from what may lose one, whatever numpy calls safe."""
    assert is_lossless(dtype(source), dtype(target)) is lossless


def dtype(name):
    """A dtype of numpy or ml_dtypes by its name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def test_complex_never_loses_its_imaginary_part():
    """No argument makes a real number of a complex one."""
    assert not is_possible(np.dtype("complex64"), np.dtype("float32"))


@given(st.sampled_from(["bfloat16", "float16", "int8", "float32"]), st.integers(0, 300), st.integers(8, 900))
def test_a_cast_in_its_own_buffer_equals_numpy_s(source, size, piece_bytes):
    """Widening and narrowing in place, in pieces of any length, give what `astype` gives."""
    for target in ("float64", "float32", "int16", "float16", "int8"):
        values = (np.arange(size) % 100).astype(dtype(source))
        width = max(dtype(source).itemsize, dtype(target).itemsize)
        buffer = np.empty(size * width, np.uint8)
        buffer[len(buffer) - values.nbytes :] = values.view(np.uint8)
        cast_in_place(buffer, values.dtype, dtype(target), size, piece_bytes)

        result = buffer[: size * dtype(target).itemsize].view(dtype(target))
        np.testing.assert_array_equal(result, values.astype(dtype(target)))
