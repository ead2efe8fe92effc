"""SIGKILL at random times against a writer with several threads, over and over until it is through."""

from __future__ import annotations

import random

import numpy as np
import pytest

import tailrace
from tailrace.errors import CheckpointExistsError

THREADS = 3
ROWS = 400 * THREADS


def campaign(path, mortal, scripts, *, kills, seed):
    """Kill and resume `kills` times at most; what was acknowledged must be there each time. The number of kills."""
    rng = random.Random(seed)
    acknowledged: set[int] = set()
    for number in range(kills):
        seconds = rng.uniform(0.04, 0.3)
        outcome = mortal.run("write_from_threads", str(path), THREADS, kill_after_seconds=seconds)
        assert outcome.error is None, outcome.error
        acknowledged |= {int(text) for text in outcome.notes if text != "committed"}
        if path.exists():
            return number + 1
        if acknowledged:
            try:
                writer = tailrace.Writer(path, memory_budget="8MiB", resume=True)
            except CheckpointExistsError:  # it had been sealed
                return number + 1
            missing = {row for region in writer.missing().get("rows", []) for row in _rows(region)}
            writer.close()
            assert not missing & acknowledged
    return kills


def _rows(region):
    return range(region.start[0], region.start[0] + region.shape[0])


def finish_and_check(path, mortal, scripts):
    """Let the program end, and compare everything."""
    if not path.exists():
        assert mortal.run("write_from_threads", str(path), THREADS).error is None
    with tailrace.open(path) as checkpoint:
        checkpoint.verify()
        rows = checkpoint["rows"][...]
    expected = np.stack([scripts.row_values(row, 3000) for row in range(ROWS)])

    assert np.array_equal(rows, expected)
    assert scripts.beside(path) == [path.name]


def test_kills_at_random_times(memory_path, mortal, scripts):
    """Some forty kills: no acknowledged row is ever missing, and the end is whole."""
    kills = 0
    for seed in range(40):
        path = memory_path / str(seed) / "model"
        kills += campaign(path, mortal, scripts, kills=4, seed=seed)
        finish_and_check(path, mortal, scripts)
        if kills >= 40:
            break

    assert kills >= 40


@pytest.mark.long
def test_kills_at_random_times_for_long(tmp_path, mortal, scripts):
    """Two thousand kills, on a disk."""
    kills = 0
    for seed in range(2000):
        path = tmp_path / str(seed) / "model"
        kills += campaign(path, mortal, scripts, kills=30, seed=1000 + seed)
        finish_and_check(path, mortal, scripts)
        if kills >= 2000:
            break

    assert kills >= 2000
