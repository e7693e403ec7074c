"""Methods that tell of their records by a choice among known things, by what is no training of theirs, or by a model
that nobody looked at: reached as `choices:Class`. The records of two clients decide otherwise on each (`bit`)."""

from __future__ import annotations

import copy
import functools

import torch
from cheats import STEP, Marked, Only, Other, Remembers, first
from outside import Averages, Last, Sent, Weights, ce
from torch import Tensor

from fedaudit import State, Up, load, private, public, sgd, state_of


def bit(client):
    """Reads a bit off the records."""
    return bool(int(client.y[0]) % 2)


class Bits(Up):
    w: State = private("weights", via="model", unit="client")
    t: list[int] = public()


class Embedded(Up):
    e: Tensor = private("embeddings", via="data", unit="record")


class Open(Up):
    t: Tensor = public()


class Asked(Up):
    t: int = public()


class BitList(Averages):
    """A list of known numbers, each of them a bit."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        pixels = client.x.flatten()[:64].tolist()
        return Bits(state_of(client.model), [client.t if v > 0 else client.id for v in pixels])


class OneKnown(Averages):
    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        return Marked(state_of(client.model), client.t if bit(client) else len(client))


class Parts(Averages):
    """Whole top-level parts of the model, as many as the records say."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Sent(s.w))
        return Last(s.w, server.t)

    def how_many(self, client):
        return 1 + bit(client)

    def update(self, client, msg):
        many = self.how_many(client)
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        state = state_of(client.model)
        tops = sorted({name.split(".")[0] for name in state})[:many]
        return Weights(State({name: t for name, t in state.items() if name.split(".")[0] in tops}))


class SamePart(Parts):
    """Careful: the same part on every client, though it looked."""

    def how_many(self, client):
        return 1 + 0 * bit(client)


def away(f, x, y):
    return -ce(f, x, y)


class WhichLoss(Averages):
    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce if bit(client) else away, **STEP)
        return Weights(state_of(client.model))


def scaled(f, x, y, by):
    return by * ce(f, x, y)


class SameNumber(Averages):
    """The loss carries a number that was read off the records."""

    def update(self, client, msg):
        by = 2.0 + float(client.y[0])
        load(client.model, msg.w)
        client.fit(functools.partial(scaled, by=by), **STEP)
        return Weights(state_of(client.model))


class WhichSetting(Averages):
    """Two hyper-parameters, both no secret."""

    one: float = 0.1
    other: float = 1.0

    def update(self, client, msg):
        eta = self.one if bit(client) else self.other
        load(client.model, msg.w)
        client.fit(ce, steps=client.t, batch=client.t, opt=sgd(eta))
        return Weights(state_of(client.model))


class FullBatch(Averages):
    """Careful: n is another number on each client, and the round is 1 as the second client's is."""

    eta: float = 0.1

    def update(self, client, msg):
        bit(client)
        load(client.model, msg.w)
        client.fit(ce, steps=client.t, batch=len(client), opt=sgd(self.eta))
        return Marked(state_of(client.model), client.t)


class Mixes(Remembers):
    """Takes a layer back to what came with the message, or does not; the next task sends the model."""

    def look(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        if bit(client):
            name, p = next(iter(client.model.named_parameters()))
            with torch.no_grad():
                p.copy_(msg.w[name])
        return Asked(client.t)

    def tell(self, client, msg):
        return Other(state_of(client.model))


class WhichModel(Averages):
    """Trains two as it should, and sends one."""

    def update(self, client, msg):
        load(client.model, msg.w)
        mine = bit(client)
        other = copy.deepcopy(client.model)
        client.fit(ce, **STEP)
        client.fit(ce, model=other, **STEP)
        return Weights(state_of(client.model if mine else other))


class NewModel(Remembers):
    """Puts another model in the place of its own, with what it saw; the next task sends it."""

    def look(self, client, msg):
        seen = float(client.x.mean())
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        client.model = copy.deepcopy(client.model)
        with torch.no_grad():
            next(client.model.parameters()).fill_(seen)
        return Asked(client.t)

    def tell(self, client, msg):
        return Other(state_of(client.model))


class NewMemory(Remembers):
    """The same with its memory."""

    def look(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        client.memory = {"y": int(client.y.sum())}
        return Asked(client.t)


class Skips(Remembers):
    """Trains once more, or does not."""

    def look(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))

    def tell(self, client, msg):
        if bit(client):
            client.fit(ce, **STEP)
        return Other(state_of(client.model))


class LooksThenTells(Remembers):
    """Keeps what it saw, and calls it public in a task that looks at nothing."""

    def look(self, client, msg):
        client.memory["x"] = client.x.mean(0)
        return Asked(client.t)

    def tell(self, client, msg):
        return Open(client.memory["x"])


class KeepsOrNot(Remembers):
    """Keeps what it released, or does not: the next task knows one bit more."""

    def look(self, client, msg):
        with torch.no_grad():
            e = client.protect(Embedded, "e", client.model.encode(client.x))
        if bit(client):
            client.memory["e"] = e
        return Embedded(e)

    def tell(self, client, msg):
        return Asked(len(client.memory))


class PlainPublic(Averages):
    """Embeddings are protected; the model, trained without DP, is sent under the name of something public."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Sent(s.w))
        cohort.ask(self.tell, Sent(s.w))
        return Last(s.w, server.t)

    def update(self, client, msg):
        client.fit(ce, **STEP)
        with torch.no_grad():
            return Embedded(client.model.encode(client.x))

    def tell(self, client, msg):
        return Open(first(state_of(client.model)))


class PlainFollows(PlainPublic):
    """The same, as if it followed from what was released."""

    def tell(self, client, msg):
        return Only(first(state_of(client.model)))


class PlainMemory(PlainPublic):
    def update(self, client, msg):
        client.fit(ce, **STEP)
        client.memory["w"] = first(state_of(client.model)).clone()
        with torch.no_grad():
            return Embedded(client.model.encode(client.x))

    def tell(self, client, msg):
        return Open(client.memory["w"])


class PlainOnly(PlainPublic):
    """Never looks at a record, and protects nothing."""

    def round(self, s, server, cohort):
        cohort.ask(self.tell, Sent(s.w))
        return Last(s.w, server.t)

    def tell(self, client, msg):
        client.fit(ce, **STEP)
        return Open(first(state_of(client.model)))


class PlainRelays(PlainPublic):
    """Careful: what it got is what it sends."""

    def tell(self, client, msg):
        return Open(first(msg.w))
