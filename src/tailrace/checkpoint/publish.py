"""The one module that makes a checkpoint visible, and the one that finishes the work when it was killed half-way.

What a pending directory goes through, each line durable before the next begins:

1. `.work/` with journals: a transaction; resume trusts nothing but the journals
2. `.work/sealed` is there: index, metadata and data are complete and synced; from here on it only rolls forward
3. an old checkpoint that is to be replaced has the marker `.tailrace-replaced` inside
4. `commit_success.txt` is there
5. `.work` is renamed to `.work-done`, then deleted: what is left is the checkpoint, to the byte
6. the directory has its final name: visible. The old one, if any, has the pending name and is deleted

A directory with the marker is the old one, whatever its name: so a kill around step 6 is told apart from step 5.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tailrace.errors import CheckpointExistsError
from tailrace.storage.location import pending_path, replaced_path
from tailrace.storage.posix import exchange, fsync_dir, remove_tree, rename_noreplace, storage_errors, write_durably

WORK, WORK_DONE, SEALED = ".work", ".work-done", "sealed"
SUCCESS = "commit_success.txt"
SUCCESS_TEXT = b"Checkpoint committed by tailrace.\n"  # fixed, so that tailrace.json can hold its checksum
REPLACED_MARKER = ".tailrace-replaced"
_SIGNS = ("manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "tailrace.json")


def is_checkpoint(path: Path) -> bool:
    """Whether the directory holds a checkpoint, ours or Orbax's (also one whose items are in subdirectories)."""
    return any((path / sign).is_file() for sign in _SIGNS)


def seal(root: Path, *, overwrite: bool) -> None:
    """Everything is in place and synced: from now on the transaction only rolls forward."""
    write_durably(root / WORK / SEALED, b"overwrite" if overwrite else b"new")
    fsync_dir(root / WORK)


def publish(root: Path, final: Path, *, release: Callable[[], None] = lambda: None) -> None:
    """Steps 3 to 6, for a sealed pending directory; may be repeated after a kill at any point."""
    with storage_errors(f"committing {final}"):
        if (root / WORK).is_dir():
            if (root / WORK / SEALED).read_bytes() == b"overwrite" and os.path.lexists(final):
                _mark_replaced(final)
            write_durably(root / SUCCESS, SUCCESS_TEXT)
            fsync_dir(root)
            (root / WORK).rename(root / WORK_DONE)
            fsync_dir(root)
        release()
        if (root / WORK_DONE).is_dir():
            remove_tree(root / WORK_DONE)
            fsync_dir(root)
        if (final / REPLACED_MARKER).exists():
            _replace(root, final)
        else:
            try:
                rename_noreplace(root, final)
            except FileExistsError as error:
                raise CheckpointExistsError(
                    f"{final} appeared while its checkpoint was being written. The new one is complete and waits at "
                    f"{root}: move {final} away, and the next open or save of {final} puts it in place."
                ) from error
        fsync_dir(final.parent)


def _mark_replaced(final: Path) -> None:
    if any(final.iterdir()):
        write_durably(final / REPLACED_MARKER, b"")
        fsync_dir(final)
    else:
        final.rmdir()


def _replace(root: Path, final: Path) -> None:
    aside = root
    if not exchange(root, final):
        aside = replaced_path(final)
        rename_noreplace(final, aside)
        fsync_dir(final.parent)
        rename_noreplace(root, final)
    fsync_dir(final.parent)
    remove_tree(aside)


def recover(final: Path) -> bool:
    """Finish a commit that was killed after it was sealed; whether there was anything to finish.

    Only rolls forward: a transaction that is not sealed is left as it is.
    """
    root, aside = pending_path(final), replaced_path(final)
    found = False
    with storage_errors(f"finishing the commit of {final}"):
        if (root / REPLACED_MARKER).exists():  # the swap is done, the old checkpoint still has the pending name
            remove_tree(root)
            found = True
        elif _sealed(root) and (not os.path.lexists(final) or _replaces(root, final)):
            publish(root, final)
            found = True
        if aside.is_dir() and (aside / REPLACED_MARKER).exists() and os.path.lexists(final):
            remove_tree(aside)
            found = True
        if found:
            fsync_dir(final.parent)
    return found


def _sealed(root: Path) -> bool:
    if (root / WORK).is_dir():
        return (root / WORK / SEALED).exists()
    return (root / WORK_DONE).is_dir() or (root / SUCCESS).exists()


def _replaces(root: Path, final: Path) -> bool:
    sealed = root / WORK / SEALED
    return (final / REPLACED_MARKER).exists() or (sealed.exists() and sealed.read_bytes() == b"overwrite")
