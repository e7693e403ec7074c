"""This engine runs the tasks of an ask side by side in this process: alike trainings are carried out as one stack.

Each task is the one function that every engine runs. They take turns (see `turns`), so that nothing is concurrent: a
task that comes to a training waits until all the others have come to one or are through. A training that cannot be
stacked is carried out alone, and the task's result says why. The numbers are those of the serial engine up to rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from fedaudit.errors import FedauditError
from fedaudit.runtime.lockstep import Globals, Turn, take_turns
from fedaudit.runtime.task import Done, Task, compute, run_task
from fedaudit.runtime.world import World, world_of
from fedaudit.setting import Setting


class StackedEngine:
    in_process = True

    def __init__(self, setting: Setting):
        self._together = setting.together

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """Yield results in the order of the tasks. As many tasks are in memory as may be trained together."""
        source = iter(tasks)
        while some := list(islice(source, self._together)):
            try:
                world = world_of(some[0].setting)
            except FedauditError:  # each task reports the error for its client
                yield from map(run_task, some)
            else:
                with compute(world):  # the turns need these conditions, and do not change them
                    done = _side_by_side(some, world)
                yield from done

    def close(self) -> None:
        pass


def _side_by_side(tasks: Sequence[Task], world: World) -> list[Done]:
    refuse = "floating-point operations are counted for each client" if world.setting.flops else None
    turns = [Turn(functools.partial(run_task, task), Globals(world.device), refuse=refuse) for task in tasks]
    take_turns(turns)
    for turn in turns:
        if turn.error is not None:
            raise turn.error
    return [dataclasses.replace(turn.result, alone=list(dict.fromkeys(turn.alone))) for turn in turns]
