"""The same tasks on Ray: a pool of workers on this machine, or on an existing cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedaudit.errors import SettingError
from fedaudit.runtime.task import Done, Task
from fedaudit.setting import Setting


class RayEngine:
    in_process = False

    def __init__(self, setting: Setting):
        try:
            import ray
        except ImportError:
            raise SettingError('The engine "ray" needs Ray: pip install "fedaudit[ray]".') from None
        self._ray = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            path = os.pathsep.join(p for p in dict.fromkeys([*sys.path, os.getcwd()]) if p)
            needed = {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            elsewhere = setting.ray_address or os.environ.get("RAY_ADDRESS")
            # Processes that Ray starts here have the environment of this one. To a cluster it has to be sent, where
            # each worker imports Ray twice for it, and those that were there already stay idle.
            try:
                with contextlib.nullcontext() if elsewhere else _environment(needed):
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
        worker = ray.remote(
            num_cpus=0 if setting.workers else setting.threads, num_gpus=setting.gpu_fraction, max_restarts=-1
        )(_Worker)
        self._workers = [worker.remote() for _ in range(workers)]

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """Every task goes to a free worker; results are handed out in the order of the tasks."""
        free = list(self._workers)
        running: dict[Any, tuple[int, int, Any]] = {}  # reference: number, client, worker
        finished: dict[int, Done] = {}
        handed_out = 0

        def collect() -> None:
            (reference,), _ = self._ray.wait(list(running), num_returns=1)
            number, k, worker = running.pop(reference)
            finished[number] = self._result(k, reference)
            free.append(worker)

        for number, task in enumerate(tasks):
            while not free:
                collect()
            worker = free.pop()
            running[worker.run.remote(task)] = (number, task.k, worker)
            while handed_out in finished:
                yield finished.pop(handed_out)
                handed_out += 1
        while running or finished:
            while handed_out in finished:
                yield finished.pop(handed_out)
                handed_out += 1
            if running:
                collect()

    def _result(self, k: int, reference: Any) -> Done:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as e:
            return Done(k, error=f"{type(e.cause).__name__} in its worker", detail=str(e), lost=True)
        except self._ray.exceptions.RayError as e:  # the worker died: memory, a signal, a lost machine
            return Done(k, error=f"its worker failed: {type(e).__name__}", detail=str(e), lost=True)

    def close(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        if self._owns:
            self._ray.shutdown()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


class _Worker:
    """Holds caches only: the world of the last settings it saw."""

    def run(self, task: Task) -> Done:
        from fedaudit.runtime.task import run_task

        return run_task(task)
