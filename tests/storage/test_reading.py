"""Open files: few descriptors, whole reads, and names that stay inside."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tailrace.errors import CorruptionError, FormatError, StorageError
from tailrace.storage.reading import OpenFiles


def descriptors() -> int:
    """File descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_are_few_and_given_back(tmp_path: Path) -> None:
    """However many files are read, no more than the limit stay open, and none after close."""
    for i in range(20):
        (tmp_path / f"f{i}").write_bytes(bytes([i]) * 10)
    before = descriptors()
    files = OpenFiles(tmp_path, limit=4)
    found = [files.read(f"f{i}", 2, 3) for i in range(20)]
    during = descriptors()
    files.close()

    assert found == [bytes([i]) * 3 for i in range(20)]
    assert during - before == 4
    assert descriptors() == before


def test_short_reads_are_continued(tmp_path: Path) -> None:
    """A read that the kernel cuts short goes on where it stopped, across buffers."""
    data = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    out = np.zeros(5000, np.uint8)
    parts = [out[:10], out[10:3000], out[3000:]]
    real = os.preadv
    with mock.patch("os.preadv", lambda fd, buffers, offset: real(fd, [memoryview(buffers[0])[:7]], offset)):
        OpenFiles(tmp_path).read_ranges("f", 0, parts)

    assert np.array_equal(out, data)


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    """Thousands of buffers are filled in order."""
    data = np.arange(3000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    out = np.zeros(3000, np.uint8)
    OpenFiles(tmp_path).read_ranges("f", 0, [out[i : i + 1] for i in range(3000)])

    assert np.array_equal(out, data)


def test_short_and_missing_files_are_corruption(tmp_path: Path) -> None:
    """The index says that the bytes are there; that they are not is damage."""
    (tmp_path / "f").write_bytes(b"abc")
    files = OpenFiles(tmp_path)

    with pytest.raises(CorruptionError, match="f has 3 bytes, the checkpoint's index refers to 9"):
        files.read("f", 4, 5)
    with pytest.raises(CorruptionError, match="g is missing"):
        files.read("g", 0, 1)


def test_refusals_of_the_file_system_are_storage_errors(tmp_path: Path) -> None:
    """A directory in place of a file, for one, with the path in the message."""
    (tmp_path / "f").mkdir()

    with pytest.raises(StorageError, match=r"reading .*/f: Is a directory"):
        OpenFiles(tmp_path).read_ranges("f", 0, [np.zeros(1, np.uint8)])


@pytest.mark.parametrize("name", ["/etc/passwd", "../f", "d/../../f", "a\0b"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    """An index from anywhere must not open files elsewhere."""
    with pytest.raises(FormatError, match="not inside the checkpoint"):
        OpenFiles(tmp_path).read(name, 0, 1)
