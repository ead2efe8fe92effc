"""The raw limit: two threads, 16 MiB O_DIRECT writes from bounce buffers and fsync; buffered `preadv` to read."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.states import Array, Spec, State, leaf_bytes, total_bytes

BLOCK_BYTES = 16 << 20
SECTOR_BYTES = 4096  # O_DIRECT wants addresses, offsets and lengths in whole sectors
THREADS = 2
RECORD_BYTES = 150  # about what a journal needs for a write

Place = tuple[int, int, int, int]  # where in the stream of leaves, length, number of the file, where in it


def save(path: str, state: State) -> None:
    Path(path).mkdir()
    blocks = _blocks(x.reshape(-1).view(np.uint8) for x in state.values())
    lock = threading.Lock()

    def write(number: int) -> list[Place]:
        places: list[Place] = []
        bounce = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        file = _open_direct(f"{path}/{number}")
        end = 0
        while True:
            with lock:
                start, parts = next(blocks, (0, []))
            if not parts:
                break
            length = _gather(parts, np.frombuffer(bounce, np.uint8))
            _write_all(file, memoryview(bounce)[: -(-length // SECTOR_BYTES) * SECTOR_BYTES], end)
            places.append((start, length, number, end))
            end += length
        os.ftruncate(file, end)
        os.fsync(file)
        os.close(file)
        return places

    with ThreadPoolExecutor(THREADS) as pool:
        places = [place for written in pool.map(write, range(THREADS)) for place in written]
    Path(path, "index.json").write_text(json.dumps(places))


def load(path: str, spec: Spec) -> State:
    places: list[Place] = json.loads(Path(path, "index.json").read_text())
    stream = np.empty(total_bytes(spec), np.uint8)
    files = [os.open(f"{path}/{number}", os.O_RDONLY) for number in range(THREADS)]

    def read(place: Place) -> None:
        start, length, number, offset = place
        done = 0
        while done < length:
            done += os.preadv(files[number], [memoryview(stream)[start + done : start + length]], offset + done)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, sorted(places)))
    for file in files:
        os.close(file)
    return dict(_leaves(stream, spec))


class TwoFsyncs:
    """What a durable, resumable write cannot do without: data and fdatasync, then a record of it and fdatasync."""

    def __init__(self, directory: Path, payload: memoryview) -> None:
        self.payload = payload
        self.paths = [directory / "raw.data", directory / "raw.records"]

    def __enter__(self) -> TwoFsyncs:
        self.data, self.records = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in self.paths)
        return self

    def __call__(self) -> float:
        """Seconds of one more."""
        start = time.monotonic()
        os.write(self.data, self.payload)
        os.fdatasync(self.data)
        os.write(self.records, bytes(RECORD_BYTES))
        os.fdatasync(self.records)
        return time.monotonic() - start

    def __exit__(self, *_: object) -> None:
        for file, path in zip((self.data, self.records), self.paths, strict=True):
            os.close(file)
            path.unlink()


def _blocks(leaves: Iterable[Array]) -> Iterator[tuple[int, list[Array]]]:
    """The leaves as one stream, cut every 16 MiB: where each block starts, and the views it is gathered from."""
    start, parts, room = 0, [], BLOCK_BYTES
    for leaf in leaves:
        while leaf.size:
            part, leaf = leaf[:room], leaf[room:]
            parts.append(part)
            room -= part.size
            if not room:
                yield start, parts
                start, parts, room = start + BLOCK_BYTES, [], BLOCK_BYTES
    if parts:
        yield start, parts


def _gather(parts: list[Array], out: Array) -> int:
    end = 0
    for part in parts:
        out[end : end + part.size] = part
        end += part.size
    return end


def _open_direct(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)  # this file system has no O_DIRECT


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _leaves(stream: Array, spec: Spec) -> Iterator[tuple[str, Any]]:
    start = 0
    for name, (shape, dtype) in spec.items():
        end = start + leaf_bytes(shape, dtype)
        yield name, stream[start:end].view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(shape)
        start = end
