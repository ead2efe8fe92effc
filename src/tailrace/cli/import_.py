"""`tailrace import`: a foreign model becomes a checkpoint."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import Annotated

import typer

from tailrace.cli.reporting import data_size, memory_size, reporting, rerun_command
from tailrace.errors import BudgetError
from tailrace.flow.budget import DEFAULT_BUDGET, parse_bytes


class Recipe(StrEnum):
    """How foreign names become keys."""

    identity = "identity"


class Compression(StrEnum):
    """How chunks are stored."""

    none = "none"
    zstd = "zstd"


def _parse_memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except BudgetError as error:
        raise typer.BadParameter(str(error)) from error


def import_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A .safetensors file, or the directory of a Hugging Face model.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Where the checkpoint will be; parents are created.")],
    memory: Annotated[
        int,
        typer.Option(parser=_parse_memory, metavar="SIZE", help="Most host memory in flight, such as 64MiB or 2GiB."),
    ] = DEFAULT_BUDGET,  # type: ignore[assignment]  # typer parses defaults, too
    recipe: Annotated[Recipe, typer.Option(help="identity: every tensor under its own name.")] = Recipe.identity,
    flat: Annotated[
        bool, typer.Option("--flat", help="Keep names whole, instead of splitting them at '.' into nested keys.")
    ] = False,
    compression: Annotated[
        Compression, typer.Option(help="zstd makes integers smaller; float weights gain little.")
    ] = Compression.none,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is at OUT.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what an unfinished import has written, and begin again.")
    ] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Resume although another host's writer may hold OUT; be sure it is dead.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Turn a Hugging Face model into an Orbax checkpoint, in a fixed amount of memory.

    Interrupted or killed, it leaves nothing at OUT that looks like a checkpoint; run the same command again and it
    goes on where it was. Run once more after it is done, it says so and does nothing.

    [bold]tailrace import ./Qwen3-0.6B ckpt/qwen[/bold]

    [bold]tailrace import model.safetensors ckpt/model --memory 64MiB --flat[/bold]
    """
    resume = rerun_command(without=("--restart", "--takeover"))
    with reporting(when_interrupted=f"Nothing is lost; to resume:\n  {resume}"):
        from tailrace.cli.progress import ByteProgress
        from tailrace.huggingface.importer import import_model
        from tailrace.testing.peak import PeakMemory

        begin = time.monotonic()
        with PeakMemory() as peak, ByteProgress("importing", quiet=quiet, peak=peak, budget_bytes=memory) as progress:
            report = import_model(
                source,
                out,
                memory_budget=memory,
                flat=flat,
                compression=None if compression is Compression.none else compression.value,
                overwrite=overwrite,
                restart=restart,
                takeover=takeover,
                progress=progress,
            )
        seconds = time.monotonic() - begin
        if quiet:
            return
        what = f"{report.leaves} leaves, {data_size(report.nbytes)}"
        if report.already_there:
            print(f"{out}: already holds this import ({recipe.value}) of {source}: {what}. Nothing to do.")
            return
        if report.resumed_bytes:
            print(f"resumed: {data_size(report.resumed_bytes)} were there already")
        rate = (report.nbytes - report.resumed_bytes) / seconds / 1e9
        print(f"{out}: {what} in {seconds:.2f} s, {rate:.2f} GB/s")
        print(f"memory: peak {memory_size(peak.peak_bytes)} above the start, budget {memory_size(memory)}")
        sys.stdout.flush()
