"""From stored arrays to JAX: what an accelerator's load does, on CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tailrace.checkpoint import reader
from tailrace.tree.arrays import empty, put_in_pieces
from tailrace.tree.match import wanted
from tailrace.tree.save import save


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), ()])
@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.complex128])
def test_aligned_buffers_are_taken_by_jax_as_they_are(shape, dtype):
    """An aligned buffer has its shape and dtype and starts on a border of 64 bytes."""
    buffer = empty(shape, np.dtype(dtype), aligned=True)

    assert (buffer.shape, buffer.dtype) == (shape, np.dtype(dtype))
    assert buffer.ctypes.data % 64 == 0 or not buffer.size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_leaf_goes_to_its_device_in_pieces(tmp_path, dtype):
    """A leaf above the limit is put together on the device, cast on the way, equal to the whole."""
    values = np.arange(3000, dtype=np.float32).reshape(50, 60)
    save(tmp_path / "checkpoint", {"x": values})
    with reader.open(tmp_path / "checkpoint") as checkpoint:
        want = wanted(("x",), jax.ShapeDtypeStruct(values.shape, jnp.dtype(dtype)))
        found = put_in_pieces(checkpoint, checkpoint["x"], want, 1000, None)

    np.testing.assert_array_equal(np.asarray(found), values.astype(jnp.dtype(dtype)), strict=True)


_ON_A_MESH = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tailrace.checkpoint import reader
from tailrace.tree.arrays import put_in_pieces
from tailrace.tree.match import wanted
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
whole = np.arange(48, dtype=np.float32).reshape(8, 6)
with reader.open(sys.argv[1]) as checkpoint:
    for spec in (P("x", "y"), P("y"), P()):
        like = jax.ShapeDtypeStruct((8, 6), np.float32, sharding=NamedSharding(mesh, spec))
        found = put_in_pieces(checkpoint, checkpoint["x"], wanted(("x",), like), 64, None)
        assert found.sharding == like.sharding
        assert np.array_equal(found, whole)
print("equal")
"""


def test_a_leaf_goes_to_a_mesh_in_pieces(tmp_path):
    """Each device is given the part that its sharding names."""
    save(tmp_path / "checkpoint", {"x": np.arange(48, dtype=np.float32).reshape(8, 6)})
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ON_A_MESH, str(tmp_path / "checkpoint")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.stdout.strip() == "equal", run.stderr[-2000:]
