"""What a call runs through: files, functions, and frames at the deepest point."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


@dataclass(slots=True)
class CallPath:
    """Own files and functions that were entered, and most own frames on one stack."""

    files: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    deepest: int = 0


@contextmanager
def recorded(directory: str) -> Iterator[CallPath]:
    """Record every call of code below a directory, in this thread and in those it starts, during the block."""
    path = CallPath()

    def inside(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(directory)

    def on_event(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not inside(frame):
            return
        path.files.add(frame.f_code.co_filename)
        path.functions.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")
        depth, caller = 0, frame
        while True:
            depth += inside(caller)
            if caller.f_back is None:
                break
            caller = caller.f_back
        path.deepest = max(path.deepest, depth)

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield path
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
