"""Data files: every byte where it was said to be, checksummed, with zeros between."""

import errno
import os
import struct
import threading
from unittest import mock

import numpy as np
import pytest
from crc32c import crc32c

from tailrace.errors import StorageError
from tailrace.storage.datafiles import BLOCK_BYTES, Lane, Lanes

BUFFER = 1 << 16


@pytest.fixture
def root(tmp_path):
    """Where data files go."""
    (tmp_path / "d").mkdir()
    return tmp_path


def some(nbytes, seed=0):
    """Bytes that are nowhere zero."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sizes", [[1, 5, BUFFER, 3 * BUFFER + 7], [BUFFER - 4, 4, 9], [0, 1]])
def test_appended_bytes_are_where_they_were_said_to_be(root, direct, sizes):
    """Each followed by its own checksum, across buffers, with and without O_DIRECT."""
    lane = Lane(root, BUFFER, direct=direct)
    blocks = [some(nbytes, i) for i, nbytes in enumerate(sizes)]
    places = [lane.append_checksummed([block]) for block in blocks]
    lane.sync()
    lane.close()
    data = (root / lane.relative).read_bytes()

    for block, (offset, length) in zip(blocks, places, strict=True):
        found = data[offset : offset + length]
        assert found == block.tobytes() + struct.pack("<I", crc32c(block.tobytes()))


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_between_is_zero_and_no_block_is_shared_across_syncs(root, direct):
    """What was durable is not written again, so a torn write cannot harm it."""
    lane = Lane(root, BUFFER, direct=direct)
    first = lane.append([some(10)])
    lane.sync()
    second = lane.append([some(10, 1)])
    lane.sync()
    lane.close()
    data = np.frombuffer((root / lane.relative).read_bytes(), np.uint8)

    assert len(data) == lane.offset
    if lane.direct:
        assert second[0] % BLOCK_BYTES == 0
    assert not data[first[0] + 10 : second[0]].any()
    assert not data[second[0] + 10 :].any()


@pytest.mark.parametrize(
    "block",
    [
        np.arange(24, dtype="<u2").reshape(4, 6)[:, ::2],
        np.arange(200_000, dtype="<f4").reshape(400, 500).T,
        np.asfortranarray(np.arange(60, dtype="<i8").reshape(3, 4, 5)),
        np.float64(3.5).reshape(()),
        np.arange(5)[:0],
    ],
)
def test_strided_blocks_are_appended_in_c_order(root, block):
    """At any offset of the buffer, also where the rest of it is too small."""
    lane = Lane(root, BUFFER)
    lane.append([some(BUFFER - 33)])
    offset, length, checksum = lane.append([block])
    lane.sync()
    lane.close()
    found = (root / lane.relative).read_bytes()[offset : offset + length]

    assert found == block.tobytes()
    assert checksum == crc32c(block.tobytes())


def test_small_appends_are_the_same_as_others(root):
    """The fast path writes the same bytes, at the buffer's end and for strided arrays, too."""
    lane = Lane(root, BUFFER)
    arrays = [some(n, n) for n in (0, 3, BUFFER // 2, BUFFER // 2 - 8, 40)] + [np.arange(20, dtype="<i4")[::2]]
    places = [lane.append_small(array) for array in arrays]
    lane.sync()
    lane.close()
    data = (root / lane.relative).read_bytes()

    for array, (offset, length) in zip(arrays, places, strict=True):
        wanted = array.tobytes() + struct.pack("<I", crc32c(array.tobytes()))
        assert data[offset : offset + length] == wanted


def test_a_file_system_without_o_direct_is_written_through_the_cache(root):
    """Whether it refuses at open or only at the first write."""
    real_open, real_write = os.open, os.pwrite

    def no_direct(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, mode)

    with mock.patch("os.open", no_direct):
        at_open = Lane(root, BUFFER)
        at_open.append([some(3 * BUFFER)])
    at_write = Lane(root, BUFFER)
    refused = []

    def refuses_once(descriptor, data, offset):
        if not refused and at_write.direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, "no")
        return real_write(descriptor, data, offset)

    with mock.patch("os.pwrite", refuses_once):
        at_write.append([some(3 * BUFFER)])
    for lane in (at_open, at_write):
        lane.sync()
        lane.close()

        assert not lane.direct
        assert (root / lane.relative).read_bytes() == some(3 * BUFFER).tobytes()


def test_lanes_hand_out_the_last_one_used_and_roll_full_files(root):
    """A single writer fills one file; a full one is closed, and its length known."""
    lanes = Lanes(root, lanes=3, buffer_bytes=BUFFER, roll_bytes=100)
    used = []
    for _ in range(4):
        with lanes.take() as lane:
            lane.append([some(60)])
            used.append(lane.relative)
    lanes.sync()
    lanes.close()

    assert used[0] == used[1] != used[2] == used[3]
    assert {name: os.path.getsize(root / name) for name in used} == lanes.lengths


def test_a_thread_waits_for_a_lane(root):
    """There are no more files than lanes."""
    lanes = Lanes(root, lanes=1, buffer_bytes=BUFFER)
    got = threading.Event()

    def take():
        with lanes.take():
            got.set()

    with lanes.take():
        other = threading.Thread(target=take)
        other.start()
        early = got.wait(0.05)
    other.join(10)
    lanes.close()

    assert not early
    assert got.is_set()
    assert len(os.listdir(root / "d")) == 1


def test_a_file_that_cannot_be_made_gives_its_lane_back(root):
    """After an error of the disk the others neither wait forever nor meet a closed lane."""
    lanes = Lanes(root, lanes=1, buffer_bytes=BUFFER, roll_bytes=1)
    with lanes.take() as lane:
        lane.append([some(10)])
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with mock.patch("os.open", full):
        for _ in range(2):
            with pytest.raises(StorageError, match="No space left"), lanes.take():
                pass
    with lanes.take() as lane:
        lane.append([some(5)])
    lanes.sync()
    lanes.close()

    assert len(os.listdir(root / "d")) == 2


def test_an_append_that_failed_half_way_is_remembered(root):
    """What it left between ranges is not zero: whoever describes the file must look."""
    lanes = Lanes(root, lanes=1, buffer_bytes=BUFFER)

    def blocks():
        yield some(100)
        raise ValueError("the source broke")

    with pytest.raises(ValueError, match="broke"), lanes.take() as lane:
        lane.append(blocks())
    lanes.close()

    assert lanes.interrupted == {lane.relative}


def test_sync_while_others_append(root):
    """Everything appended before is in the file afterwards, with three threads at work."""
    lanes = Lanes(root, lanes=3, buffer_bytes=BUFFER)
    places, stop = [], threading.Event()

    def work(seed):
        while not stop.is_set():
            block = some(1000, seed)
            with lanes.take() as lane:
                places.append((lane.relative, block, lane.append([block])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        known = list(places)
        lanes.sync()
        for relative, block, (offset, length, _) in known[-20:]:
            with open(root / relative, "rb") as file:
                file.seek(offset)
                assert file.read(length) == block.tobytes()
    stop.set()
    for thread in threads:
        thread.join()
    lanes.close()


def test_closing_gives_descriptors_and_memory_back(root):
    """Also twice."""
    before = len(os.listdir("/proc/self/fd"))
    lane = Lane(root, BUFFER)
    lane.append([some(10)])
    lane.close()
    lane.close()

    assert len(os.listdir("/proc/self/fd")) == before
