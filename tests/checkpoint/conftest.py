"""What a checkpoint holds, as TensorStore reads it."""

import gc
import os

import numpy as np
import pytest
import tensorstore


@pytest.fixture(scope="session")
def stored():
    """A function from a checkpoint's path and a leaf's name on disk to its array."""

    def read(path, name):
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}}
        return np.asarray(tensorstore.open(spec, read=True).result().read().result())

    return read


@pytest.fixture
def same_files():
    """A check that a block opens and closes the same descriptors."""
    gc.collect()  # what earlier tests dropped
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
