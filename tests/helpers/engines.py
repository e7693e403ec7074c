"""Engines that go wrong."""

from __future__ import annotations

from fedaudit.runtime.engines.serial import SerialEngine


class Killed(Exception):
    pass


class KillEngine(SerialEngine):
    """Dies before the task number `after`, as a process does: in the middle of a round."""

    def __init__(self, after):
        self.left = after

    def map(self, tasks):
        for done in super().map(tasks):
            if self.left == 0:
                raise Killed
            self.left -= 1
            yield done
