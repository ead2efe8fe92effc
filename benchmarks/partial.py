"""Many durable partial writes of 256 KB each into one unfinished checkpoint, then one commit.

Shows that a write costs the same however many came before it. tailrace keeps one writer open and calls
`write(key, leaf, durable=True)`; TensorStore commits once per save to one database; Orbax v1 calls `partial.save`, then
`partial.finalize`, with compression off by default, which is its faster way. Aims: last / first <= 1.1, a write <= 2 x
the two fsyncs it cannot do without, <= 200 journal bytes each, commit <= 0.5 s for 10,000.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from benchmarks import harness, tables
from benchmarks.partial_child import NBYTES, PEERS, PartialJob

EXPLAIN = """
how to read the table:
  first, last ms   mean of the first and of the last 100 saves (of a half each, below 200 saves)
  last / first     of the means, and of the medians
  raw first, last  median of the same number of times: write 256 KB, fdatasync, append 150 bytes, fdatasync; one after
                   each of the first and last saves, so that it sees the disk as they saw it
  x raw first,last median of the saves / raw; where both differ from `last / first`, the disk has changed its speed
  journal B        bytes of tailrace's journal per save, before commit
  beyond B         bytes on disk beyond the arrays, per save, before commit
  commit s         until every file and directory of the checkpoint is synced
tailrace and TensorStore have each save on disk when the call returns. Orbax syncs only part of what it writes; it is
not made to sync more until the commit, which favours it. It is measured at a few counts only: its time grows with their
square. Every leaf is read back and compared, outside the window. Each process has made three saves elsewhere before.
"""
ORBAX = ("orbax-v1-plain", "orbax-v1-zstd")
DEFAULT_PEERS = ("tailrace", "tensorstore", "orbax-v1-plain")
HEADER = (
    "peer", "saves", "first ms", "last ms", "last / first (median)", "raw first, last ms", "x raw first, last",
    "journal B", "beyond B", "commit s", "total s", "files", "ok",
)  # fmt: skip


def main() -> None:
    arguments = _arguments()
    jobs = [("tailrace", arguments.saves)]
    jobs += [("tensorstore", min(arguments.saves, arguments.tensorstore_saves))]
    jobs += [(peer, saves) for peer in ORBAX for saves in arguments.orbax_saves]
    rows: list[harness.Row] = []
    with harness.work_dir(arguments.dir) as work:
        for number in range(arguments.rounds):
            for peer, saves in jobs:
                if peer not in arguments.peers:
                    continue
                path = str(work / "run" / "checkpoint")
                harness.fresh_run(path)
                job = PartialJob(peer, saves, path, arguments.memory_budget, str(work / "result.json"))
                rows += _run(job, number, arguments.timeout)
    tables.print_table(f"partial saves of {NBYTES // 1024} KiB", HEADER, [_line(row) for row in rows])
    harness.finish("partial", rows, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXPLAIN, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--saves", type=int, default=10_000, help="of tailrace (default %(default)s)")
    add("--tensorstore-saves", type=int, default=1000, help="at most (default %(default)s)")
    add("--orbax-saves", type=_counts, default=(50, 100, 200), metavar="N,M", help="(default 50,100,200)")
    add("--peers", type=harness.names_of(PEERS), default=DEFAULT_PEERS, metavar="A,B", help=f"of {', '.join(PEERS)}")
    harness.add_common_options(parser, rounds=1, timeout=900)
    return parser.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _run(job: PartialJob, number: int, timeout: float) -> list[harness.Row]:
    rows = harness.run_child("benchmarks.partial_child", asdict(job), timeout, every=0.01)
    for row in rows:
        row |= {"peer": job.peer, "saves": job.saves, "round": number, "operation": f"{job.saves} saves"}
        harness.announce(row)
    return rows


def _line(row: harness.Row) -> list[str]:
    if "seconds" not in row:
        return [row["peer"], str(row["saves"]), *["-"] * (len(HEADER) - 3), "failed"]
    grown = row["last_seconds"] / row["first_seconds"]
    grown_median = row["last_median_seconds"] / row["first_median_seconds"]
    journal = row["journal_bytes_each"]
    return [
        row["peer"],
        str(row["saves"]),
        f"{row['first_seconds'] * 1e3:.2f}",
        f"{row['last_seconds'] * 1e3:.2f}",
        f"{grown:.2f} ({grown_median:.2f})",
        f"{row['raw_first_seconds'] * 1e3:.2f}, {row['raw_last_seconds'] * 1e3:.2f}",
        ", ".join(f"{row[f'{end}_median_seconds'] / row[f'raw_{end}_seconds']:.2f}" for end in ("first", "last")),
        "-" if journal is None else f"{journal:.0f}",
        f"{row['beyond_bytes_each']:.0f}",
        f"{row['commit_seconds']:.3f}",
        f"{row['total_seconds']:.1f}",
        str(row["files"]),
        "ok" if row["ok"] else "failed",
    ]


if __name__ == "__main__":
    main()
