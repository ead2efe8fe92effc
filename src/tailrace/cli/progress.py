"""Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing when asked to be quiet."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tailrace.cli.reporting import data_size, memory_size
from tailrace.testing.peak import PeakMemory

_PLAIN_SECONDS = 5.0  # between lines where there is no terminal; a log of hours stays readable


class ByteProgress:
    """Shows how far a number of bytes has come. Call it with (done, total) as often as you like, from any thread."""

    def __init__(self, doing: str, *, quiet: bool, peak: PeakMemory, budget_bytes: int) -> None:
        self._doing = doing
        self._memory: Callable[[], str] = lambda: f"peak {memory_size(peak.peak_bytes)} of {memory_size(budget_bytes)}"
        self._lock = threading.Lock()
        self._begin = self._last = time.monotonic()
        self._first_done: int | None = None  # what an earlier run had done says nothing about this run's rate
        self._quiet = quiet
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn(doing),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[memory]}"),
                console=Console(stderr=True),
                transient=True,
            )

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes are written."""
        if self._quiet:
            return
        with self._lock:
            if self._first_done is None:
                self._first_done = done
                if self._bar is not None:
                    self._bar.add_task(self._doing, total=total, completed=done, memory="")
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=done, memory=self._memory())
            elif time.monotonic() - self._last >= _PLAIN_SECONDS:
                self._print_line(done, total)

    def __enter__(self) -> ByteProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print_line(self, done: int, total: int) -> None:
        self._last = time.monotonic()
        rate = (done - (self._first_done or 0)) / (self._last - self._begin)
        left = f"{(total - done) / rate:.0f} s left" if rate else "no rate yet"
        print(
            f"{self._doing}: {done / max(1, total):.0%}, {data_size(done)} of {data_size(total)}, "
            f"{data_size(rate)}/s, {left}, {self._memory()}",
            file=sys.stderr,
            flush=True,
        )
