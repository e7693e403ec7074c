"""Starts the process from which parties in processes of their own are forked: isolated ones, and hosts of twins.

Such a process imports torch and the methods, which takes seconds, and never sees a record. It starts in the background.
This file imports neither, so that the command line can start it before it imports them itself. A process that has
imported them, and holds no record either, can fork it from itself, which takes no time.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedaudit.errors import RunError

# A party gets these variables of the environment: how to find the code, and how to compute. It gets no others.
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
COMPUTING = ("OMP_", "MKL_", "OPENBLAS_", "ATEN_", "DNNL_")
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it some sums on a GPU are not deterministic

Nurse = Callable[[socket.socket], None]  # forks for each connection that comes over this socket, until it closes


class Nursery:
    """The process that forks for each party, as the run sees it. It starts in the background."""

    def __init__(self, method: str, scratch: Path, preload: Sequence[str] = ()):
        """Start the process. It imports `method` once for all parties; if that is empty, each fork imports its own."""
        here, there = socket.socketpair()
        with there:
            self._process: subprocess.Popen[bytes] | Fork = subprocess.Popen(
                [sys.executable, "-m", "fedaudit.runtime.isolated_worker", str(there.fileno()), method, *preload],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                cwd=str(scratch),
                env=_environment(scratch),
            )
        self._control, self._method, self._word, self._served = here, method, b"", 0

    def wait(self) -> None:
        """Wait until the process is ready."""
        self._word = self._word or self._control.recv(1)
        if self._word not in (b"f", b"o"):
            self.close()
            raise RunError(f"{self._method} cannot be imported in a process of its own. Put its folder on PYTHONPATH.")

    @property
    def spent(self) -> bool:
        """Tell whether it can serve no party any more: it has ended, or serves one only and has done so."""
        if self._served > 0 and self._word == b"o":
            return True
        try:  # not by its exit code, which is known to its parent only, and a fork of that one may ask, too
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hand_over(self, connection: socket.socket) -> None:
        self.wait()
        with connection:
            socket.send_fds(self._control, [b"c"], [connection.fileno()])
        self._served += 1

    def close(self) -> None:
        """End the process. Its forks end by themselves, with their connections."""
        self._control.close()  # it sees that, and stops
        if not self._word:  # it still imports, and would not see it for seconds
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedNursery(Nursery):
    """The same, forked from this process. This one must hold no record, have one thread, and have imported all."""

    def __init__(self, nurse: Nurse, scratch: Path):
        """Fork. The new process calls `nurse`, and ends when that returns."""
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                here.close()
                _leave_all_but(there, scratch)
                nurse(there)
                code = 0
            finally:
                os._exit(code)
        there.close()
        self._process = Fork(pid)
        self._control, self._method, self._word, self._served = here, "", b"", 0


class Fork:
    """A fork of this process, with as much of a `Popen` as is needed of it."""

    def __init__(self, pid: int):
        self._pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float = math.inf) -> None:
        until = time.monotonic() + timeout
        while self.returncode is None:
            try:
                ended, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # it is the child of another process, which asks for its end
                return
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"the fork {self._pid}", timeout)
            else:
                time.sleep(0.005)


def _environment(home: Path) -> dict[str, str]:
    """Return the variables that a party's process has at first. `home` is its folder."""
    path = os.pathsep.join(dict.fromkeys(str(Path(p).resolve()) for p in [*sys.path, os.getcwd()]))
    kept = {k: v for k, v in os.environ.items() if k in ENVIRONMENT or k.startswith(COMPUTING)}
    of_home = {"PYTHONPATH": path, "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**CUBLAS, **kept, **of_home}


def _leave_all_but(control: socket.socket, home: Path) -> None:
    """Let a fork give up what its parent has: the environment, the folder, and all files and pipes but `control`.

    A lock or a pipe that it kept open would stay so when its parent has ended.
    """
    variables = _environment(home)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(home)
    sys.dont_write_bytecode, tempfile.tempdir = True, None
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


_nurseries: dict[int, tuple[Nursery, str]] = {}  # by process: two that run at a time must not share


def nursery_of_twins(nurse: Nurse | None = None, training: bool = False) -> Nursery:
    """Return the process from which hosts of twins are forked: one for all runs of this process.

    If it has to be started and `nurse` is given, it is forked from this process, and calls that. Otherwise it imports
    what private training needs if `training` says that the run has such, or if this process has imported it, too.
    """
    mine = _nurseries.get(os.getpid())
    if mine is not None and not mine[0].spent:
        return mine[0]
    end()
    scratch = tempfile.mkdtemp(prefix="fedaudit-twins-")
    if nurse is None:
        # DP-SGD needs opacus, which takes seconds to import: once here, and not in each fork.
        more = ["opacus"] if training or "opacus" in sys.modules else []
        made = Nursery("", Path(scratch), ["fedaudit.runtime.folder", *more])
    else:
        made = ForkedNursery(nurse, Path(scratch))
    _nurseries[os.getpid()] = made, scratch
    return made


def take_over() -> None:
    """Take over the parent's process for twins, if it has one. The parent must wait until this fork has ended."""
    if (of_parent := _nurseries.get(os.getppid())) is not None and os.getpid() not in _nurseries:
        _nurseries[os.getpid()] = of_parent


def has_twins(privacy: object, twins: str) -> bool:
    """Return whether a run with these policies and this setting of `twins` has any."""
    return bool(privacy) and twins not in ("off", "0")


def is_needed(policies: Iterable[str], twins: str) -> bool:
    """Return whether a run will want the process for twins.

    `policies` are kinds of releases, or policies as texts. Sums are protected as sums, and have no twins.
    """
    return has_twins({text.partition(":")[0] for text in policies} - {"updates"}, twins)


def start_for(policies: Iterable[str], twins: str) -> None:
    """Start the process for the twins of a run in the background, if the run has any."""
    kinds = {text.partition(":")[0] for text in policies}
    if is_needed(kinds, twins):
        nursery_of_twins(training="training" in kinds)


@atexit.register
def end() -> None:
    """End the process for twins of this process, if there is one, and remove its folder."""
    mine = _nurseries.pop(os.getpid(), None)
    if mine is not None:
        mine[0].close()
        shutil.rmtree(mine[1], ignore_errors=True)
