"""`verify` finds any flipped bit in any file, and what is missing, unknown or cut short."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tailrace.checkpoint.reader import open
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import CorruptionError, FormatError


def write(path: Path, *, compression: Any = None, rows: int = 40) -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint with whole, edge, inline, zero-size and replaced chunks."""
    arrays = {
        "w": np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32),
        "b": np.arange(7, dtype=np.float32).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), np.int16),
        "step": np.array(7),
    }
    with Transaction(path, compression=compression) as transaction:
        for key, array in arrays.items():
            leaf = transaction.declare(
                key, shape=array.shape, dtype=array.dtype, chunk_shape=(16, 64) if key == "w" else None
            )
            if key == "w":
                leaf[16:32] = np.ones((16, 64), np.float32)
                transaction.flush()  # written again below: a dead range
            leaf[...] = array
        transaction.set_text("name", "tail")
        transaction.set_metadata({"origin": "test"})
    return arrays


def files_of(path: Path) -> list[Path]:
    """Every file of the checkpoint."""
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_sound_checkpoint_is_read_whole(tmp_path: Path, compression: Any) -> None:
    """The report counts every leaf, every byte of every file and every file; progress adds up to the bytes."""
    write(tmp_path / "ck", compression=compression)
    told: list[int] = []
    report = open(tmp_path / "ck").verify(told.append)

    assert report.leaves == 5
    assert report.files == len(files_of(tmp_path / "ck"))
    assert report.bytes == sum(file.stat().st_size for file in files_of(tmp_path / "ck"))
    assert sum(told) == report.bytes
    assert report.unprotected == []


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_any_flipped_bit_in_any_file_is_found(tmp_path: Path, compression: Any) -> None:
    """Chunks, dead ranges, padding, index, metadata, tailrace.json: one bit anywhere fails open or verify."""
    write(tmp_path / "ck", compression=compression)
    chance = random.Random(5)
    missed = []
    for file in files_of(tmp_path / "ck"):
        sound = file.read_bytes()
        for position in chance.sample(range(len(sound)), min(len(sound), 150)):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            with contextlib.suppress(FormatError):
                open(tmp_path / "ck").verify()
                missed.append((file.name, position))
        file.write_bytes(sound)

    assert missed == []
    open(tmp_path / "ck").verify()


def test_damaged_chunk_names_leaf_region_and_file(tmp_path: Path) -> None:
    """A bit in a chunk is told by leaf, region and file; other leaves still load."""
    arrays = write(tmp_path / "ck")
    place: Any = open(tmp_path / "ck").index.get(b"w/c/2/0")
    file = tmp_path / "ck" / place.file.path
    data = bytearray(file.read_bytes())
    data[place.offset + 99] ^= 16
    file.write_bytes(data)
    found = open(tmp_path / "ck")

    with pytest.raises(CorruptionError, match=rf"leaf 'w', region \[32:40, 0:64\]: file {place.file.path}"):
        found.verify()
    with pytest.raises(CorruptionError, match="leaf 'w'"):
        found["w"][...]
    assert np.array_equal(np.asarray(found["b"]), arrays["b"])


def test_every_problem_is_counted_and_ten_are_shown(tmp_path: Path) -> None:
    """All is checked before the error is raised; the message stays short."""
    write(tmp_path / "ck", rows=400)
    files = {file for file in files_of(tmp_path / "ck") if file.parent.name == "d"}
    largest = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    for position in range(0, 90_000, 3000):
        data[position] ^= 1
    largest.write_bytes(data)

    with pytest.raises(CorruptionError) as caught:
        open(tmp_path / "ck").verify()

    assert "problems:" in str(caught.value)
    assert str(caught.value).count("\n  - ") == 10
    assert "more" in str(caught.value)


@pytest.mark.parametrize("how", ["missing", "truncated", "grown"])
def test_files_of_another_length(tmp_path: Path, how: str) -> None:
    """Every file that is gone, cut short or longer than it was is found, by name."""
    write(tmp_path / "ck")
    for file in files_of(tmp_path / "ck"):
        sound = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(sound[:-1] if how == "truncated" else sound + b"\0")
        if how == "missing" and file.name == "tailrace.json":  # what is left is an Orbax checkpoint, as it stands
            file.write_bytes(sound)
            continue
        with pytest.raises((FormatError, FileNotFoundError), match=file.name):
            open(tmp_path / "ck").verify()
        file.write_bytes(sound)


def test_unknown_file_is_reported(tmp_path: Path) -> None:
    """A file that tailrace.json does not list is named."""
    write(tmp_path / "ck")
    (tmp_path / "ck" / "d" / "stray").write_text("x")

    with pytest.raises(CorruptionError, match="file d/stray is unknown"):
        open(tmp_path / "ck").verify()


def test_small_budget_suffices(tmp_path: Path) -> None:
    """verify holds a block per thread, whatever the size of chunks."""
    array = np.arange(3_000_000, dtype=np.float64)
    with Transaction(tmp_path / "ck", memory_budget="16MiB") as transaction:
        transaction.declare("x", shape=array.shape, dtype=array.dtype)[...] = array
    checkpoint = open(tmp_path / "ck", memory_budget="8MiB")
    checkpoint.verify()

    assert 0 < checkpoint.budget.peak_bytes <= 4 << 20
