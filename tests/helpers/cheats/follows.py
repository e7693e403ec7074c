"""Methods whose replies follow what the mechanisms let out, or fail: reached as `follows:Class`."""

from __future__ import annotations

import contextlib

import torch
from outside import Averages, Weights, ce

from fedaudit import adam, load, sgd, state_of


class SgdTwice(Averages):
    """Two private trainings a task, with momentum, and noise of its own from the global generator between them."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, steps=3, batch=16, opt=sgd(0.1, momentum=0.9))
        with torch.no_grad():
            next(iter(client.model.parameters())).add_(0.01 * torch.randn(()))
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.05))
        client.memory["rounds"] = client.memory.get("rounds", 0) + 1
        return Weights(state_of(client.model))


class AdamThenPublic(Averages):
    """A private training with Adam, then one on public records with what the model says of them."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, steps=2 + client.id, batch=16, opt=adam(0.01))
        x = client.public[0]
        with torch.no_grad():
            y = client.model(x).argmax(1)
        client.fit(ce, (x, y), steps=3, batch=16, opt=adam(0.01))
        return Weights(state_of(client.model))


class FailsByNumber(Averages):
    def update(self, client, msg):
        if client.id == 1:
            raise ValueError("number 1 fails")
        load(client.model, msg.w)
        client.fit(ce, steps=1, batch=16, opt=sgd(0.1))
        return Weights(state_of(client.model))


class FailsByRecords(Averages):
    """Fails if its first label says so, before or after its training."""

    at: str = "before"

    def update(self, client, msg):
        load(client.model, msg.w)
        if self.at == "before" and client.y[0] % 2:
            raise ValueError
        client.fit(ce, steps=1, batch=16, opt=sgd(0.1))
        if client.y[0] % 2:
            raise ValueError
        return Weights(state_of(client.model))


class FailsInside(Averages):
    """Fails inside its training, in whatever looks at a record, and goes on without."""

    def update(self, client, msg):
        load(client.model, msg.w)
        with contextlib.suppress(ValueError):
            client.fit(lambda f, x, y, b: ce(f, x, y), steps=1, batch=16, opt=sgd(0.1), beside=(fails,))
        return Weights(state_of(client.model))


def fails(x):
    raise ValueError
