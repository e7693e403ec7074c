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

    monkeypatch.setattr(run_state.world_of, "begun", read)
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


@pytest.mark.parametrize(
    ("privacy", "twins", "has", "needed"),
    [
        ([], "auto", False, False),
        (["logits:eps=1"], "auto", True, True),
        (["logits:eps=1"], "off", False, False),
        (["logits:eps=1"], "0", False, False),
        (["logits:eps=1"], "2", True, True),
        (["updates:eps=1"], "all", True, False),
        (["updates:eps=1", "training"], "all", True, True),
    ],
)
@pytest.mark.usefixtures("started")
def test_which_runs_have_twins(privacy, twins, has, needed):
    assert nursery.has_twins(privacy, twins) is has
    assert nursery.is_needed(privacy, twins) is needed


def made(word=b"", served=0, peek=b"x"):
    """A nursery by hand, whose process says `word`, and which served so many parties."""
    here = object.__new__(nursery.Nursery)
    calls = []

    def recv(size, flags=0):
        if flags:
            if isinstance(peek, Exception):
                raise peek
            return peek
        calls.append("heard")
        return word

    here._control = SimpleNamespace(recv=recv, close=lambda: calls.append("closed"))
    here._process = SimpleNamespace(kill=lambda: calls.append("killed"), wait=lambda *of: calls.append(("waited", *of)))
    here._method, here._word, here._served = "fedavg", b"", served
    return here, calls


@pytest.mark.parametrize(
    ("word", "served", "peek", "spent"),
    [
        (b"f", 3, BlockingIOError(), False),
        (b"o", 0, BlockingIOError(), False),
        (b"o", 1, BlockingIOError(), True),
        (b"f", 0, b"", True),
        (b"f", 0, OSError(), True),
        (b"f", 0, b"f", False),
    ],
)
def test_a_nursery_that_serves_no_more(word, served, peek, spent):
    here, _ = made(word, served, peek)
    here._word = word
    assert here.spent is spent


def test_a_process_that_is_closed_while_it_imports_is_killed():
    here, calls = made(b"f")
    here.close()
    assert calls == ["closed", "killed", ("waited", 10)]
    here, calls = made(b"f")
    here.wait()
    here.wait()
    here.close()
    assert calls == ["heard", "closed", ("waited", 10)], "it is heard once"
    here, calls = made(b"e")
    with pytest.raises(RunError, match="fedavg cannot be imported"):
        here.wait()
    assert calls == ["heard", "closed", ("waited", 10)]

    def wait(*of):
        calls.append(("waited", *of))
        if of:
            raise subprocess.TimeoutExpired("it", 10)

    here, calls = made(b"f")
    here._word, here._process.wait = b"f", wait
    here.close()
    assert calls == ["closed", ("waited", 10), "killed", ("waited",)]


def test_a_fork_is_waited_for_as_long_as_it_was_told(monkeypatch):
    """It ends at the third look, with code 3."""
    now, looks = [0.0], []
    monkeypatch.setattr(nursery.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(nursery.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 1.0))

    def waitpid(pid, how):
        looks.append((pid, how))
        return (pid, 3 << 8) if len(looks) == 3 else (0, 0)

    monkeypatch.setattr(nursery.os, "waitpid", waitpid)
    monkeypatch.setattr(nursery.os, "kill", lambda *of: looks.append(of))
    fork = nursery.Fork(77)
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.5)
    assert len(looks) == 2
    fork.wait(0.5)
    assert (fork.returncode, looks) == (3, [(77, os.WNOHANG)] * 3)
    fork.wait()
    fork.kill()
    assert len(looks) == 3, "it is gone"

    def of_another(pid, how):
        raise ChildProcessError

    monkeypatch.setattr(nursery.os, "waitpid", of_another)
    other = nursery.Fork(78)
    other.wait()
    assert other.returncode is None
    other.kill()
    assert looks[-1] == (78, nursery.signal.SIGKILL)


def test_the_variables_of_a_partys_process(monkeypatch, tmp_path):
    kept = next(iter(sorted(nursery.ENVIRONMENT)))
    monkeypatch.setattr(nursery.os, "environ", {kept: "a", "OMP_X": "b", "SECRET": "c", "HOME": "d"})
    monkeypatch.setattr(nursery, "COMPUTING", ("OMP_",))
    monkeypatch.setattr(nursery.sys, "path", [str(tmp_path), "", str(tmp_path)])
    found = nursery._environment(tmp_path / "home")
    assert (found["OMP_X"], found["HOME"], found["TMPDIR"]) == ("b", str(tmp_path / "home"), str(tmp_path / "home"))
    assert found["PYTHONDONTWRITEBYTECODE"] == "1"
    assert "SECRET" not in found
    assert found["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), os.getcwd()]
    assert kept in found
