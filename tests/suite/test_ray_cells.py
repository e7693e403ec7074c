"""Suites on a Ray cluster: the cells of any audit, also when a machine is lost in the middle."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from suite_tools import comparable

from fedaudit.errors import FedauditError, RunError
from fedaudit.runtime.engines.ray import RayEngine
from fedaudit.runtime.engines.ray_contact import RayContact
from fedaudit.runtime.folder import locked
from fedaudit.setting import Setting
from fedaudit.suite import ray_cells
from fedaudit.suite.cell import Cell
from fedaudit.suite.ray_cells import carry_out_on_ray, needs
from fedaudit.suite.scheduler import _Queue, audit
from fedaudit.suite.suite_file import Suite

ROUNDS = 20
SMALL = {"clients": 3, "rounds": 1, "set": {"E": 1}, "model": "mlp"}


def test_a_cell_asks_for_what_its_setting_takes() -> None:
    assert needs(Setting.make(threads=3, device="cpu")) == {"num_cpus": 3.0, "num_gpus": 0.0}
    assert needs(Setting.make(device="cuda:1")) == {"num_cpus": 1.0, "num_gpus": 1.0}
    assert needs(Setting.make(device="cuda", gpu_fraction=0.25))["num_gpus"] == 0.25


def test_two_ways_to_run_things_beside_each_other_are_one_too_many(tmp_path: Path) -> None:
    suite = Suite(base=SMALL)
    with pytest.raises(FedauditError, match="Leave --jobs 2 out"):
        audit(suite, tmp_path, on="ray", jobs=2)
    with pytest.raises(FedauditError, match="Leave the engine ray out"):
        audit(suite, tmp_path, on="ray", engine="ray")


class Begun:
    """As much of Ray as a pool of workers needs to begin."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, str | None, Any]] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, runtime_env: Any, num_cpus: Any, **how: Any) -> None:
        self.found.append((runtime_env, os.environ.get("PYTHONPATH"), num_cpus))

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, *what: Any, **how: Any) -> Any:
        return SimpleNamespace(remote=lambda: None) if what else self.remote


def test_workers_find_the_users_own_code_here_and_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they have this process's environment, to which the path is lent; to a cluster it is sent."""
    monkeypatch.setitem(sys.modules, "ray", ray := Begun())
    monkeypatch.setenv("PYTHONPATH", "as it was")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.syspath_prepend("/their/code")
    RayEngine(Setting.make(engine="ray", workers=1))
    RayEngine(Setting.make(engine="ray", workers=1, ray_address="auto"))
    monkeypatch.setenv("RAY_ADDRESS", "another:6379")
    RayEngine(Setting.make(engine="ray", workers=1))
    (here, path, processors), *elsewhere = ray.found
    assert (here, str(path).split(os.pathsep)[0]) == (None, "/their/code")
    assert processors >= 1
    for sent, path, processors in elsewhere:
        assert sent["env_vars"]["PYTHONPATH"].startswith("/their/code")
        assert sent["env_vars"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert (path, processors) == ("as it was", None)
    assert os.environ["PYTHONPATH"] == "as it was"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


class Tried:
    """As much of Ray as carrying out cells needs: tasks run at once, some of them are lost for good."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, lose: int, cpus: int = 2):
        self.lose, self.cpus, self.asked, self.waited = lose, cpus, list[Any](), False

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}, {"Alive": False, "Resources": {"CPU": 64}}]

    def remote(self, **options: Any) -> Any:
        tried = self

        def made(work: Any) -> Any:
            class Task:
                def options(self, **wanted: Any) -> Any:
                    tried.asked.append({**options, **wanted})
                    return self

                def remote(self, request: Any) -> Any:
                    tried.lose -= 1
                    return ("lost",) if tried.lose >= 0 else ("here", request["folder"])

            return Task()

        return made

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        first, self.waited = not self.waited, True
        return ([], references) if first else (references[:1], references[1:])

    def get(self, reference: Any) -> tuple[str, str | None]:
        if reference == ("lost",):
            raise self.exceptions.RayError("the machine is gone")
        return "done", None


@pytest.fixture(autouse=True)
def contact(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Where Ray is made up, it is there until a test says otherwise."""
    contact = SimpleNamespace(check=lambda then: None)
    monkeypatch.setattr(ray_cells, "RayContact", lambda ray: RayContact(ray) if hasattr(ray, "util") else contact)
    return contact


def cells(tmp_path: Path, **setting: Any) -> list[Cell]:
    return [Cell(tmp_path / str(seed), Setting.make(seed=seed, **setting), [], []) for seed in range(3)]


def test_what_is_lost_for_good_fails_and_the_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray, told = Tried(lose=1), list[str]()
    monkeypatch.setattr(ray_cells, "_ray", lambda: ray)
    todo = cells(tmp_path, threads=2)
    carry_out_on_ray(_Queue(todo), lambda cell, what: told.append(what), None)
    assert [cell.status for cell in todo] == ["failed", "done", "done"]
    assert "its worker failed" in str(todo[0].reason)
    assert told == ["failed", "done", "done"]
    assert all(asked == {"max_retries": ray_cells.RETRIES, "num_cpus": 2.0, "num_gpus": 0.0} for asked in ray.asked)


def test_without_ray_no_cell_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contact: SimpleNamespace
) -> None:
    """The audit ends in an error that says how to go on, and does not blame a cell for it."""

    def gone(then: str) -> None:
        if ray.waited:
            raise RunError(f"Ray is gone. {then}")

    ray, todo, told = Tried(lose=3), cells(tmp_path), list[str]()
    contact.check = gone
    monkeypatch.setattr(ray_cells, "_ray", lambda: ray)
    with pytest.raises(RunError, match=r"Every cell is kept up to its last whole round.*the same audit"):
        carry_out_on_ray(_Queue(todo), lambda cell, what: told.append(what), None)
    assert [cell.status for cell in todo] == ["to do"] * 3
    assert told == []


def test_a_cell_that_no_machine_could_take_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cells, "_ray", lambda: Tried(lose=0))
    todo = cells(tmp_path, threads=3)  # the machine with 64 is gone
    carry_out_on_ray(_Queue(todo), lambda cell, what: None, None)
    assert [cell.status for cell in todo] == ["failed"] * 3
    assert "needs 3 processors" in str(todo[0].reason)


def test_a_cell_waits_until_its_lost_process_has_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, folder = threading.Event(), tmp_path / "cell"

    def hold() -> None:
        with locked(folder):
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    begun = time.monotonic()
    ray_cells._wait_for(folder)
    assert time.monotonic() - begun > 0.1
    thread.join()
    monkeypatch.setattr(ray_cells, "PATIENCE", 0.1)
    with locked(folder), pytest.raises(FedauditError, match="Another process"):
        ray_cells._wait_for(folder)


# --- each function alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machines", "gpu", "fits"),
    [
        ([(4, 0, True)], 0.0, True), ([(3, 9, True)], 0.0, False), ([(4, 0.5, True)], 0.5, True),
        ([(9, 0.25, True)], 0.5, False), ([(3, 1, True), (9, 0, True)], 0.5, False), ([(4, 1, False)], 0.0, False),
        ([(1, 1, True), (4, 1, True)], 1.0, True), ([(None, None, True)], 0.0, False), ([], 0.0, False),
    ],
)  # fmt: skip
def test_one_machine_must_have_all_that_a_cell_needs(machines: list[Any], gpu: float, fits: bool) -> None:
    def resources(cpus: float | None, gpus: float | None) -> dict[str, float]:
        return {key: value for key, value in (("CPU", cpus), ("GPU", gpus)) if value is not None}

    nodes = [{"Alive": alive, "Resources": resources(cpus, gpus)} for cpus, gpus, alive in machines]
    found = ray_cells._no_room(SimpleNamespace(nodes=lambda: nodes), {"num_cpus": 4.0, "num_gpus": gpu})
    assert (found is None) is fits
    if found is not None:
        asked = f"4 processors and {gpu:g} GPU, and" if gpu else "4 processors, and"
        assert found.startswith(f"it needs {asked} no machine")


def test_a_cell_is_carried_out_elsewhere_as_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder in which the audit was started, if there is one, and after its lost process."""
    monkeypatch.chdir(tmp_path)
    cell = Cell(Path("runs/a"), Setting.make(seed=4), ["loss"], ["outsider"], 6, keep_stale=True)
    request = json.loads(json.dumps(ray_cells._request(cell)))
    assert (request["folder"], request["here"]) == (str(tmp_path / "runs" / "a"), str(tmp_path))
    done: list[Any] = []

    def carry_out(made: Cell) -> None:
        done.append((made.folder, made.setting, made.attacks, made.threats, made.trials, made.keep_stale, made.trust))
        done.append(os.getcwd())
        made.status, made.reason = "refused", "why"

    monkeypatch.setattr(ray_cells, "_wait_for", lambda folder: done.append(("waited", folder)))
    monkeypatch.setattr(ray_cells, "carry_out", carry_out)
    (tmp_path / "other").mkdir()
    os.chdir(tmp_path / "other")
    assert ray_cells._work(request) == ("refused", "why")
    folder = tmp_path / "runs" / "a"
    made = (folder, cell.setting, ["loss"], ["outsider"], 6, True, False)
    assert done == [("waited", folder), made, str(tmp_path)]
    done.clear()
    os.chdir(tmp_path / "other")
    ray_cells._work({**request, "here": str(tmp_path / "gone"), "trust": True})
    assert (done[1][-1], done[2]) == (True, str(tmp_path / "other"))


def test_a_cluster_is_begun_and_left_unless_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Ray:
        there = False

        def is_initialized(self) -> bool:
            return self.there

        def init(self, **how: Any) -> None:
            said.append({**how, "fork": {name: os.environ.get(name) for name in ray_cells.OUTLIVE}})
            if how["address"] == "nowhere":
                raise ConnectionError("refused")

        def shutdown(self) -> None:
            said.append("shutdown")

    ray = Ray()
    monkeypatch.setattr(sys, "path", ["/their/code", "", "/their/code", "/lib"])
    path = os.pathsep.join(["/their/code", "/lib", os.getcwd()])
    for address, dashboard in ((None, False), ("auto", None)):
        said.clear()
        with pytest.raises(ZeroDivisionError), ray_cells._cluster(ray, address):
            raise ZeroDivisionError
        how, end = said
        assert how.pop("fork") == dict(ray_cells.OUTLIVE)
        assert how == {
            "address": address, "include_dashboard": dashboard, "log_to_driver": False, "logging_level": "ERROR",
            "runtime_env": {"env_vars": {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}},
        }  # fmt: skip
        assert end == "shutdown"
    with pytest.raises(FedauditError, match="No Ray cluster answers at 'nowhere'"), ray_cells._cluster(ray, "nowhere"):
        pass
    ray.there = True
    said.clear()
    with ray_cells._cluster(ray, None):
        pass
    assert said == []


def test_the_patience_with_a_lost_process_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried = [100.0], list[float]()

    def busy(folder: Path) -> Any:
        tried.append(clock[0])
        raise RunError("Another process")

    monkeypatch.setattr(ray_cells, "locked", busy)
    monkeypatch.setattr(ray_cells.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_cells.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 10 * seconds * 5))
    with pytest.raises(RunError, match="Another process"):
        ray_cells._wait_for(Path("a"))
    assert tried == [100.0 + 10 * i for i in range(8)], "60 seconds, and once more"


@pytest.mark.slow
def test_a_suite_survives_the_loss_of_a_machine_to_the_bit(tmp_path: Path) -> None:
    """Two machines with one processor each, and one of them is killed when both are in the middle of a cell."""
    ray = pytest.importorskip("ray", reason="--on ray needs Ray")
    if ray.is_initialized():
        pytest.skip("another test has a cluster")
    from ray.cluster_utils import Cluster

    suite = Suite(base={**SMALL, "rounds": ROUNDS}, attacks=["loss"], grid={"seed": [0, 1]})
    serial = audit(suite, tmp_path / "a")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        found: list[list[Cell]] = []
        audited = threading.Thread(
            target=lambda: found.append(audit(suite, tmp_path / "b", on="ray", ray_address=cluster.address))
        )
        audited.start()
        under_way = _wait_for_two(tmp_path / "b" / "runs")
        cluster.remove_node(second, allow_graceful=False)
        audited.join(240)
        assert found, "the audit came to its end"
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert len(under_way) >= 2
    assert [cell.status for cell in found[0]] == ["done", "done"]
    for a, b in zip(serial, found[0], strict=True):
        assert a.folder.name == b.folder.name
        assert comparable(a.folder) == comparable(b.folder)


def _wait_for_two(runs: Path) -> list[Path]:
    """Runs that have come through a round, and are not at their end."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        heads = [head for head in runs.glob("*/*/HEAD.json") if 1 <= json.loads(head.read_text())["round"] < ROUNDS - 5]
        if len(heads) >= 2:
            return heads
        time.sleep(0.02)
    raise AssertionError("two cells were never under way at the same time")
