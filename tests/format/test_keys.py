"""Keys: what is typed, what is shown, and what is on disk."""

import pytest

from tailrace.errors import KeyPathError
from tailrace.format.keys import MAX_NAME_BYTES, check_path, collision, disk_name, display, parse_key


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("a", ("a",)),
        ("a/b/0", ("a", "b", "0")),
        (3, (3,)),
        (("a", 0, "b/c"), ("a", 0, "b/c")),
        (["a", 1], ("a", 1)),
        ("a//b", ("a", "", "b")),
    ],
)
def test_keys_as_typed(given, path):
    """A str is split at slashes, anything else is taken part by part."""
    assert parse_key(given) == path


@pytest.mark.parametrize("given", ["", (), ("",), True, 1.5, None, ("a", True), ("a", 1.5), ("a", None), "a/\ud800"])
def test_what_names_no_leaf_is_refused(given):
    """Empty keys, and parts that are neither str nor int or have no bytes."""
    with pytest.raises(KeyPathError, match="key"):
        parse_key(given)


def test_a_name_may_be_long_but_not_endless():
    """The limit is in bytes of UTF-8, and both numbers are named."""
    check_path(("é" * (MAX_NAME_BYTES // 2),))

    with pytest.raises(KeyPathError, match=f"has {MAX_NAME_BYTES + 2} bytes, at most {MAX_NAME_BYTES}"):
        check_path(("é" * (MAX_NAME_BYTES // 2 + 1),))


def test_names_are_joined_by_dots_and_shown_with_slashes():
    """On disk as Orbax joins them, on the surface as people type them."""
    assert disk_name(("a", 0, "b.c")) == "a.0.b.c"
    assert display(("a", 0, "b.c")) == "a/0/b.c"


def test_a_collision_names_both_keys_and_the_name():
    """Whoever has to rename must know what."""
    message = str(collision("a.b", ("a.b",), ("a", "b")))

    assert "('a.b',)" in message
    assert "('a', 'b')" in message
    assert "'a.b' (parts" in message
