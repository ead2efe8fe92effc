"""`tailrace`: the commands, and what each exit code means."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli import import_, inspect
from tailrace.cli.reporting import set_debug

app = typer.Typer(
    name="tailrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is for --debug and for mistakes in tailrace
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed (the reason is the last line on stderr), 2 wrong usage, 130 interrupted.",
)


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Checkpoints of any size through a small, fixed amount of memory.

    Import a Hugging Face model as an Orbax checkpoint, and look at or verify any Orbax checkpoint; neither needs JAX.

    [bold]tailrace import ./Llama-3.1-8B ckpt/llama --memory 256MiB[/bold]

    [bold]tailrace ls ckpt/llama[/bold]

    [bold]tailrace verify ckpt/llama[/bold]
    """
    del version  # seen by its callback
    set_debug(debug)


def version() -> None:
    """Show the version."""
    import importlib.metadata

    print(f"tailrace {importlib.metadata.version('tailrace')}")


app.command("import")(import_.import_command)
app.command("ls")(inspect.ls)
app.command("show")(inspect.show)
app.command("verify")(inspect.verify)
app.command("version")(version)
