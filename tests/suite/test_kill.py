"""SIGKILL at random instants during a suite, then the same audit again: nothing lost, nothing run twice, equal bits.

The audit that is shot is a fork of this process, and its workers are forks of a process that has imported everything:
20 starts of an interpreter would take longer than all the rest. A kill hits the audit alone (its workers must go by
themselves, at whatever instant that finds them) or, in turn, the audit and its workers at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from suite_tools import comparable, from_nursery

from fedaudit.suite import scheduler as auditing
from fedaudit.suite.scheduler import audit
from fedaudit.suite.suite_file import Suite
from fedaudit.wire.transcript import Transcript

SUITE = Suite(
    base={"clients": 2, "rounds": 3, "minimum": 40},
    attacks=["suite_tools:Scaled"],
    methods=[
        {"method": "fedavg", "set": {"E": 1}, "model": "mlp"},
        {"method": "outside:Exchange", "set": {"steps": 4}},
    ],
)


def start(out: Path, jobs: int, at: str) -> int:
    """An audit in a process group of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            auditing._Worker.start = from_nursery(at)
            code = sum(cell.status != "done" for cell in audit(SUITE, out, jobs=jobs))
        finally:
            os._exit(code)
    with contextlib.suppress(ProcessLookupError):  # by whoever comes first: a kill may follow at once
        os.setpgid(pid, pid)
    return pid


def finish(out: Path, jobs: int, at: str) -> float:
    begun = time.monotonic()
    _, status = os.waitpid(start(out, jobs, at), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return time.monotonic() - begun


def traces(out: Path) -> dict[str, tuple[int, str]]:
    """Per cell: how often its record was written so far, told by its file's identity, and its content."""
    return {path.parent.name: (path.stat().st_ino, path.read_text()) for path in out.glob("runs/*/record.json")}


def state(out: Path) -> dict[str, dict]:
    return {path.parent.name: comparable(path.parent) for path in out.glob("runs/*/record.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, nursery_at):
    """The suite undisturbed, and how long it takes."""
    out = tmp_path_factory.mktemp("whole")
    seconds = finish(out, 1, nursery_at)
    return state(out), seconds


def finished(out: Path) -> dict[str, tuple[int, str]]:
    return {name: trace for name, trace in traces(out).items() if '"status": "done"' in trace[1]}


def shoot(out: Path, jobs: int, at: str, delay: float, everybody: bool) -> bool:
    """Kill an audit after so many seconds; whether it was still at work."""
    pid = start(out, jobs, at)
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    (os.killpg if everybody else os.kill)(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def rounds_of(out: Path) -> dict[str, list[int]]:
    """The rounds in each cell's transcript, in order, as the messages have them."""
    found = {}
    for path in out.glob("runs/*/transcript"):
        entries = list(Transcript(path).entries())
        assert [entry.seq for entry in entries] == sorted({entry.seq for entry in entries})
        found[path.parent.name] = [entry.round for entry in entries]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "times"), [(1, 4), pytest.param(2, 16, marks=pytest.mark.slow)])
def test_killed_at_random_instants_and_gone_on(whole, nursery_at, tmp_path, jobs, times):
    """20 kills in all. One folder is shot again and again until it is through, then the
    next is begun; before each shot, the finished cells are noted, and must be the same files after it."""
    expected, seconds = whole
    rng = random.Random(jobs)
    number, kills, unfinished = 0, 0, 0
    out = tmp_path / "0"
    while kills < times or (not unfinished and kills < 40):  # on a busy machine a shot may come too early
        before = finished(out)
        hit = shoot(out, jobs, nursery_at, rng.uniform(0, seconds / jobs), everybody=kills % 2 == 1)
        kills += hit
        after = traces(out)
        unfinished += any('"status": "running"' in text for _, text in after.values())
        assert all(after[name] == trace for name, trace in before.items()), "a finished cell was run again"
        if not hit:
            assert state(out) == expected
            number += 1
            out = tmp_path / str(number)
    assert unfinished, "no shot hit a run; the suite is too quick for this test"
    for folder in [tmp_path / str(i) for i in range(number + 1)]:
        finish(folder, jobs, nursery_at)
        assert state(folder) == expected, "not what an undisturbed audit gives"
        assert rounds_of(folder) == rounds_of(tmp_path / "0"), "a message lost or sent twice"
        done = finished(folder)
        finish(folder, jobs, nursery_at)
        assert finished(folder) == done, "run again although nothing was left to do"


def test_a_worker_stops_when_its_audit_is_gone(nursery_at, tmp_path):
    """The lock is inherited: that it is free shows that nobody of the killed audit is left."""
    assert shoot(tmp_path, 2, nursery_at, 0.3, everybody=False)
    begun = time.monotonic()
    with auditing.locked(tmp_path, "audit", auditing.PATIENCE):
        assert time.monotonic() - begun < 5
