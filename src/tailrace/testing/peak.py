"""Peak memory of a stretch of code: what a memory budget is held to."""

from __future__ import annotations

import re
import resource
import sys
import threading
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_INTERVAL_SECONDS = 0.005


def resident_bytes() -> int:
    """Anonymous memory this process holds now: what it allocated, without the page cache that a mapped file shows as.

    Where the kernel does not tell (macOS), the highest resident size so far.
    """
    if _STATUS.exists():
        found = re.search(r"RssAnon:\s+(\d+) kB", _STATUS.read_text())
        if found:
            return int(found[1]) << 10
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest << 10


class PeakMemory:
    """How far memory rose above where it stood when the block was entered.

        with PeakMemory() as peak:
            work()
        assert peak.peak_bytes <= budget + margin

    A thread looks every 5 ms, so shorter spikes may be missed; nothing is slowed down.
    """

    def __init__(self) -> None:
        self.start_bytes = 0
        self._highest_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tailrace-peak", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The highest memory seen so far, above the start."""
        return max(0, self._highest_bytes - self.start_bytes)

    def __enter__(self) -> PeakMemory:
        self.start_bytes = self._highest_bytes = resident_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_SECONDS):
            self._look()

    def _look(self) -> None:
        self._highest_bytes = max(self._highest_bytes, resident_bytes())
