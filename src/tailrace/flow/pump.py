"""The way of a byte, down: regions of a Source, cut to chunk borders, through the budget, into a leaf's chunks.

| step                                            | where                | where the byte is  | host memory held |
|-------------------------------------------------|----------------------|--------------------|------------------|
| 1 name the leaves, refuse bad ones              | tree/, huggingface/  | device, file       | 0                |
| 2 cut to pieces within the budget               | flow/regions         | same               | 0                |
| 3 wait for room                                 | flow/budget          | same               | reserved         |
| 4 read the piece (a host array is only viewed)  | a Source             | host               | piece            |
| 5 encode, append to a data file                 | storage/datafiles    | write buffer       | piece            |
| 6 give back                                     | flow/budget          | write buffer, disk | 0                |
| 7 sync, journal: acknowledged                   | checkpoint/ledger    | disk, invisible    | 0                |
| 8 index, metadata, sync, publish                | checkpoint/publish   | disk, visible      | O(keys)          |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from tailrace.flow.regions import Region, Shape

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]
PIECE_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20


def run(tasks: Iterable[T], work: Callable[[T], None], pool: ThreadPoolExecutor, threads: int) -> None:
    """Do `work` on every task on several threads, taking tasks one by one as threads come free.

    The first error stops the others after their current task and is raised; so does an interrupt of this thread.

    Not `parallel.run_jobs`, by which loads go: there the calling thread works too, and an interrupt that lands inside a
    write would close the writer for good. Here it only waits. And of several errors the first in time is the cause
    (a full disk), what comes after it a consequence (a lane that takes no more).
    """
    iterator = iter(tasks)
    taking = threading.Lock()
    stop = threading.Event()
    errors: list[BaseException] = []

    def worker() -> None:
        try:
            while not stop.is_set():
                with taking:
                    try:
                        task = next(iterator)
                    except StopIteration:
                        return
                work(task)
        except BaseException as error:
            errors.append(error)
            stop.set()
            raise

    running = [pool.submit(worker) for _ in range(threads)]
    try:
        wait(running, return_when=FIRST_EXCEPTION)
    finally:
        stop.set()
        wait(running)
    if errors:  # the first: the others may come of it
        raise errors[0]


def padded_blocks(chunk: Array, chunk_shape: Shape) -> Iterator[Array]:
    """The bytes of a whole chunk in C order as blocks; what the array lacks of `chunk_shape` is zeros.

    Blocks of a C-contiguous array are views of it, at most a row of blocks of other arrays is copied, 1 MiB at a time.
    """
    if chunk.shape == chunk_shape:
        yield from _blocks(chunk)
        return
    full_bytes = chunk.dtype.itemsize * int(np.prod(chunk_shape))
    if full_bytes <= BLOCK_BYTES or not chunk_shape[1:]:
        if chunk.shape[1:] == chunk_shape[1:]:
            yield from _blocks(chunk)
            yield from _zeros(full_bytes - chunk.nbytes)
            return
        whole = np.zeros(chunk_shape, chunk.dtype)
        whole[tuple(slice(0, n) for n in chunk.shape)] = chunk
        yield whole
        return
    if chunk.shape[1:] == chunk_shape[1:]:
        yield from _blocks(chunk)
    else:
        for row in chunk:
            yield from padded_blocks(row, chunk_shape[1:])
    yield from _zeros(full_bytes // chunk_shape[0] * (chunk_shape[0] - chunk.shape[0]))


def _blocks(array: Array) -> Iterator[Array]:
    if array.flags.c_contiguous or array.nbytes <= BLOCK_BYTES:
        yield array
    else:
        rows = max(1, BLOCK_BYTES // (array.nbytes // array.shape[0]))
        if rows > 1:
            for at in range(0, array.shape[0], rows):
                yield array[at : at + rows]
        else:
            for row in array:
                yield from _blocks(row)


_ZEROS = np.zeros(BLOCK_BYTES, np.uint8)


def _zeros(nbytes: int) -> Iterator[Array]:
    while nbytes > 0:
        yield _ZEROS[:nbytes]
        nbytes -= BLOCK_BYTES


def relative_slices(region: Region, origin: Shape) -> tuple[slice, ...]:
    """The numpy index of a region inside an array whose first element is at `origin`."""
    return region.relative_to(origin).slices
