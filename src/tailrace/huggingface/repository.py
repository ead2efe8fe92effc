"""A Hugging Face model on disk: one safetensors file, or a directory of shards with an index.

The index is the only authority on which file holds what: shard names are never guessed, and files that it does not
name (a stray consolidated.safetensors, an `original/` folder) are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tailrace.errors import InputError, SourceFormatError, StorageError
from tailrace.huggingface import strict_json
from tailrace.huggingface.safetensors import MAX_HEADER_BYTES, SafetensorsFile, TensorSource

INDEX_NAME = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_INDEX = msgspec.json.Decoder(_Index)


@dataclass(frozen=True, slots=True)
class Repository:
    """A model's tensors and the files that hold them, every header read and checked against the index."""

    path: Path
    files: Mapping[str, SafetensorsFile]  # by name relative to `path`

    def sources(self) -> list[TensorSource]:
        """Every tensor, file by file and in the order of its bytes, so that reading them in turn reads forward.

        Raises LeafError for a tensor that no checkpoint can store.
        """
        return [
            file.source(tensor.name)
            for _, file in sorted(self.files.items())
            for tensor in sorted(file.tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes))
        ]

    def fingerprint(self) -> dict[str, Any]:
        """What tells this model from another, or from itself after a change, without reading its weights."""
        return {
            name: {"bytes": file.size, "mtime_ns": file.mtime_ns, "header_crc32c": file.header_crc32c}
            for name, file in sorted(self.files.items())
        }

    def close(self) -> None:
        """Give all files back."""
        for file in self.files.values():
            file.close()


def open_repository(path: str | Path) -> Repository:
    """The model at `path`: a .safetensors file, an index, or a directory that holds either.

    Raises InputError when there is none, SourceFormatError naming file and tensor when files are broken or disagree.
    """
    path = Path(path)
    if path.name.endswith(_INDEX_SUFFIX) and path.is_file():
        return _open_sharded(path)
    if path.is_file():
        return Repository(path.parent, {path.name: SafetensorsFile(path)})
    if not path.is_dir():
        found = "is neither a file nor a directory" if path.exists() else "does not exist"
        raise InputError(
            f"{path} {found}: give a .safetensors file or the directory of a Hugging Face model. "
            f"A model on the Hub has to be downloaded first."
        )
    try:
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise StorageError.wrap(error, f"reading the directory {path}") from error
    return _open_directory(path, names)


def _open_directory(path: Path, names: list[str]) -> Repository:
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if INDEX_NAME in indexes:
        return _open_sharded(path / INDEX_NAME)
    if len(indexes) > 1:
        raise SourceFormatError(f"{path} holds several indexes: {', '.join(indexes)}. Give the path of one of them.")
    if indexes:
        return _open_sharded(path / indexes[0])
    weights = [name for name in names if name.endswith(".safetensors")]
    if len(weights) == 1:
        return Repository(path, {weights[0]: SafetensorsFile(path / weights[0])})
    if weights:
        raise SourceFormatError(
            f"{path} holds {len(weights)} safetensors files ({_some(weights)}) but no {INDEX_NAME} "
            f"that says which belong to the model. Add the index, or give the path of one file."
        )
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".incomplete"))]
    hint = (
        f" Found {_some(others)}, which tailrace does not read: convert or download the safetensors." if others else ""
    )
    raise InputError(f"{path} holds no .safetensors file and no {INDEX_NAME}.{hint}")


def _open_sharded(index_path: Path) -> Repository:
    weight_map = _read_index(index_path)
    expected: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        expected.setdefault(shard, set()).add(tensor)
    for shard in expected:
        _check_shard_name(shard, index_path)
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(expected):
        path = index_path.parent / shard
        if not path.exists():
            raise SourceFormatError(
                f"{index_path} names {shard}, which is not there; {_some(sorted(expected[shard]))} would be in it. "
                f"Finish the download."
            )
        files[shard] = SafetensorsFile(path)
        _check_same_tensors(shard, files[shard], expected[shard], weight_map, index_path)
    return Repository(index_path.parent, files)


def _read_index(path: Path) -> dict[str, str]:
    try:
        size = path.stat().st_size
        if size > MAX_HEADER_BYTES:
            raise SourceFormatError(f"{path}: index of {size} bytes, at most {MAX_HEADER_BYTES} are allowed.")
        data = path.read_bytes()
    except OSError as error:
        raise StorageError.wrap(error, f"reading {path}") from error
    if data.startswith(b"version https://git-lfs"):
        raise SourceFormatError(
            f"{path}: this is a Git LFS pointer. Run `git lfs pull` in its repository, or download it."
        )
    weight_map = strict_json.decode(data, _INDEX, str(path)).weight_map
    if not weight_map:
        raise SourceFormatError(f"{path}: weight_map is empty, so the model has no tensors.")
    return weight_map


def _check_shard_name(shard: str, index_path: Path) -> None:
    """An index may only name files in or below its own directory."""
    parts = PurePosixPath(shard).parts
    if not parts or shard.startswith("/") or ".." in parts or "\0" in shard:
        raise SourceFormatError(f"{index_path}: shard name {shard!r} leads out of the model's directory; refused.")


def _check_same_tensors(
    shard: str, file: SafetensorsFile, expected: set[str], weight_map: dict[str, str], index_path: Path
) -> None:
    absent = sorted(expected - file.tensors.keys())
    if absent:
        raise SourceFormatError(f"{file.path}: {index_path.name} says it holds {_some(absent)}, which it does not.")
    for name in sorted(file.tensors.keys() - expected):
        if name in weight_map:
            raise SourceFormatError(
                f"tensor {name!r} is in two files: {shard}, and {weight_map[name]} by {index_path}."
            )
        raise SourceFormatError(f"{file.path}: holds tensor {name!r}, which {index_path.name} does not name.")


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
