"""FedAvg after a careless change: its clients send a second tree of weights."""

from __future__ import annotations

from fedaudit import State, Up, private
from fedaudit.methods.averaging import fedavg


class Local(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")
    m: State = private("weights", via="model", unit="client")


class FedAvg(fedavg.FedAvg):
    def client_update(self, client, msg):
        sent = super().client_update(client, msg)
        return Local(sent.w, sent.n, sent.w)

    def traffic(self, plan):
        return {**super().traffic(plan), ("up", "Local.m"): plan.state() * len(plan.replied(0))}
