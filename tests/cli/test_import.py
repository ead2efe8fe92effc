"""`tailrace import` as a process: exit codes, interruption, and what it leaves behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

COMMAND = [sys.executable, "-m", "tailrace"]


def snapshot(directory):
    """Every file below a directory with its bytes, and every directory."""
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in sorted(directory.rglob("*"))
    }


def started(*arguments, **options):
    """The command, running."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for_journal(pending, process):
    """Return once the pending transaction has written some data, or the process has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if sum(p.stat().st_size for p in pending.rglob("*") if p.is_file()) > 60_000_000:
            return
        time.sleep(0.005)


def failed(result, *words):
    """It exited 1 with one line on stderr that holds these words, and no traceback."""
    assert result.returncode == 1, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_import_is_what_orbax_loads(tailrace, model, tmp_path):
    """Every tensor arrives under its name, bit for bit, through orbax-checkpoint; the parents of OUT are created."""
    result = tailrace("import", model, tmp_path / "new/parents/out", "--memory", "16MiB")
    assert result.returncode == 0, result.stderr
    loaded = ocp.StandardCheckpointer().restore(tmp_path / "new/parents/out")
    expected = safetensors.numpy.load_file(model / "model.safetensors")

    assert "6 leaves" in result.stdout
    assert "peak" in result.stdout
    assert "budget 16 MiB" in result.stdout
    for name, array in expected.items():
        node = loaded
        for part in name.split("."):
            node = node[part]
        got = np.asarray(node)
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()


def test_quiet_prints_nothing(tailrace, model, tmp_path):
    """--quiet is silent when all goes well."""
    result = tailrace("import", model, tmp_path / "out", "--quiet")

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_rerun_of_a_finished_import(tailrace, model, tmp_path):
    """The second run says that it is done, changes nothing and exits 0."""
    tailrace("import", model, tmp_path / "out")
    before = snapshot(tmp_path / "out")

    result = tailrace("import", model, tmp_path / "out")

    assert result.returncode == 0
    assert "already holds this import" in result.stdout
    assert snapshot(tmp_path / "out") == before


def test_other_source_needs_overwrite(tailrace, model, tmp_path):
    """A checkpoint of another source is kept, until --overwrite is given."""
    tailrace("import", model, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    safetensors.numpy.save_file({"other": np.ones(3)}, tmp_path / "other.safetensors")

    refused = tailrace("import", tmp_path / "other.safetensors", tmp_path / "out")
    kept = snapshot(tmp_path / "out")
    replaced = tailrace("import", tmp_path / "other.safetensors", tmp_path / "out", "--overwrite")

    failed(refused, "--overwrite")
    assert kept == before
    assert replaced.returncode == 0, replaced.stderr
    np.testing.assert_array_equal(ocp.StandardCheckpointer().restore(tmp_path / "out")["other"], np.ones(3))


def test_interrupt_leaves_a_resumable_import(tailrace, big_model, tmp_path):
    """Ctrl-C exits 130 and prints a command that, run as printed, finishes the import."""
    out = tmp_path / "out"
    process = started("import", big_model, out, "--memory", "16MiB")
    wait_for_journal(tmp_path / "out.tailrace-pending", process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the import was done before the signal arrived")

    assert process.returncode == 130, stderr
    assert not out.exists()
    assert "Traceback" not in stderr
    command = stderr.strip().splitlines()[-1].strip()
    assert command == f"tailrace import {big_model} {out} --memory 16MiB"
    finished = tailrace(*command.split()[1:])
    assert finished.returncode == 0, finished.stderr
    check_big(tailrace, out)


def killed_import(model, out):
    """An import to `out` that SIGKILL ends after its first flush."""
    process = started("import", model, out, "--memory", "16MiB")
    wait_for_journal(Path(f"{out}.tailrace-pending"), process)
    process.kill()
    process.communicate()
    if process.returncode == 0:
        pytest.skip("the import was done before the signal arrived")


def test_kill_leaves_a_resumable_import(tailrace, big_model, tmp_path):
    """After SIGKILL nothing is at OUT, and the same command finishes the import."""
    out = tmp_path / "out"
    killed_import(big_model, out)

    assert not out.exists()
    finished = tailrace("import", big_model, out, "--memory", "16MiB")
    assert finished.returncode == 0, finished.stderr
    check_big(tailrace, out)


def test_restart_after_the_source_changed(tailrace, big_model, tmp_path):
    """An unfinished import does not go on with another source; --restart begins again."""
    out = tmp_path / "out"
    killed_import(big_model, out)
    os.utime(big_model, ns=(1, 1))

    refused = tailrace("import", big_model, out)
    restarted = tailrace("import", big_model, out, "--restart")

    failed(refused, "big.safetensors changed (mtime_ns", "--restart")
    assert restarted.returncode == 0, restarted.stderr
    check_big(tailrace, out)


def test_two_imports_at_once(tailrace, big_model, tmp_path):
    """While one import is at work, another to the same place is refused and does the first no harm."""
    out = tmp_path / "out"
    first = started("import", big_model, out, "--memory", "16MiB")
    wait_for_journal(tmp_path / "out.tailrace-pending", first)
    first.send_signal(signal.SIGSTOP)
    if first.poll() is not None:
        pytest.skip("the first import was done already")
    second = tailrace("import", big_model, out)
    first.send_signal(signal.SIGCONT)
    _, stderr = first.communicate(timeout=60)

    failed(second, str(first.pid))
    assert first.returncode == 0, stderr
    check_big(tailrace, out)


def check_big(tailrace, out):
    """The imported big model is whole, by our own verify and by what TensorStore reads of it."""
    import tensorstore as ts

    assert tailrace("verify", out).returncode == 0
    assert not Path(f"{out}.tailrace-pending").exists()
    for i in range(12):
        store = ts.open(
            {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{out}", "path": f"layers.{i}.w/"}}
        ).result()
        assert store.shape == (50_000, 1000)
        assert (store[i].read().result() == i + 1).all()
        assert not store[i + 1 : i + 100].read().result().any()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing", ["does not exist"]),
        ("empty-directory", ["holds no .safetensors file"]),
        ("not-safetensors.txt", ["not-safetensors.txt", "bytes"]),
        ("cut.safetensors", ["cut.safetensors", "truncated"]),
        ("clash.safetensors", ["'a'", "'a.b'", "--flat"]),
        ("dots.safetensors", ["'a..b'", "--flat"]),
    ],
)
def test_bad_source(tailrace, tmp_path, source, words):
    """A source that cannot be imported is refused in one line, and neither OUT nor its parents appear."""
    (tmp_path / "empty-directory").mkdir()
    (tmp_path / "not-safetensors.txt").write_text("hello, this is no model\n")
    safetensors.numpy.save_file({"a": np.ones(100)}, tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", 500)
    safetensors.numpy.save_file({"a": np.ones(1), "a.b": np.ones(2)}, tmp_path / "clash.safetensors")
    safetensors.numpy.save_file({"a..b": np.ones(1)}, tmp_path / "dots.safetensors")
    before = snapshot(tmp_path)

    result = tailrace("import", tmp_path / source, tmp_path / "deep/er/out")

    failed(result, *words)
    assert snapshot(tmp_path) == before


def test_out_inside_a_file(tailrace, model, tmp_path):
    """A parent of OUT that is a file is named."""
    (tmp_path / "file").write_text("mine")

    result = tailrace("import", model, tmp_path / "file/out")

    failed(result, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_out_is_a_file(tailrace, model, tmp_path):
    """A file at OUT stays, also with --overwrite."""
    (tmp_path / "out").write_text("mine")

    for options in [], ["--overwrite"]:
        failed(tailrace("import", model, tmp_path / "out", *options), str(tmp_path / "out"))
        assert (tmp_path / "out").read_text() == "mine"


def test_out_is_a_foreign_directory(tailrace, model, tmp_path):
    """A directory that is no checkpoint stays as it is, also with --overwrite."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    before = snapshot(tmp_path)

    for options in [], ["--overwrite"]:
        failed(tailrace("import", model, tmp_path / "out", *options), str(tmp_path / "out"))
        assert snapshot(tmp_path) == before


def test_read_only_directory(tailrace, model, tmp_path):
    """A parent that may not be written to is named in one line."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write anywhere, so no directory is read-only")

    failed(tailrace("import", model, locked / "out"), str(locked))
    assert not list(locked.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mount") or libc.mount(b"tmpfs", bytes(disk), b"tmpfs", 0, b"size=16m") != 0:
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    libc.umount2(bytes(disk), 2)


def test_full_disk(tailrace, big_model, small_disk):
    """A full disk is one line, exit 1, nothing visible at OUT, and nothing of the user's touched."""
    (small_disk / "mine").write_text("mine")

    result = tailrace("import", big_model, small_disk / "out", "--memory", "16MiB")

    failed(result, "No space left on device")
    assert not (small_disk / "out").exists()
    assert (small_disk / "mine").read_text() == "mine"


def test_file_size_limit(big_model, tmp_path):
    """A limit on file sizes is refused like a full disk, wherever mounting is not permitted."""
    arguments = ["import", big_model, tmp_path / "out", "--memory", "16MiB"]
    result = subprocess.run(
        ["sh", "-c", 'ulimit -f 16384; exec "$@"', "sh", *COMMAND, *map(str, arguments)],  # 8 or 16 MiB
        capture_output=True,
        text=True,
        check=False,
    )

    failed(result, "File too large")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["import"],
        ["import", "a"],
        ["import", "a", "b", "--memory", "lots"],
        ["import", "a", "b", "--memory", "1MiB"],
        ["import", "a", "b", "--recipe", "none-such"],
        ["import", "a", "b", "--compression", "lzma"],
        ["none-such"],
        ["show", "a", "--index", "0"],
        ["show", "a", "key", "--index", "one"],
    ],
)
def test_wrong_usage(tailrace, arguments):
    """A command line that cannot be meant exits 2 before anything is done."""
    result = tailrace(*arguments)

    assert result.returncode == 2
    assert "Usage" in result.stderr


def test_debug_shows_the_traceback(tailrace, tmp_path):
    """--debug is for whoever looks into an error."""
    result = tailrace("--debug", "import", tmp_path / "missing", tmp_path / "out")

    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "InputError" in result.stderr
