"""This module checks whether Ray itself is still there.

Ray ends a process that uses what it has lost: at once, with exit code 1, and without a message. So we check before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fedaudit.errors import RunError

LOOK = 1.0  # seconds between two looks while nothing happens
AGAIN = 1.0  # seconds after which the directory is asked again
GRACE = 30.0  # seconds for something that does not answer to come back
ANSWER = 5.0  # seconds for a connection to be made
# Ray ends this process, with exit code 1, when its directory has been away for this long (60 s by default).
OUTLIVE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}
Place = tuple[str, int]  # host, port


class RayContact:
    """Checks the two processes that Ray cannot work without: its agent on this machine (the raylet), and the directory
    of its cluster (the GCS)."""

    def __init__(self, ray: Any):
        self.gone = ""  # what does not answer
        self._agent: Place | None = None
        self._directory: Place | None = None
        self._seen = 0.0  # when the directory answered last
        if ray.util.client.ray.is_connected():
            return  # at an address ray://..., another process speaks for this one, and reports its own end
        context = ray.get_runtime_context()
        (here,) = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
        self._agent = here["NodeManagerAddress"], int(here["NodeManagerPort"])
        host, _, port = context.gcs_address.rpartition(":")
        self._directory = host.strip("[]"), int(port)

    def check(self, then: str) -> None:
        """Raise RunError if Ray is gone; `then` says what is kept and how to go on."""
        self.gone = self.gone or self._look()
        if self.gone:
            raise RunError(
                f"Ray is gone: {self.gone} does not answer. It was stopped or killed, likely for want of memory. {then}"
            )

    def _look(self) -> str:
        """Return the name of what does not answer; empty if all do."""
        if self._agent is not None and not _answers(self._agent, comes_back=False):
            return f"its agent on this machine (the raylet, {self._agent[0]}:{self._agent[1]})"
        if self._directory is not None and time.monotonic() - self._seen > AGAIN:
            if not _answers(self._directory, comes_back=True):
                return f"the directory of its cluster (the GCS, {self._directory[0]}:{self._directory[1]})"
            self._seen = time.monotonic()
        return ""


def _answers(where: Place, comes_back: bool) -> bool:
    """Return whether somebody listens there. If nobody does, that is final, unless it may be started again
    (`comes_back`)."""
    deadline = time.monotonic() + GRACE
    while True:
        try:
            socket.create_connection(where, ANSWER).close()
            return True
        except OSError as e:
            if isinstance(e, ConnectionRefusedError) and not comes_back:
                return False
            if time.monotonic() > deadline:
                return False
        time.sleep(0.2)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set some environment variables of this process for a while."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
