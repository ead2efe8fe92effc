"""The one module that makes a checkpoint visible, and the one that finishes the work when it was killed half-way.

What a pending directory goes through, each line durable before the next begins:

1. `.work/` with journals: a transaction; resume trusts nothing but the journals
2. `.work/sealed` is there: index, metadata and data are complete and synced; from here on it only rolls forward
3. an old checkpoint that is to be replaced has the marker `.tailrace-replaced` inside; data files no chunk is in go
4. `commit_success.txt` is there
5. `.work` is renamed to `.work-done`, then deleted: what is left is the checkpoint, to the byte
6. the directory has its final name: visible. The old one, if any, has the pending name, by a swap of names, or is put
   aside as `<name>.tailrace-replaced`, and is deleted there

A directory with the marker is the old one, whatever its name: so a kill around step 6 is told apart from step 5.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from tailrace.errors import CheckpointExistsError
from tailrace.storage.location import pending_path, replaced_path
from tailrace.storage.posix import (
    exchange,
    fsync_dir,
    holding,
    remove_empty,
    remove_tree,
    rename_noreplace,
    replace_durably,
    storage_errors,
    write_durably,
)

WORK, WORK_DONE, SEALED = ".work", ".work-done", "sealed"
SUCCESS = "commit_success.txt"
SUCCESS_TEXT = b"Checkpoint committed by tailrace.\n"  # fixed, so that tailrace.json can hold its checksum
REPLACED_MARKER = ".tailrace-replaced"
_SIGNS = ("manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "tailrace.json")


def is_checkpoint(path: Path) -> bool:
    """Whether the directory holds a checkpoint, ours or Orbax's (also one whose items are in subdirectories)."""
    return any((path / sign).is_file() for sign in _SIGNS)


class Seal(msgspec.Struct, frozen=True):
    """What is to be done once a transaction is sealed.

    `unused` are its data files that no chunk is in. They go only now: before, a kill would send the transaction back
    to journals that still name them.
    """

    overwrite: bool
    unused: list[str]


def seal(root: Path, contents: Seal) -> None:
    """Everything is in place and synced: from now on the transaction only rolls forward."""
    with storage_errors(f"sealing {root}"):
        replace_durably(root / WORK / SEALED, msgspec.json.encode(contents))


def publish(root: Path, final: Path, *, release: Callable[[], None] = lambda: None) -> None:
    """Steps 3 to 6, for a sealed pending directory that we are `holding`; may be repeated after any failure."""
    with storage_errors(f"committing {final}"):
        if is_sealed(root) or _is_replaced(root):
            _roll_forward(root, final, release)
        elif not is_checkpoint(final):  # else another process opened the path since a failed attempt, and did it
            raise FileNotFoundError(errno.ENOENT, f"{root} is gone: somebody deleted it")
        _remove_replaced(final)


def _roll_forward(root: Path, final: Path, release: Callable[[], None] = lambda: None) -> None:
    if _is_replaced(root):
        _remove_replaced(final)
        rename_noreplace(root, replaced_path(final))
        fsync_dir(root.parent)
        return
    if (root / WORK).is_dir():
        sealed = _read_seal(root)
        if sealed.overwrite and os.path.lexists(final):
            _mark_replaced(root, final)
        _remove_unused(root, sealed.unused)
        write_durably(root / SUCCESS, SUCCESS_TEXT)
        fsync_dir(root)
        (root / WORK).rename(root / WORK_DONE)
        fsync_dir(root)
    release()
    if (root / WORK_DONE).is_dir():
        remove_tree(root / WORK_DONE)
        fsync_dir(root)
    if _is_replaced(final):
        _replace(root, final)
    else:
        try:
            rename_noreplace(root, final)
        except FileExistsError as error:
            raise _appeared(root, final) from error
    fsync_dir(final.parent)


def _read_seal(root: Path) -> Seal:
    return msgspec.json.decode((root / WORK / SEALED).read_bytes(), type=Seal)


def _is_replaced(path: Path) -> bool:
    return (path / REPLACED_MARKER).exists()


def _remove_unused(root: Path, unused: list[str]) -> None:
    for relative in unused:
        (root / relative).unlink(missing_ok=True)
    for directory in {(root / relative).parent for relative in unused}:
        if directory.parent != root:  # of an inherited database: it goes with its last file
            remove_empty([directory.parent, directory])
        if directory.is_dir():
            fsync_dir(directory)


def _appeared(root: Path, final: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{final} appeared while its checkpoint was being written. The new one is complete and waits at {root}: move "
        f"{final} away, and the next open or save of {final} puts it in place."
    )


def _may_replace(final: Path) -> bool:
    """Whether what is at the path may be replaced by who asked for it: a checkpoint, or an empty directory."""
    return not final.is_symlink() and final.is_dir() and (is_checkpoint(final) or _is_empty(final))


def _mark_replaced(root: Path, final: Path) -> None:
    if not _may_replace(final):
        raise _appeared(root, final)
    if not _is_empty(final):
        write_durably(final / REPLACED_MARKER, b"")
        fsync_dir(final)
    else:
        final.rmdir()


def _replace(root: Path, final: Path) -> None:
    _remove_replaced(final)
    aside = replaced_path(final)
    with holding(final):  # the old one, whatever its name
        if exchange(root, final):
            fsync_dir(final.parent)
            rename_noreplace(root, aside)  # the pending name is free for the next transaction
        else:
            rename_noreplace(final, aside)
            fsync_dir(final.parent)
            rename_noreplace(root, final)
        fsync_dir(final.parent)
        remove_tree(aside, last=REPLACED_MARKER)


def recover(final: Path) -> bool:
    """Finish a commit that was killed after it was sealed; whether there was anything to finish.

    Only rolls forward: a transaction that is not sealed is left as it is. Waits for a process that is at it.
    """
    root = pending_path(final)
    found = False
    with storage_errors(f"finishing the commit of {final}"):
        if _unfinished(root, final):
            with holding(root) as there:
                if there and _unfinished(root, final):  # still, now that nobody else is at it
                    _roll_forward(root, final)
            found = True
        return _remove_replaced(final) or found


def _remove_replaced(final: Path) -> bool:
    """Delete an old checkpoint that was put aside, once the new one has the name; whether there was anything."""
    aside = replaced_path(final)
    if not (_is_put_aside(aside) and os.path.lexists(final)):
        return False
    with holding(aside) as there:
        if there and _is_put_aside(aside):
            remove_tree(aside, last=REPLACED_MARKER)
    fsync_dir(final.parent)
    return True


def _is_put_aside(path: Path) -> bool:
    return _is_replaced(path) or _is_empty(path)  # empty: killed at its last call


def _is_empty(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _unfinished(root: Path, final: Path) -> bool:
    if _is_replaced(root):  # the swap is done, the old checkpoint still has the pending name
        return True
    if not is_sealed(root):
        return False
    if not os.path.lexists(final) or _is_replaced(final):
        return True
    return (root / WORK / SEALED).exists() and _read_seal(root).overwrite and _may_replace(final)


def is_sealed(root: Path) -> bool:
    """Whether a pending directory holds a whole checkpoint, which only needs to be published."""
    if (root / WORK).is_dir():
        return (root / WORK / SEALED).exists()
    return (root / WORK_DONE).is_dir() or (root / SUCCESS).exists()
