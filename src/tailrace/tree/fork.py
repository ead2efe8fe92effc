"""fork: a new checkpoint that begins as another one."""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.checkpoint.inherit import inherit
from tailrace.checkpoint.reader import open as open_checkpoint
from tailrace.errors import InputError
from tailrace.flow.budget import DEFAULT_BUDGET
from tailrace.storage.location import resolve
from tailrace.tree.writer import Writer


def fork(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    memory_budget: int | str = DEFAULT_BUDGET,
    resume: bool = False,
    overwrite: bool = False,
    takeover: bool = False,
    compression: str | None = None,
) -> Writer:
    """A writer for `path` that already holds everything in the checkpoint `source`: write what changes, then commit.

    Unchanged data files are hard-linked, or cloned, or copied with a logged message, so a fork costs what is written
    to it; the source may be deleted afterwards. Leaves that Orbax wrote can be replaced whole, ours by regions too.
    Raises NotACheckpointError, InputError, and whatever opening a Writer raises; then nothing has changed.
    """
    if resolve(source) == resolve(path):
        raise InputError(
            f"a fork of {os.fspath(source)!r} needs a path of its own; to change it in place, fork it and use "
            "overwrite."
        )
    with open_checkpoint(resolve(source), memory_budget=memory_budget) as parent:
        writer = Writer(
            path,
            memory_budget=memory_budget,
            resume=resume,
            overwrite=overwrite,
            takeover=takeover,
            compression=compression,
        )
        try:
            if not _has_inherited(writer, parent.path):
                inherit(writer, parent)
        except BaseException:
            writer.close() if writer.resumed else writer.abort()
            raise
    return writer


def _has_inherited(writer: Writer, parent: Path) -> bool:
    """Whether a resumed writer holds all of `parent` already; InputError where it began in another way."""
    begun = writer.inherited
    if begun is None:
        if writer.keys():
            raise InputError(
                f"the unfinished transaction for {writer.path} did not begin as a fork: resume it with Writer, or "
                "discard it with abort()."
            )
        return False
    if begun.parent != str(parent):
        raise InputError(
            f"the unfinished transaction for {writer.path} is a fork of {begun.parent}, not of {parent}: resume it "
            "with that, or discard it with Writer(..., resume=True).abort()."
        )
    return begun.complete  # a kill on the way leaves a part of it: it is done again
