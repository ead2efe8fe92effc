"""`tailrace ls`, `show` and `verify` as processes, on our checkpoints and on Orbax's."""

import json
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest


@pytest.fixture
def imported(tailrace, model, tmp_path):
    """The path of an imported checkpoint."""
    assert tailrace("import", model, tmp_path / "out", "--quiet").returncode == 0
    return tmp_path / "out"


@pytest.fixture
def foreign(tmp_path):
    """A checkpoint that Orbax wrote."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "foreign", {"a": {"w": np.arange(12.0).reshape(3, 4)}, "b": np.int32(5)})
    return tmp_path / "foreign"


def test_ls(tailrace, imported):
    """A line for each leaf, and totals that are right."""
    result = tailrace("ls", imported)
    lines = [line.split() for line in result.stdout.splitlines()]

    assert result.returncode == 0, result.stderr
    assert ["model/layers/0/mlp/weight", "(64,", "640)", "bfloat16", "81920"] in lines
    assert ["model/scale", "()", "float64", "8"] in lines
    assert result.stdout.splitlines()[-1] == "6 leaves, 159 kB (158912 bytes)"


@pytest.mark.parametrize("glob", ["model/layers", "model/layers/*", "*/layers/*"])
def test_ls_of_some_keys(tailrace, imported, glob):
    """A prefix or a pattern chooses."""
    result = tailrace("ls", imported, glob, "--json")
    listed = json.loads(result.stdout)

    assert {row["key"] for row in listed["leaves"]} == {
        "model/layers/0/mlp/weight",
        "model/layers/0/norm",
        "model/layers/10/ids",
    }
    assert listed["totals"] == {"leaves": 3, "bytes": 81920 + 128 + 56}


def test_foreign_checkpoint(tailrace, foreign):
    """What Orbax wrote is listed, shown and verified, too."""
    listed = json.loads(tailrace("ls", foreign, "--json").stdout)
    shown = tailrace("show", foreign, "a/w", "--index", "1, ::2")

    assert [(row["key"], row["shape"]) for row in listed["leaves"]] == [("a/w", [3, 4]), ("b", [])]
    assert shown.stdout.splitlines()[-1] == "[4. 6.]"
    assert tailrace("verify", foreign).returncode == 0


def test_show(tailrace, imported):
    """The checkpoint's summary names its source; a leaf is shown with its values, as a scalar, too."""
    summary = tailrace("show", imported)
    ids = tailrace("show", imported, "model/layers/10/ids", "--index", "-3:")
    scale = tailrace("show", imported, "model/scale")
    empty = tailrace("show", imported, "model/none")

    assert "6 leaves" in summary.stdout
    assert "model.safetensors" in summary.stdout
    assert "[4 5 6]" in ids.stdout
    assert "2.5" in scale.stdout
    assert empty.returncode == 0, empty.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "OUT", "model/scael"], "model/scale"),
        (["show", "OUT", "model/layers/10/ids", "--index", "7"], "out of bounds"),
        (["show", "OUT", "model/layers/10/ids", "--index", "1, 2"], "too many indices"),
        (["ls", "/none/such"], "/none/such"),
        (["verify", "HF"], "hf"),
    ],
)
def test_mistakes(tailrace, imported, model, arguments, words):
    """A wrong key, index or path exits 1 with one line that helps."""
    places = {"OUT": str(imported), "HF": str(model)}
    result = tailrace(*[places.get(a, a) for a in arguments])

    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_verify_finds_a_flipped_bit(tailrace, imported):
    """A whole checkpoint exits 0, a damaged one 1 with the reason."""
    whole = tailrace("verify", imported)
    as_json = json.loads(tailrace("verify", imported, "--json").stdout)
    largest = max((p for p in imported.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    damaged = tailrace("verify", imported)

    assert whole.returncode == 0
    assert "intact. 6 leaves" in whole.stdout
    assert as_json["path"] == str(imported)
    assert (as_json["ok"], as_json["leaves"]) == (True, 6)
    assert damaged.returncode == 1
    assert len(damaged.stderr.splitlines()) == 1


def test_names_cannot_drive_the_terminal(tailrace, tmp_path):
    """Control characters in a stranger's names are shown, not obeyed."""
    import safetensors.numpy

    safetensors.numpy.save_file({"evil\x1b[2J": np.ones(1)}, tmp_path / "m.safetensors")
    tailrace("import", tmp_path / "m.safetensors", tmp_path / "out", "--quiet")

    result = tailrace("ls", tmp_path / "out")

    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert r"evil\x1b[2J" in result.stdout


def test_version(tailrace):
    """Both spellings print it."""
    assert tailrace("version").stdout == tailrace("--version").stdout != ""


@pytest.mark.parametrize("command", [[], ["import"], ["ls"], ["show"], ["verify"]])
def test_help_teaches(tailrace, command):
    """Every command's help holds an example."""
    result = tailrace(*command, "--help")

    assert result.returncode == 0
    assert f"tailrace {command[0] if command else 'import'} " in result.stdout


def test_needs_no_jax():
    """The command line works where JAX is not installed, and starts without what it does not need."""
    import subprocess

    code = "import sys, tailrace.cli.main; print([m for m in ('jax', 'tensorstore', 'orbax') if m in sys.modules])"

    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
