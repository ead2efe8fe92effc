"""Save a tree, look into it, load it back, and load it with Orbax."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

import tailrace

rng = np.random.default_rng(0)
state = {
    "params": {"kernel": rng.standard_normal((512, 256), np.float32), "bias": np.zeros(256, np.float32)},
    "step": 1000,
}
tailrace.save("ckpt", state, metadata={"loss": 0.3})

with tailrace.open("ckpt") as checkpoint:
    print(checkpoint.keys(), checkpoint.metadata)
    print(checkpoint["params/kernel"][7, :4])  # reads only what it takes
    print(checkpoint.verify())

loaded = tailrace.load("ckpt")
assert loaded["step"] == 1000
np.testing.assert_array_equal(loaded["params"]["kernel"], state["params"]["kernel"])

restored = ocp.StandardCheckpointer().restore(Path("ckpt").absolute())
np.testing.assert_array_equal(restored["params"]["kernel"], state["params"]["kernel"])
print("Orbax loads the same values")
