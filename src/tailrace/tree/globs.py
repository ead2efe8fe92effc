"""Patterns over keys: "*" is any one part of a key or some of it, "**" any number of parts, "?" one character."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from tailrace.errors import InputError, MissingKeyError


class Glob:
    """One pattern, such as "params/**", "*/bias" or "**/kernel"."""

    __slots__ = ("_regex", "text", "wildcards")

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise InputError(f"pattern {text!r}: write a key, or a pattern of keys such as 'params/**'.")
        self.text = text
        self.wildcards = re.findall(r"\*\*|\*|\?", text)
        parts = text.split("/")
        regex = ""
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if part == "**":
                regex += "(.+)" if last else "((?:[^/]+/)*)"
            else:
                regex += "".join(_piece(piece) for piece in re.split(r"(\*+|\?)", part)) + ("" if last else "/")
        self._regex = re.compile(regex, re.DOTALL)

    def match(self, key: str) -> tuple[str, ...] | None:
        """What each wildcard stands for in this key, or None where the pattern does not match it."""
        found = self._regex.fullmatch(key)
        return tuple(group.rstrip("/") for group in found.groups()) if found else None

    def fill(self, captured: Sequence[str]) -> str:
        """The key this pattern becomes when its wildcards stand for `captured`."""
        rest = iter(captured)
        filled = [re.sub(r"\*\*|\*|\?", lambda _: next(rest), part) for part in self.text.split("/")]
        return "/".join(part for part, made in zip(filled, self.text.split("/"), strict=True) if part or made != "**")


def _piece(piece: str) -> str:
    if piece == "?":
        return "([^/])"
    return "([^/]*)" if piece.startswith("*") else re.escape(piece)


def select(keys: Iterable[str], only: str | Sequence[str], what: str) -> set[str]:
    """The keys that any of the patterns matches.

    Raises MissingKeyError for a pattern that matches none, naming what was near.
    """
    patterns = [Glob(text) for text in ([only] if isinstance(only, str) else only)]
    all_keys = list(keys)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {key for key in all_keys if pattern.match(key) is not None}
        if not found:
            raise MissingKeyError(f"only={pattern.text!r} matches no leaf of {what}{_hint(pattern.text, all_keys)}")
        chosen |= found
    return chosen


def renamed(keys: Sequence[str], rename: Mapping[str, str], what: str) -> dict[str, str]:
    """For each key, what it is called after renaming; the first rule that matches a key counts.

    Raises InputError for a rule that matches nothing, whose sides have different wildcards, or that makes two keys one.
    """
    rules = [(Glob(old), Glob(new)) for old, new in rename.items()]
    for old, new in rules:
        if old.wildcards != new.wildcards:
            raise InputError(
                f"rename {old.text!r}: {new.text!r}: both sides need the same wildcards in the same order, "
                f"found {old.wildcards} and {new.wildcards}."
            )
    used: set[str] = set()
    names: dict[str, str] = {}
    for key in keys:
        names[key] = key
        for old, new in rules:
            captured = old.match(key)
            if captured is not None:
                names[key] = new.fill(captured)
                used.add(old.text)
                break
    for old, _ in rules:
        if old.text not in used:
            raise MissingKeyError(f"rename {old.text!r} matches no leaf of {what}{_hint(old.text, keys)}")
    origin: dict[str, str] = {}
    for key, name in names.items():
        if (other := origin.setdefault(name, key)) != key:
            raise InputError(
                f"rename would give {other!r} and {key!r} the one name {name!r}: give them different names."
            )
    return names


def nearest(key: str, keys: Sequence[str], most: int = 3) -> list[str]:
    """Keys that look like this one, those with its last part first."""
    last = key.rpartition("/")[2]
    same_end = [other for other in keys if other.rpartition("/")[2] == last]
    return difflib.get_close_matches(key, (same_end or keys)[:500], n=most, cutoff=0.5)  # it is quadratic


def _hint(text: str, keys: Sequence[str]) -> str:
    below = [key for key in keys if key.startswith(text.rstrip("/") + "/")]
    if below:
        return f": it holds {len(below)} leaves; write {text.rstrip('/') + '/**'!r} for all of them."
    near = nearest(text, keys)
    tops = sorted({key.split("/")[0] for key in keys})[:8]
    return f". Nearest: {', '.join(near)}." if near else f". At the top there are: {', '.join(tops) or 'no leaves'}."
