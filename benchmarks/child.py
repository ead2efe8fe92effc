"""The process that does one operation: `python -m benchmarks.child JOB`, started by the harness.

Before the measured window it does the same work once untimed: libraries load lazily, and a virtual machine that has
given idle memory back to its host pays up to 2 s for each GB it touches first, page cache included.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, states
from benchmarks.peers import PEERS, Peer

FULL_REHEARSAL_FROM_BYTES = 256 << 20
REHEARSED_LEAVES = 200
SAVE = ("save",)
LOADS = ("load cold", "load warm")
LOAD_ONCE = ("load",)
TINY: states.Spec = {"rehearsal": ((8, 8), "float32")}


@dataclass(frozen=True, slots=True)
class Job:
    """What the parent asks for, as JSON."""

    peer: str
    state: str
    scale: int
    path: str
    operations: Sequence[str]  # what is measured, in this order: SAVE alone, or loads
    rehearse: bool
    memory_budget: str
    result: str


def main() -> None:
    die_with_parent()
    job = Job(**json.loads(sys.argv[1]))
    peer = PEERS[job.peer](job.memory_budget)
    spec = states.SPECS[job.state](job.scale)
    rehearsal = _rehearsal(spec) if job.rehearse else TINY
    measured = _save if tuple(job.operations) == SAVE else _load
    rows = measured(job, peer, spec, rehearsal)
    Path(job.result).write_text(json.dumps(rows))


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def _rehearsal(spec: states.Spec) -> states.Spec:
    """All of it where memory is what must be warm, else enough leaves to have run every line."""
    if states.total_bytes(spec) >= FULL_REHEARSAL_FROM_BYTES:
        return spec
    return dict(islice(spec.items(), REHEARSED_LEAVES))


def _save(job: Job, peer: Peer, spec: states.Spec, rehearsal: states.Spec) -> list[dict[str, Any]]:
    if rehearsal is not spec:
        _rehearse_save(peer, {name: peer.place(leaf) for name, leaf in states.build(rehearsal)}, job.path)
    state = {name: peer.place(leaf) for name, leaf in states.build(spec)}
    if rehearsal is spec:
        _rehearse_save(peer, state, job.path)
    if rehearsal is spec:
        measure.warm_memory(2 * states.total_bytes(spec))
    _, window = measure.timed(lambda: peer.save(job.path, dict(state)), made=job.path)
    files, disk = measure.tree_size(Path(job.path))
    return [{"operation": "save", "ok": True, "files": files, "disk_bytes": disk, "result_bytes": 0} | window]


def _load(job: Job, peer: Peer, spec: states.Spec, rehearsal: states.Spec) -> list[dict[str, Any]]:
    if rehearsal is spec:
        peer.load(job.path, spec)
    else:
        path = job.path + ".rehearsal"
        peer.save(path, {name: peer.place(leaf) for name, leaf in states.build(rehearsal)})
        peer.load(path, rehearsal)
        shutil.rmtree(path)
    rows = []
    for operation in job.operations:
        if operation == "load cold":
            measure.make_cold(Path(job.path))
        if rehearsal is spec:
            measure.warm_memory(2 * states.total_bytes(spec))
        loaded, window = measure.timed(lambda: peer.load(job.path, spec))
        wrong = states.differences(spec, loaded)
        row = {"operation": operation, "ok": not wrong, "result_bytes": _own_bytes(loaded)}
        if wrong:
            row["error"] = f"{len(wrong)} of {len(spec)} leaves differ, first {wrong[0]}"
        rows.append(row | window)
        del loaded
    return rows


def _rehearse_save(peer: Peer, state: states.State, path: str) -> None:
    path += ".rehearsal"
    peer.save(path, dict(state))
    measure.sync_tree(Path(path))  # its write-back must not fall into the measured window
    shutil.rmtree(path)
    measure.sync(str(Path(path).parent))


def _own_bytes(loaded: states.State) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in loaded.values())


if __name__ == "__main__":
    main()
