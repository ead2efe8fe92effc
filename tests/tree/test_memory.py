"""The memory a save or load of a tree takes beside the tree itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CODE = """
import sys
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from tailrace.testing.peak import PeakMemory
from tailrace.tree.load import load
from tailrace.tree.save import save
path, what = sys.argv[1:]
n = 64 << 20
stored = jnp.ones(n, jnp.float32) if what != "widen" else np.ones(n, ml_dtypes.bfloat16)
jax.block_until_ready(stored)
with PeakMemory() as saving:
    save(path, {"x": stored}, memory_budget="32MiB")
del stored
dtype = {"narrow": jnp.bfloat16}.get(what, jnp.float32)
like = {"x": jax.ShapeDtypeStruct((n,), dtype)}
jax.device_put(np.ones(4)).block_until_ready()
with PeakMemory() as loading:
    found = load(path, like, cast=what == "narrow", memory_budget="32MiB")["x"]
assert found.dtype == dtype and float(found[0]) == float(found[-1]) == 1
print(saving.peak_bytes >> 20, (loading.peak_bytes - found.nbytes) >> 20)
"""


@pytest.mark.parametrize("what", ["same", "widen", "narrow"])
def test_saving_and_loading_take_the_budget_beside_the_tree(tmp_path, what):
    """256 MB of jax.Array, saved, and loaded with a cast or without, take 32 MiB and a margin (google/orbax#1640)."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE, str(tmp_path / "checkpoint"), what],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr[-2000:]
    saving, loading = map(int, run.stdout.split())
    assert saving <= 32 + 60
    assert loading <= 32 + 60
