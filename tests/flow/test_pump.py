"""The pump: tasks on threads, and the bytes of a padded chunk."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.flow import pump


@pytest.fixture
def pool():
    """Three threads."""
    with ThreadPoolExecutor(3) as pool:
        yield pool


def test_every_task_is_done_once(pool):
    """And on return none is at work any more."""
    done = []
    pump.run(range(500), done.append, pool, 3)

    assert sorted(done) == list(range(500))


def test_the_first_error_stops_the_rest_and_is_raised(pool):
    """Later errors come of the first and must not hide it; few tasks begin after it."""
    begun, failed = [], threading.Event()

    def work(task):
        begun.append(task)
        if task == 1:
            failed.set()
            raise OSError("the cause")
        if task == 0:
            failed.wait(10)
            raise ValueError("a consequence")

    with pytest.raises(OSError, match="the cause"):
        pump.run(range(10_000), work, pool, 2)

    assert len(begun) < 100


def test_an_error_of_the_tasks_themselves_is_raised(pool):
    """A source of tasks that fails ends the run."""

    def tasks():
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        pump.run(tasks(), lambda _: None, pool, 3)


def test_tasks_are_taken_as_threads_come_free(pool):
    """A million tasks are never listed."""
    taken, done = 0, 0
    most = 0

    def tasks():
        nonlocal taken, most
        for i in range(1000):
            taken += 1
            most = max(most, taken - done)
            yield i

    def work(_):
        nonlocal done
        done += 1

    pump.run(tasks(), work, pool, 3)

    assert most <= 10


@given(st.data())
def test_padded_blocks_are_the_chunk_in_c_order(data):
    """Whatever the strides, byte for byte what numpy's pad gives."""
    chunk_shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    shape = tuple(data.draw(st.integers(1, n)) for n in chunk_shape)
    base = np.arange(np.prod(shape, dtype=int), dtype="<u4").reshape(shape[::-1]).T + 1
    array = data.draw(st.sampled_from([base, base.copy(), base[..., ::-1] if shape else base]))
    wanted = np.zeros(chunk_shape, "<u4")
    wanted[tuple(slice(0, n) for n in shape)] = array
    blocks = b"".join(np.ascontiguousarray(block).tobytes() for block in pump.padded_blocks(array, chunk_shape))

    assert blocks == wanted.tobytes()


@pytest.mark.parametrize(
    ("array", "chunk_shape"),
    [
        (np.arange(600_000, dtype="<u4").reshape(3, 200_000), (4, 300_000)),
        (np.arange(600_000, dtype="<u4").reshape(200_000, 3).T, (3, 200_000)),
        (np.arange(1_200_000, dtype="<u4")[::2], (600_000,)),
        (np.arange(600_000, dtype="<u4").reshape(2, 300, 1000)[:, :, ::-1], (2, 301, 1000)),
    ],
)
def test_large_chunks_are_copied_by_small_blocks_only(array, chunk_shape):
    """Of a chunk that is strided or clipped at most 1 MiB is copied at a time; views cost nothing."""
    wanted = np.zeros(chunk_shape, "<u4")
    wanted[tuple(slice(0, n) for n in array.shape)] = array
    blocks = list(pump.padded_blocks(array, chunk_shape))
    copied = [block for block in blocks if not block.flags.c_contiguous or not np.shares_memory(block, array)]

    assert b"".join(np.ascontiguousarray(block).tobytes() for block in blocks) == wanted.tobytes()
    assert max(block.nbytes for block in copied) <= pump.BLOCK_BYTES
