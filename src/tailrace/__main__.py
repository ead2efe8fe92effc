"""`python -m tailrace` is `tailrace`."""

from tailrace.cli import run

if __name__ == "__main__":
    run()
