"""The examples run, each in an empty directory and a process of its own."""

import os
import subprocess
import sys

import pages
import pytest

EXAMPLES = pages.ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("quickstart.py", "Orbax loads the same values"),
        ("convert_by_regions.py", "all 12 layers are equal to their source"),
        ("finetune.py", "tuned: 5 leaves, its base shares its data with the first checkpoint"),
        ("flax_train_state.py", "training goes on as if it had not stopped"),
    ],
)
def test_example(name, last_line, tmp_path):
    """The example ends well and says so in its last line."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == last_line


def test_every_example_is_tested():
    """No example is left to rot: all are above but demo.py, which needs a model from a package index."""
    tested = {mark.args[1][i][0] for mark in test_example.pytestmark for i in range(len(mark.args[1]))}
    there = {path.name for path in EXAMPLES.glob("*.py")}

    assert there - {"demo.py"} == tested
