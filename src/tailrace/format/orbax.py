"""Orbax's JSON files: `_METADATA`, `_CHECKPOINT_METADATA`, `_sharding`, `array_metadatas/process_0`, `_strings.json`.

What is recorded, and why (seen with orbax-checkpoint 0.12.8, by StandardCheckpointer, PyTreeCheckpointer,
CheckpointManager and v1, with and without targets): array leaves have the value type `np.ndarray`, since a leaf of
type `jax.Array` whose saved devices are absent does not load bare. PRNG keys are `jax.Array` all the same, on a
device that is everywhere, since only so, with `array_metadatas`, do they come back typed. `_sharding` names every
leaf, since v1 looks there for targets without a sharding. Python numbers are `scalar` and come back as such.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tailrace.errors import FormatError, UnsupportedFormatError
from tailrace.format import structure
from tailrace.format.keys import KeyPath, disk_name
from tailrace.format.structure import Node

METADATA = "_METADATA"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
SHARDING = "_sharding"
ARRAY_METADATAS = "array_metadatas/process_0"
STRINGS = "_strings.json"

PRNG = "prng:"  # a kind is "array", "int", "float", "bool", "complex", "scalar" or "prng:<implementation>"
SCALAR_KINDS = frozenset(
    {"int", "float", "bool", "scalar"}
)  # complex: Orbax has no such scalar, an array of rank 0 it has

_T = TypeVar("_T")
_SEQUENCE, _DICT = 1, 2
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_FIRST_DEVICE = (  # the device with id 0, whatever its platform; "cpu:0" would be absent where JAX runs on a GPU
    '{"sharding_type":"NamedSharding","shape":[1],"axis_names":["x"],"partition_spec":[],'
    '"device_mesh":{"mesh":[{"id":0}]}}'
)


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """What Orbax's files say of one array; `kind` is what a load gives back, on disk it is always an array."""

    path: KeyPath
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    kind: str = "array"


@dataclass(frozen=True, slots=True)
class Parsed:
    """What Orbax's files say of a checkpoint."""

    root: Node
    arrays: list[tuple[KeyPath, str]] = field(repr=False)  # path, name on disk
    texts: dict[KeyPath, str] = field(repr=False)
    kinds: dict[KeyPath, str] = field(repr=False)  # of arrays whose kind is not "array"
    custom_metadata: dict[str, Any]
    use_ocdbt: bool
    use_zarr3: bool


def render(
    root: Node,
    arrays: Iterable[ArrayRecord],
    texts: Mapping[KeyPath, str],
    *,
    custom_metadata: Mapping[str, Any],
    now_ns: int,
    item: bool = False,
) -> dict[str, bytes]:
    """Orbax's small files for a tree, by relative path.

    `item=True` leaves out `_CHECKPOINT_METADATA`, which then belongs to the step directory around it.
    """
    by_name = {disk_name(record.path): record for record in arrays}
    strings = {disk_name(path): text for path, text in texts.items()}
    metadata = {
        "tree_metadata": msgspec.Raw(_tree_metadata(root, by_name, strings).encode()),
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": dict(custom_metadata) or None,
    }
    encode = msgspec.json.encode
    files = {
        METADATA: encode(metadata),
        SHARDING: encode(dict.fromkeys([base64.b64encode(name.encode()).decode() for name in by_name], _FIRST_DEVICE)),
        ARRAY_METADATAS: encode({"array_metadatas": [_array_metadata(name, by_name[name]) for name in by_name]}),
    }
    if not item:
        files[CHECKPOINT_METADATA] = encode(
            {
                "item_handlers": _HANDLER,
                "metrics": {},
                "performance_metrics": {},
                "init_timestamp_nsecs": now_ns,
                "commit_timestamp_nsecs": now_ns,
                "custom_metadata": dict(custom_metadata),
            }
        )
    if strings:
        files[STRINGS] = encode(_nested_strings(strings))
    return files


def _tree_metadata(root: Node, arrays: Mapping[str, ArrayRecord], strings: Mapping[str, str]) -> str:
    """JSON of every place that holds no further place, under the text of its path as Orbax writes a tuple of str.

    Put together as text, since most of each entry is its container's: four times as fast as encoding it.
    """
    entries: list[str] = []
    # Of each place: how deep it is, its name, the repr of its keys, and the JSON of their metadata.
    todo: list[tuple[Node, int, str, str, str]] = [(root, 0, "", "", "")]
    while todo:
        at, depth, name, parts, keys = todo.pop()
        key_type = _SEQUENCE if isinstance(at, structure.List | structure.Tuple) else _DICT
        below = [
            (
                child,
                depth + 1,
                f"{name}.{key}" if keys else str(key),
                f"{parts}, {str(key)!r}" if keys else repr(str(key)),
                f'{keys}{"," if keys else ""}{{"key":{_text(str(key))},"key_type":{key_type}}}',
            )
            for key, child in structure.entries(at)
        ]
        if below:
            todo.extend(reversed(below))
        elif keys:
            path = _text(f"({parts})" if depth > 1 else f"({parts},)")
            entries.append(f'{path}:{{"key_metadata":[{keys}],"value_metadata":{_value(at, name, arrays, strings)}}}')
    return "{" + ",".join(entries) + "}"


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()


def _value(node: Node, name: str, arrays: Mapping[str, ArrayRecord], strings: Mapping[str, str]) -> str:
    if not isinstance(node, structure.Leaf):
        empty = {structure.Null: "None", structure.List: "List", structure.Tuple: "Tuple"}.get(type(node), "Dict")
        return f'{{"value_type":"{empty}","skip_deserialize":true}}'
    if name in strings:
        return '{"value_type":"string","skip_deserialize":false}'
    kind = arrays[name].kind
    value_type = "jax.Array" if kind.startswith(PRNG) else "scalar" if kind in SCALAR_KINDS else "np.ndarray"
    return f'{{"value_type":"{value_type}","skip_deserialize":false}}'


def _array_metadata(name: str, record: ArrayRecord) -> dict[str, Any]:
    extension = {"random_key_impl": record.kind[len(PRNG) :]} if record.kind.startswith(PRNG) else None
    return {
        "array_metadata": {
            "param_name": name,
            "write_shape": record.shape,
            "chunk_shape": record.chunk_shape,
            "ext_metadata": extension,
        }
    }


def _nested_strings(strings: Mapping[str, str]) -> dict[str, Any]:
    """Orbax finds a string by the JSON pointer "/" + name, so a name that holds "/" is a way through objects."""
    nested: dict[str, Any] = {}
    for name, text in strings.items():
        at = nested
        *way, last = name.split("/")
        for part in way:
            below = at.setdefault(part, {})
            if not isinstance(below, dict):  # "a" and "a/b" both: Orbax can name only one of them, we both
                at, last = nested, name
                break
            at = below
        if isinstance(at.get(last), dict):
            raise FormatError(f"strings {name!r} and {name}/... have no common place in {STRINGS}: rename one of them.")
        at[last] = text
    return nested


# The way back.


class _Key(msgspec.Struct):
    key: str
    key_type: int


class _Value(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _Entry(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Value


class _Metadata(msgspec.Struct):
    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    custom_metadata: Any = None


class _Array(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _ArrayEntry(msgspec.Struct):
    array_metadata: _Array


class _Arrays(msgspec.Struct):
    array_metadatas: list[_ArrayEntry]


class _Checkpoint(msgspec.Struct):
    custom_metadata: dict[str, Any] | None = None


def parse(read: Callable[[str], bytes | None]) -> Parsed:
    """What the files of a checkpoint say; `read` gives a small file's bytes, or None where there is no such file.

    Raises FormatError, naming the file, for JSON that is damaged or not Orbax's.
    """
    metadata = _load(read, METADATA, _Metadata)
    if metadata is None:
        raise UnsupportedFormatError(f"{METADATA} is missing: an Orbax checkpoint without it has no recorded tree.")
    use_ocdbt = metadata.use_ocdbt if metadata.use_ocdbt is not None else read("manifest.ocdbt") is not None
    implementations = _implementations(read)
    strings: Any = None
    arrays: list[tuple[KeyPath, str]] = []
    texts: dict[KeyPath, str] = {}
    kinds: dict[KeyPath, str] = {}
    for entry in metadata.tree_metadata.values():
        path = tuple(_part(key) for key in entry.key_metadata)
        name = disk_name(path)
        value_type = entry.value_metadata.value_type
        if value_type in _EMPTY:
            continue
        if value_type == "string":
            strings = _load(read, STRINGS, dict[str, Any]) if strings is None else strings
            texts[path] = _find_string(strings or {}, name)
            continue
        if not use_ocdbt and (name.startswith("/") or ".." in name.split("/")):
            raise FormatError(f"{METADATA}: leaf {name!r} would be read from outside the checkpoint.")
        arrays.append((path, name))
        if name in implementations:
            kinds[path] = PRNG + implementations[name]
        elif value_type == "scalar":
            kinds[path] = "scalar"
    checkpoint = _load(read, CHECKPOINT_METADATA, _Checkpoint)
    custom = (checkpoint.custom_metadata if checkpoint else None) or metadata.custom_metadata
    return Parsed(
        root=_root(metadata.tree_metadata.values()),
        arrays=arrays,
        texts=texts,
        kinds=kinds,
        custom_metadata=custom if isinstance(custom, dict) else {},
        use_ocdbt=use_ocdbt,
        use_zarr3=metadata.use_zarr3,
    )


_EMPTY: dict[str, Node] = {
    "None": structure.NULL,
    "Dict": structure.EMPTY,
    "List": structure.List(()),
    "Tuple": structure.Tuple(()),
    "NamedTuple": structure.NULL,  # Orbax gives None for it, too
}


def _load(read: Callable[[str], bytes | None], file: str, kind: type[_T]) -> _T | None:
    data = read(file)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{file} is damaged or not Orbax's: {error}") from error


def _implementations(read: Callable[[str], bytes | None]) -> dict[str, str]:
    found = _load(read, ARRAY_METADATAS, _Arrays)
    return {
        entry.array_metadata.param_name: str(extension["random_key_impl"])
        for entry in (found.array_metadatas if found else ())
        if (extension := entry.array_metadata.ext_metadata) and extension.get("random_key_impl")
    }


def _part(key: _Key) -> str | int:
    if key.key_type != _SEQUENCE:
        return key.key
    if not (key.key.isascii() and key.key.isdigit()):
        raise FormatError(f"{METADATA} has the list position {key.key!r}, which is not a number.")
    return int(key.key)


def _find_string(strings: Mapping[str, Any], name: str) -> str:
    if isinstance(strings.get(name), str):
        return str(strings[name])
    at: Any = strings
    for part in name.split("/"):
        at = at.get(part) if isinstance(at, dict) else None
    if not isinstance(at, str):
        raise FormatError(f"{METADATA} names the string {name!r}, which {STRINGS} does not hold.")
    return at


def _root(found: Iterable[_Entry]) -> Node:
    """The nested containers of the entries; a sequence with gaps is a dict with int keys, as it cannot be a list."""
    root: dict[str | int, Any] = {}
    for entry in found:
        if not entry.key_metadata:
            raise UnsupportedFormatError(f"{METADATA} records one bare value without a key; tailrace reads trees.")
        at = root
        for key in entry.key_metadata[:-1]:
            at = at.setdefault(_part(key), {})
            if not isinstance(at, dict):
                raise FormatError(f"{METADATA}: {key.key!r} is a leaf and also holds others.")
        last = _part(entry.key_metadata[-1])
        if last in at:
            raise FormatError(f"{METADATA}: {last!r} is recorded twice, or is a leaf and also holds others.")
        at[last] = _EMPTY.get(entry.value_metadata.value_type, structure.LEAF)
    return _node(root)


def _node(at: Any) -> Node:
    if not isinstance(at, dict):
        return at  # type: ignore[no-any-return]  # a Node
    if at and all(type(key) is int for key in at) and sorted(at) == list(range(len(at))):
        return structure.List(tuple(_node(at[i]) for i in range(len(at))))
    return structure.Dict(tuple(at), tuple(_node(child) for child in at.values()))
