"""Jobs on a few threads: in order, one error out, nothing left running."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def default_threads() -> int:
    """Threads that overlap reading, checking and copying: two suffice for a disk, four at most for what is faster."""
    return max(1, min(4, os.cpu_count() or 1))


def run_jobs(jobs: Iterable[T], work: Callable[[T], None], *, threads: int | None = None) -> None:
    """Do `work` on every job and return when all are done; the calling thread is one of the `threads`.

    `jobs` is taken from lazily, one job at a time, so it may plan while others work. After an error no further job
    begins; of the errors of jobs already begun the one of the earliest job is raised. An interrupt (Ctrl-C) stops
    the same way: when it is raised, no thread of this call runs any more.
    """
    crew = _Crew(jobs, work)
    helpers: list[threading.Thread] = []
    try:
        # A second job first: most reads are one job, and a thread costs as much as a small read.
        if crew.fetch_ahead() and crew.fetch_ahead():
            for number in range(1, threads if threads is not None else default_threads()):
                helper = threading.Thread(target=crew.run, name=f"tailrace-{number}", daemon=True)
                helper.start()
                helpers.append(helper)
        crew.run()
        for helper in helpers:
            helper.join()
    finally:  # no error, or an interrupt while waiting
        crew.stopped = True
        for helper in helpers:
            helper.join()
    if crew.errors:
        raise min(crew.errors, key=lambda found: (isinstance(found[1], Exception), found[0]))[1]


class _Crew(Generic[T]):
    def __init__(self, jobs: Iterable[T], work: Callable[[T], None]) -> None:
        self._jobs = enumerate(jobs)
        self._ahead: list[tuple[int, T]] = []
        self._work = work
        self._lock = threading.Lock()
        self.errors: list[tuple[int, BaseException]] = []
        self.stopped = False

    def fetch_ahead(self) -> bool:
        for job in self._jobs:
            self._ahead.append(job)
            return True
        return False

    def run(self) -> None:
        number = 0
        try:
            while not self.stopped:
                with self._lock:
                    job = self._ahead.pop(0) if self._ahead else next(self._jobs, None)
                if job is None:
                    return
                number = job[0]
                self._work(job[1])
                number += 1  # an error from here on is the next job's
        except BaseException as error:
            self.stopped = True
            self.errors.append((number, error))
