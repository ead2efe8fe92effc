"""Every benchmark runs at a tiny size, with every peer giving back what it was given."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FEW = (
    "raw,tailrace,tailrace-jax,orbax-v1-plain,tensorstore"  # all peers run in one of them: Orbax takes seconds to load
)
SAVE = {"save", "load cold", "load warm"}


@pytest.mark.parametrize(
    ("benchmark", "options", "peers", "operations"),
    [
        (
            "large",
            ["--scale", "1000"],
            {
                *("raw", "tailrace", "tailrace-jax", "tensorstore", "safetensors", "safetensors-jax", "tofile"),
                *("orbax-zstd", "orbax-plain", "orbax-v1-zstd", "orbax-v1-plain"),
            },
            SAVE,
        ),
        ("transformer", ["--scale", "1000", "--peers", FEW], set(FEW.split(",")), SAVE),
        ("small", ["--scale", "200", "--peers", FEW], set(FEW.split(",")), SAVE),
        (
            "memory",
            ["--scale", "1000", "--peers", "raw,tailrace,tailrace-jax,tensorstore"],
            {"raw", "tailrace", "tailrace-jax", "tensorstore"},
            {"save", "load"},
        ),
        (
            "partial",
            ["--saves", "20", "--orbax-saves", "4"],
            {"tailrace", "tensorstore", "orbax-v1-plain"},
            {"20 saves", "4 saves"},
        ),
    ],
)
def test_benchmark_runs_and_every_peer_is_right(benchmark, options, peers, operations, tmp_path):
    """The program ends with exit code 0, and its JSON holds a good row for each peer and operation."""
    rows_path = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *options, "--rounds", "1"]
    command += ["--dir", str(tmp_path / "work"), "--json", str(rows_path)]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(rows_path.read_text())["rows"]
    assert {row["peer"] for row in rows} == peers
    assert {row["operation"] for row in rows} == operations
    assert all(row["ok"] for row in rows)
    assert all(row["seconds"] > 0 for row in rows)
    assert list((tmp_path / "work").iterdir()) == []
