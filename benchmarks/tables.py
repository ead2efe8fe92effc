"""Rows to markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]

HEADER = ("peer", "seconds, least / median", "x raw", "CPU s", "extra MB", "ok", "files", "MB on disk")


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    print(f"\n### {title}\n")
    for line in (header, ["-" * width for width in widths], *lines):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("| " + " | ".join(cells) + " |")


def print_operations(rows: list[Row]) -> None:
    """One table for each state and operation, a line for each peer."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row["state"], row["operation"]), {}).setdefault(row["peer"], []).append(row)
    for (state, operation), peers in groups.items():
        raw = {row["round"]: row["seconds"] for row in peers.get("raw", ()) if row["ok"]}
        width = len(HEADER) if operation == "save" else HEADER.index("files")
        lines = [(peer, *_cells(measured, raw))[:width] for peer, measured in peers.items()]
        print_table(f"{state}: {operation}", HEADER[:width], lines)


def _cells(rows: list[Row], raw: dict[int, float]) -> list[str]:
    good = [row for row in rows if row["ok"]]
    ratios = [row["seconds"] / raw[row["round"]] for row in good if row["round"] in raw]
    seconds = [row["seconds"] for row in good]
    return [
        f"{min(seconds):.3f} / {median(seconds):.3f}" if seconds else "-",
        f"{median(ratios):.2f}" if ratios else "-",
        middle(good, "cpu_seconds", "{:.2f}".format),
        middle(good, "extra_bytes", lambda nbytes: f"{nbytes / 1e6:.0f}"),
        f"{len(good)}/{len(rows)}",
        middle(good, "files", "{:.0f}".format),
        middle(good, "disk_bytes", lambda nbytes: f"{nbytes / 1e6:.1f}"),
    ]


def middle(rows: list[Row], field: str, show: Callable[[float], str]) -> str:
    """The median of a field, shown, or a dash where nobody has it."""
    values = [row[field] for row in rows if row.get(field) is not None]
    return show(median(values)) if values else "-"
