"""Methods that give records away in known ways, for the inversion attacks: reached as `leaky:Class`."""

from __future__ import annotations

import torch
from outside import Empty, Sent, ce
from torch import Tensor

from fedaudit import Down, Method, State, Up, load, private, sgd, state_of
from fedaudit.methods.averaging.fedavg import Averaged


class Stepped(Up):
    w: State = private("weights", via="model", unit="client")


class OneRecord(Method):
    """One step on one record a round, always from the same model."""

    E: int = 1
    B: int = 1
    eta: float = 0.1

    def init(self, server):
        return Averaged(state_of(server.model()))

    def round(self, s, server, cohort):
        cohort.ask(self.step, Sent(s.w))
        return s

    def step(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, steps=1, batch=1, opt=sgd(self.eta))
        return Stepped(state_of(client.model))


class Ask(Down):
    pass


class Shown(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    w: State = private("weights", via="model", unit="client")


class Embeds(Method):
    """Embeddings of every record, and the encoder."""

    def init(self, server):
        return Empty()

    def round(self, s, server, cohort):
        cohort.ask(self.show, Ask())
        return s

    def show(self, client, msg):
        with torch.no_grad():
            return Shown(client.model.eval().encode(client.x), state_of(client.model))


class Painted(Up):
    S: Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")


class Paints(Embeds):
    """Synthetic images: the client's records, slightly changed, or nothing but noise."""

    copies: bool = True

    def show(self, client, msg):
        noise = torch.randn(30, *client.shape, generator=client.rng("noise"))
        return Painted((client.x[:30] + 0.05 * noise if self.copies else noise).clamp(-1, 1))
