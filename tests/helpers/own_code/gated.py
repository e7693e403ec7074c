"""Methods for the gates of a test suite: one that is slower, one that computes more, both otherwise FedAvg."""

from __future__ import annotations

from fedaudit.gates.in_turns import clock
from fedaudit.methods.averaging.fedavg import FedAvg


class Same(FedAvg):
    """FedAvg by another name."""


class Slower(FedAvg):
    """Its rounds take `factor` times as long, whatever else the machine does."""

    factor: float = 1.5

    def round(self, s, server, cohort):
        begun = clock()
        after = super().round(s, server, cohort)
        until = clock() + (self.factor - 1) * (clock() - begun)
        while clock() < until:
            pass
        return after


class Twice(FedAvg):
    """It trains twice as long: twice the FLOPs, the same bytes."""

    def client_update(self, client, msg):
        return type(self)(E=2 * self.E, B=self.B, eta=self.eta)._once(client, msg)

    def _once(self, client, msg):
        return FedAvg.client_update(self, client, msg)
