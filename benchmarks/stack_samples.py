"""Samples the stacks of a program's threads while it runs, and says in which functions its time went.

A thread counts while it works. One that waits for another thread stands in `threading` or `queue`, and does not count.
A function's seconds hold those of all that it calls, so that they do not add up. What a GPU does shows where the
program waits for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

WAITING = ("threading.py", "queue.py", "selectors.py", "socket.py", "connection.py")


class StackSamples:
    """Counts how often each function of a package stood on the stack of a thread that works."""

    def __init__(self, package: str = "fedaudit", every_s: float = 0.004):
        self.package, self.every_s = package, every_s
        self.seen, self.leaves = Counter[str](), Counter[str]()
        self.samples, self.seconds = 0, 0.0

    def take(self) -> None:
        """Look at all threads but this one."""
        self.samples += 1
        mine = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            if thread != mine and Path(frame.f_code.co_filename).name not in WAITING:
                names = self.functions(frame)
                self.seen.update(set(names))
                self.leaves.update(names[:1])

    def functions(self, frame: FrameType | None) -> list[str]:
        """Return the package's functions on a stack, the innermost first."""
        names = []
        while frame is not None:
            _, inside, path = frame.f_code.co_filename.rpartition(f"/{self.package}/")
            if inside:
                names.append(f"{path.removesuffix('.py')}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        return names

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample until the block ends."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(self.every_s):
                self.take()

        begun, thread = time.perf_counter(), threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.seconds += time.perf_counter() - begun

    def table(self, most: int = 60) -> list[list[str | float]]:
        """Return the functions in which most time went: the name, its seconds, and those of itself alone."""
        each = self.seconds / max(self.samples, 1)
        return [
            [name, round(n * each, 3), round(self.leaves[name] * each, 3)] for name, n in self.seen.most_common(most)
        ]
