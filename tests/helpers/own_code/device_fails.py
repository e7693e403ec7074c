"""Methods whose device fails in a round, for tests of what is said then: `device_fails:Fails`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from fedaudit.methods.averaging.fedavg import FedAvg

ERRORS: dict[str, Any] = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more"),
    "device": lambda: RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be ..."),
    "own": lambda: ValueError("a fault of the client's own"),
}


class Fails(FedAvg):
    """FedAvg that fails in round 2 as long as the file `until` is not there: on client 1, or on the server."""

    kind: str = "device"
    where: Literal["client", "server"] = "client"
    until: str = ""

    def _fail(self, t: int) -> None:
        if t == 2 and not Path(self.until).exists():
            raise ERRORS[self.kind]()

    def round(self, s: Any, server: Any, cohort: Any) -> Any:
        after = super().round(s, server, cohort)
        if self.where == "server":
            self._fail(server.t)
        return after

    def client_update(self, client: Any, msg: Any) -> Any:
        if self.where == "client" and client.id == 1:
            self._fail(client.t)
        return super().client_update(client, msg)
