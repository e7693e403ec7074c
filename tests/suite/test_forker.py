"""Workers are forked from one process, which imports once, tells of their ends, and outlives neither them nor the
audit."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedaudit.suite import forker, worker
from fedaudit.suite.forker import Forker

# The process itself, with imports that only count, and workers that do what a line says.
ACTING = """
import os, sys, time
from fedaudit.suite import forker, worker

def prepare(preload):
    print("imports", *preload, flush=True)
    if preload == ["long"]:
        time.sleep(600)
    if preload == ["threads"]:
        sys.executable = "/bin/echo"
    return preload != ["threads"]

def serve(requests, replies):
    print("serves", flush=True)
    with open(requests) as file:
        for line in file:
            what, *number = line.split()
            if what == "exit":
                os._exit(int(number[0]))
            os.write(replies, f"{os.getppid()} {os.getpid()}\\n".encode())

worker.prepare, worker.serve, forker.PATIENCE = prepare, serve, 0.3
forker.main(sys.argv[1:])
"""

pytestmark = pytest.mark.skipif(not worker.FORK, reason="processes are not forked here")


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A forker whose process acts, and workers with a log each."""
    opened = []
    popen = subprocess.Popen

    def start(words, **how):
        assert words[1:3] == ["-m", "fedaudit.suite.forker"]
        opened.append(popen([words[0], "-c", ACTING, *words[3:]], **how))
        return opened[-1]

    monkeypatch.setattr(forker.subprocess, "Popen", start)
    lock = (tmp_path / "lock").open("w")
    made = []

    def make(*preload):
        made.append(Forker(lock.fileno(), preload))
        made[-1].opened = opened
        return made[-1]

    yield make
    for one in opened:
        one.kill()
    for one in made:
        one.close()
    lock.close()


def begin(of):
    log = tempfile.TemporaryFile()  # noqa: SIM115
    made = of.worker(log)
    made.log = log
    return made


def ask(one, text="who"):
    one.stdin.write(f"{text}\n".encode())
    assert select.select([one.stdout], [], [], 30)[0], "neither an answer nor an end"
    line = one.stdout.readline().decode()
    return [int(number) for number in line.split()]


def logged(one):
    one.log.seek(0)
    return one.log.read().decode().splitlines()


def test_workers_are_forked_from_one_process_that_imports_once(make):
    of = make("mine")
    first, second = begin(of), begin(of)
    (parent, one), (other, two) = ask(first), ask(second)
    assert len(of.opened) == 1
    assert parent == other == of.opened[0].pid
    assert len({parent, one, two}) == 3
    assert logged(first) == ["imports mine", "serves"], "what goes wrong before the first fork is in its log"
    assert logged(second) == ["serves"]


def test_a_workers_end_is_heard_and_told(make):
    of = make()
    first, second = begin(of), begin(of)
    _, pid = ask(second)
    assert ask(first, "exit 3") == [], "its pipe ends, because nobody else holds it"
    assert first.wait() == 3
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.05)
    second.kill()
    assert second.stdout.readline() == b""
    assert second.wait(60) == -signal.SIGKILL
    assert not Path(f"/proc/{pid}").exists(), "it was waited for"


def test_workers_that_are_hung_up_on_end_and_so_does_the_process(make):
    of = make()
    workers = [begin(of), begin(of)]
    pids = [ask(one)[1] for one in workers]
    workers[0].stdin.close()
    assert workers[0].wait(60) == 0
    workers[1].stdin.close()
    of.close()
    assert of.opened[0].returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert workers[1].wait(0.1) == 0, "there is nobody left to ask"
    of.close()


def test_a_worker_that_stays_is_killed_in_the_end(make):
    of = make()
    stays = begin(of)
    _, pid = ask(stays)
    of.close()  # its pipe is still open
    assert of.opened[0].returncode == 0
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_process_has_a_successor(make):
    of = make()
    first = begin(of)
    parent, _ = ask(first)
    os.kill(parent, signal.SIGKILL)
    of.opened[0].wait()
    assert first.wait(1.0) == -signal.SIGKILL, "its own end is not known"
    second = begin(of)
    other, _ = ask(second)
    assert (len(of.opened), other) == (2, of.opened[1].pid)
    assert first.wait(1.0) == 0
    first.kill()
    assert ask(second)[0] == other, "it has not stumbled over another's worker"
    first.stdin.close()


def test_it_ends_with_its_audit_while_it_imports(make):
    of = make("long")
    one = begin(of)
    begun = time.monotonic()
    one.stdin.close()
    of.close()
    assert time.monotonic() - begun < 2 * forker.PATIENCE, "it was not killed"
    assert of.opened[0].returncode == 1


def test_where_it_cannot_fork_workers_import_by_themselves(make):
    """`echo` stands in for the interpreter: what it is called with goes where replies go."""
    one = begin(make("threads"))
    assert one.stdout.readline() == b"-m fedaudit.suite.worker threads\n"
    assert one.wait(60) == 0


def test_it_lets_the_lock_go_and_sees_to_its_workers_when_the_audit_is_gone(monkeypatch):
    order = []

    class Started:
        def __init__(self, number, ends):
            self.number, self.ends, self.returncode = number, ends, None

        def wait(self, seconds=None):
            order.append((self.number, seconds))
            if seconds is not None and not self.ends:
                raise subprocess.TimeoutExpired("it", seconds)
            self.returncode = 0

        def kill(self):
            order.append(("kill", self.number))

    made = iter([Started(0, True), Started(1, False)])
    monkeypatch.setattr(forker, "_forked", lambda control, *fds: next(made))
    monkeypatch.setattr(forker.os, "close", lambda fd: order.append(("close", fd)))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        for number in (1, 2):
            here.sendall(f"start {number}".encode())
        here.shutdown(socket.SHUT_WR)
        forker.attend(there, 77, [], True)
    assert order == [("close", 77), (0, 10.0), (1, 10.0), ("kill", 1), (1, None)]


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize(("mine", "theirs"), [(None, "1"), ("3", "3")])
def test_a_worker_has_one_thread_unless_the_user_says_otherwise(mine, theirs, forks, monkeypatch, tmp_path):
    """Two workers with a thread for each processor wait for each other: an audit then takes half as long again."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if mine:
        monkeypatch.setenv("OMP_NUM_THREADS", mine)
    monkeypatch.setattr(worker, "FORK", forks)
    given = {}

    class Started(Exception):
        pass

    def popen(words, **how):
        given.update(how, words=words)
        raise Started

    monkeypatch.setattr(forker.subprocess, "Popen", popen)
    with (tmp_path / "log").open("wb") as log, pytest.raises(Started):
        Forker(5, ["mine"]).worker(log)
    assert given["env"]["OMP_NUM_THREADS"] == theirs
    assert given["env"]["PYTHONPATH"].split(os.pathsep)[-1] == os.getcwd() or os.getcwd() in sys.path
    assert given["pass_fds"] == [5]
    assert given["words"][2:] == (
        ["fedaudit.suite.forker", "5", "mine"] if forks else ["fedaudit.suite.worker", "mine"]
    )


def test_where_nothing_is_forked_each_worker_is_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "FORK", False)
    made = []
    monkeypatch.setattr(forker.subprocess, "Popen", lambda words, **how: made.append(how) or SimpleNamespace())
    of = Forker(5, [])
    with (tmp_path / "log").open("wb") as log:
        of.worker(log), of.worker(log)
    of.close()
    assert [(how["stdin"], how["stdout"], how["stderr"].name) for how in made] == [
        (subprocess.PIPE, subprocess.PIPE, str(tmp_path / "log"))
    ] * 2
