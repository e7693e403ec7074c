"""The process from which an audit's workers are forked: it imports everything once for all of them, and not each anew.

The audit asks it through a socket, one packet a request: to start a worker on the files that come along, and to wait
for a worker's end or to kill it. It carries out no cell itself. Its workers end with their pipes, and it ends with its
socket, so that nothing outlives a killed audit. Run as a module, this file is that process.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import IO

from fedaudit.runtime.nursery import Fork
from fedaudit.suite import worker

PATIENCE = 10.0  # seconds until a worker that was hung up on is killed


# --- the audit's side ------------------------------------------------------------------------------------------


class Forker:
    """That process, as the audit sees it. It starts with the first worker, and again if it was killed."""

    def __init__(self, lock: int, preload: Sequence[str]):
        """Workers inherit `lock`, and import the modules `preload`."""
        self.lock, self.preload = lock, list(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def worker(self, log: IO[bytes]) -> Forked | subprocess.Popen[bytes]:
        """Have a worker started that writes what it prints into `log`. Return it before it is there."""
        if not worker.FORK:
            pipe = subprocess.PIPE
            words = [sys.executable, "-m", "fedaudit.suite.worker", *self.preload]
            return subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=log, pass_fds=[self.lock], env=_environment()
            )
        self._count += 1
        requests, asking = os.pipe()
        hearing, replies = os.pipe()
        made = Forked(self, self._count, asking, hearing)
        try:
            if self._process is None:
                self._start(log)
            try:
                self._send(f"start {self._count}", [requests, replies, log.fileno()])
            except OSError:  # it was killed
                self.close()
                self._start(log)
                self._send(f"start {self._count}", [requests, replies, log.fileno()])
        finally:
            os.close(requests)
            os.close(replies)
        return made

    def ended(self, number: int, seconds: float) -> int | None:
        """Return the exit code of a worker; None if it has not ended after so many seconds."""
        try:
            self._send(f"wait {number} {seconds}")
            said = self._control.recv(64).decode()
        except OSError:
            said = ""
        if said:
            return None if said == "none" else int(said)
        return self._process.wait() if self._process is not None else 0  # it is gone, and its workers cannot be seen

    def kill(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._send(f"kill {number}")

    def close(self) -> None:
        """End the process. It waits for its workers, which have been hung up on, and kills those that stay."""
        if self._process is None:
            return
        self._control.close()
        try:
            self._process.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self, log: IO[bytes]) -> None:
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedaudit.suite.forker", str(self.lock), *self.preload],
                stdin=there.fileno(),
                stdout=log,
                stderr=log,
                pass_fds=[self.lock],
                env=_environment(),
            )

    def _send(self, text: str, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._control, [text.encode()], fds)


class Forked:
    """A worker, with what the audit needs of a `Popen`."""

    def __init__(self, forker: Forker, number: int, asking: int, hearing: int):
        self._forker, self._number = forker, number
        self.stdin: IO[bytes] = open(asking, "wb", 0)  # noqa: SIM115 (closed by the audit)
        self.stdout: IO[bytes] = open(hearing, "rb", 0)  # noqa: SIM115

    def wait(self, timeout: float = math.inf) -> int:
        """Return the exit code. Raise `TimeoutExpired` if it has not ended after so many seconds."""
        code = self._forker.ended(self._number, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a worker", timeout)
        return code

    def kill(self) -> None:
        self._forker.kill(self._number)


def _environment() -> dict[str, str]:
    """Return the variables of a process that carries out cells. In parallel, each gets one thread."""
    path = os.pathsep.join(p for p in dict.fromkeys([*sys.path, os.getcwd()]) if p)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


# --- its own side ----------------------------------------------------------------------------------------------


def main(words: list[str]) -> None:
    lock, preload = int(words[0]), words[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the audit decides, and closes the socket
    with worker._ending_with(0):  # if the audit is killed meanwhile, the next one need not wait for these imports
        forks = worker.prepare(preload)
    with socket.socket(fileno=os.dup(0)) as control, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        attend(control, lock, preload, forks)
    os._exit(0)  # unloading all modules would take seconds


def attend(control: socket.socket, lock: int, preload: list[str], forks: bool) -> None:
    """Do what the audit asks, until it hangs up. Without `forks`, start workers that import everything themselves."""
    workers: dict[str, Fork | subprocess.Popen[bytes]] = {}
    while True:
        text, fds, _, _ = socket.recv_fds(control, 64, 3)
        if not text:
            break
        what, number, *rest = text.decode().split()
        if what == "start":
            workers[number] = _forked(control, *fds) if forks else _started(lock, preload, *fds)
            for fd in fds:
                os.close(fd)
        elif number not in workers:  # of a process that was killed, in whose place this one is
            control.sendall(b"0" if what == "wait" else b"")
        elif what == "kill":
            workers[number].kill()
        else:
            control.sendall(_end_of(workers[number], float(rest[0])).encode())
    os.close(lock)  # they hold it as long as they work, and this process does not
    for left in workers.values():
        if _end_of(left, PATIENCE) == "none":
            left.kill()
            left.wait()


def _end_of(one: Fork | subprocess.Popen[bytes], seconds: float) -> str:
    """Return the exit code of a worker as text; "none" if it does not end in so many seconds."""
    try:
        one.wait(seconds)
    except subprocess.TimeoutExpired:
        return "none"
    return str(one.returncode)


def _forked(control: socket.socket, requests: int, replies: int, log: int) -> Fork:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            control.close()
            os.dup2(log, 1)  # what a method prints goes to the log, not among the replies
            os.dup2(log, 2)
            worker.serve(requests, replies)
            code = 0
        except BaseException:  # noqa: BLE001 (the fork ends here in any case; the log has the traceback)
            traceback.print_exc()
        finally:
            os._exit(code)
    return Fork(pid)


def _started(lock: int, preload: list[str], requests: int, replies: int, log: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "fedaudit.suite.worker", *preload]
    return subprocess.Popen(words, stdin=requests, stdout=replies, stderr=log, pass_fds=[lock])


if __name__ == "__main__":
    main(sys.argv[1:])
