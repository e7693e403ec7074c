"""This engine runs the tasks on Ray: on a pool of workers on this machine, or on an existing cluster."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fedaudit.errors import RunError, SettingError
from fedaudit.extras import install
from fedaudit.runtime.engines.losses import KEPT, TRIES, lost_too_often
from fedaudit.runtime.engines.ray_contact import LOOK, OUTLIVE, RayContact, environment
from fedaudit.runtime.task import Done, Task
from fedaudit.setting import Setting

PATIENCE = 300.0  # seconds to wait for any worker to come up after all were lost
FEWER = "Go on with --resume: with fewer --workers, or with --engine serial."
GO_ON = f"{KEPT} Go on with --resume, also with --engine serial."


@dataclass
class _Job:
    number: int  # its place in the order of the tasks
    task: Task
    losses: int = 0


@dataclass
class _Called:
    """A worker that was asked whether it is there."""

    worker: Any
    new: bool  # False: it was there before


class RayEngine:
    in_process = False

    def __init__(self, setting: Setting):
        try:
            import ray
        except ImportError:
            raise SettingError(f'The engine "ray" needs Ray: {install("ray")}.') from None
        self._ray = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            path = os.pathsep.join(p for p in dict.fromkeys([*sys.path, os.getcwd()]) if p)
            needed = {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            elsewhere = setting.ray_address or os.environ.get("RAY_ADDRESS")
            # Processes that Ray starts here have our environment. To a cluster it has to be sent. There,
            # each worker imports Ray twice for that, and the workers that were there already stay idle.
            try:
                with environment(OUTLIVE if elsewhere else {**OUTLIVE, **needed}):
                    ray.init(
                        address=setting.ray_address,
                        num_cpus=None if elsewhere else max(setting.workers or 0, os.cpu_count() or 1),
                        runtime_env={"env_vars": needed} if elsewhere else None,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level="ERROR",
                    )
            except ConnectionError as e:
                raise SettingError(f"No Ray cluster answers at {setting.ray_address!r}: {e}.") from e
        workers = setting.workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // setting.threads)
        # Ray must not restart a worker by itself: calls to a worker that is restarting fail, one after another.
        self._worker = ray.remote(
            num_cpus=0 if setting.workers else setting.threads, num_gpus=setting.gpu_fraction, max_restarts=0
        )(_Worker)
        self._workers = [self._worker.remote() for _ in range(workers)]
        self._called: dict[Any, _Called] = {}  # by the reference of the answer
        self._stillborn = 0  # workers in a row that died before they answered

    @functools.cached_property
    def _contact(self) -> RayContact:
        return RayContact(self._ray)

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """Give tasks to free workers, and yield results in the order of the tasks. A lost task is done again."""
        called = [call.worker for call in self._called.values()]
        free = [worker for worker in self._workers if worker not in called]
        new = (_Job(number, task) for number, task in enumerate(tasks))
        again: list[_Job] = []
        running: dict[Any, tuple[_Job, Any]] = {}  # by reference: the job and its worker
        finished: dict[int, Done] = {}
        handed_out, more = 0, True
        while more or again or running or finished:
            while handed_out in finished:
                yield finished.pop(handed_out)
                handed_out += 1
            if free and (more or again):
                job = again.pop(0) if again else next(new, None)
                if job is None:
                    more = False
                    continue
                self._contact.check(GO_ON)
                worker = free.pop()
                running[worker.run.remote(job.task)] = job, worker
            elif running or more or again:
                reference = self._next([*self._called, *running], bool(running))
                if reference in self._called:
                    free += self._arrived(reference)
                    continue
                job, worker = running.pop(reference)
                try:
                    done = self._result(job.task.k, reference)
                except self._ray.exceptions.RayError as e:
                    self._contact.check(GO_ON)
                    job.losses += 1
                    if job.losses >= TRIES:
                        raise lost_too_often(job.task, _first_line(e), FEWER) from e
                    again.append(job)
                    self._replace(worker)
                    while free:  # find other workers that are gone before the task is given away again
                        self._call(free.pop(), new=False)
                    continue
                finished[job.number] = dataclasses.replace(done, redone=job.losses)
                free.append(worker)

    def _next(self, references: list[Any], running: bool) -> Any:
        """Return the reference of the next result. Meanwhile, check whether Ray is still there."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._contact.check(GO_ON)
            ready, _ = self._ray.wait(references, num_returns=1, timeout=LOOK)
            if ready:
                self._contact.check(GO_ON)
                return ready[0]
            if not running and time.monotonic() > deadline:
                raise RunError(
                    f"All workers on Ray are gone, and none came up in {PATIENCE:.0f} s: the cluster has no room for "
                    f"one. {GO_ON}"
                )

    def _result(self, k: int, reference: Any) -> Done:
        """Return a task's result. An error that the task raised is its client's; any other is a loss, and is raised
        here."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as e:
            if isinstance(e.cause, self._ray.exceptions.RayError):  # the task's message did not reach the worker
                raise e.cause from e
            return Done(k, error=f"{type(e.cause).__name__} in its worker", detail=str(e), lost=True)

    def _call(self, worker: Any, new: bool) -> None:
        self._called[worker.is_here.remote()] = _Called(worker, new)

    def _replace(self, worker: Any) -> None:
        """Put a new worker in the place of one that is gone, or that cannot be reached."""
        self._ray.kill(worker)
        self._workers.remove(worker)
        self._workers.append(new := self._worker.remote())
        self._call(new, new=True)

    def _arrived(self, reference: Any) -> list[Any]:
        """Return the worker that answered, if it did."""
        call = self._called.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as e:
            self._contact.check(GO_ON)
            self._stillborn += call.new
            if self._stillborn >= TRIES:
                raise RunError(
                    f"{TRIES} workers on Ray in a row ended before they were up: {_first_line(e)}. The likely cause is "
                    f"memory. {GO_ON}"
                ) from e
            self._replace(call.worker)
            return []
        self._stillborn = 0
        return [call.worker]

    def close(self) -> None:
        if "_contact" not in vars(self) or not self._contact.gone:  # if Ray is gone, nobody would answer
            for worker in self._workers:
                self._ray.kill(worker)
        if self._owns:
            self._ray.shutdown()


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}".rstrip(" .:")


class _Worker:
    """Holds caches only: the world of the last settings it saw."""

    def run(self, task: Task) -> Done:
        from fedaudit.runtime.task import run_task

        return run_task(task)

    def is_here(self) -> None:
        """Answer, which says that this worker is up."""
