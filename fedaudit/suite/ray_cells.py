"""Running the cells of a suite as tasks of a Ray cluster: `fedaudit audit suite.toml --on ray [--ray-address ...]`.

Each cell is one task that asks for the processors and GPUs of its setting. Folders and keys are those of any audit, on
a disk that all machines see. If a machine is lost, another one takes its cell and goes on from the last whole round.
It waits until the lost process is gone, because that process holds a lock on the folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedaudit.errors import RunError, SettingError
from fedaudit.extras import install
from fedaudit.runtime.engines.ray_contact import LOOK, OUTLIVE, RayContact, environment
from fedaudit.runtime.folder import locked
from fedaudit.setting import Setting
from fedaudit.suite.cell import Cell, carry_out

RETRIES = 5  # number of machines that a cell may lose
GO_ON = (
    "Every cell is kept up to its last whole round. Start Ray again and repeat the same audit: it goes on from there."
)
PATIENCE = 60.0  # seconds to wait until a cell's lost process is gone


class Waiting(Protocol):
    """A queue of cells, some of which are ready to run."""

    def ready(self) -> bool: ...
    def take(self) -> Cell: ...


def needs(setting: Setting) -> dict[str, float]:
    """Return what a cell asks of the cluster: its threads as processors, and its share of a GPU if it uses one."""
    gpu = setting.gpu_fraction or (1.0 if setting.device.startswith("cuda") else 0.0)
    return {"num_cpus": float(setting.threads), "num_gpus": float(gpu)}


def carry_out_on_ray(waiting: Waiting, tell: Callable[[Cell, str], None], address: str | None) -> None:
    """Carry out all cells, as many at a time as the cluster has room for. A failure becomes the cell's reason."""
    ray = _ray()
    with _cluster(ray, address):
        work, contact = ray.remote(max_retries=RETRIES)(_work), RayContact(ray)
        running: dict[Any, Cell] = {}
        while True:
            while waiting.ready():
                cell = waiting.take()
                if wrong := _no_room(ray, needs(cell.setting)):
                    cell.status, cell.reason = "failed", wrong
                    tell(cell, "failed")
                    continue
                contact.check(GO_ON)
                running[work.options(**needs(cell.setting)).remote(_request(cell))] = cell
            if not running:
                return
            contact.check(GO_ON)
            ready, _ = ray.wait(list(running), num_returns=1, timeout=LOOK)
            contact.check(GO_ON)  # a cell that was lost with Ray itself has not failed
            if not ready:
                continue
            cell = running.pop(ready[0])
            try:
                cell.status, cell.reason = ray.get(ready[0])
            except ray.exceptions.RayError as e:
                cell.status = "failed"
                cell.reason = f"its worker failed {RETRIES + 1} times: {type(e).__name__}: {e}".splitlines()[0]
            tell(cell, cell.status)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise SettingError(f"--on ray needs Ray: {install('ray')}.") from None
    return ray


@contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to the cluster at an address, or start one on this machine. An open connection is used and left open."""
    if ray.is_initialized():
        yield
        return
    path = os.pathsep.join(p for p in dict.fromkeys([*sys.path, os.getcwd()]) if p)
    try:
        with environment(OUTLIVE):
            ray.init(
                address=address,
                runtime_env={"env_vars": {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}},
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level="ERROR",
            )
    except ConnectionError as e:
        raise SettingError(f"No Ray cluster answers at {address!r}: {e}. Check the address, or start Ray there.") from e
    try:
        yield
    finally:
        ray.shutdown()


def _no_room(ray: Any, wanted: dict[str, float]) -> str | None:
    """Return why no machine of the cluster can ever take a cell, which would wait for ever; None if one can."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(m.get("CPU", 0) >= wanted["num_cpus"] and m.get("GPU", 0) >= wanted["num_gpus"] for m in machines):
        return None
    asked = f"{wanted['num_cpus']:g} processors" + (f" and {wanted['num_gpus']:g} GPU" if wanted["num_gpus"] else "")
    return f"it needs {asked}, and no machine of the cluster has them. Lower threads, or add a machine."


def _request(cell: Cell) -> dict[str, Any]:
    return {
        "folder": str(cell.folder.resolve()),
        "setting": cell.setting.model_dump(),
        "attacks": cell.attacks,
        "threats": cell.threats,
        "trials": cell.trials,
        "keep_stale": cell.keep_stale,
        "trust": cell.trust,
        "here": os.getcwd(),
    }


def _work(request: dict[str, Any]) -> tuple[str, str | None]:
    """Carry out a cell on this machine of the cluster, from where it stands. Return its status and reason."""
    if os.path.isdir(request["here"]):
        os.chdir(request["here"])  # a setting may name files relative to this folder
    setting = Setting.make(**request["setting"])
    cell = Cell(Path(request["folder"]), setting, request["attacks"], request["threats"], request["trials"])
    cell.keep_stale, cell.trust = request["keep_stale"], request["trust"]
    _wait_for(cell.folder)
    carry_out(cell)
    return cell.status, cell.reason


def _wait_for(folder: Path) -> None:
    """Wait until the process that had this cell before is gone."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with locked(folder):
                return
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
