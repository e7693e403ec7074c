"""The process from which parties are forked: who starts it, and that it is gone when nobody needs it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest

from fedaudit.errors import RunError
from fedaudit.runtime import nursery


@pytest.fixture
def started(monkeypatch, _twins_where_asked_for):
    found = []
    monkeypatch.setattr(nursery, "has_twins", _twins_where_asked_for)
    monkeypatch.setattr(nursery, "nursery_of_twins", lambda training: found.append(training))
    return found


@pytest.mark.parametrize(
    ("privacy", "twins", "how"),
    [
        ({}, "auto", []),
        ({"training": {}}, "off", []),
        ({"training": {}}, "0", []),
        (["training:eps=1"], "auto", [True]),
        (["updates:eps=8,clip=1"], "auto", []),
        ({"updates": {}, "logits": {}}, "auto", [False]),
    ],
)
def test_it_starts_for_runs_that_have_twins(privacy, twins, how, started):
    """Told whether they train privately: what that needs is imported once, and not in each fork."""
    nursery.start_for(privacy, twins)
    assert started == how


@pytest.mark.parametrize(
    ("training", "here", "there"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_it_imports_what_private_training_needs_once(training, here, there, monkeypatch):
    made = []
    monkeypatch.setattr(nursery, "Nursery", lambda *of: made.append(of) or SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(nursery, "_nurseries", {})
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "opacus"})
    if here:
        sys.modules["opacus"] = sys
    nursery.nursery_of_twins(training=training)
    nursery.end()
    ((method, _, preload),) = made
    assert (method, preload) == ("", ["fedaudit.runtime.folder", *["opacus"] * there])


def test_a_run_starts_it_before_it_reads_its_data(started, tiny, tmp_path, monkeypatch):
    from fedaudit.runtime import run_state, runner

    class Read(Exception):
        pass

    def read(_):
        raise Read(len(started))

    monkeypatch.setattr(run_state, "world_of", read)
    policy = {"training": {"mechanism": "dp-sgd", "sensitivity": "clip:1.0", "noise_multiplier": 1.0}}
    with pytest.raises(Read, match="1"):
        runner.run(tiny(privacy=policy), out=tmp_path / "run")


def test_the_command_can_start_it_before_it_imports_torch():
    code = "import sys, fedaudit.cli.run, fedaudit.runtime.nursery; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def test_one_that_is_still_importing_does_not_hold_up_the_end(tmp_path):
    of_nobody = nursery.Nursery("", tmp_path)
    begun = time.perf_counter()
    of_nobody.close()
    assert of_nobody._process.returncode == -9
    assert time.perf_counter() - begun < 2, "its imports take longer"


def forked(tmp_path, nurse):
    made = nursery.ForkedNursery(nurse, tmp_path)
    ours, theirs = socket.socketpair()
    made.hand_over(theirs)
    with ours, ours.makefile() as file:
        said = json.loads(file.readline())
    return made, said


def nurse(control):
    """Say over the first connection what this process still has of its parent."""
    control.sendall(b"f")
    _, fds, _, _ = socket.recv_fds(control, 1, 1)
    standard = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
    more = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and fd not in (control.fileno(), fds[0])]
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in more if os.path.exists(f"/proc/self/fd/{fd}")]
    found = [os.getcwd(), dict(os.environ), standard, links, tempfile.gettempdir()]
    socket.socket(fileno=fds[0]).sendall(json.dumps(found).encode() + b"\n")
    while control.recv(1):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_a_forked_one_keeps_nothing_of_its_parent(tmp_path, monkeypatch):
    """An audit's lock or pipe that it held would outlast the audit."""
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")
    tempfile.gettempdir()
    with open(tmp_path / "lock", "w") as lock:
        made, (folder, environment, standard, links, scratch) = forked(tmp_path, nurse)
        assert not lock.closed
    assert folder == scratch == environment["HOME"] == str(tmp_path)
    assert "SECRET_OF_THE_USER" not in environment
    assert standard == [os.devnull] * 3
    assert links == []
    assert not made.spent
    made.close()
    assert made._process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_a_forked_one_that_fails_is_said_to_be_spent(tmp_path, capfd):
    def fails(control):
        raise ValueError("no")

    made = nursery.ForkedNursery(fails, tmp_path)
    with pytest.raises(RunError):
        made.wait()
    assert made._process.returncode == 1
    made._process.wait(1)  # it is gone, and asking again does not wait
    made._process.kill()


def test_runs_of_one_process_share_it(monkeypatch):
    made = []

    class Made:
        spent = False

        def __init__(self, *_):
            made.append(self)

        def close(self):
            pass

    monkeypatch.setattr(nursery, "Nursery", Made)
    monkeypatch.setattr(nursery, "_nurseries", {})
    first = nursery.nursery_of_twins()
    assert nursery.nursery_of_twins() is first
    first.spent = True
    assert nursery.nursery_of_twins() is not first
    assert list(nursery._nurseries) == [os.getpid()]
    nursery.end()
    assert (nursery._nurseries, len(made)) == ({}, 2)


def test_a_fork_tells_whether_its_parents_process_still_serves(tmp_path):
    """Its exit code is known to the parent alone."""

    def told() -> bool:
        pid = os.fork()
        if pid == 0:
            os._exit(int(of_parent.spent))
        return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    of_parent = nursery.Nursery("", tmp_path)
    assert not told()
    of_parent._process.kill()
    of_parent._process.wait()
    assert told()
    assert of_parent.spent
    of_parent.close()
    assert told()


def test_a_fork_takes_over_its_parents_process(monkeypatch):
    monkeypatch.setattr(nursery, "_nurseries", {os.getpid(): ("the parent's", "its folder")})
    pid = os.fork()
    if pid == 0:
        nursery.take_over()
        os._exit(0 if nursery._nurseries[os.getpid()] == ("the parent's", "its folder") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    nursery._nurseries.clear()
