"""Indexing a leaf selects what numpy selects."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from tailrace.checkpoint.indexing import select
from tailrace.errors import InputError, RegionIndexError


def selected(array: np.ndarray[Any, Any], index: Any, chunk_shape: tuple[int, ...]) -> Any:
    """What a leaf of this array gives for the index, reading boxes and pieces as it does."""
    selection = select(index, array.shape)
    out = np.empty(selection.shape, array.dtype)
    for box, place in selection.boxes(chunk_shape):
        target = out[place] if place else out
        taken = selection.inside(box, box)
        assert taken is not None
        target[taken[1] if place else ...] = array[box.slices][taken[0]] if place else array
    return selection.shaped(out)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Any, tuple[int, ...]]:
    """An array, a basic index of it, and a chunk shape."""
    shape = draw(array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7) | st.just(()))
    index = draw(basic_indices(shape, allow_newaxis=True, allow_ellipsis=True, max_dims=8))
    chunk_shape = tuple(draw(st.integers(1, 4)) for _ in shape)
    return np.arange(np.prod(shape, dtype=int)).reshape(shape), index, chunk_shape


@given(cases())
def test_any_basic_index_is_numpys(case: tuple[np.ndarray[Any, Any], Any, tuple[int, ...]]) -> None:
    """Ints, slices with any step, ellipsis and newaxis give numpy's elements, shape and kind of result."""
    array, index, chunk_shape = case

    expected, found = array[index], selected(array, index, chunk_shape)

    assert type(found) is type(expected)
    assert np.array_equal(found, expected)
    assert np.shape(found) == np.shape(expected)


@given(st.integers(-9, 9) | st.slices(6), st.integers(-9, 9) | st.slices(4), st.integers(0, 3))
def test_indices_out_of_range_fail_as_numpys_do(first: Any, second: Any, more: int) -> None:
    """Where numpy raises IndexError so do we, in its words."""
    index = (first, second, *[0] * more)
    array = np.arange(24).reshape(6, 4)
    expected = None
    with contextlib.suppress(IndexError):
        array[index]
        expected = True
    if expected:
        assert np.array_equal(selected(array, index, (2, 2)), array[index])
        return
    with pytest.raises(IndexError) as numpys:
        array[index]
    with pytest.raises(RegionIndexError) as ours:
        select(index, array.shape)

    assert str(ours.value) == str(numpys.value)


@pytest.mark.parametrize("index", [[0, 1], np.array([True, False]), True, 1.0, "x", (0, [1])], ids=repr)
def test_advanced_indices_are_refused_with_the_way_out(index: Any) -> None:
    """Lists, arrays, bools and floats are no basic indices; the error says how to use them."""
    with pytest.raises(RegionIndexError, match=r"leaf\[\.\.\.\]\[index\]"):
        select(index, (2, 2))


def test_two_ellipses_and_a_zero_step_are_refused() -> None:
    """As numpy refuses them, in its words."""
    with pytest.raises(RegionIndexError, match="single ellipsis"):
        select((..., ...), (2, 2))
    with pytest.raises(InputError, match="slice step cannot be zero"):
        select(slice(None, None, 0), (2,))


def test_wide_steps_pass_over_chunks() -> None:
    """A step wider than a chunk reads single rows, not what lies between."""
    boxes = list(select(slice(None, None, 100), (1000, 8)).boxes((10, 8)))

    assert [box.start[0] for box, _ in boxes] == list(range(0, 1000, 100))
    assert {box.shape for box, _ in boxes} == {(1, 8)}
