"""`tailrace ls`, `show` and `verify`: look at a checkpoint, ours or any that Orbax wrote."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections import Counter
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.reporting import data_size, memory_size, printable, reporting
from tailrace.errors import ShapeError
from tailrace.format.keys import KeyPath, display

if TYPE_CHECKING:
    from tailrace.checkpoint.leaf import Leaf
    from tailrace.checkpoint.reader import Checkpoint

Index = tuple[int | slice | EllipsisType, ...]
PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: the directory that holds _METADATA.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

_MAX_SHOWN_BYTES = 64 << 20  # what --index selects is printed from memory
_PREVIEW = 6  # elements along each of the last two axes


def ls(
    path: PathArgument,
    glob: Annotated[
        str, typer.Argument(metavar="[GLOB]", help="Which keys: a prefix such as params/decoder, or a pattern.")
    ] = "*",
    as_json: JsonOption = False,
) -> None:
    """List the leaves of a checkpoint: key, shape, dtype and bytes, and their totals.

    [bold]tailrace ls ckpt/llama[/bold]

    [bold]tailrace ls ckpt/llama 'model/layers/*/mlp/*'[/bold]
    """
    with reporting(), _open(path) as checkpoint:
        rows = [_row(checkpoint, key) for key in checkpoint.paths() if _matches(display(key), glob)]
        nbytes = sum(row["bytes"] for row in rows)
        if as_json:
            print(
                json.dumps(
                    {"path": str(checkpoint.path), "leaves": rows, "totals": {"leaves": len(rows), "bytes": nbytes}}
                )
            )
        else:
            _print_table([("KEY", "SHAPE", "DTYPE", "BYTES"), *map(_cells, rows)])
            of = "" if len(rows) == len(checkpoint) else f" of {len(checkpoint)}"
            print(f"{len(rows)}{of} leaves, {data_size(nbytes)} ({nbytes} bytes)")


def show(
    path: PathArgument,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="A leaf, such as model/norm/weight.")] = None,
    index: Annotated[
        str | None, typer.Option(metavar="INDEX", help="Which values, as numpy would index them: '0, :5' or '..., -1'.")
    ] = None,
) -> None:
    """Show a leaf and some of its values, reading only the chunks it takes; without KEY, the checkpoint itself.

    [bold]tailrace show ckpt/llama[/bold]

    [bold]tailrace show ckpt/llama model/norm/weight --index ':8'[/bold]
    """
    if index is not None and key is None:
        raise typer.BadParameter("--index needs a KEY.")
    selected = None if index is None else _parse_index(index)
    with reporting(), _open(path) as checkpoint:
        if key is None:
            _show_checkpoint(checkpoint)
            return
        leaf = checkpoint[key]
        if isinstance(leaf, str):
            print(f"{printable(key)}: text of {len(leaf)} characters\n{printable(leaf)}")
        else:
            _show_leaf(leaf, selected)


def verify(
    path: PathArgument,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Read every byte of a checkpoint and check it: any flipped bit, missing or truncated file is found and named.

    [bold]tailrace verify ckpt/llama && echo intact[/bold]
    """
    with reporting(), _open(path) as checkpoint:
        from tailrace.cli.progress import ByteProgress
        from tailrace.testing.peak import PeakMemory

        total = sum(_row(checkpoint, key)["bytes"] for key in checkpoint.paths())
        done = 0
        with (
            PeakMemory() as peak,
            ByteProgress(
                "verifying", quiet=quiet or as_json, peak=peak, budget_bytes=checkpoint.budget.limit_bytes
            ) as progress,
        ):

            def advance(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                progress(done, total)

            report = checkpoint.verify(progress=advance)
        unprotected = list(report.unprotected)
        if as_json:
            totals = {"leaves": report.leaves, "bytes": report.bytes, "seconds": round(report.seconds, 3)}
            print(json.dumps({"path": str(checkpoint.path), "ok": True, **totals, "unprotected": unprotected}))
        elif not quiet:
            amount = f"{report.leaves} leaves, {data_size(report.bytes)} in {report.seconds:.2f} s"
            print(f"{checkpoint.path}: intact. {amount}")
            if unprotected:
                some = ", ".join(map(printable, unprotected[:3]))
                print(f"{len(unprotected)} leaves could be decoded, but were saved without checksums: {some} ...")
            print(f"memory: peak {memory_size(peak.peak_bytes)} above the start")


def _open(path: str) -> Checkpoint:
    from tailrace.checkpoint import reader

    return reader.open(path)


def _matches(key: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(key, glob) or fnmatch.fnmatchcase(key, glob.rstrip("/") + "/*")


def _row(checkpoint: Checkpoint, path: KeyPath) -> dict[str, Any]:
    leaf = checkpoint[path]
    if isinstance(leaf, str):
        return {"key": display(path), "kind": "text", "shape": None, "dtype": "str", "bytes": len(leaf.encode())}
    return {
        "key": display(path),
        "kind": leaf.kind,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "bytes": leaf.nbytes,
        "chunk_shape": list(leaf.chunk_shape),
    }


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    shape = "" if row["shape"] is None else f"({', '.join(map(str, row['shape']))})"
    return printable(row["key"]), shape, row["dtype"], str(row["bytes"])


def _print_table(rows: list[tuple[str, str, str, str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for key, shape, dtype, nbytes in rows:
        print(f"{key:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {nbytes:>{widths[3]}}")


def _show_checkpoint(checkpoint: Checkpoint) -> None:
    rows = [_row(checkpoint, key) for key in checkpoint.paths()]
    counts = Counter(row["dtype"] for row in rows)
    print(f"{checkpoint.path}: {len(rows)} leaves, {data_size(sum(row['bytes'] for row in rows))}")
    print(f"dtypes: {', '.join(f'{count} {dtype}' for dtype, count in counts.most_common()) or 'none'}")
    for name, value in (("source", checkpoint.source), ("metadata", checkpoint.metadata)):
        if value:
            print(f"{name}: {json.dumps(value, indent=2, default=str)}")  # ASCII: nothing in it moves the cursor


def _show_leaf(leaf: Leaf, index: Index | None) -> None:
    print(f"{printable(leaf.key)}: {leaf.dtype.name} of shape {leaf.shape}, {data_size(leaf.nbytes)}")
    print(f"stored as {printable(leaf.name)}, chunks {leaf.chunk_shape}, codecs {_codec_names(leaf)}, kind {leaf.kind}")
    if index is None:
        index = (0,) * (leaf.ndim - 2) + tuple(slice(_PREVIEW) for _ in leaf.shape[-2:])
        if 0 in leaf.shape:
            return
    from tailrace.checkpoint.indexing import select

    nbytes = math.prod(select(index, leaf.shape).shape) * leaf.dtype.itemsize
    if nbytes > _MAX_SHOWN_BYTES:
        raise ShapeError(
            f"leaf {leaf.key!r}: the index selects {nbytes} bytes, at most {_MAX_SHOWN_BYTES} are shown. Select fewer."
        )
    print(f"[{', '.join(map(_index_text, index))}]:")
    print(leaf[index])


def _codec_names(leaf: Leaf) -> str:
    return " + ".join(codec.name for codec in leaf.codecs) or "that only TensorStore reads"


def _parse_index(text: str) -> Index:
    parts: list[int | slice | EllipsisType] = []
    for part in text.strip().strip("[]").split(","):
        numbers = re.fullmatch(r"\s*([+-]?\d+)?\s*(?:(:)\s*([+-]?\d+)?\s*(?:(:)\s*([+-]?\d+)?)?)?\s*", part)
        if part.strip() == "...":
            parts.append(...)
        elif numbers is None or not part.strip():
            raise typer.BadParameter(f"--index {text!r}: {part!r} is no integer, slice or '...'.")
        elif numbers[2] is None:
            parts.append(int(numbers[1]))
        else:
            start, stop, step = (None if n is None else int(n) for n in numbers.group(1, 3, 5))
            if step == 0:
                raise typer.BadParameter(f"--index {text!r}: a step cannot be zero.")
            parts.append(slice(start, stop, step))
    return tuple(parts)


def _index_text(part: int | slice | EllipsisType) -> str:
    if isinstance(part, slice):
        ends = [part.start, part.stop] + ([] if part.step is None else [part.step])
        return ":".join("" if n is None else str(n) for n in ends)
    return "..." if part is ... else str(part)
