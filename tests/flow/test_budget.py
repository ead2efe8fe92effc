"""The memory budget: what is typed, who waits, and that nobody waits forever."""

import threading

import pytest

from tailrace.errors import BudgetError
from tailrace.flow.budget import MemoryBudget, parse_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (8 * MIB, 8 * MIB),
        ("8MiB", 8 * MIB),
        (" 512 mib ", 512 * MIB),
        ("1.5GiB", 3 * 512 * MIB),
        ("2GB", 2 * 10**9),
        ("16777216", 16 * MIB),
        ("1TiB", 1 << 40),
        ("10000000B", 10**7),
    ],
)
def test_sizes_as_typed(given, nbytes):
    """Ints, and numbers with binary or decimal units, in any case."""
    assert parse_bytes(given) == nbytes


@pytest.mark.parametrize("given", ["", "lots", "5 apples", "-1GiB", "1e9", True, 1.5e9, None, b"8MiB", "1GiB2"])
def test_anything_else_is_refused(given):
    """Naming the argument and what to write."""
    with pytest.raises(BudgetError, match=r"memory_budget=.*write an int of bytes or a size such as '512MiB'"):
        parse_bytes(given)


@pytest.mark.parametrize("given", [0, -5, 8 * MIB - 1, "7MiB"])
def test_too_little_is_refused(given):
    """The least is named."""
    with pytest.raises(BudgetError, match="below the least that works, 8MiB"):
        MemoryBudget(given)


def test_peak_and_use_are_counted():
    """What is taken and given back, and the most that was out at once."""
    budget = MemoryBudget("8MiB")
    with budget.holding(5 * MIB), budget.holding(3 * MIB):
        inside = budget.used_bytes

    assert (inside, budget.used_bytes, budget.peak_bytes) == (8 * MIB, 0, 8 * MIB)


def test_first_come_first_served():
    """A small request does not overtake a large one that waits, so the large one is never starved."""
    budget = MemoryBudget("8MiB")
    budget.reserve(5 * MIB)
    order = []

    def take(name, nbytes):
        budget.reserve(nbytes)
        order.append(name)

    large = threading.Thread(target=take, args=("large", 6 * MIB))
    large.start()
    while not budget._waiting:
        pass
    refused = budget.try_reserve(MIB)
    small = threading.Thread(target=take, args=("small", MIB))
    small.start()
    budget.release(5 * MIB)
    large.join(10)
    small.join(10)

    assert not refused
    assert order == ["large", "small"]


def test_an_interrupted_waiter_does_not_block_the_queue():
    """An exception while waiting leaves the line to those behind."""
    budget = MemoryBudget("8MiB")
    budget.reserve(8 * MIB)

    class InterruptedCondition(threading.Condition):
        def wait(self, timeout=None):  # noqa: ARG002
            raise KeyboardInterrupt

    real, budget._changed = budget._changed, InterruptedCondition()
    with pytest.raises(KeyboardInterrupt):
        budget.reserve(MIB)
    budget._changed = real
    budget.release(8 * MIB)

    assert budget.try_reserve(8 * MIB)


def test_a_piece_above_the_limit_is_our_mistake():
    """It would wait forever; and giving back too much is one, too."""
    budget = MemoryBudget("8MiB")
    with pytest.raises(AssertionError, match="piece of"):
        budget.reserve(9 * MIB)
    with pytest.raises(AssertionError, match="released more"):
        budget.release(1)
