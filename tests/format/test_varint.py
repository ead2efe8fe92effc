"""Varints: literal bytes, round trips, and what a reader makes of damage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CorruptionError, FormatError
from tailrace.format.varint import MAX_INT64, MAX_UINT64, ByteReader, encode_many, encode_one

LITERALS = [
    (0, "00"),
    (1, "01"),
    (127, "7f"),
    (128, "8001"),
    (300, "ac02"),
    (16384, "808001"),
    (MAX_UINT64, "ff" * 9 + "01"),
]


@pytest.mark.parametrize(("number", "encoded"), LITERALS)
def test_literal_bytes(number, encoded):
    """Numbers at the borders of a byte have the bytes that uleb128 gives them."""
    assert encode_one(number).hex() == encoded
    assert ByteReader(bytes.fromhex(encoded)).varint(MAX_UINT64) == number


def test_a_column_is_its_numbers_one_after_the_other():
    """A column of every width at once has the literal bytes joined."""
    encoded = encode_many([number for number, _ in LITERALS])

    assert encoded.hex() == "".join(literal for _, literal in LITERALS)


@given(st.lists(st.integers(0, MAX_INT64) | st.integers(0, 300)), st.binary(max_size=12))
def test_columns_round_trip(numbers, rest):
    """Any column comes back, and the reader stands right behind it."""
    reader = ByteReader(encode_many(numbers) + rest)

    column = reader.varints(len(numbers))

    assert column.dtype == np.int64
    assert column.tolist() == numbers
    assert reader.take(reader.remaining) == rest


@given(st.lists(st.integers(0, MAX_UINT64), max_size=20))
def test_one_and_many_agree(numbers):
    """The numpy path writes what the plain loop writes."""
    assert encode_many(numbers) == b"".join(map(encode_one, numbers))


@given(st.binary(max_size=200), st.integers(0, 250))
def test_random_bytes_are_a_column_or_damage(data, count):
    """Random bytes give `count` non-negative numbers, the plain loop's, or a FormatError."""
    try:
        column = ByteReader(data).varints(count).tolist()
    except FormatError:
        return
    plain = ByteReader(data)

    assert column == [plain.varint() for _ in range(count)]


@pytest.mark.parametrize("encoded", ["", "80", "ff" * 9 + "02", "80" * 10 + "00"])
def test_a_varint_that_never_ends_or_overflows_is_damage(encoded):
    """A varint cut short, above 64 bits or of more than ten bytes raises CorruptionError."""
    with pytest.raises(CorruptionError):
        ByteReader(bytes.fromhex(encoded)).varint(MAX_UINT64)


def test_a_number_above_the_limit_is_damage():
    """A column's largest number is held against the limit, and both are named."""
    with pytest.raises(CorruptionError, match="is 300, at most 299 is valid"):
        ByteReader(encode_many([5, 300])).varints(2, 299)


def test_a_huge_count_allocates_nothing():
    """A count beyond the bytes left is refused as such."""
    with pytest.raises(CorruptionError, match=r"1099511627776 bytes expected at byte 0, 3 found"):
        ByteReader(b"abc").varints(1 << 40)


def test_bytes_left_over_are_damage():
    """`end` names what is left."""
    reader = ByteReader(b"abc")
    reader.take(1)

    with pytest.raises(CorruptionError, match="2 bytes left over after byte 1"):
        reader.end()
