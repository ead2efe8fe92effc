"""The load pump: what it reads, in how many calls, with how much memory, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from crc32c import crc32c

from tailrace.errors import CorruptionError
from tailrace.flow.budget import MemoryBudget
from tailrace.flow.fetch import Request, fetch
from tailrace.flow.regions import Region
from tailrace.format import zarr
from tailrace.format.ocdbt import DataFile, Indirect
from tailrace.storage.reading import OpenFiles

MIB = 1 << 20


class CountingFiles(OpenFiles):
    """Counts the calls and bytes of reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls = 0
        self.nbytes = 0

    def read_ranges(self, name: str, offset: int, buffers: Sequence[Any]) -> None:
        """Count, then read."""
        self.calls += 1
        self.nbytes += sum(buffer.nbytes for buffer in buffers)
        super().read_ranges(name, offset, buffers)


class Store:
    """Leaves in one data file, their chunks written here by hand: elements, zstd if asked, crc32c."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index: dict[bytes, bytes | Indirect] = {}
        self.metadata: dict[str, zarr.ArrayMetadata] = {}
        self.file = root / "data"
        self.file.touch()
        self.files = CountingFiles(root)
        self.budget = MemoryBudget("64MiB")

    def put(self, name: str, array: Any, chunk: tuple[int, ...], *, zstd: bool = False, crc: bool = True) -> None:
        """Append a leaf, chunk by chunk."""
        codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        codecs += [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}] * zstd + [
            {"name": "crc32c"}
        ] * crc
        fields = {
            "zarr_format": 3, "node_type": "array", "shape": array.shape, "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default"}, "codecs": codecs, "fill_value": 0,
        }  # fmt: skip
        self.metadata[name] = zarr.parse(json.dumps(fields).encode(), 3)
        with self.file.open("ab") as file:
            for place in np.ndindex(*(-(-n // c) for n, c in zip(array.shape, chunk, strict=True))):
                padded = np.zeros(chunk, array.dtype)
                part = array[tuple(slice(i * c, i * c + c) for i, c in zip(place, chunk, strict=True))]
                padded[tuple(map(slice, part.shape))] = part
                data = zstandard.compress(padded.tobytes()) if zstd else padded.tobytes()
                data += crc32c(data).to_bytes(4, "little") * crc
                key = "/".join([name, "c", *map(str, place)]).encode()
                self.index[key] = Indirect(DataFile(b"", b"data"), file.tell(), len(data))
                file.write(data)

    def request(self, name: str, region: Region | None = None, **options: Any) -> Request:
        """A request for a region into a new array."""
        meta = self.metadata[name]
        region = region or Region.whole(meta.shape)
        return Request(name, name, meta, region, np.empty(region.shape, meta.dtype), True, **options)

    def fetch(self, *requests: Request, progress: Callable[[int], None] | None = None) -> None:
        """Fetch them all."""
        fetch(requests, self.index.get, self.files, self.budget, progress=progress)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    store = Store(tmp_path)
    yield store
    store.files.close()


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    """Random ints."""
    return np.random.default_rng(7).integers(0, 2**31, shape, np.int32)


def test_many_small_leaves_come_in_few_calls(store: Store) -> None:
    """1,000 neighbours of 4 KB are read in a handful of calls, each byte once."""
    arrays = {f"x{i:04}": numbers(32, 32) + i for i in range(1000)}
    for name, array in arrays.items():
        store.put(name, array, (32, 32))
    requests = [store.request(name) for name in arrays]
    store.fetch(*requests)

    assert all(np.array_equal(request.out, arrays[request.name]) for request in requests)
    assert store.files.calls <= 8
    assert store.files.nbytes == store.file.stat().st_size


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("chunk", [(100, 300), (64, 300), (37, 41), (1, 300), (128, 512)], ids=str)
def test_any_region_into_any_strides(store: Store, zstd: bool, crc: bool, chunk: tuple[int, int]) -> None:
    """Regions that cut chunks anywhere go to destinations of any strides."""
    array = numbers(100, 300)
    store.put("x", array, chunk, zstd=zstd, crc=crc)
    regions = [
        Region((0, 0), (100, 300)),
        Region((3, 0), (50, 300)),
        Region((60, 40), (40, 3)),
        Region((99, 299), (1, 1)),
    ]
    wide = np.zeros((300, 200), np.int32).T[::2]
    requests = [store.request("x", region) for region in regions]
    store.fetch(*requests, store.request("x")._replace(out=wide))

    assert all(np.array_equal(request.out, array[request.region.slices]) for request in requests)
    assert np.array_equal(wide, array)


def test_large_chunks_stream_in_blocks(store: Store) -> None:
    """A chunk of 12 MiB, edge padding included, goes straight home: memory is a block, not a chunk."""
    array = numbers(2000, 1024)
    store.put("x", array, (3072, 1024))
    request = store.request("x")
    store.fetch(request)

    assert np.array_equal(request.out, array)
    assert store.budget.peak_bytes <= 4 * MIB


def test_small_part_of_a_large_chunk_is_read_alone(store: Store) -> None:
    """A sparing request for 8 elements of a 16 MiB chunk reads 32 bytes; one that is not verifies the chunk."""
    array = numbers(4096, 1024)
    store.put("x", array, (4096, 1024))
    sparing = store.request("x", Region((17, 3), (1, 8)), sparing=True)
    store.fetch(sparing)
    read = store.files.nbytes
    verified = store.request("x", Region((17, 3), (1, 8)))
    store.fetch(verified)

    assert read == 32
    assert store.files.nbytes - read == store.file.stat().st_size
    assert np.array_equal(sparing.out, array[17:18, 3:11])
    assert np.array_equal(verified.out, array[17:18, 3:11])


@pytest.mark.parametrize("zstd", [False, True])
def test_many_regions_of_one_chunk_read_it_once(store: Store, zstd: bool) -> None:
    """Eight shards of one chunk are served by one verified pass over it."""
    array = numbers(64, 8192)
    store.put("x", array, (64, 8192), zstd=zstd)
    requests = [store.request("x", Region((i * 8, 0), (8, 8192))) for i in range(8)]
    store.fetch(*requests)

    assert all(np.array_equal(request.out, array[request.region.slices]) for request in requests)
    assert store.files.nbytes == store.file.stat().st_size


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("chunk", [(8, 16), (400, 1024)], ids=["small", "large"])
def test_flipped_bit_anywhere_in_a_chunk(store: Store, zstd: bool, chunk: tuple[int, int]) -> None:
    """Payload, padding or checksum: a flipped bit is a CorruptionError with leaf, region and file."""
    array = numbers(chunk[0] - 3, chunk[1])
    store.put("x", array, chunk, zstd=zstd)
    size = store.file.stat().st_size
    for position in {0, size // 3, size - 5, size - 1}:
        data = bytearray(store.file.read_bytes())
        data[position] ^= 4
        store.file.write_bytes(data)
        with pytest.raises(
            CorruptionError, match=rf"leaf 'x', region \[0:{array.shape[0]}, 0:{array.shape[1]}\]: file data"
        ):
            store.fetch(store.request("x"))
        data[position] ^= 4
        store.file.write_bytes(data)
    store.fetch(store.request("x"))


@pytest.mark.parametrize("shape", [(8, 16), (400, 1024)], ids=["small", "large"])
def test_truncated_file(store: Store, shape: tuple[int, int]) -> None:
    """A data file that is too short is named, with both lengths."""
    store.put("x", numbers(*shape), shape)
    os.truncate(store.file, 100)

    with pytest.raises(CorruptionError, match=r"leaf 'x'.*/data has 100 bytes.*truncated"):
        store.fetch(store.request("x"))


def test_missing_chunk_of_a_complete_leaf(store: Store) -> None:
    """Where every chunk was written, a missing one is damage."""
    store.put("x", numbers(4, 4), (2, 4))
    del store.index[b"x/c/1/0"]

    with pytest.raises(CorruptionError, match=r"leaf 'x', region .*the index has no chunk 'x/c/1/0'"):
        store.fetch(store.request("x"))


def test_progress_adds_up(store: Store) -> None:
    """What progress is told sums to the bytes of the destinations."""
    for i in range(20):
        store.put(f"x{i}", numbers(256, 1024), (100, 1024), zstd=i % 2 == 0)
    told: list[int] = []
    store.fetch(*[store.request(f"x{i}") for i in range(20)], progress=told.append)

    assert sum(told) == 20 * MIB
    assert len(told) > 1


def test_error_in_progress_stops_everything(store: Store) -> None:
    """An exception of the caller's own, Ctrl-C included, comes out as it is, and the budget is whole again."""
    for i in range(200):
        store.put(f"x{i}", numbers(256, 1024), (256, 1024))

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.fetch(*[store.request(f"x{i}") for i in range(200)], progress=interrupt)

    assert store.budget.used_bytes == 0
    assert store.files.nbytes < 100 * MIB


def test_zero_size_and_scalar_leaves(store: Store) -> None:
    """A zero-size leaf needs no chunk, a scalar one has one."""
    store.put("none", numbers(0, 3), (1, 3))
    store.put("one", np.int32(5) * np.ones((), np.int32), ())
    none, one = store.request("none"), store.request("one")
    store.fetch(none, one)

    assert one.out == 5
    assert none.out.size == 0
