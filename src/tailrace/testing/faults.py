"""Faults on demand: die at the n-th durable system call, refuse calls, write short, record what was made durable.

`intercepted` puts a function around every call that changes a file system. `Mortal` is a warm process without threads
from which children are forked to die: some milliseconds each, so that every single step of a program can be its last.

    with Mortal(Path("scripts.py")) as mortal:             # scripts.py defines save(path)
        steps = mortal.run("save", path).calls
        for step in range(steps):
            outcome = mortal.run("save", path, kill_before=step)
            ...                                            # what is at the path now?
"""

from __future__ import annotations

import errno
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailrace.storage import posix

_NAMES = (
    *("open", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "mkdir", "rmdir", "link", "unlink", "rename"),
    "replace",
)
SYNCS = frozenset({"fsync", "fdatasync"})
WRITES = frozenset({"write", "pwrite"})
_write = os.write  # not intercepted


@dataclass(frozen=True, slots=True)
class Call:
    """A call about to be made: `real(*args)` makes it. Named as in os, or "file" (io.open) or "renameat2"."""

    name: str
    real: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def make(self) -> Any:
        """Make the call."""
        return self.real(*self.args, **self.options)

    @property
    def durable(self) -> bool:
        """Whether it changes anything that outlives the process: opening for reading does not."""
        if self.name == "open":
            return bool(self.args[1] & os.O_CREAT)
        if self.name == "file":
            mode = self.args[1] if len(self.args) > 1 else self.options.get("mode", "r")
            return any(letter in mode for letter in "wxa+")
        return True


Around = Callable[[Call], Any]


@contextmanager
def intercepted(around: Around) -> Iterator[None]:
    """For the length of the block `around(call)` stands for every file system call of this process."""
    names = [name for name in _NAMES if hasattr(os, name)]
    places: list[tuple[Any, str, str]] = [(os, name, name) for name in names]
    places += [(io, "open", "file"), (posix, "_renameat2", "renameat2")]
    reals = [getattr(module, attribute) for module, attribute, _ in places]

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: around(Call(name, real, args, options))

    for (module, attribute, name), real in zip(places, reals, strict=True):
        setattr(module, attribute, wrapped(name, real))
    try:
        yield
    finally:
        for (module, attribute, _), real in zip(places, reals, strict=True):
            setattr(module, attribute, real)


def unavailable(without: Sequence[str], around: Around = Call.make) -> Around:
    """A file system that lacks what `without` names: "renameat2", "o_direct", "link"."""

    def refuse(call: Call) -> Any:
        if call.name == "renameat2" and "renameat2" in without:
            return False
        if call.name == "link" and "link" in without:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        if call.name == "open" and "o_direct" in without and call.args[1] & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return around(call)

    return refuse


class Steps:
    """Counts durable calls, and kills this process before the one numbered `kill_before`.

    With `torn` a write that is the last call is made for half its bytes. Syncs are counted, not made: what a killed
    process has written stays in the kernel all the same, and only a power cut needs them.
    """

    def __init__(self, kill_before: int | None = None, *, torn: bool = False) -> None:
        self.calls = 0
        self._kill_before, self._torn = kill_before, torn
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> Any:
        """Count the call and make it, or die."""
        if not call.durable:
            return call.make()
        with self._lock:
            if self.calls == self._kill_before:
                self._die(call)
            self.calls += 1
        return None if call.name in SYNCS else call.make()

    def _die(self, call: Call) -> None:
        if self._torn and call.name in WRITES:
            data = memoryview(call.args[1])
            call.real(call.args[0], data[: len(data) // 2], *call.args[2:])
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended: whether it was killed, else after how many durable calls; its notes, and its error."""

    killed: bool
    calls: int
    notes: list[str]
    error: str | None


class Mortal:
    """A warm process that runs functions of a script, each in a forked child of its own, to its end or to its death."""

    def __init__(self, script: Path) -> None:
        command = [sys.executable, "-c", f"from tailrace.testing import faults; faults.serve({os.fspath(script)!r})"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self,
        function: str,
        *args: Any,
        kill_before: int | None = None,
        torn: bool = False,
        kill_after_seconds: float | None = None,
        without: Sequence[str] = (),
    ) -> Outcome:
        """Call a function of the script, with JSON arguments, and wait for the child's end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "function": function,
            "args": args,
            "kill_before": kill_before,
            "torn": torn,
            "kill_after_seconds": kill_after_seconds,
            "without": list(without),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the warm process ended with {self._process.wait()}")
        return Outcome(**json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


_notes = -1  # where a child's notes go


def note(text: str) -> None:
    """In a script: tell the parent something that stays told when the child is killed right after."""
    if _notes >= 0:
        _write(_notes, json.dumps({"note": text}).encode() + b"\n")


def serve(script: str) -> None:
    """The warm process: answer requests on standard input, one JSON object a line, until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a script prints must not be taken for an answer
    functions = runpy.run_path(script)
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _live(functions[request["function"]], request, writing)
        os.close(writing)
        if request["kill_after_seconds"] is not None:
            time.sleep(request["kill_after_seconds"])
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(reading, "rb") as pipe:
            told = [json.loads(entry) for entry in pipe]
        _, status = os.waitpid(pid, 0)
        end: dict[str, Any] = next((entry for entry in told if "calls" in entry), {})
        answer = {
            "killed": os.WIFSIGNALED(status),
            "calls": end.get("calls", 0),
            "notes": [entry["note"] for entry in told if "note" in entry],
            "error": end.get("error"),
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _live(function: Callable[..., None], request: dict[str, Any], notes: int) -> None:
    """The child: call the function, tell how it went, and end without any of Python's farewells."""
    global _notes
    _notes = notes
    steps = Steps(request["kill_before"], torn=request["torn"])
    error = None
    try:
        with intercepted(unavailable(request["without"], steps)):
            function(*request["args"])
    except BaseException:
        error = traceback.format_exc()
    _write(notes, json.dumps({"calls": steps.calls, "error": error}).encode() + b"\n")
    os._exit(0)
