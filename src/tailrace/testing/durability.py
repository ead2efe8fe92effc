"""A model of a disk that loses power: what of each file, and which names, would surely be there afterwards.

Only what POSIX promises counts: bytes after fsync or fdatasync of their file, a name after fsync of its directory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.testing.faults import Call

Watch = Callable[["Disk", Call], None]


class Disk:
    """Follows every call that `faults.intercepted` hands to it, and makes it. `watch(disk, call)` sees each before.

    Files and directories are counted durable when the disk first sees them, if they were there before.
    """

    def __init__(self, watch: Watch | None = None, *, lose: Callable[[str], bool] | None = None) -> None:
        self._watch = watch
        self._lose = lose  # whether a file's syncs are not made
        self._open: dict[int, str] = {}
        self._synced: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}  # for each byte of files written
        self._new_names: dict[str, set[str]] = {}  # directory -> names not durable in it
        self._lock = threading.RLock()

    def __call__(self, call: Call) -> Any:
        """Make the call and note what it does."""
        with self._lock:
            if call.durable and self._watch is not None:
                self._watch(self, call)
            handler = getattr(self, "_opened" if call.name == "open" else f"_{call.name}", None)
            return handler(call) if handler is not None else call.make()

    def path_of(self, call: Call) -> str:
        """The file that a call on a descriptor is about."""
        return self._open.get(call.args[0], "")

    def unsure(self, top: str | Path, *, besides: str = "\0") -> list[str]:
        """What below a directory might be lost, `besides` what has this in its path."""
        inside = f"{top}{os.sep}"
        lost = [
            f"bytes of {path}" for path, synced in self._synced.items() if path.startswith(inside) and not synced.all()
        ]
        for directory, names in self._new_names.items():
            if directory == str(top) or directory.startswith(inside):
                lost += [f"name {directory}/{name}" for name in names]
        return sorted(entry for entry in lost if besides not in entry)

    def sure(self, path: str | Path, offset: int, length: int) -> bool:
        """Whether a range of a file, its name, and those of all directories above would be there."""
        synced = self._synced.get(str(path))
        ranges = synced is None or (len(synced) >= offset + length and bool(synced[offset : offset + length].all()))
        return ranges and self.name_is_sure(path)

    def name_is_sure(self, path: str | Path) -> bool:
        """Whether a name, and those of all directories above, would be there."""
        return all(
            Path(at).name not in self._new_names.get(str(Path(at).parent), ())
            for at in (Path(path), *Path(path).parents)
        )

    # What calls do

    def _file(self, call: Call) -> Any:
        path = os.path.abspath(call.args[0])  # noqa: PTH100
        new = not os.path.exists(path)  # noqa: PTH110
        file = call.make()
        if call.durable:
            self._open[file.fileno()] = path
            self._synced[path] = np.zeros(1, bool)  # its writes are not seen: dirty until it is synced
            self._named(path) if new else None
        return file

    def _opened(self, call: Call) -> int:
        path = os.path.abspath(call.args[0])  # noqa: PTH100
        new = not os.path.exists(path)  # noqa: PTH110
        descriptor: int = call.make()
        self._open[descriptor] = path
        if new or call.args[1] & os.O_TRUNC:
            self._synced[path] = np.zeros(0, bool)
        self._named(path) if new else None
        return descriptor

    def _pwrite(self, call: Call) -> int:
        done: int = call.make()
        self._wrote(self.path_of(call), call.args[2], done)
        return done

    def _write(self, call: Call) -> int:
        done: int = call.make()
        path = self.path_of(call)
        if path:
            self._wrote(path, len(self._synced.get(path, ())), done)
        return done

    def _wrote(self, path: str, offset: int, length: int) -> None:
        known = self._synced.get(path, np.zeros(0, bool))
        synced = np.zeros(max(len(known), offset + length), bool)
        synced[: len(known)] = known
        synced[offset : offset + length] = False
        self._synced[path] = synced

    def _fsync(self, call: Call) -> None:
        path = self.path_of(call)
        if self._lose is not None and self._lose(path):
            return
        call.make()
        if os.path.isdir(path):  # noqa: PTH112
            self._new_names.pop(path, None)
        elif path in self._synced:
            self._synced[path] = np.ones(os.path.getsize(path), bool)

    _fdatasync = _fsync

    def _mkdir(self, call: Call) -> None:
        new = not os.path.exists(call.args[0])  # noqa: PTH110
        call.make()
        self._named(os.fspath(call.args[0])) if new else None

    def _link(self, call: Call) -> None:
        call.make()
        self._named(os.fspath(call.args[1]))

    def _rename(self, call: Call) -> None:
        call.make()
        self._moved(os.fspath(call.args[0]), os.fspath(call.args[1]))

    _replace = _rename

    def _renameat2(self, call: Call) -> bool:
        done: bool = call.make()
        if done:
            source, target = os.fspath(call.args[0]), os.fspath(call.args[1])
            if os.path.lexists(source):  # swapped
                self._moved(source, f"{source}\0")
                self._moved(target, source)
                self._moved(f"{source}\0", target)
            else:
                self._moved(source, target)
        return done

    def _unlink(self, call: Call) -> None:
        call.make()
        self._gone(os.fspath(call.args[0]))

    def _rmdir(self, call: Call) -> None:
        call.make()
        self._gone(os.fspath(call.args[0]))

    # Names

    def _named(self, path: str) -> None:
        directory, name = os.path.split(path)
        self._new_names.setdefault(directory, set()).add(name)

    def _gone(self, path: str) -> None:
        self._named(path)  # that it is gone is not durable, either
        for known in list(self._below(self._synced, path)):
            del self._synced[known]
        for known in list(self._below(self._new_names, path)):
            del self._new_names[known]

    def _moved(self, source: str, target: str) -> None:
        tables: list[dict[str, Any]] = [self._synced, self._new_names]
        for table in tables:
            for known in list(self._below(table, source)):
                table[target + known[len(source) :]] = table.pop(known)
        self._open = {
            descriptor: target + path[len(source) :] if path == source or path.startswith(f"{source}/") else path
            for descriptor, path in self._open.items()
        }
        self._named(source)
        self._named(target)

    @staticmethod
    def _below(table: dict[str, Any], path: str) -> Iterator[str]:
        return (known for known in table if known == path or known.startswith(f"{path}/"))
