"""What the children of the crash tests do. Each step is data, so that the tests can do it to a model, too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

import tailrace
from tailrace.checkpoint import publish
from tailrace.flow.regions import Region
from tailrace.testing.faults import note
from tailrace.testing.model import Model

Step = tuple[Any, ...]
BUDGET = "8MiB"
WARM = (tailrace.Writer, tailrace.save, tailrace.fork)  # imported when first used: here, not in every child

# Regions cut chunks, overlap before and after flushes, and complete chunks that were spilled; a leaf is deleted, one
# declared otherwise, one replaced by a text.
FIRST: list[Step] = [
    ("declare", "layers/a", (5, 7), "int32", (2, 3)),
    ("declare", "b", (40,), "float32", (16,)),
    ("declare", "gone", (6,), "int8", (6,)),
    ("write", "layers/a", (0, 0), (3, 5), 1),
    ("write", "gone", (0,), (4,), 2),
    ("text", "note", "first"),
    ("flush",),
    ("write", "layers/a", (1, 1), (3, 6), 3),
    ("write", "b", (0,), (16,), 4),
    ("delete", "gone"),
    ("declare", "b", (50,), "float32", (16,)),
    ("write", "b", (3,), (20,), 5),
    ("metadata", {"step": 1}),
    ("flush",),
]
SECOND: list[Step] = [
    ("write", "layers/a", (0, 0), (5, 4), 6),
    ("write", "b", (0,), (50,), 7),
    ("write", "b", (10,), (5,), 8),
    ("text", "note", "second"),
    ("flush",),
    ("write", "layers/a", (2, 3), (3, 4), 9),
    ("write", "layers/a", (0, 4), (2, 3), 10),
    ("metadata", {"step": 2}),
]
OLD: list[Step] = [("declare", "old", (30,), "int16", (8,)), ("write", "old", (0,), (30,), 11)]
CHANGE: list[Step] = [
    ("write", "layers/a", (1, 1), (1, 1), 12),
    ("flush",),
    ("declare", "more", (9,), "uint8", (4,)),
    ("write", "more", (0,), (9,), 13),
    ("delete", "note"),
]


def values(shape: tuple[int, ...], seed: int, dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Numbers that tell which write they are from."""
    return (np.arange(int(np.prod(shape))).reshape(shape) % 8 + 8 * (seed % 15)).astype(dtype)


def do(writer: tailrace.Writer, steps: list[Step], first: int = 0) -> None:
    """Carry steps out, noting the number of each flush that has returned."""
    for number, (what, *args) in enumerate(steps, first):
        if what == "declare":
            key, shape, dtype, chunk_shape = args
            writer.declare(key, shape=shape, dtype=dtype, chunk_shape=chunk_shape)
        elif what == "write":
            key, start, shape, seed = args
            leaf = writer.declare(key, **_declaration(steps[: number - first], key))
            leaf.write(Region(start, shape), values(shape, seed, leaf.dtype))
        elif what == "text":
            writer.set_text(*args)
        elif what == "delete":
            if args[0] in set(writer.keys()):
                writer.delete(*args)
        elif what == "metadata":
            writer.set_metadata(*args)
        else:
            writer.flush()
            note(f"flushed {number}")


def _declaration(earlier: list[Step], key: str) -> dict[str, Any]:
    """How a leaf was last declared, in these steps or in FIRST."""
    for what, *args in [*FIRST, *earlier][::-1]:
        if what == "declare" and args[0] == key:
            return {"shape": args[1], "dtype": args[2], "chunk_shape": args[3]}
    raise AssertionError(key)


def model_of(steps: list[Step], start: Model | None = None) -> Model:
    """What is there after these steps."""
    model = start.copy() if start is not None else Model()
    for what, *args in steps:
        if what == "declare":
            model.declare(*args)
        elif what == "write":
            key, at, shape, seed = args
            model.write(key, Region(at, shape), values(shape, seed, model.leaves[key].values.dtype))
        elif what == "text":
            model.set_text(*args)
        elif what == "delete":
            if args[0] in model:
                model.delete(*args)
        elif what == "metadata":
            model.metadata = args[0]
    return model


def _writer(path: str, **options: Any) -> tailrace.Writer:
    return tailrace.Writer(path, memory_budget=BUDGET, threads=1, **options)


def write_new(path: str) -> None:
    """A new checkpoint, with flushes on the way."""
    writer = _writer(path)
    do(writer, [*FIRST, *SECOND])
    writer.finish()
    note("committed")


def overwrite(path: str) -> None:
    """The same in place of an older one."""
    writer = _writer(path, overwrite=True)
    do(writer, [*FIRST, *SECOND])
    writer.finish()
    note("committed")


def begin(path: str) -> None:
    """A writer that dies after its last flush."""
    do(_writer(path), FIRST)


def resume(path: str) -> None:
    """Going on from `begin` to the end."""
    writer = _writer(path, resume=True)
    do(writer, SECOND, first=len(FIRST))
    writer.finish()
    note("committed")


def rerun(path: str, overwrite: bool) -> None:
    """The same program once more, after a death."""
    try:
        writer = _writer(path, resume=True, overwrite=overwrite)
    except tailrace.errors.CheckpointExistsError:  # it had been sealed
        return
    do(writer, [*FIRST, *SECOND])
    writer.finish()


def abort(path: str) -> None:
    """Going on from `begin`, and then not."""
    writer = _writer(path, resume=True)
    do(writer, SECOND, first=len(FIRST))
    writer.abort()
    note("aborted")


def fork(path: str, source: str) -> None:
    """A checkpoint that begins as another, in part written over."""
    try:
        writer = tailrace.fork(source, path, memory_budget=BUDGET, resume=True)
    except tailrace.errors.CheckpointExistsError:  # it had been sealed
        return
    note("forked")
    do(writer, CHANGE)
    writer.finish()
    note("committed")


def save(path: str) -> None:
    """The plain function, over an older checkpoint."""
    arrays = {"a": values((20, 3), 14, "float64"), "b": values((), 3, "int8"), "text": "new"}
    tailrace.save(path, arrays, overwrite=True, memory_budget=BUDGET)
    note("committed")


def recover(path: str) -> None:
    """Finish what was sealed."""
    publish.recover(Path(path))


def write_from_threads(path: str, threads: int) -> None:
    """Several threads that write rows, flush, and note each row that a flush acknowledged; then commit."""
    writer = tailrace.Writer(path, memory_budget=BUDGET, resume=True)
    leaf = writer.declare("rows", shape=(400 * threads, 3000), dtype="int32", chunk_shape=(5, 1700))

    def work(mine: int) -> None:
        for row in range(mine, 400 * threads, threads):
            leaf[row] = row_values(row, 3000)
            if row % 2 == 0:
                writer.flush()
                note(str(row))

    running = [threading.Thread(target=work, args=(mine,)) for mine in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    writer.finish()
    note("committed")


def row_values(row: int, length: int) -> np.ndarray[Any, np.dtype[Any]]:
    """What a row of `write_from_threads` holds."""
    return np.arange(length, dtype=np.int32) + 10_000 * (row + 1)


def beside(path: Path) -> list[str]:
    """Everything in the directory that the checkpoint is in."""
    return sorted(entry.name for entry in path.parent.iterdir())
