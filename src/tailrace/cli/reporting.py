"""What every command shares: exit codes, one-line reasons, and how numbers and names are printed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tailrace.errors import TailraceError

FAILED = 1
USAGE = 2  # typer's own code for a wrong command line
INTERRUPTED = 130

_debug = False


def set_debug(on: bool) -> None:
    """Let errors through with their traceback."""
    global _debug
    _debug = on


@contextmanager
def reporting(when_interrupted: str = "") -> Iterator[None]:
    """Run a command's work; what goes wrong becomes one line on stderr and an exit code.

    An error of ours or of the file system exits 1, Ctrl-C exits 130 and says `when_interrupted`. Anything else is a
    mistake in tailrace and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted. {when_interrupted}".rstrip(), file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `tailrace ls ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while it exits
        raise typer.Exit(FAILED) from None
    except (TailraceError, OSError) as error:
        if _debug:
            raise
        print(f"tailrace: {one_line(error)}", file=sys.stderr)
        raise typer.Exit(FAILED) from None


def one_line(error: BaseException) -> str:
    """The error's message on one line, its control characters made visible."""
    return printable(" ".join(str(error).split()) or type(error).__name__)


def rerun_command(*, without: tuple[str, ...]) -> str:
    """The command line that was typed, less some options, quoted for a shell."""
    return shlex.join(["tailrace", *(argument for argument in sys.argv[1:] if argument not in without)])


def printable(text: str) -> str:
    """The text with control characters escaped: names come from strangers, and terminals obey them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def data_size(nbytes: float) -> str:
    """Bytes of data, in the decimal units that disks and networks are sold in: 90.9 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def memory_size(nbytes: int) -> str:
    """Bytes of memory, in the binary unit that budgets are given in: 64 MiB."""
    return f"{nbytes / (1 << 20):.0f} MiB"
