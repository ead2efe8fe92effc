"""Two writers for one path: the second is refused, or takes over and the first acknowledges nothing more."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tailrace.checkpoint.reader import open as open_checkpoint
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import LockedError, WriterClosedError

WRITE = """
import sys
from tailrace.checkpoint.transaction import Transaction
writer = Transaction(sys.argv[1], resume=True)
writer.declare("theirs", shape=(3,), dtype="int32")[...] = 1
writer.flush()
print("flushed", flush=True)
for line in sys.stdin:
    try:
        writer.declare("late", shape=(3,), dtype="int32")[...] = 2
        writer.commit() if line == "commit\\n" else writer.flush()
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        writer.close()
        writer.abort()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that has written a leaf and flushed it."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, tmp_path / "x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "flushed\n"

    yield process
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


def ask(process, command):
    """Have the other process flush or commit; what it says."""
    process.stdin.write(f"{command}\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_writer_is_refused_and_told_who_writes(tmp_path, other, resume):
    """Whatever it wants; and the first one is not disturbed."""
    with pytest.raises(LockedError, match=f"is being written by process {other.pid} on "):
        Transaction(tmp_path / "x", resume=resume)

    assert ask(other, "flush") == "done\n"


@pytest.mark.parametrize("command", ["flush", "commit"])
def test_after_a_takeover_the_first_writer_acknowledges_nothing_and_deletes_nothing(tmp_path, other, command):
    """Its flush and commit fail, its close and abort leave the transaction to the new holder."""
    writer = Transaction(tmp_path / "x", resume=True, takeover=True)
    writer.declare("mine", shape=(2,), dtype="int32")[...] = 3
    writer.flush()
    said = ask(other, command)
    with writer.commit() as checkpoint:
        checkpoint.verify()

        assert checkpoint.keys() == ["mine", "theirs"]

    assert said.startswith("WriterClosedError")
    assert f"taken over by process {os.getpid()} on " in said


def test_a_killed_writer_is_resumed_at_once(tmp_path, other):
    """Without takeover and without waiting for a heartbeat."""
    other.send_signal(signal.SIGKILL)
    other.wait()
    with Transaction(tmp_path / "x", resume=True) as writer:
        resumed = writer.resumed
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint["theirs"][...].tolist() == [1, 1, 1]

    assert resumed


def test_two_writers_of_one_process(tmp_path):
    """The second is refused; a writer that is dropped lets go."""
    first = Transaction(tmp_path / "x")
    first.write_arrays([(("a",), np.ones(3), "array")])
    first.flush()
    with pytest.raises(LockedError):
        Transaction(tmp_path / "x", resume=True)
    first.close()
    with Transaction(tmp_path / "x", resume=True) as second:
        second.abort()
    with pytest.raises(WriterClosedError, match="has been closed"):
        first.flush()


def test_a_writer_that_lost_an_unflushed_transaction_deletes_nothing(tmp_path):
    """Leaving its with block, it would discard what was never flushed: by now that is another's."""
    first = Transaction(tmp_path / "x")
    second = Transaction(tmp_path / "x", resume=True, takeover=True)
    second.write_arrays([(("a",), np.ones(3), "array")])
    second.flush()
    first.set_text("t", "text")
    with pytest.raises(WriterClosedError, match="taken over"):
        first.flush()
    first.close()
    with second.commit() as checkpoint:
        assert checkpoint.keys() == ["a"]
