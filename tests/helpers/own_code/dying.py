"""A method that takes processes down, for tests of what is lost with them: `dying:Dies`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from outside import Averages


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylet() -> int:
    """The agent of Ray that started this worker."""
    return os.getppid()


def gcs() -> int:
    """The directory of the cluster of that agent: both were started by the run."""
    run = parent_of(raylet())
    children = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and of(path, run)]
    (found,) = [pid for pid in children if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]]
    return found


def of(path: Path, parent: int) -> bool:
    try:
        return parent_of(int(path.name)) == parent
    except OSError:  # it ended meanwhile
        return False


class Dies(Averages):
    """Client 1 kills `whom` in the second round, or raises an error, in the middle of its task: `times` times, each of
    which leaves a file in `folder`."""

    folder: str = ""
    whom: str = "worker"  # worker | raylet | gcs | nobody (raise)
    times: int = 1

    def update(self, client: Any, msg: Any) -> Any:
        reply = super().update(client, msg)
        died = len(os.listdir(self.folder))
        if client.id == 1 and client.t == 2 and died < self.times:
            (Path(self.folder) / str(died)).touch()
            if self.whom == "nobody":
                raise RuntimeError("an error of its own")
            os.kill({"worker": os.getpid, "raylet": raylet, "gcs": gcs}[self.whom](), signal.SIGKILL)
        return reply
