"""Handles tasks that were lost with their process: killed for lack of memory, by a signal, or with its machine.

A task is a pure function of bytes, and nobody has seen what a lost one computed. So it is done again, with the same
noise, and the run is the one that it would have been. A client whose task fails by an error of its own is absent.
"""

from __future__ import annotations

from fedaudit.errors import RunError
from fedaudit.runtime.task import Task

TRIES = 3  # how often a task is begun: a task that is lost each time is likely the cause itself
KEPT = "The run is kept up to its last whole round."


def lost_too_often(task: Task, why: str, remedy: str) -> RunError:
    """Return the error for a task that was lost `TRIES` times: which one, the last reason, the likely cause, what to
    do."""
    return RunError(
        f"Client {task.k}'s task ({task.fn}, round {task.t}) was lost {TRIES} times: {why}. The likely cause is "
        f"memory: the system kills a process when there is none left. {KEPT} {remedy}"
    )
