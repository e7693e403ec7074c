"""For tests of suites: workers without another import of torch, records without their times, and what goes wrong.

Run as a script, this file is a nursery: a process that has imported everything and forks a worker whenever it is asked
to. The test process cannot fork its own: it has computed with torch, whose threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outside import Averages, Margin

from fedaudit import read_record
from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack

TIMES = ("started", "finished", "timings", "peak_rss_bytes", "peak_gpu_bytes", "wall_s")


def comparable(folder: Path, timings: bool = False) -> dict[str, Any]:
    """A record as plain data; without `timings`, less what no two runs have in common, and where it was carried out."""
    record = read_record(folder).model_dump(mode="json")
    return record if timings else _without(record, {*TIMES, "engine"})


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


# --- the nursery -----------------------------------------------------------------------------------------------


def few_trees(setattr: Callable[[Any, str, int], None]) -> None:
    """In the forest of the blind baselines."""
    from fedaudit.attack import score

    assert score.TREES == 100
    setattr(score, "TREES", 10)


def nursery(path: str) -> None:
    from fedaudit.suite.worker import prepare, serve

    Path(f"{path}.forks").write_text(str(prepare([])))
    few_trees(setattr)
    _read_code()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for its workers
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    server.settimeout(1.0)
    parent = os.getppid()
    while os.getppid() == parent:  # the tests may be killed, too
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            text, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            if not fds:
                continue  # killed before it could ask
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                server.close()
                connection.close()
                asked = json.loads(text)
                os.setpgid(0, asked["group"])
                os.chdir(asked["cwd"])
                sys.path[:] = asked["path"]
                if "main" in asked:
                    _main(asked, fds[0])
                serve(fds[0], fds[1])
                os._exit(0)
            for fd in fds:
                os.close(fd)
            try:
                connection.sendall(str(pid).encode())
            except BrokenPipeError:
                continue


def _main(asked: dict[str, Any], fd: int) -> None:
    """A module's `main` as `python -m` would run it, whose first word is the number of an open file."""
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv[:] = [asked["main"], str(fd), *asked["words"]]
    code = 1
    try:
        importlib.import_module(asked["main"]).main()
        code = 0
    finally:
        os._exit(code)


def _read_code() -> None:
    """What every cell's record says of the code: read here, and by a fork only if it was edited since."""
    from fedaudit.registry import find
    from fedaudit.runtime.code_digest import harness, sources

    names = ("loss", "blind_prior", "blind_pixels", "blind_nearest")
    sources([find("fedavg"), find("local"), *(find(name, "attacks") for name in names)])
    harness(), harness(("attack",))


class Born:
    """As much of subprocess.Popen as is used here, around a process from the nursery."""

    stdin: Any
    stdout: Any

    def __init__(self, path: str, fds: list[int], **asked: Any):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            found = [p or os.getcwd() for p in sys.path]  # as a process of its own would get
            said = json.dumps({"group": os.getpgrp(), "cwd": os.getcwd(), "path": found, **asked})
            socket.send_fds(connection, [said.encode()], fds)
            self.pid = int(connection.recv(64))

    @classmethod
    def worker(cls, path: str, lock: int) -> Born:
        requests, ours = os.pipe()
        theirs, replies = os.pipe()
        born = cls(path, [requests, replies, lock])
        os.close(requests)
        os.close(replies)
        born.stdin, born.stdout = open(ours, "wb", 0), open(theirs, "rb", 0)  # noqa: SIM115
        return born

    def poll(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.002)
        return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(path) == 0


@contextlib.contextmanager
def started() -> Iterator[str]:
    """A nursery; where it is to be asked."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        process = subprocess.Popen([sys.executable, __file__, path], env=env)
        try:
            while not _answers(path):
                assert process.poll() is None, "the nursery did not start"
                time.sleep(0.02)
            yield path
        finally:
            process.kill()
            process.wait()


def from_nursery(path: str) -> Any:
    """What stands in for `_Worker.start`."""

    def start(worker: Any, forker: Any) -> None:
        worker.process = Born.worker(path, forker.lock)
        worker.requests, worker.replies = worker.process.stdin.fileno(), worker.process.stdout.fileno()

    return start


def opened_in(path: str) -> Any:
    """What stands in for `subprocess.Popen` where a module is run whose first word is an open file."""

    def popen(words: list[str], pass_fds: list[int], cwd: str, env: dict[str, str], **how: Any) -> Born:
        _, _, main, _, *rest = words
        return Born(path, pass_fds, main=main, words=rest, cwd=cwd, env=env)

    return popen


# --- methods and attacks ---------------------------------------------------------------------------------------


class Killed(Averages):
    """Its process is shot, as the kernel does when memory is short."""

    def update(self, client, msg):
        os.kill(os.getpid(), signal.SIGKILL)


class Scaled(Margin):
    """An attack with a setting."""

    by: float = 1.0

    def run(self, scene):
        return Claims(self.by * super().run(scene).scores)


class BrokenAttack(Attack):
    def run(self, scene):
        return 1 / 0


if __name__ == "__main__":
    nursery(sys.argv[1])
