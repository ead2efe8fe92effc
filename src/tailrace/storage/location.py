"""Where a checkpoint is: a path, absolute and checked, and the names that belong to it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tailrace.errors import InputError

PENDING_SUFFIX = ".tailrace-pending"
REPLACED_SUFFIX = ".tailrace-replaced"


def resolve(path: str | os.PathLike[str]) -> Path:
    """The absolute path a user means: relative paths count from the working directory, ~ is the home directory.

    Raises InputError for an empty path, for URLs (buckets are not supported by this version), and for the root.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise InputError(f"path {text!r}: give a str or pathlib.Path, not bytes.")
    if not text:
        raise InputError("the path is empty: name a directory for the checkpoint.")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", text)
    if scheme:
        raise InputError(
            f"path {text!r}: this version reads and writes local paths only, not {scheme[1]}:// URLs. Mount it or "
            "copy it."
        )
    resolved = Path(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111 (no symlink is followed: the name counts)
    if not resolved.name:
        raise InputError(f"path {text!r} is the root of the file system: name a directory in it.")
    return resolved


def pending_path(path: Path) -> Path:
    """Where a transaction gathers what will become `path`."""
    return path.with_name(path.name + PENDING_SUFFIX)


def replaced_path(path: Path) -> Path:
    """Where the old checkpoint waits while it is replaced, on file systems that cannot swap names."""
    return path.with_name(path.name + REPLACED_SUFFIX)
