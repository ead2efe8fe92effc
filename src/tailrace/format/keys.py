"""Key paths: where a leaf hangs in its tree, what it is called, and what it is called on disk.

A key path is a tuple of str and int. On the surface it may be one string whose parts are joined by "/"
(a part that itself holds "/" needs the tuple). On disk a leaf is named as Orbax names it: the parts joined
by ".", so two paths may share one name, which is refused (`collision`) before any byte is written.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.errors import KeyPathError

KeyPath = tuple[str | int, ...]
MAX_NAME_BYTES = 4096  # far above any model's names; keeps a hostile source from growing the index


def parse_key(key: str | int | Iterable[str | int]) -> KeyPath:
    """The key path of a surface key: "a/b", ("a", 0) or a single int.

    Raises KeyPathError for an empty string or tuple, and for parts that are neither str nor int.
    """
    if isinstance(key, str):
        path: KeyPath = tuple(key.split("/"))
    elif isinstance(key, int) and not isinstance(key, bool):
        path = plain((key,))
    elif isinstance(key, Iterable):
        path = plain(tuple(key))
    else:
        raise KeyPathError(
            f"key {key!r}: a key is a str such as 'a/b' or a tuple of str and int, not {type(key).__name__}."
        )
    check_path(path)
    return path


def plain(path: KeyPath) -> KeyPath:
    """The same path of nothing but str and int themselves: their subclasses, such as numpy.str_, cannot be recorded."""
    if all(type(part) is str or type(part) is int for part in path):
        return path
    return tuple(map(_plain, path))


def _plain(part: str | int) -> str | int:
    if isinstance(part, str):
        return str.__str__(part)
    return int(part) if isinstance(part, int) and not isinstance(part, bool) else part


def check_path(path: KeyPath) -> None:
    """Refuse a path that cannot name a leaf."""
    if not path:
        raise KeyPathError("the empty key names no leaf: give the leaf a key, such as {'x': array}.")
    for part in path:
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise KeyPathError(f"key {path!r}: part {part!r} is a {type(part).__name__}; parts are str or int.")
    name = disk_name(path)
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise KeyPathError(f"key {path!r} is not valid Unicode and has no name on disk.") from error
    if not encoded:
        raise KeyPathError(f"key {path!r} has an empty name on disk: give it at least one non-empty part.")
    if len(encoded) > MAX_NAME_BYTES:
        raise KeyPathError(
            f"key {name[:60]!r}...: the name has {len(encoded)} bytes, at most {MAX_NAME_BYTES} are allowed."
        )


def display(path: KeyPath) -> str:
    """The path as people read and type it, parts joined by "/"."""
    return "/".join(map(str, path))


def disk_name(path: KeyPath) -> str:
    """The leaf's name on disk, parts joined by "." as Orbax joins them."""
    return ".".join(map(str, path))


def collision(name: str, first: KeyPath, second: KeyPath) -> KeyPathError:
    """The error for two paths that share `name` on disk."""
    return KeyPathError(
        f"keys {first!r} and {second!r} would both be stored as {name!r} (parts are joined by '.', as Orbax joins "
        "them). "
        f"Rename one of them."
    )
