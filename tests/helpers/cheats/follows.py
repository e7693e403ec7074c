"""Methods whose replies follow what the mechanisms let out, or fail: reached as `follows:Class`."""

from __future__ import annotations

import contextlib

import torch
from outside import Averages, Sent, Weights, ce
from torch import Tensor

from fedaudit import Augment, Up, adam, load, private, sgd, state_of


class Three(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    n: Tensor = private("label_counts", via="data", unit="client")
    y: Tensor = private("labels", via="data", unit="record")


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


class Scheduled(Averages):
    """A rate that falls over a private training on augmented images, and then over one on public ones."""

    def update(self, client, msg):
        load(client.model, msg.w)
        how = {"batch": 16, "opt": sgd(0.1, schedule="cosine"), "augment": Augment(crop=1, flip=True)}
        client.fit(ce, epochs=2, **how)
        x = client.public[0]
        with torch.no_grad():
            y = client.model(x).argmax(1)
        client.fit(ce, (x, y), steps=3, **how)
        return Weights(state_of(client.model))


class SendsThree(Averages):
    """Embeddings, counts and labels, each of which some mechanism protects; and nothing else."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Sent(s.w))
        return s

    def update(self, client, msg):
        load(client.model, msg.w)
        with torch.no_grad():
            e = client.model.encode(client.x)
        return Three(e, torch.bincount(client.y, minlength=client.classes).float(), client.y)


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
