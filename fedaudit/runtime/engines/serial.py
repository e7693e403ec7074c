"""This engine runs one task after another, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedaudit.runtime.task import Done, Task, run_task


class SerialEngine:
    in_process = True

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        return map(run_task, tasks)

    def close(self) -> None:
        pass
