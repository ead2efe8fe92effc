"""What an import shows while it runs: lines in a log, a bar on a terminal, nothing when quiet."""

import os
import subprocess
import sys

import pytest

from tailrace.cli import progress as progress_module
from tailrace.cli.progress import ByteProgress
from tailrace.testing.peak import PeakMemory

MIB = 1 << 20


def test_lines_where_there_is_no_terminal(monkeypatch, capsys):
    """A line says how far it is, how fast, how long it takes, and what memory it took of what it may."""
    monkeypatch.setattr(progress_module, "_PLAIN_SECONDS", 0)
    with PeakMemory() as peak, ByteProgress("importing", quiet=False, peak=peak, budget_bytes=64 * MIB) as progress:
        progress(0, 4_000_000_000)
        progress(1_000_000_000, 4_000_000_000)

    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("importing: 25%, 1 GB of 4 GB, ")
    assert "/s, " in line
    assert " s left, peak " in line
    assert line.endswith(" of 64 MiB")


def test_few_lines(capsys):
    """A log is not flooded, however often progress is made."""
    with PeakMemory() as peak, ByteProgress("importing", quiet=False, peak=peak, budget_bytes=64 * MIB) as progress:
        for done in range(1000):
            progress(done, 1000)

    assert capsys.readouterr().err == ""


def test_quiet(monkeypatch, capsys):
    """Quiet is quiet."""
    monkeypatch.setattr(progress_module, "_PLAIN_SECONDS", 0)
    with PeakMemory() as peak, ByteProgress("importing", quiet=True, peak=peak, budget_bytes=64 * MIB) as progress:
        progress(1, 2)

    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_bar_on_a_terminal(model, tmp_path):
    """On a terminal a bar with the budget is drawn on stderr; stdout keeps to the result."""
    master, terminal = os.openpty()
    command = [sys.executable, "-m", "tailrace", "import", str(model), str(tmp_path / "out")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, check=False, env=environment)
    os.close(terminal)
    drawn = os.read(master, 100_000).decode()
    os.close(master)

    assert result.returncode == 0
    assert "importing" in drawn
    assert "of 256 MiB" in drawn
    assert "\x1b" not in result.stdout
