"""Where a checkpoint is and what it holds: from a path to names, paths, containers and an index."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crc32c import crc32c

from tailrace.checkpoint import publish
from tailrace.checkpoint.index import MANIFEST, DatabaseIndex, FileIndex, Index
from tailrace.errors import CorruptionError, FormatError, NotACheckpointError, StorageError
from tailrace.format import manifest, orbax, structure
from tailrace.format.keys import KeyPath, disk_name
from tailrace.format.manifest import Manifest
from tailrace.storage import location
from tailrace.storage.reading import OpenFiles


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds, before any array is looked at."""

    index: Index
    manifest: Manifest | None  # of tailrace.json; None for a checkpoint of another writer
    root: structure.Node
    names: dict[KeyPath, str]  # of arrays, in the order of the tree
    texts: dict[KeyPath, str]
    kinds: dict[KeyPath, str]
    custom_metadata: dict[str, Any]
    zarr_format: int
    in_database: bool


def locate(path: str | os.PathLike[str]) -> Path:
    """The directory that holds the checkpoint's `_METADATA`: `path` itself or its only item.

    A commit that was killed after its seal is finished first. Raises NotACheckpointError that says what was found.
    """
    root = _finished(location.resolve(path))
    if not root.is_dir():
        raise _absent(root)
    if (root / orbax.METADATA).is_file():
        if not (root / MANIFEST).exists() and list(root.glob("ocdbt.process_*")):
            raise _unfinished(root)
        return root
    try:
        items = sorted(item for item in root.iterdir() if item.is_dir() and (item / orbax.METADATA).is_file())
    except OSError as error:
        raise StorageError.wrap(error, f"looking for a checkpoint in {root}") from error
    if len(items) > 1:
        raise NotACheckpointError(
            f"{root} holds several checkpoints: {', '.join(item.name for item in items)}. Open one of them."
        )
    if items:
        return locate(items[0])
    if (root / manifest.FILE_NAME).exists() or (root / MANIFEST).exists():
        raise CorruptionError(f"{root} is a checkpoint, but {orbax.METADATA} is missing from it.")
    if list(root.glob("ocdbt.process_*")):
        raise _unfinished(root)
    found = sorted(item.name for item in root.iterdir())
    shown = f"it holds {', '.join(found[:8])}{' ...' if len(found) > 8 else ''}" if found else "it is empty"
    raise NotACheckpointError(f"{root} is not a checkpoint: there is no {orbax.METADATA}; {shown}.{_pending(root)}")


def _finished(root: Path) -> Path:
    """Where to read what is, or was meant to be, at `root`."""
    if root.is_dir() and not (root / publish.REPLACED_MARKER).exists():
        return root
    try:
        publish.recover(root)
    except StorageError:  # a place where we may only read: the old checkpoint, put aside, is still whole
        aside = location.replaced_path(root)
        if not root.is_dir() and aside.is_dir():
            return aside
    return root


def read_contents(files: OpenFiles) -> Contents:
    """What the small files of a checkpoint say. Raises FormatError, naming the file, for what is damaged."""
    data = files.read_whole(manifest.FILE_NAME)
    return _foreign_contents(files) if data is None else _own_contents(files, data)


def _own_contents(files: OpenFiles, data: bytes) -> Contents:
    """What tailrace.json says; the other small files only repeat it, for Orbax, and are checked."""
    with _naming(files):
        own = manifest.decode(data)
        for name, expected in own.files.items():
            small = files.read_whole(name)
            if small is None:
                raise CorruptionError(f"{name} is missing, {manifest.FILE_NAME} names it.")
            check_small(name, small, expected)
        root = structure.decode(bytes(own.structure))
    names: dict[KeyPath, str] = {}
    texts: dict[KeyPath, str] = {}
    kinds: dict[KeyPath, str] = {}
    for path in structure.leaf_paths(root):
        name = disk_name(path)
        text = own.texts.get(name)
        if text is not None:
            texts[path] = text
            continue
        names[path] = name
        if name in own.kinds:
            kinds[path] = own.kinds[name]
    return Contents(DatabaseIndex(files), own, root, names, texts, kinds, own.custom_metadata, 3, in_database=True)


def _foreign_contents(files: OpenFiles) -> Contents:
    with _naming(files):
        parsed = orbax.parse(lambda name: _read_small(files, name))
    return Contents(
        index=DatabaseIndex(files) if parsed.use_ocdbt else FileIndex(files),
        manifest=None,
        root=parsed.root,
        names=dict(parsed.arrays),
        texts=parsed.texts,
        kinds=parsed.kinds,
        custom_metadata=parsed.custom_metadata,
        zarr_format=3 if parsed.use_zarr3 else 2,
        in_database=parsed.use_ocdbt,
    )


@contextmanager
def _naming(files: OpenFiles) -> Iterator[None]:
    """Put the checkpoint's path before what is wrong with one of its files."""
    try:
        yield
    except FormatError as error:
        raise type(error)(f"{files.root}: {error}") from error


def check_small(name: str, data: bytes, expected: manifest.SmallFile) -> None:
    """Raise CorruptionError unless a small file is as tailrace.json says."""
    if len(data) != expected.length:
        raise CorruptionError(f"{name} has {len(data)} bytes, {manifest.FILE_NAME} says {expected.length}.")
    found = crc32c(data)
    if found != expected.crc32c:
        raise CorruptionError(
            f"{name} has crc32c {found:08x}, {manifest.FILE_NAME} says {expected.crc32c:08x}: it is damaged."
        )


def _read_small(files: OpenFiles, name: str) -> bytes | None:
    data = files.read_whole(name)
    if data is None and name == orbax.CHECKPOINT_METADATA:
        return _of_step(files.root / "..")
    return data


def _of_step(step: Path) -> bytes | None:
    """Orbax keeps the metadata of an item in the step directory around it."""
    return OpenFiles(step).read_whole(orbax.CHECKPOINT_METADATA)


def _absent(root: Path) -> NotACheckpointError:
    if root.exists():
        return NotACheckpointError(f"{root} is a file; a checkpoint is a directory.{_pending(root)}")
    return NotACheckpointError(f"{root} does not exist.{_pending(root)}")


def _unfinished(root: Path) -> NotACheckpointError:
    return NotACheckpointError(
        f"{root} is an Orbax save that was not finalized: it has ocdbt.process_* directories but no {MANIFEST}. "
        f"Save it again."
    )


def _pending(root: Path) -> str:
    pending = location.pending_path(root)
    if not pending.is_dir():
        return ""
    return (
        f" An unfinished transaction is beside it ({pending.name}): "
        f"run the program again, with Writer(resume=True), to go on with it."
    )
