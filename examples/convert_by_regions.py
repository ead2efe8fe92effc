"""Stack the layers of a model into one leaf, one layer at a time, be killed half way, and go on.

The stacked leaf is never in memory: each layer is a region of it, durable after `flush`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import tailrace

LAYERS, WIDTH = 12, 512


def read_layer(layer: int) -> np.ndarray:
    """One layer of the source; here made up, in earnest read from a file."""
    return np.random.default_rng(layer).standard_normal((WIDTH, WIDTH), np.float32)


def convert(die_after: int | None = None) -> None:
    with tailrace.Writer("stacked", memory_budget="16MiB", resume=True) as writer:
        kernel = writer.declare(
            "layers/kernel", shape=(LAYERS, WIDTH, WIDTH), dtype="float32", stacked_axes=[0]
        )  # one layer is whole chunks
        todo = [layer for region in kernel.missing() for layer in range(region.start[0], region.stop[0])]
        print(f"layers to write: {todo}", flush=True)
        for layer in todo:
            kernel[layer] = read_layer(layer)
            writer.flush()
            if layer == die_after:
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out


def main() -> None:
    killed = subprocess.run([sys.executable, __file__, "6"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not Path("stacked").exists(), "nothing is visible before commit"
    convert()

    with tailrace.open("stacked") as checkpoint:
        for layer in range(LAYERS):
            np.testing.assert_array_equal(checkpoint["layers/kernel"][layer], read_layer(layer))
    print(f"all {LAYERS} layers are equal to their source")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        convert(die_after=int(sys.argv[1]))
    else:
        main()
