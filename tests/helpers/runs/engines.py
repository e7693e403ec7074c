"""Engines that go wrong, and the sizes of the stacks that an engine made."""

from __future__ import annotations

import dataclasses

from fedaudit.runtime import lockstep
from fedaudit.runtime.engines.serial import SerialEngine


def stack_sizes(monkeypatch):
    """Return a list that will hold how many models each stack had, of plain and of private trainings."""
    sizes = []
    for name in ("fit_together", "fit_private_together"):
        fit = getattr(lockstep, name)

        def counted(jobs, fit=fit, **how):
            sizes.append(len(jobs))
            return fit(jobs, **how)

        monkeypatch.setattr(lockstep, name, counted)
    return sizes


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


class DropEngine(SerialEngine):
    """Drops out who is named: a set of (client, round, ask)."""

    def __init__(self, drops):
        self.drops = drops

    def map(self, tasks):
        return super().map(
            dataclasses.replace(task, drop=True) if (task.k, task.t, task.ask) in self.drops else task for task in tasks
        )
