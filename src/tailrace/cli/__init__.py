"""The command line: `run` is the console script."""

import sys


def run() -> None:
    """Run `tailrace`; an interrupt ends it with exit code 130, also while Python is still importing."""
    try:
        from tailrace.cli.main import app

        app()
    except KeyboardInterrupt:  # before or after a command's own work
        sys.exit(130)
