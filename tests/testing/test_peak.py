"""Peak memory, against allocations of known size."""

import sys

import numpy as np
import pytest

from tailrace.testing.peak import PeakMemory

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the highest resident size of the process is known")
def test_sees_memory_that_is_freed_again():
    """The peak is that of the block, above its start, even when nothing is left at the end."""
    before = np.ones(64 * MIB, np.uint8)
    with PeakMemory() as peak:
        array = np.ones(100 * MIB, np.uint8)
        total = int(array.sum())
        del array

    assert total == 100 * MIB
    assert before.all()
    assert 100 * MIB <= peak.peak_bytes <= 130 * MIB
