"""The surface: what is public, what importing it costs, and what a save runs through."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tailrace
from tailrace.testing.callpath import recorded

API = Path(__file__).parents[1] / "docs" / "api.md"
HEAVY = ["jax", "tensorstore", "orbax", "flax", "torch", "typer", "rich", "yaml"]


def test_every_public_name_is_documented():
    """docs/api.md lists `__all__`, no more and no less, each with what it promises."""
    listed = re.findall(r"^- `(\w+)(?:\(.*?\))?`:\s+(\S)", API.read_text(), re.MULTILINE | re.DOTALL)

    assert sorted(name for name, _ in listed) == sorted(tailrace.__all__)


@pytest.mark.parametrize("name", ["save", "load", "open", "fork", "Writer"])
def test_documented_arguments_are_the_real_ones(name):
    """With their defaults."""
    import inspect

    text = re.search(rf"^- `{name}\((.*?)\)`", API.read_text(), re.MULTILINE | re.DOTALL)[1]
    documented = inspect.signature(eval(f"lambda {text}: None"))
    real = inspect.signature(getattr(tailrace, name))

    assert [(p.name, p.kind, p.default) for p in documented.parameters.values()] == [
        (p.name, p.kind, p.default) for p in real.parameters.values()
    ]


@pytest.mark.parametrize("name", tailrace.__all__)
def test_every_public_name_is_there(name):
    """And has a docstring."""
    assert getattr(tailrace, name).__doc__
    assert name in dir(tailrace)


@pytest.mark.parametrize(
    "code",
    [
        "import tailrace",
        "import tailrace; [getattr(tailrace, name) for name in tailrace.__all__]",
        "import sys, numpy, tailrace; tailrace.save(sys.argv[1], {'a': numpy.ones(3), 'b': [1, 'x']}); "
        "tailrace.load(sys.argv[1]); tailrace.open(sys.argv[1]).verify()",
    ],
)
def test_nothing_heavy_is_imported(tmp_path, code):
    """Neither by the import nor by saving and loading numpy arrays."""
    check = f"{code}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check, tmp_path / "x"], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_import_time(record_property):
    """Measured, and failing only where it is beyond any doubt: the machine may be busy."""
    code = "import time, numpy; start = time.perf_counter(); import tailrace; print(time.perf_counter() - start)"
    seconds = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    record_property("import_seconds", seconds)

    assert seconds < 3


def test_a_save_runs_through_little(tmp_path, record_property):
    """Two small arrays, durably, the index read back: the ceilings are what it takes today; lower them, never raise."""
    tree = {"a": np.ones(3), "b": np.ones(4)}
    tailrace.save(tmp_path / "warm", tree)
    with recorded(str(Path(tailrace.__file__).parent)) as path:
        tailrace.save(tmp_path / "x", tree)
    functions = {
        name for name in path.functions if not re.search(r"<(listcomp|genexpr|setcomp|dictcomp|lambda)>", name)
    }
    found = len(path.files), len(functions), path.deepest
    record_property("files, functions, deepest", found)

    assert found[0] <= 34
    assert found[1] <= 235
    assert found[2] <= 20
