"""Jobs on threads: all done, one error out, none left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tailrace.flow.parallel import run_jobs


def test_every_job_is_done_once() -> None:
    """Every job, on more than one thread."""
    done: list[int] = []
    run_jobs(range(100), done.append, threads=3)

    assert sorted(done) == list(range(100))


def test_two_jobs_overlap() -> None:
    """Two jobs that wait for each other both end."""
    meeting = threading.Barrier(2, timeout=10)
    run_jobs(range(2), lambda _: meeting.wait() and None, threads=2)

    assert not meeting.broken


def test_error_of_the_earliest_job_is_raised_and_no_more_begin() -> None:
    """Of two jobs that fail, whichever fails first, the earlier one's error comes out; later jobs never begin."""
    begun: list[int] = []
    failed = threading.Event()

    def work(job: int) -> None:
        begun.append(job)
        if job == 1:
            failed.set()
            raise ValueError("job 1")
        if job == 0:
            failed.wait(10)
            time.sleep(0.02)
            raise ValueError("job 0")

    with pytest.raises(ValueError, match="job 0"):
        run_jobs(range(100), work, threads=2)

    assert sorted(begun) == [0, 1]


def test_error_while_planning_is_raised() -> None:
    """An error of the iterator of jobs comes out, after the jobs before it."""
    done: list[int] = []

    def jobs() -> Iterator[int]:
        yield from range(5)
        raise ValueError("planning")

    with pytest.raises(ValueError, match="planning"):
        run_jobs(jobs(), done.append, threads=2)

    assert sorted(done) == list(range(5))


def test_interrupt_leaves_no_thread() -> None:
    """A KeyboardInterrupt in the calling thread is raised once the helpers have stopped."""
    before = threading.active_count()
    me = threading.get_ident()

    def work(job: int) -> None:
        time.sleep(0.001)
        if threading.get_ident() == me and job > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(range(10_000), work, threads=3)

    assert threading.active_count() == before


def test_one_job_takes_no_thread() -> None:
    """A single job runs in the calling thread."""
    ran: list[int] = []
    run_jobs([1], lambda _: ran.append(threading.get_ident()), threads=4)

    assert ran == [threading.get_ident()]
