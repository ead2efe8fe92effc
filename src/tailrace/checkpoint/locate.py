"""Where a checkpoint is and what it holds: from a path to names, paths, containers and an index."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c

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

    Raises NotACheckpointError that says what was found.
    """
    root = location.resolve(path)
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


def read_contents(files: OpenFiles) -> Contents:
    """What the small files of a checkpoint say. Raises FormatError, naming the file, for what is damaged."""
    data = files.read_whole(manifest.FILE_NAME)
    try:
        own = manifest.decode(data) if data is not None else None
        parsed = orbax.parse(lambda name: _read_small(files, own, name))
        names: dict[KeyPath, str] = dict(parsed.arrays)
        root, texts, kinds, custom = parsed.root, parsed.texts, parsed.kinds, parsed.custom_metadata
        if own is not None:
            custom = own.custom_metadata
            if own.structure is not None:
                root = structure.decode(msgspec.json.encode(own.structure))
                names, texts = _with_paths_of(root, names, texts)
            by_name = {name: path for path, name in names.items()} if own.kinds else {}
            kinds = {by_name[name]: kind for name, kind in own.kinds.items() if name in by_name}
        if parsed.use_ocdbt:
            _read_small(files, own, MANIFEST)
    except FormatError as error:
        raise type(error)(f"{files.root}: {error}") from error
    if parsed.use_ocdbt:
        index: Index = DatabaseIndex(files)
    else:
        index = FileIndex(files)
    return Contents(
        index=index,
        manifest=own,
        root=root,
        names=names,
        texts=texts,
        kinds=kinds,
        custom_metadata=custom,
        zarr_format=3 if parsed.use_zarr3 else 2,
        in_database=parsed.use_ocdbt,
    )


def check_small(name: str, data: bytes, expected: manifest.SmallFile) -> None:
    """Raise CorruptionError unless a small file is as tailrace.json says."""
    if len(data) != expected.length:
        raise CorruptionError(f"{name} has {len(data)} bytes, {manifest.FILE_NAME} says {expected.length}.")
    found = crc32c(data)
    if found != expected.crc32c:
        raise CorruptionError(
            f"{name} has crc32c {found:08x}, {manifest.FILE_NAME} says {expected.crc32c:08x}: it is damaged."
        )


def _read_small(files: OpenFiles, own: Manifest | None, name: str) -> bytes | None:
    data = files.read_whole(name)
    if data is None and own is None and name == orbax.CHECKPOINT_METADATA:
        return _of_step(files.root / "..")
    expected = own.files.get(name) if own is not None else None
    if expected is not None:
        if data is None:
            raise CorruptionError(f"{name} is missing, {manifest.FILE_NAME} names it.")
        check_small(name, data, expected)
    return data


def _of_step(step: Path) -> bytes | None:
    """Orbax keeps the metadata of an item in the step directory around it."""
    return OpenFiles(step).read_whole(orbax.CHECKPOINT_METADATA)


def _with_paths_of(
    root: structure.Node, names: dict[KeyPath, str], texts: dict[KeyPath, str]
) -> tuple[dict[KeyPath, str], dict[KeyPath, str]]:
    """Names and texts under the paths of the recorded structure, which also has int keys."""
    arrays = set(names.values())
    strings = {disk_name(path): text for path, text in texts.items()}
    new_names: dict[KeyPath, str] = {}
    new_texts: dict[KeyPath, str] = {}
    for path in structure.leaf_paths(root):
        name = disk_name(path)
        if name in arrays:
            new_names[path] = name
        elif name in strings:
            new_texts[path] = strings[name]
        else:
            raise CorruptionError(f"{manifest.FILE_NAME} has the leaf {name!r}, {orbax.METADATA} does not.")
    if len(new_names) + len(new_texts) != len(arrays) + len(strings):
        lost = sorted((arrays | strings.keys()) - {disk_name(path) for path in [*new_names, *new_texts]})
        raise CorruptionError(f"{orbax.METADATA} has leaves that {manifest.FILE_NAME} does not: {_some(lost)}.")
    return new_names, new_texts


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


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
