"""The memory budget: host bytes that may be in flight at once."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.errors import BudgetError

DEFAULT_BUDGET = "256MiB"
MIN_BUDGET_BYTES = 8 << 20  # two write buffers and one chunk; below that every piece would be a system call
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def parse_bytes(value: int | str) -> int:
    """Bytes named by an int or by a string such as "512MiB", "2 GB" or "1.5GiB".

    Raises BudgetError for anything else, and for less than 8 MiB.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise BudgetError(f"memory_budget={value!r}: write an int of bytes or a size such as '512MiB' or '2GB'.")
        nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise BudgetError(
            f"memory_budget={value!r}: write an int of bytes or a size such as '512MiB', not a {type(value).__name__}."
        )
    if nbytes < MIN_BUDGET_BYTES:
        raise BudgetError(f"memory_budget={value!r} is below the least that works, 8MiB.")
    return nbytes


class MemoryBudget:
    """Host bytes that may be in flight at once, granted first come first served.

    A piece asks once for all it will need, so nobody waits while holding. A piece above
    the limit is a mistake in tailrace: callers cut with `regions.split` first.
    """

    def __init__(self, limit: int | str = DEFAULT_BUDGET) -> None:
        self.limit_bytes = parse_bytes(limit)
        self.peak_bytes = 0
        self._free_bytes = self.limit_bytes
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def reserve(self, nbytes: int) -> None:
        """Wait until `nbytes` are free and take them."""
        assert nbytes <= self.limit_bytes, f"piece of {nbytes} bytes, budget of {self.limit_bytes}"
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is me and self._free_bytes >= nbytes)
                self._take(nbytes)
            finally:  # an interrupted waiter must not block the queue
                self._waiting.remove(me)
                self._changed.notify_all()

    def try_reserve(self, nbytes: int) -> bool:
        """Take `nbytes` if they are free now and nobody waits; never blocks."""
        with self._changed:
            if self._waiting or self._free_bytes < nbytes:
                return False
            self._take(nbytes)
            return True

    def release(self, nbytes: int) -> None:
        """Give back what `reserve` or `try_reserve` took."""
        with self._changed:
            self._free_bytes += nbytes
            assert self._free_bytes <= self.limit_bytes, "released more than was reserved"
            self._changed.notify_all()

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Reserve for the length of a with block."""
        self.reserve(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        return self.limit_bytes - self._free_bytes

    def _take(self, nbytes: int) -> None:
        self._free_bytes -= nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
