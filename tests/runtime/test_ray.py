"""How Ray is started and asked for workers, with as much of Ray as that needs."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fedaudit.errors import SettingError
from fedaudit.runtime.engines import ray as module
from fedaudit.runtime.engines.ray import RayEngine
from fedaudit.runtime.task import Done
from fedaudit.setting import Setting


class Error(Exception):
    pass


class TaskError(Error):
    def __init__(self, cause: Exception):
        super().__init__("in many words")
        self.cause = cause


class Ray:
    """A Ray of seven processors. It notes what it is asked for."""

    exceptions = SimpleNamespace(RayError=Error, RayTaskError=TaskError)

    def __init__(self, there: bool = False, answers: bool = True):
        self.there, self.answers, self.said = there, answers, list[Any]()

    def is_initialized(self) -> bool:
        return self.there

    def init(self, **how: Any) -> None:
        if not self.answers:
            raise ConnectionError("refused")
        self.said.append((how, {name: os.environ.get(name) for name in (*module.OUTLIVE, "CUBLAS_WORKSPACE_CONFIG")}))

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 7.0}

    def remote(self, **how: Any) -> Any:
        self.said.append(how)
        return lambda cls: SimpleNamespace(remote=lambda: object())

    def kill(self, worker: Any) -> None:
        self.said.append("killed")

    def shutdown(self) -> None:
        self.said.append("shut down")

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def make(ray: Ray, **values: Any) -> RayEngine:
        monkeypatch.setitem(sys.modules, "ray", ray)
        return RayEngine(Setting.make(engine="ray", device="cpu", **values))

    return make


@pytest.mark.parametrize(
    ("values", "count", "cpus"),
    [({"threads": 1}, 7, 1), ({"threads": 2}, 3, 2), ({"threads": 9}, 1, 9), ({"workers": 5, "threads": 2}, 5, 0)],
)
def test_as_many_workers_as_processors_for_their_threads(
    made: Any, values: dict[str, int], count: int, cpus: int
) -> None:
    ray = Ray(there=True)
    engine = made(ray, gpu_fraction=0.25, **values)
    assert len(engine._workers) == count
    assert ray.said == [{"num_cpus": cpus, "num_gpus": 0.25, "max_restarts": 0}]
    assert engine.in_process is False
    engine.close()
    assert ray.said[1:] == ["killed"] * count, "whoever started Ray ends it"


@pytest.mark.parametrize("elsewhere", [None, "10.0.0.1:6379"])
def test_ray_is_started_here_or_found_elsewhere(
    made: Any, elsewhere: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here its processes have our environment. To a cluster it is sent."""
    ray = Ray()
    monkeypatch.setattr(module.os, "cpu_count", lambda: 3)
    engine = made(ray, workers=4, ray_address=elsewhere)
    how, around = ray.said[0]
    outlive = dict(module.OUTLIVE)
    assert around == outlive | {"CUBLAS_WORKSPACE_CONFIG": None if elsewhere else ":4096:8"}
    sent = how.pop("runtime_env")
    assert how == {
        "address": elsewhere, "num_cpus": None if elsewhere else 4, "include_dashboard": False,
        "log_to_driver": False, "logging_level": "ERROR",
    }  # fmt: skip
    if elsewhere:
        assert sent["env_vars"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.getcwd() in sent["env_vars"]["PYTHONPATH"].split(os.pathsep)
    else:
        assert sent is None
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    engine.close()
    assert ray.said[-1] == "shut down"


def test_where_no_cluster_answers_that_is_said(made: Any) -> None:
    with pytest.raises(SettingError, match="No Ray cluster answers at 'there': refused"):
        made(Ray(answers=False), ray_address="there")


def test_workers_are_not_killed_where_ray_is_gone(made: Any) -> None:
    ray = Ray(there=True)
    engine = made(ray, workers=2)
    engine._contact = SimpleNamespace(gone="the raylet")
    engine.close()
    assert "killed" not in ray.said
    engine._contact.gone = ""
    engine.close()
    assert ray.said.count("killed") == 2


def test_an_error_that_a_task_raised_is_its_clients(made: Any) -> None:
    engine = made(Ray(there=True), workers=1)
    assert engine._result(3, Done(3)) == Done(3)
    found = engine._result(3, TaskError(KeyError("x")))
    assert found == Done(3, error="KeyError in its worker", detail="in many words", lost=True)
    for loss in (Error("gone"), TaskError(Error("its message was lost"))):
        with pytest.raises(Error):
            engine._result(3, loss)


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("one.\ntwo"), "ValueError: one"), (ValueError(), "ValueError"), (KeyError("x"), "KeyError: 'x'")],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert module._first_line(error) == line
