"""Reading a checkpoint: ours, and those that Orbax wrote."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tailrace.checkpoint.index import Index
from tailrace.checkpoint.leaf import Leaf
from tailrace.checkpoint.locate import Contents, locate, read_contents
from tailrace.errors import KeyPathError, MissingKeyError
from tailrace.flow.budget import DEFAULT_BUDGET, MemoryBudget
from tailrace.flow.fetch import Request, fetch
from tailrace.flow.regions import Region, chunk_region, chunks_touching
from tailrace.flow.sources import Array
from tailrace.format import structure
from tailrace.format.keys import KeyPath, display, parse_key
from tailrace.format.manifest import Manifest
from tailrace.storage.foreign import ForeignArray
from tailrace.storage.reading import OpenFiles

if TYPE_CHECKING:
    from tailrace.checkpoint.verify import VerifyReport

_SHOWN = 8  # keys in a message
_GUESSED = 20_000  # keys that a misspelt one is compared with


def open(path: str | Path, *, memory_budget: int | str = DEFAULT_BUDGET) -> Checkpoint:
    """The checkpoint at `path`, read lazily: nothing but its index and metadata is read now.

    Ours and Orbax's alike. Raises NotACheckpointError, saying what is there instead, and FormatError, naming the
    file, where metadata is damaged.
    """
    budget = MemoryBudget(memory_budget)
    root = locate(path)
    files = OpenFiles(root)
    try:
        return Checkpoint(files, read_contents(files), budget)
    except BaseException:
        files.close()
        raise


class Checkpoint:
    """An open checkpoint: a mapping of keys to leaves, which are read when they are indexed.

    Usable from several threads at once. Close it, or use it in a with statement, to give its file descriptors back.
    """

    def __init__(self, files: OpenFiles, contents: Contents, budget: MemoryBudget) -> None:
        self.path: Path = files.root
        self.budget = budget
        self.files = files
        self.index: Index = contents.index
        self.manifest: Manifest | None = contents.manifest
        self.metadata: dict[str, Any] = contents.custom_metadata
        self.source: dict[str, Any] | None = contents.manifest.source if contents.manifest else None
        self.root: structure.Node = contents.root
        self.texts: dict[KeyPath, str] = contents.texts
        self.kinds: dict[KeyPath, str] = contents.kinds
        self.zarr_format = contents.zarr_format
        self.in_database = contents.in_database
        self._names = contents.names
        self._displayed: dict[str, KeyPath] | None = None

    def paths(self) -> list[KeyPath]:
        """The paths of all leaves: arrays in the order of the tree, then texts."""
        return [*self._names, *self.texts] if self.texts else list(self._names)

    def keys(self) -> list[str]:
        """The paths of all leaves as strings joined by "/"."""
        return [display(path) for path in self.paths()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._names) + len(self.texts)

    def __contains__(self, key: object) -> bool:
        try:
            return self._find(key) is not None  # type: ignore[arg-type]
        except KeyPathError:
            return False

    def __getitem__(self, key: str | int | Iterable[str | int]) -> Leaf | str:
        """The leaf at a key such as "a/b" or ("a", 0); a text leaf is a str.

        Raises MissingKeyError that names the keys below a prefix, or the nearest keys to a misspelt one.
        """
        path = self._find(key)
        if path is None:
            raise self._missing(key)
        text = self.texts.get(path)
        return text if text is not None else self.leaf(path)

    def leaf(self, path: KeyPath) -> Leaf:
        """The array leaf at a path that `paths` lists."""
        return Leaf(self, path, self._names[path], self.kinds.get(path, "array"))

    def tree(self) -> Any:
        """The containers as they were saved, holding Leaf objects and texts."""
        return structure.rebuild(self.root, lambda path: self.texts[path] if path in self.texts else self.leaf(path))

    def read_into(
        self, requests: Sequence[tuple[Leaf, Region, Array]], *, progress: Callable[[int], None] | None = None
    ) -> None:
        """Fill many destinations at once, each of its region's shape and its leaf's dtype, with any strides.

        Chunks that are neighbours on disk are read together, whatever leaves they belong to; so one call for a
        thousand leaves is much faster than a thousand calls. `progress` is told bytes as they arrive.
        """
        self.read(requests, self.budget, progress=progress)

    def read(
        self,
        requests: Sequence[tuple[Leaf, Region, Array]],
        budget: MemoryBudget,
        *,
        progress: Callable[[int], None] | None = None,
        sparing: bool = False,
    ) -> None:
        """Like `read_into`, with memory from another budget; `sparing` as indexing a leaf reads, see Leaf."""
        native: list[Request] = []
        for leaf, region, out in requests:
            meta = leaf.metadata
            if isinstance(meta, ForeignArray):
                self._read_foreign(meta, region, out, budget, progress)
            else:
                native.append(Request(leaf.key, leaf.name, meta, region, out, self.manifest is not None, sparing))
        fetch(native, self.index.get, self.files, budget, progress=progress)

    def verify(self, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read every byte of the checkpoint and check it.

        Raises CorruptionError naming leaf, region and file of what is damaged, missing or unknown.
        """
        from tailrace.checkpoint.verify import verify

        return verify(self, progress)

    def close(self) -> None:
        """Give the file descriptors back. Reading afterwards is a ValueError."""
        self.files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.path)!r}: {len(self)} leaves>"

    def _read_foreign(
        self,
        array: ForeignArray,
        region: Region,
        out: Array,
        budget: MemoryBudget,
        progress: Callable[[int], None] | None,
    ) -> None:
        with budget.holding(array.scratch_bytes(budget.limit_bytes)):
            for index in chunks_touching(region, array.chunk_shape):
                part = chunk_region(index, array.shape, array.chunk_shape).intersection(region)
                assert part is not None
                array.read_chunk_part(part.slices, out[part.relative_to(region.start).slices] if index else out)
        if progress is not None:
            progress(out.nbytes)

    def _find(self, key: str | int | Iterable[str | int]) -> KeyPath | None:
        path = parse_key(key)
        if path in self._names or path in self.texts:
            return path
        if any(isinstance(part, str) and part.isascii() and part.isdigit() for part in path):
            return self._by_display().get(display(path))
        return None

    def _by_display(self) -> dict[str, KeyPath]:
        """For strings that name list positions: "layers/0/w" for ("layers", 0, "w")."""
        if self._displayed is None:
            self._displayed = {display(path): path for path in self.paths()}
        return self._displayed

    def _missing(self, key: str | int | Iterable[str | int]) -> MissingKeyError:
        wanted = display(parse_key(key))
        keys = self.keys()
        below = [found for found in keys if found.startswith(wanted + "/")]
        if below:
            more = f" and {len(below) - _SHOWN} more" if len(below) > _SHOWN else ""
            return MissingKeyError(
                f"{wanted!r} is not a leaf but holds {len(below)}: {', '.join(map(repr, below[:_SHOWN]))}{more}. "
                f"Name one of them."
            )
        near = difflib.get_close_matches(wanted, keys[:_GUESSED], n=3, cutoff=0.6) or keys[:_SHOWN]
        named = f"The nearest keys: {', '.join(map(repr, near))}." if near else "It has no leaves."
        return MissingKeyError(f"no leaf {wanted!r} in {self.path}, which has {len(keys)} leaves. {named}")
