"""Peak host memory above the state while saving, and above the result while loading.

Three states: one 2 GB leaf, the 2 GB transformer, and a 2 GB leaf that Orbax wrote, one zstd chunk for the whole shard,
which others must unpack within their bounds. Aim: tailrace stays under its budget (256 MiB) + 150 MB in all of them,
where a peer may take the state or the result once more.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks import harness, tables
from benchmarks.child import LOAD_ONCE

EVERY_SECONDS = 0.002  # how often memory is sampled: a copy of 2 GB lives for hundreds of milliseconds
READERS_OF_ORBAX = ("tailrace", "tailrace-jax", "orbax-zstd", "tensorstore")
FOREIGN = "a leaf that Orbax wrote"

EXPLAIN = (
    harness.HOW_TO_READ.split("Each process has done")[0]
    + """
Unlike elsewhere nothing is rehearsed here but a leaf of 256 bytes: memory that a rehearsal left in an allocator would
hide in the base. So the seconds are those of a first call, and say little. A jax.Array on the CPU shares host memory;
on an accelerator the copy that a peer stages comes on top.
"""
)


def main() -> None:
    arguments = harness.parser(__doc__, peers=harness.ALL, rounds=1, explain=EXPLAIN).parse_args()
    rows: list[harness.Row] = []
    with harness.work_dir(arguments.dir) as work:
        for number in range(arguments.rounds):
            for state in ("large", "transformer"):
                for peer in harness.rotated(arguments.peers, number):
                    job = dataclasses.replace(harness.new_job(peer, state, arguments, work), rehearse=False)
                    rows += harness.save_and_load(job, number, arguments.timeout, loads=LOAD_ONCE, every=EVERY_SECONDS)
            rows += _load_from_orbax(arguments, work, number)
    tables.print_operations(rows)
    harness.finish("memory", rows, arguments)


def _load_from_orbax(arguments: argparse.Namespace, work: Path, number: int) -> list[harness.Row]:
    """Orbax saves once, unmeasured; everyone asked for who can read it loads it."""
    readers = [peer for peer in harness.rotated(arguments.peers, number) if peer in READERS_OF_ORBAX]
    if not readers:
        return []
    job = dataclasses.replace(harness.new_job("orbax-zstd", "large", arguments, work), rehearse=False)
    harness.fresh_run(job.path)
    saved = harness.run_job(job, number, arguments.timeout, EVERY_SECONDS)
    rows = [] if saved[-1]["ok"] else saved
    for peer in readers if saved[-1]["ok"] else ():
        load = dataclasses.replace(job, peer=peer, operations=LOAD_ONCE)
        rows += harness.run_job(load, number, arguments.timeout, EVERY_SECONDS)
    return [row | {"state": FOREIGN} for row in rows]


if __name__ == "__main__":
    main()
