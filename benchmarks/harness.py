"""Runs peers side by side: a fresh process for each operation, interleaved, the order rotated every round."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import measure, tables
from benchmarks.child import LOADS, SAVE, Job
from benchmarks.peers import PEERS

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
ALL = tuple(PEERS)
LIBRARIES = ("tailrace", "numpy", "jax", "orbax-checkpoint", "tensorstore", "safetensors")

Row = dict[str, Any]

HOW_TO_READ = """
how to read the tables:
  seconds       least and median over the rounds. A save ends when every file and directory it made is on disk: an
                fsync of each is inside the window, for all peers, so a library that synced already pays little for it.
  x raw         median of the ratio to "raw" of the same round: two threads, 16 MiB O_DIRECT writes and fsync, buffered
                reads. Compare ratios, not seconds: the machine's speed moves from minute to minute.
  CPU s         user and system seconds of the process inside the window.
  extra MB      peak of anonymous memory inside the window, above what the process held before, and for a load above
                the result too (below zero: the result is partly a mapped file). Mapped files are not counted.
  ok            rounds that ended well and, for loads, gave back every bit; checked outside the window.
  -zstd/-plain  Orbax with its default compression, and with compression off. Never compare without naming which.
  -jax          takes and returns jax.Array on the CPU, as Orbax does; without it, numpy arrays.
Each process has done the same work once, untimed, before the window. A cold load follows fadvise(DONTNEED) on the
checkpoint and, as root, a drop of all the machine's caches.
"""


def parser(
    description: str | None, *, peers: Sequence[str], rounds: int, explain: str = HOW_TO_READ
) -> argparse.ArgumentParser:
    """The options of a benchmark that saves states."""
    made = argparse.ArgumentParser(
        description=description, epilog=explain, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--peers", type=names_of(ALL), default=tuple(peers), metavar="A,B", help=f"of {', '.join(ALL)}")
    made.add_argument("--scale", type=int, default=1, help="divide the sizes; above 1 only to see that it runs")
    add_common_options(made, rounds=rounds, timeout=300)
    return made


def add_common_options(parser: argparse.ArgumentParser, *, rounds: int, timeout: float) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=rounds, help="how often each peer is measured (default %(default)s)")
    add("--memory-budget", default="256MiB", help="what tailrace may hold (default %(default)s)")
    add("--dir", type=Path, default=RESULTS, help="file system to measure (default benchmarks/results)")
    add("--json", type=Path, help="where the rows go (default benchmarks/results/NAME.json)")
    add("--timeout", type=float, default=timeout, help="seconds a process may take (default %(default)s)")


def names_of(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"no peer {', '.join(unknown)}; there are {', '.join(allowed)}")
        return names

    return parse


def compare(name: str, description: str | None, *, peers: Sequence[str] = ALL) -> None:
    """The whole program of a benchmark that saves a state and loads it cold and warm."""
    arguments = parser(description, peers=peers, rounds=3).parse_args()
    rows: list[Row] = []
    with work_dir(arguments.dir) as work:
        for number in range(arguments.rounds):
            for peer in rotated(arguments.peers, number):
                job = new_job(peer, name, arguments, work)
                rows += save_and_load(job, number, arguments.timeout)
    tables.print_operations(rows)
    finish(name, rows, arguments)


def rotated(peers: Sequence[str], number: int) -> list[str]:
    """So that no peer always comes first, or always after the same one's debris."""
    shift = number * 5 % len(peers)
    return [*peers[shift:], *peers[:shift]]


def new_job(peer: str, state: str, arguments: argparse.Namespace, work: Path) -> Job:
    return Job(
        peer=peer,
        state=state,
        scale=arguments.scale,
        path=str(work / "run" / "checkpoint"),
        operations=SAVE,
        rehearse=True,
        memory_budget=arguments.memory_budget,
        result=str(work / "result.json"),
    )


def save_and_load(
    job: Job, number: int, timeout: float, *, loads: Sequence[str] = LOADS, every: float = 0.01
) -> list[Row]:
    """One peer's turn."""
    fresh_run(job.path)
    rows = run_job(job, number, timeout, every)
    if rows[-1]["ok"]:
        rows += run_job(dataclasses.replace(job, operations=loads), number, timeout, every)
    shutil.rmtree(Path(job.path).parent)
    return rows


def fresh_run(path: str) -> None:
    """An empty directory for what a peer makes beside its checkpoint."""
    shutil.rmtree(Path(path).parent, ignore_errors=True)
    Path(path).parent.mkdir(parents=True)


def run_job(job: Job, number: int, timeout: float, every: float) -> list[Row]:
    rows = run_child("benchmarks.child", dataclasses.asdict(job), timeout, every)
    for row in rows:
        row |= {"state": job.state, "peer": job.peer, "round": number}
        row.setdefault("operation", job.operations[0])
        announce(row)
    return rows


def run_child(module: str, job: dict[str, Any], timeout: float, every: float) -> list[Row]:
    """Rows of one child process; a single row that is not ok when it fails."""
    result = Path(job["result"])
    result.unlink(missing_ok=True)
    log = result.with_suffix(".log")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    with log.open("w") as out:
        command = [sys.executable, "-m", module, json.dumps(job)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=ROOT)
        watched = measure.watch(process, every_seconds=every, timeout_seconds=timeout)
    if watched.returncode is None:
        return [{"ok": False, "error": f"not done after {timeout:.0f} s; --timeout gives it more"}]
    if watched.returncode != 0 or not result.exists():
        return [{"ok": False, "error": f"exit {watched.returncode}: {log.read_text()[-600:].strip()}"}]
    rows: list[Row] = json.loads(result.read_text())
    for row in rows:
        sampled = watched.peak_bytes(row.pop("started"), row.pop("ended"))
        peak = max(sampled, row.pop("end_bytes"))
        base = row.pop("base_bytes") + row.pop("result_bytes")
        row["extra_bytes"] = peak - base if peak else None  # None: not Linux
    return rows


def announce(row: Row) -> None:
    """A line as soon as it is known: a whole run takes minutes."""
    seconds = f"{row['seconds']:.3f} s" if "seconds" in row else ""
    ending = "ok" if row["ok"] else f"FAILED {row['error']}"
    print(time.strftime("%H:%M:%S"), row["round"], row["peer"], row["operation"], seconds, ending, flush=True)


@contextmanager
def work_dir(parent: Path) -> Iterator[Path]:
    """Not the system's temporary directory: that may be memory."""
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="work-", dir=parent.resolve()))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def finish(name: str, rows: list[Row], arguments: argparse.Namespace) -> None:
    """Write the JSON and end the program: exit code 1 if a peer failed."""
    path = arguments.json or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": name,
        "taken": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "libraries": {library: _version(library) for library in LIBRARIES},
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1))
    print(f"\nrows in {path}")
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
