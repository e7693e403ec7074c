"""Calm: FedAvg with weight decay in local training. `fedaudit run --method calm` once this package is installed."""

from __future__ import annotations

from typing import Any, ClassVar

from fedaudit import Client, load, sgd, state_of
from fedaudit.methods.averaging.fedavg import FedAvg, Global, Local, ce


class Calm(FedAvg):
    decay: float = 0.01  # weight of the l2 penalty

    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    def client_update(self, client: Client, msg: Global) -> Local:
        load(client.model, msg.w)
        client.fit(ce, epochs=self.E, batch=self.B, opt=sgd(self.eta, weight_decay=self.decay))
        return Local(state_of(client.model), len(client))
