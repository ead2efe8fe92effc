"""One writer per transaction: a kernel lock where the file system has one, and a file that says who holds it.

The kernel lock (flock) ends with its process, so a dead owner on this machine never blocks anybody. Where several
machines share the directory, or flock is not there, the owner file decides: host, boot id, pid and process start time
prove a death on the same boot; another machine's owner counts as alive while its heartbeat is fresh.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from tailrace.errors import LockedError, WriterClosedError
from tailrace.storage.posix import replace_durably

HEARTBEAT_SECONDS = 10.0
EXPIRY_SECONDS = 60.0
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Owner(msgspec.Struct, frozen=True):
    """Who holds a transaction, since when (Unix seconds)."""

    host: str
    boot_id: str
    pid: int
    process_start: str
    writer_id: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since}"


class Lock:
    """The right to write into a pending directory, held from construction until `release`.

    Raises LockedError naming the holder. `takeover` wins over a holder that is alive; that one finds out at its next
    flush and acknowledges nothing more.
    """

    def __init__(self, work: Path, *, takeover: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.writer_id = uuid.uuid4().hex
        self._path, self._owner_path = work / "lock", work / "owner.json"
        self._clock = clock
        self._descriptor = self._acquire(takeover)
        try:
            self._refuse_living_owner(takeover)
            owner = Owner(
                socket.gethostname(), _boot_id(), os.getpid(), _process_start(os.getpid()), self.writer_id, clock()
            )
            replace_durably(self._owner_path, msgspec.json.encode(owner))
        except BaseException:
            os.close(self._descriptor)
            raise
        self._pid = os.getpid()
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="tailrace-heartbeat", daemon=True).start()

    def _acquire(self, takeover: bool) -> int:
        if takeover:  # a new inode: the old holder keeps a lock on a file that has no name any more
            self._path.unlink(missing_ok=True)
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_FLOCK:
                    return descriptor
                os.close(descriptor)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise self._locked() from error
                raise
            try:
                if self._path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except FileNotFoundError:
                pass
            os.close(descriptor)  # taken over or cleaned away between open and lock: look again

    def _locked(self) -> LockedError:
        owner = read_owner(self._owner_path)
        return LockedError(
            f"{self._path.parent.parent} is being written by {owner or 'another writer'}. Wait for it, stop it, or "
            "pass takeover=True "
            f"(--takeover) to take the transaction from it."
        )

    def _refuse_living_owner(self, takeover: bool) -> None:
        owner = read_owner(self._owner_path)
        if owner is None or takeover or is_dead(owner):
            return
        age = self._clock() - self._owner_path.stat().st_mtime
        if age < EXPIRY_SECONDS:
            raise LockedError(
                f"{self._path.parent.parent} was held by {owner}, whose heartbeat is {max(age, 0.0):.0f} s old. It "
                "counts as dead after "
                f"{EXPIRY_SECONDS:.0f} s: try again then, or pass takeover=True (--takeover) if you know that it is "
                "gone."
            )

    @property
    def held(self) -> bool:
        """Whether nobody took the transaction over."""
        owner = read_owner(self._owner_path)
        return owner is not None and owner.writer_id == self.writer_id

    def check(self) -> None:
        """Raise WriterClosedError when somebody took the transaction over."""
        if not self.held:
            owner = read_owner(self._owner_path)
            raise WriterClosedError(
                f"{self._path.parent.parent} was taken over by {owner or 'another writer'}; this writer acknowledges "
                "nothing more."
            )

    def release(self) -> None:
        """Let go; the owner file is removed if it is still ours, so that the next writer need not prove our death."""
        if self._released.is_set():
            return
        self._released.set()
        if os.getpid() != self._pid:  # a forked child ends: the transaction is its parent's
            os.close(self._descriptor)
            return
        if self.held:
            self._owner_path.unlink(missing_ok=True)
        with suppress(OSError):  # explicitly: a child forked from this process may hold the same open file for long
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            if not self.held:  # a new holder's heartbeat is its own
                return
            try:
                os.utime(self._owner_path)
            except OSError:  # gone with the directory, or taken over: `check` tells the writer
                return


def read_owner(path: Path) -> Owner | None:
    """What the owner file says; None where there is none or it is unreadable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def is_dead(owner: Owner) -> bool:
    """Whether the owner provably runs no more: same machine, same boot, and no such process."""
    if owner.host != socket.gethostname() or owner.boot_id != _boot_id():
        return False
    if owner.pid == os.getpid():
        return True  # ours, from a writer of this process that was dropped: flock tells living ones apart
    return _process_start(owner.pid) != owner.process_start


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _process_start(pid: int) -> str:
    """When the process started, in clock ticks since boot; empty when it does not run (or /proc is not there)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
