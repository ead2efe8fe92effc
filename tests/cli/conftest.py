"""Models on disk, and the command line as users run it: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

COMMAND = [sys.executable, "-m", "tailrace"]


def tailrace(*arguments, **options):
    """Run `tailrace` to its end; the result has returncode, stdout and stderr."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
        **options,
    )


@pytest.fixture(name="tailrace")
def tailrace_fixture():
    """The command line."""
    return tailrace


def model_tensors(seed=0):
    """A small model: matrices, a scalar, nothing at all, several dtypes."""
    rng = np.random.default_rng(seed)
    return {
        "model.embed.weight": rng.standard_normal((300, 64), np.float32),
        "model.layers.0.mlp.weight": rng.standard_normal((64, 640), np.float32).astype(ml_dtypes.bfloat16),
        "model.layers.0.norm": np.ones(64, np.float16),
        "model.layers.10.ids": np.arange(7),
        "model.scale": np.array(2.5),
        "model.none": np.empty((0, 3), np.int8),
    }


@pytest.fixture
def model(tmp_path) -> Path:
    """The directory of a model with one safetensors file."""
    directory = tmp_path / "hf"
    directory.mkdir()
    safetensors.numpy.save_file(model_tensors(), directory / "model.safetensors")
    return directory


@pytest.fixture
def big_model(tmp_path) -> Path:
    """A file of 600 MB in 12 tensors: long enough to be interrupted half way. Most of it are holes."""
    import json
    import struct

    nbytes = 50_000_000
    entries = {
        f"layers.{i}.w": {
            "dtype": "U8",
            "shape": [nbytes // 1000, 1000],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i in range(12)
    }
    header = json.dumps(entries).encode()
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 12 * nbytes)
        for i in range(12):  # a mark in each, so that mixed-up tensors show
            file.seek(8 + len(header) + i * nbytes + 1000 * i)
            file.write(bytes([i + 1]) * 1000)
    return path
