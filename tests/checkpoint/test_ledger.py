"""The ledger: nothing is acknowledged before it is durable, whoever flushes beside whom."""

import os
import sys
import threading

import pytest

from tailrace.checkpoint.ledger import Ledger
from tailrace.errors import StorageError, WriterClosedError
from tailrace.format import journal
from tailrace.storage.lock import Lock


@pytest.fixture
def ledger(tmp_path):
    """A ledger of its own, with its lock."""
    (tmp_path / "x" / ".work").mkdir(parents=True)
    lock = Lock(tmp_path / "x" / ".work")
    ledger = Ledger(tmp_path / "x" / ".work", lock, first_sequence=10)
    yield ledger
    ledger.close()
    lock.release()


def recorded(ledger):
    """What a resumed writer would find."""
    return [record.path for record in journal.decode(ledger._path.read_bytes())]


def test_records_are_written_after_their_bytes(ledger):
    """And only then."""
    ledger.add(journal.DataFile(0, "a"))
    before = []
    ledger.acknowledge(lambda: before.extend(recorded(ledger)))

    assert (before, recorded(ledger)) == ([], ["a"])
    assert ledger.acknowledged_any


def test_what_is_noted_during_a_sync_waits_for_the_next_flush(ledger):
    """Its bytes may have come too late for this one."""
    ledger.add(journal.DataFile(0, "a"))
    ledger.acknowledge(lambda: ledger.add(journal.DataFile(1, "b")))
    first = recorded(ledger)
    ledger.acknowledge(lambda: None)

    assert (first, recorded(ledger)) == (["a"], ["a", "b"])


def test_every_flush_finds_its_own_records_durable(ledger):
    """Also when another thread takes them along, or just took all others; threads change as often as they can."""
    lost = []
    interval = sys.getswitchinterval()

    def work(number):
        for i in range(150):
            ledger.add(journal.DataFile(0, f"{number}-{i}"))
            ledger.acknowledge(lambda: None)
            if f"{number}-{i}".encode() not in ledger._path.read_bytes():
                lost.append((number, i))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert lost == []
    assert len(recorded(ledger)) == 600


def test_a_failed_sync_breaks_the_ledger_for_good(ledger, monkeypatch):
    """Nothing more is acknowledged, and nothing was."""
    ledger.add(journal.DataFile(0, "a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StorageError, match=r"writing journal .*Input/output error"):
            ledger.acknowledge(lambda: None)
    ledger.add(journal.DataFile(1, "b"))
    with pytest.raises(WriterClosedError, match="an earlier flush failed"):
        ledger.acknowledge(lambda: None)

    assert not ledger.acknowledged_any
    assert "b" not in recorded(ledger)


def test_alone_waits_for_calls_and_lets_new_ones_wait(ledger):
    """So a commit sees every write that was accepted, and none that is not in it."""
    first = ledger.enter()
    order = []

    def commit():
        with ledger.alone():
            order.append("alone")
            late.start()
            late.join(0.05)
            order.append("done")

    def write():
        ledger.leave(ledger.enter())
        order.append("late")

    late = threading.Thread(target=write)
    committing = threading.Thread(target=commit)
    committing.start()
    committing.join(0.05)
    order.append("first")
    ledger.leave(first)
    committing.join(10)
    late.join(10)

    assert order == ["first", "alone", "done", "late"]
    assert first == 11
