"""The lock: one writer, known by name, and dead ones in nobody's way."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import msgspec
import pytest

from tailrace.errors import LockedError, WriterClosedError
from tailrace.storage import lock as module
from tailrace.storage.lock import Lock, Owner, is_dead, read_owner

HOLD = """
import sys, time
from pathlib import Path
from tailrace.storage.lock import Lock
lock = Lock(Path(sys.argv[1]))
print(lock.writer_id, flush=True)
time.sleep(60)
"""


@pytest.fixture
def work(tmp_path):
    """The working directory of a transaction."""
    (tmp_path / "x.tailrace-pending" / ".work").mkdir(parents=True)
    return tmp_path / "x.tailrace-pending" / ".work"


@pytest.fixture
def other(work):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, work], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def write_owner(work, **changes):
    """An owner file as another host's writer leaves it."""
    fields = {"host": "elsewhere", "boot_id": "b", "pid": 77, "process_start": "5", "writer_id": "w", "since": 0.0}
    (work / "owner.json").write_bytes(msgspec.json.encode({**fields, **changes}))


def without_flock():
    """A file system that has no flock."""
    return mock.patch.object(module.fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))


def test_the_holder_is_named(work, other):
    """With process, host, since when, and what to do."""
    with pytest.raises(LockedError) as caught:
        Lock(work)
    message = str(caught.value)

    assert f"process {other.pid} on {socket.gethostname()} since " in message
    assert "takeover=True" in message
    assert str(work.parent) in message


def test_the_lock_of_a_killed_process_is_free_at_once(work, other):
    """No waiting for heartbeats on the same machine."""
    other.send_signal(signal.SIGKILL)
    other.wait()
    Lock(work).release()

    assert read_owner(work / "owner.json") is None


def test_takeover_wins_over_a_living_holder(work, other):
    """Who is taken over finds out when it checks; who took over does not."""
    lock = Lock(work, takeover=True)
    lock.check()

    assert read_owner(work / "owner.json").pid == os.getpid()

    lock.release()


def test_who_was_taken_over_is_told_by_whom_and_removes_nothing(work):
    """Its release leaves the new holder's file."""
    first = Lock(work)
    second = Lock(work, takeover=True)
    with pytest.raises(WriterClosedError, match=f"taken over by process {os.getpid()} on "):
        first.check()
    first.release()
    second.check()

    assert (first.held, second.held) == (False, True)

    second.release()


def test_an_owner_on_another_host_counts_as_alive_while_its_heartbeat_is_fresh(work):
    """Where no kernel lock reaches; the age and the limit are named."""
    write_owner(work)
    now = (work / "owner.json").stat().st_mtime
    with pytest.raises(LockedError, match=r"held by process 77 on elsewhere .* heartbeat is 59 s old.* after 60 s"):
        Lock(work, clock=lambda: now + 59)
    Lock(work, clock=lambda: now + 61).release()


def test_takeover_does_not_wait_for_a_heartbeat(work):
    """Who knows that the other is gone may say so."""
    write_owner(work)
    Lock(work, takeover=True).release()


def test_an_unreadable_owner_file_is_no_owner(work):
    """A torn one was never acknowledged by anybody."""
    (work / "owner.json").write_bytes(b'{"host": "els')
    Lock(work).release()


def test_deaths_are_proven_on_the_same_boot_only():
    """Another process may have the number of a dead one; another host's numbers say nothing."""
    sleeper = subprocess.Popen(["sleep", "60"])
    start = module._process_start(sleeper.pid)
    here = Owner(socket.gethostname(), module._boot_id(), sleeper.pid, start, "w", 0.0)
    alive = is_dead(here)
    reused = is_dead(msgspec.structs.replace(here, process_start="1"))
    sleeper.kill()
    sleeper.wait()

    assert (alive, reused, is_dead(here)) == (False, True, True)
    assert not is_dead(msgspec.structs.replace(here, host="elsewhere"))
    assert not is_dead(msgspec.structs.replace(here, boot_id="earlier"))


def test_without_flock_the_owner_file_decides(work, other):
    """A living process of this machine is found by its number and start."""
    with without_flock():
        with pytest.raises(LockedError, match=f"held by process {other.pid}"):
            Lock(work)
        other.kill()
        other.wait()
        Lock(work).release()


def test_a_heartbeat_is_the_holders_own(work, monkeypatch):
    """A holder that was taken over must not keep its successor looking alive."""
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    first = Lock(work)
    os.utime(work / "owner.json", (1, 1))
    deadline = time.monotonic() + 10
    while (work / "owner.json").stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    beaten = (work / "owner.json").stat().st_mtime
    write_owner(work)
    os.utime(work / "owner.json", (1, 1))
    time.sleep(0.2)
    after = (work / "owner.json").stat().st_mtime
    first.release()

    assert (beaten > 1, after) == (True, 1)


def test_a_released_lock_leaves_no_file_descriptor_or_thread(work):
    """And may be released twice."""
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    lock = Lock(work)
    lock.release()
    lock.release()
    deadline = time.monotonic() + 10
    while threading.active_count() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)

    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_forked_child_that_ends_keeps_its_parents_lock(work):
    """A data loader's process runs finalizers, too."""
    code = """
import os, sys
from pathlib import Path
from tailrace.storage.lock import Lock
lock = Lock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    lock.release()
    os._exit(0)
os.waitpid(child, 0)
lock.check()
try:
    Lock(Path(sys.argv[1]))
except BlockingIOError:
    print("held")
"""
    done = subprocess.run([sys.executable, "-c", code, work], capture_output=True, text=True, check=True)

    assert done.stdout == "held\n"
