"""Regions: boxes against numpy's own masks."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.flow.regions import Region, chunk_region, chunks_touching, grid_shape, missing_regions, split


@st.composite
def boxes(draw, inside):
    """Boxes inside a shape."""
    shape = list(inside)
    start = [draw(st.integers(0, n - 1)) for n in shape]
    return Region(tuple(start), tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))


def mask(shape, regions):
    """How many of the regions each element is in."""
    counts = np.zeros(shape, int)
    for region in regions:
        counts[region.slices] += 1
    return counts


def test_a_region_shows_itself_as_people_index():
    """In messages."""
    assert str(Region((1, 0), (2, 5))) == "[1:3, 0:5]"
    assert str(Region((), ())) == "[]"


@given(st.data())
def test_intersection_is_numpys(data):
    """The elements in both boxes, or None where there are none."""
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    first, second = data.draw(boxes(inside=shape)), data.draw(boxes(inside=shape))
    both = (mask(shape, [first]) + mask(shape, [second])) == 2
    found = first.intersection(second)

    assert (mask(shape, [found] if found else []) == both).all()
    assert found == second.intersection(first)


@given(st.data())
def test_split_covers_once_within_the_limit_and_on_chunk_borders(data):
    """Every element is in one piece; pieces are small enough; no chunk that fits is cut."""
    shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=3)))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    region = data.draw(boxes(inside=shape))
    limit = data.draw(st.integers(1, 200))
    pieces = list(split(region, chunk, limit))
    pieces_of = [sum(piece.intersection(chunk_region(i, shape, chunk)) is not None for piece in pieces)
                 for i in np.ndindex(*grid_shape(shape, chunk))]  # fmt: skip

    assert (mask(shape, pieces) == mask(shape, [region])).all()
    assert max(piece.size for piece in pieces) <= limit
    assert [piece.start for piece in pieces] == sorted(piece.start for piece in pieces)
    if math.prod(chunk) <= limit:
        assert max(pieces_of) <= 1


def test_an_empty_region_has_no_pieces_and_touches_no_chunk():
    """Zero-size leaves have nothing to write."""
    empty = Region((0, 2), (3, 0))

    assert list(split(empty, (2, 2), 10)) == []
    assert list(chunks_touching(empty, (2, 2))) == []


@given(st.data())
def test_chunks_touching_is_every_chunk_that_shares_an_element(data):
    """Checked chunk by chunk."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    region = data.draw(boxes(inside=shape))
    wanted = [
        index
        for index in itertools.product(*map(range, grid_shape(shape, chunk)))
        if (mask(shape, [region]) * mask(shape, [chunk_region(index, shape, chunk)])).any()
    ]

    assert list(chunks_touching(region, chunk)) == wanted


@given(st.data())
def test_missing_is_what_no_box_covers(data):
    """As disjoint boxes in order, exactly the elements left."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    covered = data.draw(st.lists(boxes(inside=shape), max_size=6))
    left = missing_regions(covered, Region.whole(shape))

    assert (mask(shape, left) == (mask(shape, covered) == 0)).all()
    assert [region.start for region in left] == sorted(region.start for region in left)


@pytest.mark.parametrize("order", [lambda rows: rows[::2] + rows[1::2], lambda rows: rows[::-1]])
def test_thousands_of_boxes_in_any_order_do_not_cost_their_square(order, monkeypatch):
    """Rows written odd ones first leave a comb; it must not be compared tooth by tooth."""
    rows = [Region((i, 0), (1, 4)) for i in range(4000)]
    calls = 0
    real = Region.intersection

    def counted(self, other):
        nonlocal calls
        calls += 1
        return real(self, other)

    monkeypatch.setattr(Region, "intersection", counted)

    assert missing_regions(order(rows), Region.whole((4001, 4))) == [Region((4000, 0), (1, 4))]
    assert calls <= 3 * len(rows)
