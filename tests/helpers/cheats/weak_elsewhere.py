"""FedAvg whose private training has half of its noise in every process but one: workers that are not what they seem."""

from __future__ import annotations

import os
from contextlib import contextmanager
from unittest import mock

from fedaudit.methods.averaging.fedavg import FedAvg


@contextmanager
def half_the_noise():
    from opacus.optimizers import DPOptimizer

    real = DPOptimizer.add_noise

    def add_noise(self):
        real(self)
        for p in self.params:
            total = p.summed_grad.view_as(p)
            p.grad = total + 0.5 * (p.grad - total)

    with mock.patch.object(DPOptimizer, "add_noise", add_noise):
        yield


class WeakElsewhere(FedAvg):
    spared: int = 0  # the process that trains as it should; 0: all of them do

    def client_update(self, client, msg):
        if self.spared in (0, os.getpid()):
            return super().client_update(client, msg)
        with half_the_noise():
            return super().client_update(client, msg)
