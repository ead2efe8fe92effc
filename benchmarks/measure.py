"""One measured window in a child process, and the parent's view of the child's memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# Other processes keep the caches they have during smoke tests.
DROP_ALL_CACHES_FROM_BYTES = 64 << 20


def timed(action: Callable[[], T], made: str | None = None) -> tuple[T, dict[str, float]]:
    """Run and measure. With `made`, the path a save made, until all of it is on disk."""
    trim()
    base = own_memory_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.monotonic()
    result = action()
    acted = time.monotonic()
    if made is not None:
        sync_tree(Path(made))
    end = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_SELF)
    left = own_memory_bytes()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result, {
        "started": start,
        "ended": end,
        "base_bytes": base,
        "end_bytes": left,
        "seconds": end - start,
        "own_seconds": acted - start,  # before the harness made it durable
        "cpu_seconds": cpu,
    }


def trim() -> None:
    """Give freed memory back, so that the next window starts from what is in use."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def sync_tree(root: Path) -> None:
    """fsync every file and directory under `root`, then the directory that names it. Not the rest of the machine."""
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            sync(f"{directory}/{name}")
        sync(directory)
    sync(str(root.parent))


def sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_cold(root: Path) -> None:
    """Drop these files from the page cache; as root, and for sizes that matter, all cached files and directories."""
    files, nbytes = tree_size(root)
    if hasattr(os, "posix_fadvise"):
        for path in root.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
    if files and nbytes >= DROP_ALL_CACHES_FROM_BYTES and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")


def warm_memory(nbytes: int) -> None:
    """Touch that much memory and give it back to the kernel, which hands it out again while it is still the guest's.

    Verifying between two windows takes seconds, in which a virtual machine returns what was freed to its host.
    """
    with mmap.mmap(-1, max(1, nbytes)) as memory:
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def tree_size(root: Path) -> tuple[int, int]:
    """Files and bytes under `root`."""
    sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def own_memory_bytes() -> int:
    return memory_bytes("self") or 0


def memory_bytes(pid: int | str) -> int | None:
    """Memory that only this process pays for: anonymous, and shared anonymous, which RssAnon does not count.

    Pages of mapped files are left out: the system takes them back when it wants. None where the process is gone or
    the system is not Linux.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines())
    if "RssAnon" not in fields:
        return None
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


@dataclass(frozen=True, slots=True)
class Watched:
    """How a child ended, and its memory over time."""

    returncode: int | None  # None: it ran out of time
    samples: list[tuple[float, int]]

    def peak_bytes(self, start: float, end: float) -> int:
        """The highest sample inside; 0 where the window was too short for one."""
        return max((nbytes for moment, nbytes in self.samples if start <= moment <= end), default=0)


def watch(process: subprocess.Popen[Any], *, every_seconds: float, timeout_seconds: float) -> Watched:
    """Sample the child's memory until it ends; kill it when its time is over or this process is interrupted."""
    deadline = time.monotonic() + timeout_seconds
    samples: list[tuple[float, int]] = []
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return Watched(None, samples)
            nbytes = memory_bytes(process.pid)
            if nbytes is not None:
                samples.append((time.monotonic(), nbytes))
            time.sleep(every_seconds)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return Watched(process.returncode, samples)
