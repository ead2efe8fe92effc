"""The memory promise: whatever the size of a leaf, at most the budget and 150 MB above the state or the result.

Each case runs in a process of its own. Two proofs: anonymous memory sampled every 5 ms, and RLIMIT_DATA set to what
the process holds plus the promise, above which any allocation fails.
"""

import json
import subprocess
import sys
import textwrap

import pytest

BUDGET_BYTES = 64 << 20
MARGIN_BYTES = 150 << 20
GIB = 1 << 30

PRELUDE = """
import json, os, resource, sys
import numpy as np
import tailrace
from tailrace.testing.peak import PeakMemory, resident_bytes

path, promise = sys.argv[1], int(sys.argv[2])

def state(nbytes):
    block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    return np.concatenate([block] * (nbytes >> 22)).reshape(-1, 4096)

def data_bytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10

def measured(work, result_bytes=0):
    with PeakMemory() as peak:  # its own thread is started before the limit is set
        limit = data_bytes() + promise + result_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        got = work()
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps({"above_bytes": peak.peak_bytes - result_bytes}))
    return got
"""


def run(path, code, *arguments):
    """Run code in a fresh process and return what it measured."""
    program = PRELUDE + textwrap.dedent(code)
    command = [sys.executable, "-c", program, str(path), str(BUDGET_BYTES + MARGIN_BYTES), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_saving_a_leaf_of_1_gb_takes_the_budget(tmp_path):
    """google/orbax#1640: a save holds at most the budget and 150 MB above the array."""
    seen = run(
        tmp_path / "ck",
        """
        array = state(1 << 30)
        measured(lambda: tailrace.save(path, {"w": array}, memory_budget="64MiB"))
        """,
    )

    assert seen["above_bytes"] <= BUDGET_BYTES + MARGIN_BYTES


def test_saving_a_transposed_leaf_takes_the_budget(tmp_path):
    """A leaf that is not contiguous is not copied whole either."""
    seen = run(
        tmp_path / "ck",
        """
        array = state(1 << 29).T
        measured(lambda: tailrace.save(path, {"w": array}, memory_budget="64MiB"))
        """,
    )

    assert seen["above_bytes"] <= BUDGET_BYTES + MARGIN_BYTES


def test_saving_compressed_takes_the_budget(tmp_path):
    """Compressing needs room for a few chunks, which the budget covers."""
    seen = run(
        tmp_path / "ck",
        """
        array = state(1 << 28)
        measured(lambda: tailrace.save(path, {"w": array}, memory_budget="64MiB", compression="zstd"))
        """,
    )

    assert seen["above_bytes"] <= BUDGET_BYTES + MARGIN_BYTES


@pytest.mark.parametrize(
    "like", ["None", "{'w': jax.ShapeDtypeStruct((1 << 16, 4096), 'float32')}"], ids=["numpy", "jax"]
)
def test_loading_a_leaf_of_1_gb_takes_the_budget_above_the_result(tmp_path, like):
    """marin#8480: a load holds at most the result, the budget and 150 MB."""
    run(
        tmp_path / "ck",
        """
        array = state(1 << 30)
        measured(lambda: tailrace.save(path, {"w": array}, memory_budget="64MiB"))
        """,
    )
    seen = run(
        tmp_path / "ck",
        f"""
        import jax
        jax.device_put(np.zeros(4)).block_until_ready()  # JAX's own start is not what is measured
        got = measured(lambda: tailrace.load(path, {like}, memory_budget="64MiB"), 1 << 30)
        assert got["w"].shape == (1 << 16, 4096)
        """,
    )

    assert seen["above_bytes"] <= BUDGET_BYTES + MARGIN_BYTES


def test_verifying_takes_the_budget(tmp_path):
    """verify reads every byte and holds few of them."""
    seen = run(
        tmp_path / "ck",
        """
        array = state(1 << 29)
        tailrace.save(path, {"w": array}, memory_budget="64MiB")
        del array
        measured(lambda: tailrace.open(path, memory_budget="64MiB").verify())
        """,
    )

    assert seen["above_bytes"] <= BUDGET_BYTES + MARGIN_BYTES


def test_importing_a_tensor_of_1_gb_takes_the_budget(tmp_path):
    """levanter#506, maxtext#551: an import never holds a whole tensor, let alone the model."""
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.ones((1 << 16, 4096), np.float32)}, tmp_path / "model.safetensors")
    seen = run(
        tmp_path / "ck",
        """
        from tailrace.huggingface.importer import import_model
        measured(lambda: import_model(sys.argv[3], path, memory_budget="64MiB"))
        """,
        str(tmp_path / "model.safetensors"),
    )

    assert seen["above_bytes"] <= BUDGET_BYTES + MARGIN_BYTES


def test_loading_orbax_leaves_of_one_chunk_takes_the_budget_above_the_result(tmp_path):
    """google/orbax#375: Orbax writes a leaf as one zstd chunk, here eight times the budget: it is streamed."""
    seen = run(
        tmp_path / "ck",
        """
        import orbax.checkpoint as ocp
        array = state(1 << 29)
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)).save(path, {"w": array})
        reference = array[::997].copy()
        del array
        got = measured(lambda: tailrace.load(path, memory_budget="64MiB"), 1 << 29)
        assert np.array_equal(got["w"][::997], reference)
        """,
    )

    assert seen["above_bytes"] <= BUDGET_BYTES + MARGIN_BYTES


def test_memory_stays_flat_over_many_saves(tmp_path):
    """google/orbax#2090, marin#6774: the fiftieth save leaves no more behind than the tenth."""
    seen = run(
        tmp_path / "ck",
        """
        array = state(1 << 24)
        held = []
        for i in range(50):
            tailrace.save(path, {"w": array}, memory_budget="64MiB", overwrite=True)
            held.append(resident_bytes())
        print(json.dumps({"grown_bytes": held[-1] - held[10]}))
        """,
    )

    assert seen["grown_bytes"] <= 8 << 20
