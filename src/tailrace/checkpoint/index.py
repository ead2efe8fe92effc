"""What a checkpoint holds, by key: the OCDBT index of a database, or the files of a plain zarr directory.

Both answer the same three questions: `get` (the inline value or the byte range of one key), `read` (its bytes) and
`entries` (all of them, in order).
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tailrace.errors import CorruptionError, FormatError, NotACheckpointError
from tailrace.format import ocdbt
from tailrace.format.ocdbt import DataFile, Entry, Indirect, InteriorNode, LeafNode
from tailrace.storage.reading import OpenFiles

CACHE_BYTES = 16 << 20  # some 200 nodes of 512 keys
MAX_NODE_BYTES = 1 << 30  # Orbax writes nodes of up to 100 MB
MAX_HEIGHT = 32  # a taller tree is a loop
_BYTES_PER_KEY = 200  # of a decoded node, beside inline values
MANIFEST = "manifest.ocdbt"


class Index(Protocol):
    """Where the value of each key is."""

    def get(self, key: bytes) -> bytes | Indirect | None:
        """The inline value or the byte range of a key; None where there is none."""
        ...

    def read(self, key: bytes) -> bytes | None:
        """The value's bytes, wherever they are."""
        ...

    def entries(self, prefix: bytes = b"") -> Iterator[Entry]:
        """Every key that starts with `prefix`, in order, with its inline value or byte range."""
        ...

    def nodes(self) -> Iterator[Indirect]:
        """The byte ranges of the index itself, each once."""
        ...


class _LeafReference(NamedTuple):
    node: Indirect
    prefix: bytes


class DatabaseIndex:
    """An OCDBT database: interior nodes are read when it is opened, leaf nodes on demand, the latest kept.

    Raises an error that names the file for a manifest or node that is damaged or not understood.
    """

    def __init__(self, files: OpenFiles, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._files = files
        self._first_keys: list[bytes] = []
        self._leaves: list[_LeafReference] = []
        self._interior: list[Indirect] = []
        self._cache: OrderedDict[int, tuple[LeafNode, int]] = OrderedDict()
        self._cached_bytes = 0
        self._cache_limit = cache_bytes
        self._lock = threading.Lock()
        root = _newest_root(files)
        if root is not None:
            self._walk(root.node, root.height, b"", b"")

    def get(self, key: bytes) -> bytes | Indirect | None:
        """The inline value or the byte range of a key; None where there is none."""
        number = bisect_right(self._first_keys, key) - 1
        if number < 0:
            return None
        node = self._node(number)
        i = bisect_left(node.keys, key)
        return node.value(i) if i < len(node.keys) and node.keys[i] == key else None

    def read(self, key: bytes) -> bytes | None:
        """The value's bytes, wherever they are."""
        return _read(self._files, self.get(key))

    def entries(self, prefix: bytes = b"") -> Iterator[Entry]:
        """Every key that starts with `prefix`, in order, with its inline value or byte range."""
        first = max(0, bisect_right(self._first_keys, prefix) - 1)
        for number in range(first, len(self._leaves)):
            if self._first_keys[number] > prefix and not self._first_keys[number].startswith(prefix):
                return
            for key, value in self._node(number).items():
                if key.startswith(prefix):
                    yield key, value

    def nodes(self) -> Iterator[Indirect]:
        """The byte ranges of the index itself, each once."""
        yield from self._interior
        for leaf in self._leaves:
            yield leaf.node

    def _walk(self, place: Indirect, height: int, prefix: bytes, first_key: bytes) -> None:
        if height == 0:
            if self._first_keys and first_key <= self._first_keys[-1]:
                raise CorruptionError(f"the index of {self._files.root} has nodes out of order at key {first_key!r}.")
            self._first_keys.append(first_key)
            self._leaves.append(_LeafReference(place, prefix))
            return
        node = self._decode(place, height, prefix)
        if not isinstance(node, InteriorNode):
            raise CorruptionError(f"{_where(self._files, place)}: a leaf node at height {height}.")
        self._interior.append(place)
        for child in node.children:
            self._walk(child.node, height - 1, child.prefix, child.first_key)

    def _node(self, number: int) -> LeafNode:
        cached = self._cache.get(number)
        if cached is not None:
            return cached[0]
        leaf = self._leaves[number]
        node = self._decode(leaf.node, 0, leaf.prefix)
        assert isinstance(node, LeafNode)
        nbytes = len(node.keys) * _BYTES_PER_KEY + len(node.inline)
        with self._lock:
            if number not in self._cache:
                self._cache[number] = node, nbytes
                self._cached_bytes += nbytes
            while self._cached_bytes > self._cache_limit and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1][1]
        return node

    def _decode(self, place: Indirect, height: int, prefix: bytes) -> LeafNode | InteriorNode:
        if place.length > MAX_NODE_BYTES:
            raise FormatError(
                f"{_where(self._files, place)}: a node of {place.length} bytes; at most {MAX_NODE_BYTES} are read."
            )
        data = self._files.read(place.file.path, place.offset, place.length)
        try:
            return ocdbt.decode_node(data, height=height, base=place.file.base, prefix=prefix)
        except FormatError as error:
            raise type(error)(f"{_where(self._files, place)}: index node: {error}") from error


class FileIndex:
    """A directory with one zarr array to a subdirectory and one file to a chunk, as Orbax does with use_ocdbt=False."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files

    def get(self, key: bytes) -> bytes | Indirect | None:
        """The byte range of a key, which is a whole file; None where there is none."""
        name = os.fsdecode(key)
        try:
            length = self._files.length(name)
        except CorruptionError:  # no such file: here the files are the index
            return None
        return Indirect(DataFile(b"", key), 0, length)

    def read(self, key: bytes) -> bytes | None:
        """The file's bytes."""
        return _read(self._files, self.get(key))

    def entries(self, prefix: bytes = b"") -> Iterator[Entry]:
        """Every file whose relative name starts with `prefix`, in order."""
        root = os.fspath(self._files.root)
        found = []
        for directory, _, names in os.walk(root):
            base = "" if directory == root else f"{os.path.relpath(directory, root)}/"
            found += [os.fsencode(base + name) for name in names]
        for key in sorted(found):
            if key.startswith(prefix) and (value := self.get(key)) is not None:
                yield key, value

    def nodes(self) -> Iterator[Indirect]:
        """None: the files are the index."""
        return iter(())


def manifest_files(files: OpenFiles) -> list[str]:
    """The files that say where the index begins: `manifest.ocdbt`, and the newest numbered one where it is numbered."""
    data = files.read_whole(MANIFEST)
    if data is None:
        raise NotACheckpointError(f"{files.root} has no {MANIFEST}.")
    if _decode_manifest(files, MANIFEST, data).config.kind != "numbered":
        return [MANIFEST]
    newest = ocdbt.newest_numbered_manifest(os.listdir(files.root))
    if newest is None:
        raise CorruptionError(f"{files.root}/{MANIFEST} says that numbered manifests are beside it; there are none.")
    return [MANIFEST, newest]


def _newest_root(files: OpenFiles) -> ocdbt.Root | None:
    name = manifest_files(files)[-1]
    version = _decode_manifest(files, name, files.read_whole(name) or b"").newest
    root = version.root if version is not None else None
    if root is not None and root.height > MAX_HEIGHT:
        raise FormatError(f"{files.root}/{name}: an index of height {root.height}; at most {MAX_HEIGHT} is read.")
    return root


def _decode_manifest(files: OpenFiles, name: str, data: bytes) -> ocdbt.Manifest:
    try:
        return ocdbt.decode_manifest(data)
    except FormatError as error:
        raise type(error)(f"{files.root}/{name}: {error}") from error


def _read(files: OpenFiles, value: bytes | Indirect | None) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return files.read(value.file.path, value.offset, value.length)


def _where(files: OpenFiles, place: Indirect) -> str:
    return f"{files.root}/{place.file.path} at {place.offset}"
