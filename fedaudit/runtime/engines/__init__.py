"""Engines run clients' tasks. An engine maps `run_task` over tasks and knows nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from fedaudit.runtime.task import Done, Task
from fedaudit.runtime.world import chosen_engine
from fedaudit.setting import Setting


class Engine(Protocol):
    in_process: bool  # whether tasks run inside this process, and so inside what is timed here

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """Yield results in the order of the tasks. Tasks are drawn lazily: at most a few states are in memory."""
        ...

    def close(self) -> None: ...


def make_engine(setting: Setting) -> Engine:
    engine = chosen_engine(setting)
    if setting.isolate:
        from fedaudit.runtime.engines.isolated import IsolatedEngine

        return IsolatedEngine(setting)
    if engine == "ray":
        from fedaudit.runtime.engines.ray import RayEngine

        return RayEngine(setting)
    if engine == "stacked":
        from fedaudit.runtime.engines.stacked import StackedEngine

        return StackedEngine(setting)
    from fedaudit.runtime.engines.serial import SerialEngine

    return SerialEngine()
