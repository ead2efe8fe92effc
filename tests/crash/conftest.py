"""Fixtures of the crash tests: a warm process to fork from, a directory in memory, no syncs in this process."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tailrace.testing import faults

SCRIPTS = Path(__file__).with_name("scripts.py")


@pytest.fixture(scope="session")
def scripts() -> SimpleNamespace:
    """The module of the children, for what the tests must know of it."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPTS)))


@pytest.fixture(scope="session")
def mortal() -> Iterator[faults.Mortal]:
    """The warm process."""
    with faults.Mortal(SCRIPTS) as process:
        yield process


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system in memory, where there is one: a kill is the same there, and much faster."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="tailrace-", dir=shared))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def unsynced() -> Iterator[None]:
    """Syncs of this process do nothing: what a kill leaves does not depend on them."""
    with faults.intercepted(lambda call: None if call.name in faults.SYNCS else call.make()):
        yield
