"""TensorStore used well: zarr3 in one OCDBT database, 16 MiB chunks, no compression, a bounded window in flight."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.states import Array, Spec, State

CHUNK_BYTES = 16 << 20
SMALL_BYTES = 1 << 20
WRITES_IN_FLIGHT = 16
READS_IN_FLIGHT = 16
CONFIG = {"compression": {"id": "zstd"}, "max_inline_value_bytes": 1024}  # inline spares a small leaf a read
# Nodes of 16 KiB keep a commit flat however many came before it; the default node holds all keys and grows.
MANY_COMMITS = CONFIG | {"max_decoded_node_bytes": 16384}


class Engine:
    """One context for all leaves, so that the limits hold over all of them."""

    def __init__(self) -> None:
        import tensorstore

        self.ts = tensorstore
        self.context = tensorstore.Context(
            {
                "file_io_concurrency": {"limit": 32},
                "data_copy_concurrency": {"limit": 2},
                "cache_pool": {"total_bytes_limit": 100 << 20},
            }
        )

    def save(self, path: str, state: State) -> None:
        """Leaves under 1 MiB share one transaction, which holds its payload in memory; larger ones go straight."""
        Path(path).mkdir()
        transaction = self.ts.Transaction(atomic=False)
        opening = []
        for name, leaf in state.items():
            shared = transaction if leaf.nbytes < SMALL_BYTES else None
            opening.append((leaf, shared, self._create(path, name, leaf, shared, CONFIG)))
        copied: list[Any] = []
        in_flight: deque[Any] = deque()
        for leaf, shared, opened in opening:
            array = opened.result()
            for rows in _row_ranges(leaf.shape, leaf.dtype.itemsize):
                write = array[rows].write(leaf[rows], can_reference_source_data_indefinitely=True)
                if shared is not None:
                    copied.append(write.copy)
                    continue
                in_flight.append(write.commit)
                if len(in_flight) > WRITES_IN_FLIGHT:
                    in_flight.popleft().result()
        for copy in copied:
            copy.result()
        committed = transaction.commit_async()
        for commit in in_flight:
            commit.result()
        committed.result()

    def load(self, path: str, spec: Spec) -> State:
        """Chunk by chunk into the result: reading whole arrays would take them twice."""
        opening = [(name, self._open(path, name)) for name in spec]
        loaded: State = {}
        in_flight: deque[Any] = deque()
        for name, opened in opening:
            array = opened.result()
            leaf = loaded[name] = np.empty(array.shape, array.dtype.numpy_dtype)
            target = self.ts.array(leaf, context=self.context)
            rows = array.chunk_layout.read_chunk.shape[0]
            for start in range(0, leaf.shape[0], rows):
                part = slice(start, min(start + rows, leaf.shape[0]))
                in_flight.append(target[part].write(array[part]))
                if len(in_flight) > READS_IN_FLIGHT:
                    in_flight.popleft().result()
        for read in in_flight:
            read.result()
        return loaded

    def save_one(self, path: str, name: str, leaf: Array) -> None:
        """One leaf, one commit."""
        transaction = self.ts.Transaction(atomic=True)
        array = self._create(path, name, leaf, transaction, MANY_COMMITS).result()
        array.write(leaf).copy.result()
        transaction.commit_async().result()

    def _open(self, path: str, name: str) -> Any:
        return self.ts.open({"driver": "zarr3", "kvstore": _database(path, name)}, open=True, context=self.context)

    def _create(self, path: str, name: str, leaf: Array, transaction: Any, config: dict[str, Any]) -> Any:
        rows = _chunk_rows(leaf.shape, leaf.dtype.itemsize)
        chunk = {"name": "regular", "configuration": {"chunk_shape": [rows, *leaf.shape[1:]]}}
        metadata = {
            "shape": list(leaf.shape),
            "data_type": leaf.dtype.name,
            "chunk_grid": chunk,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        database = _database(path, name) | {"config": config, "target_data_file_size": 2**31 - 1}
        spec = {"driver": "zarr3", "kvstore": database, "metadata": metadata}
        return self.ts.open(spec, create=True, open=True, context=self.context, transaction=transaction)


def _database(path: str, name: str) -> dict[str, Any]:
    """Named as Orbax names leaves, so that what it wrote can be read too."""
    return {"driver": "ocdbt", "base": f"file://{path}/", "path": name.replace("/", ".") + "/"}


def _chunk_rows(shape: tuple[int, ...], itemsize: int) -> int:
    return max(1, min(shape[0], CHUNK_BYTES // (math.prod(shape[1:]) * itemsize)))


def _row_ranges(shape: tuple[int, ...], itemsize: int) -> list[slice]:
    rows = _chunk_rows(shape, itemsize)
    return [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]
