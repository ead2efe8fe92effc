"""Checkpoints of any size through a small, fixed amount of memory.

    tailrace.save("ckpt/base", state)
    state = tailrace.load("ckpt/base", like=abstract_state)

    with tailrace.Writer("ckpt/big", memory_budget="1GiB", resume=True) as writer:
        experts = writer.declare("moe/wi", shape=(384, 60, 7168, 2048), dtype="bfloat16")
        experts[17, 3] = block
        writer.flush()

    tailrace.open("ckpt/big")["moe/wi"][17, 3, :8]

Each name is imported when it is first used, so that `import tailrace` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tailrace import errors
from tailrace._version import __version__
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.checkpoint.leaf import Leaf
    from tailrace.checkpoint.leafwriter import LeafWriter
    from tailrace.checkpoint.reader import Checkpoint, open
    from tailrace.checkpoint.verify import VerifyReport
    from tailrace.flow.budget import MemoryBudget
    from tailrace.flow.regions import Region
    from tailrace.tree.fork import fork
    from tailrace.tree.load import load
    from tailrace.tree.save import save
    from tailrace.tree.writer import Writer

__all__ = [
    "Checkpoint",
    "Leaf",
    "LeafWriter",
    "MemoryBudget",
    "Region",
    "TailraceError",
    "VerifyReport",
    "Writer",
    "__version__",
    "errors",
    "fork",
    "load",
    "open",
    "save",
]

_HOME = {
    "Checkpoint": "tailrace.checkpoint.reader",
    "Leaf": "tailrace.checkpoint.leaf",
    "LeafWriter": "tailrace.checkpoint.leafwriter",
    "MemoryBudget": "tailrace.flow.budget",
    "Region": "tailrace.flow.regions",
    "VerifyReport": "tailrace.checkpoint.verify",
    "Writer": "tailrace.tree.writer",
    "fork": "tailrace.tree.fork",
    "load": "tailrace.tree.load",
    "open": "tailrace.checkpoint.reader",
    "save": "tailrace.tree.save",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
