"""What is lost on Ray: a worker changes nothing, Ray itself ends the run in a line that says how to go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedaudit import read_record
from fedaudit.cli.listing import summary
from fedaudit.errors import RunError
from fedaudit.runtime.engines import ray as ray_module
from fedaudit.runtime.engines import ray_contact
from fedaudit.runtime.engines.losses import TRIES
from fedaudit.runtime.engines.ray import RayEngine
from fedaudit.runtime.runner import run
from fedaudit.runtime.task import Done, Task

OWN_CODE = Path(__file__).parents[1] / "helpers" / "own_code"


@pytest.fixture
def dying(tiny, tmp_path):
    """A setting of `dying:Dies`, and the folder in which it counts."""
    (tmp_path / "died").mkdir()

    def make(**values):
        return tiny("dying:Dies", model="mlp", set={"folder": str(tmp_path / "died"), **values})

    return make, tmp_path / "died"


@pytest.fixture
def digest(tiny, tmp_path):
    """The messages of the run in which nobody dies."""
    return run(tiny("outside:Averages", model="mlp"), out=tmp_path / "serial").transcript_digest


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(dying, digest, ray_engine, tmp_path):
    setting, died = dying
    record = run(setting(), out=tmp_path / "ray", engine=ray_engine)
    assert len(list(died.iterdir())) == 1, "the worker was killed"
    assert record.transcript_digest == digest
    assert [row.absent for row in record.rounds] == [[], []]
    assert [row.redone for row in read_record(tmp_path / "ray").rounds] == [0, 1]
    assert "  1 tasks run again, because their processes were lost; results do not change" in summary(record)


@pytest.mark.slow
def test_a_task_that_always_kills_its_worker_ends_the_run(dying, digest, ray_engine, tmp_path):
    """Seven deaths, of which it comes to three: without a bound the run would come to its end."""
    setting, died = dying
    with pytest.raises(RunError) as error:
        run(setting(times=7), out=tmp_path / "ray", engine=ray_engine)
    for words in ("Client 1's task (update, round 2) was lost 3 times", "memory", "last whole round"):
        assert words in str(error.value)
    assert "--resume" in str(error.value)
    assert "--engine serial" in str(error.value)
    assert len(list(died.iterdir())) == TRIES == 3
    for i in range(3, 7):
        (died / str(i)).touch()  # there is memory again
    assert len(read_record(tmp_path / "ray").rounds) == 1
    assert run(setting(times=7), out=tmp_path / "ray", resume=True).transcript_digest == digest


@pytest.mark.long
def test_an_error_of_its_own_is_an_absent_client(dying, ray_engine, tmp_path):
    setting, died = dying
    record = run(setting(whom="nobody", times=9), out=tmp_path / "ray", engine=ray_engine)
    assert [[absence.client for absence in row.absent] for row in record.rounds] == [[], [1]]
    assert record.rounds[1].absent[0].reason.startswith("RuntimeError (update, dying.py:")
    assert record.rounds[1].redone == 0  # in round 1 a worker may be gone that another test killed
    assert len(list(died.iterdir())) == 1, "it was not tried again"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="who started whom is read from /proc")
@pytest.mark.parametrize(("whom", "named"), [("raylet", "(the raylet, "), ("gcs", "(the GCS, ")])
def test_without_ray_a_run_ends_in_a_line_of_ours(whom, named, tmp_path):
    """With messages that are too large for a call: whoever uses the raylet's store when it is gone is ended by Ray."""
    pytest.importorskip("ray", reason="the engine ray needs Ray")
    (tmp_path / "died").mkdir()
    short = "from fedaudit.runtime.engines import ray_contact as c; c.GRACE, c.AGAIN = 2, 0; "
    short += "from fedaudit.cli.main import main; main()"
    words = [
        "run", "--method", "dying:Dies", "--out", tmp_path / "a", "--model", "fedfree_cnn", "--clients", "3",
        "--rounds", "2", "--set", f"folder={tmp_path / 'died'}", "--set", f"whom={whom}", "--no-eval-clients",
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(OWN_CODE)])

    def command(*more):
        call = [sys.executable, "-c", short, *map(str, words), *more]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(call, capture_output=True, text=True, timeout=180, cwd=tmp_path, env=environment)

    gone = command("--engine", "ray", "--workers", "2")
    assert gone.returncode == 2, gone.stderr
    (line,) = [line for line in gone.stderr.splitlines() if line.startswith("error: ")]
    assert "Ray is gone" in line
    assert named in line
    assert "--resume" in line
    assert "Traceback" not in gone.stderr
    assert len(read_record(tmp_path / "a").rounds) == 1
    assert command("--engine", "serial", "--resume").returncode == 0
    there, here = read_record(tmp_path / "a"), tmp_path / "b"
    plain = there.setting.model_copy(update={"method": "outside:Averages", "set": {}})
    assert run(plain, out=here).transcript_digest == there.transcript_digest


# --- with as much of Ray as a pool needs: who dies when is up to the test ------------------------------------------


class Lost(Exception):
    pass


class Raised(Lost):
    cause = ValueError()


class Workers:
    """Workers by number. `fate(worker, what, so_far)` says whether a call is answered: a number of calls so far."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=Raised)

    def __init__(self, fate: Any):
        self.fate, self.calls, self.started, self.killed = fate, list[tuple[int, str]](), 0, list[int]()

    def is_initialized(self) -> bool:
        return True

    def remote(self, **how: Any) -> Any:
        assert how["max_restarts"] == 0, "calls to a worker that Ray starts again fail meanwhile"
        return lambda cls: SimpleNamespace(remote=self.start)

    def start(self) -> Any:
        self.started += 1
        assert self.started < 50, "it has no end"
        number = self.started - 1

        def call(what: str) -> Any:
            def remote(task: Any = None) -> tuple[Any, ...]:
                fine = self.fate(number, what, self.calls.count((number, what)))
                self.calls.append((number, what))
                return number, what, len(self.calls), task.k if task else None, fine

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(number=number, run=call("run"), is_here=call("is_here"))

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [reference for reference in references if reference[-1] is not None]
        return ready[:1], []

    def get(self, reference: Any) -> Done | None:
        _, what, _, k, fine = reference
        if not fine:
            raise Lost("it died\nin many words")
        return Done(k) if what == "run" else None

    def kill(self, worker: Any) -> None:
        self.killed.append(worker.number)


@pytest.fixture
def pool(monkeypatch, tiny):
    def make(fate: Any, workers: int) -> tuple[Workers, RayEngine]:
        monkeypatch.setitem(sys.modules, "ray", ray := Workers(fate))
        engine = RayEngine(tiny(engine="ray", workers=workers))
        engine._contact = SimpleNamespace(check=lambda then: None, gone="")
        return ray, engine

    return make


TASKS = [Task("{}", "M.f", k, 1, 0, None, b"") for k in range(6)]


@pytest.mark.parametrize("count", [1, 6])
def test_workers_that_died_while_idle_cost_a_task_one_try(pool, count):
    """Five of five are gone, with their machine. A lost task is given to who has just answered, and not to the next."""
    ray, engine = pool(lambda worker, what, so_far: worker >= 5, 5)
    done = list(engine.map(TASKS[:count]))
    assert [one.k for one in done] == list(range(count)), "in the order of the tasks"
    assert max(one.redone for one in done) == 1
    assert len(list(engine.map(TASKS))) == 6
    assert sorted(ray.killed) == [0, 1, 2, 3, 4]
    assert sum(one.redone for one in engine.map(TASKS)) == 0, "the new ones stay"


def test_a_task_is_begun_three_times(pool):
    """Every worker comes up, and dies of the first task that it is given."""
    ray, engine = pool(lambda worker, what, so_far: what == "is_here", 1)
    with pytest.raises(RunError, match=r"Client 0's task \(M\.f, round 1\) was lost 3 times: Lost: it died\. "):
        list(engine.map(TASKS))
    assert [what for _, what in ray.calls].count("run") == 3


def test_workers_that_never_come_up_end_the_run(pool):
    ray, engine = pool(lambda worker, what, so_far: worker == 0 and so_far == 0, 1)
    with pytest.raises(
        RunError, match=r"3 workers on Ray in a row ended before they were up: Lost: it died\. .*--resume"
    ):
        list(engine.map(TASKS))
    assert ray.started == 4


def test_a_cluster_without_room_ends_the_run(pool, monkeypatch):
    monkeypatch.setattr(ray_module, "PATIENCE", 0.0)
    _, engine = pool(lambda worker, what, so_far: False if worker == 0 else None, 1)
    with pytest.raises(RunError, match=r"none came up in 0 s: the cluster has no room for one.*--resume"):
        list(engine.map(TASKS))


def test_a_directory_may_come_back_and_an_agent_does_not(monkeypatch):
    knocks: list[tuple[str, int]] = []

    def connect(where: tuple[str, int], timeout: float) -> Any:
        knocks.append(where)
        if len(knocks) < 3:
            raise ConnectionRefusedError
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(ray_contact.socket, "create_connection", connect)
    monkeypatch.setattr(ray_contact.time, "sleep", lambda seconds: None)
    assert ray_contact._answers(("head", 1), comes_back=True)
    knocks.clear()
    assert not ray_contact._answers(("here", 2), comes_back=False)
    assert knocks == [("here", 2)]
