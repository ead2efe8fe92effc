"""The process that makes one peer's partial saves: `python -m benchmarks.partial_child JOB`, started by partial.py."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, states
from benchmarks.child import die_with_parent
from benchmarks.peers import abstract, on_device
from benchmarks.raw import TwoFsyncs
from benchmarks.states import Array, Spec

SHAPE = (256, 256)  # of float32: 256 KB
NBYTES = 4 * SHAPE[0] * SHAPE[1]


@dataclass(frozen=True, slots=True)
class PartialJob:
    """What the parent asks for, as JSON."""

    peer: str  # one of PEERS
    saves: int
    path: str
    memory_budget: str
    result: str


@dataclass(frozen=True, slots=True)
class Partial:
    """`save` one leaf, `commit` them all, read them back leaf by leaf."""

    save: Callable[[str, Any], None]
    commit: Callable[[], None]
    read: Callable[[Spec], Iterator[Array]]
    place: Callable[[Array], Any] = lambda leaf: leaf


def main() -> None:
    die_with_parent()
    job = PartialJob(**json.loads(sys.argv[1]))
    _rehearse(job)
    peer = PEERS[job.peer](job)
    row, window = measure.timed(lambda: _save_all(job, peer))
    spec: Spec = {_name(i): (SHAPE, "float32") for i in range(job.saves)}
    wrong = [i for i, leaf in enumerate(peer.read(spec)) if not np.array_equal(np.asarray(leaf), _value(i))]
    row |= {"ok": not wrong, "result_bytes": 0}
    if wrong:
        row["error"] = f"{len(wrong)} of {job.saves} leaves differ, first {_name(wrong[0])}"
    Path(job.result).write_text(json.dumps([asdict(job) | row | window]))


def _rehearse(job: PartialJob) -> None:
    """Three saves elsewhere, so that the first measured one loads no library."""
    rehearsal = PartialJob(job.peer, 3, job.path + ".rehearsal", job.memory_budget, job.result)
    _save_all(rehearsal, PEERS[job.peer](rehearsal))
    shutil.rmtree(rehearsal.path)


def _save_all(job: PartialJob, peer: Partial) -> dict[str, Any]:
    """Save, commit, and what each cost. The raw cost is taken between saves at both ends, since disks change speed."""
    seconds: list[float] = []
    raw: dict[int, float] = {}
    edge = min(100, max(1, job.saves // 2))
    with TwoFsyncs(Path(job.result).parent, np.ascontiguousarray(_value(0)).data) as two_fsyncs:
        for i in range(job.saves):
            leaf = peer.place(_value(i))
            start = time.monotonic()
            peer.save(_name(i), leaf)
            seconds.append(time.monotonic() - start)
            if not edge <= i < job.saves - edge:
                raw[i] = two_fsyncs()
    where = Path(job.path).parent
    journals = [file.stat().st_size for file in where.rglob("journal.*") if file.is_file()]
    beyond = measure.tree_size(where)[1] - job.saves * NBYTES
    start = time.monotonic()
    peer.commit()
    measure.sync_tree(Path(job.path))
    commit_seconds = time.monotonic() - start
    first, last = slice(None, edge), slice(job.saves - edge, None)
    return {
        "first_seconds": float(np.mean(seconds[first])),
        "last_seconds": float(np.mean(seconds[last])),
        "first_median_seconds": float(np.median(seconds[first])),
        "last_median_seconds": float(np.median(seconds[last])),
        "raw_first_seconds": float(np.median([raw[i] for i in range(edge)])),
        "raw_last_seconds": float(np.median([raw[i] for i in range(job.saves - edge, job.saves)])),
        "commit_seconds": commit_seconds,
        "total_seconds": sum(seconds) + commit_seconds,
        "journal_bytes_each": sum(journals) / job.saves if journals else None,
        "beyond_bytes_each": beyond / job.saves,
        "files": measure.tree_size(Path(job.path))[0],
    }


def _name(i: int) -> str:
    return f"layer{i}/w"


def _value(i: int) -> Array:
    """Leaf i: noise told apart by its low bits."""
    if not _noise:
        _noise.append(next(states.build({"w": (SHAPE, "float32")}))[1].view(np.uint32))
    return np.bitwise_xor(_noise[0], np.uint32(i)).view(np.float32)


_noise: list[Array] = []


def _tailrace(job: PartialJob) -> Partial:
    import tailrace

    writer = tailrace.Writer(job.path, memory_budget=job.memory_budget)

    def save(name: str, leaf: Array) -> None:
        writer.write(name, leaf, durable=True)

    def commit() -> None:
        writer.commit()

    def read(spec: Spec) -> Iterator[Array]:
        with tailrace.open(job.path) as checkpoint:
            yield from (np.asarray(checkpoint[name]) for name in spec)

    return Partial(save, commit, read)


def _tensorstore(job: PartialJob) -> Partial:
    from benchmarks.tensorstore_peer import Engine

    engine = Engine()
    Path(job.path).mkdir()

    def read(spec: Spec) -> Iterator[Array]:
        yield from (engine.load(job.path, {name: leaf})[name] for name, leaf in spec.items())

    return Partial(lambda name, leaf: engine.save_one(job.path, name, leaf), lambda: None, read)


def _orbax_v1(job: PartialJob, *, compression: bool) -> Partial:
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = compression
    context.__enter__()  # for as long as the process lives

    def save(name: str, leaf: Any) -> None:
        ocp.partial.save(job.path, states.nest({name: leaf}))

    def read(spec: Spec) -> Iterator[Array]:
        loaded = states.flatten(ocp.load(job.path, abstract(spec)))
        yield from (np.asarray(loaded[name]) for name in spec)

    return Partial(save, lambda: ocp.partial.finalize(job.path), read, on_device)


PEERS: dict[str, Callable[[PartialJob], Partial]] = {
    "tailrace": _tailrace,
    "tensorstore": _tensorstore,
    "orbax-v1-zstd": partial(_orbax_v1, compression=True),
    "orbax-v1-plain": partial(_orbax_v1, compression=False),
}

if __name__ == "__main__":
    main()
