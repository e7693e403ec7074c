"""Methods and an attack as somebody outside the package would write them, reached as `outside:Class`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedaudit import (
    NUMBER,
    Down,
    Method,
    Record,
    State,
    Up,
    load,
    private,
    public,
    relay,
    sgd,
    state_of,
    weighted_mean,
)  # fmt: skip
from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack


def ce(f, x, y):
    return cross_entropy(f(x), y, reduction="none")


class Empty(Record):
    pass


class Start(Down):
    t: int


class Shared(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    y: Tensor = private("labels", via="data", unit="record")
    w: State = private("weights", via="model", unit="client")
    t: int = public()


class Peers(Down):
    e: dict[int, Tensor] = relay("embeddings")


class Answer(Up):
    z: dict[int, Tensor] = private("logits", via="model", unit="client")


class Last(Record):
    w: State | None
    t: int


class Exchange(Method):
    """Two asks a round, relays, memory over rounds: the traffic pattern of knowledge exchange in miniature."""

    quick: ClassVar = {"steps": 2}
    steps: int = 3

    def init(self, server):
        return Last(None, 0)

    def round(self, s, server, cohort):
        shared = cohort.ask(self.share, Start(server.t))
        messages = {k: Peers({i: r.e for i, r in shared.items() if i != k}) for k in shared}
        answers = cohort.ask(self.answer, messages)
        assert all(r.t == server.t for r in shared.values())
        return Last(weighted_mean({k: shared[k].w for k in answers}, dict.fromkeys(answers, 1.0)), server.t)

    def share(self, client, msg):
        client.fit(ce, steps=self.steps, batch=16, opt=sgd(0.1))
        client.memory["rounds"] = [*client.memory.get("rounds", []), msg.t]  # before it looks at its records
        with torch.no_grad():
            e = client.model.encode(client.x)
        return Shared(e, client.y, state_of(client.model), msg.t)

    def answer(self, client, msg):
        assert client.memory["rounds"][-1] == client.t
        with torch.no_grad():
            return Answer({i: client.model.classify(e) for i, e in msg.e.items()})

    def predictor(self, s, server):
        return None if s.w is None else load(server.model(), s.w)

    def traffic(self, plan):
        h, c = 64, plan.classes
        rows = {k: plan.n[k] for k in plan.replied(0)}
        others = {k: sum(n for i, n in rows.items() if i != k) for k in rows}
        count = len(rows)
        return {
            ("down", "Start.t"): NUMBER * len(plan.asked(0)),
            ("up", "Shared.e"): sum(plan.tensor(n, h) for n in rows.values()),
            ("up", "Shared.y"): sum(plan.tensor(n, size=8) for n in rows.values()),
            ("up", "Shared.w"): plan.state() * count,
            ("up", "Shared.t"): NUMBER * count,
            ("down", "Peers.e"): sum(plan.tensor(n, h) for n in others.values()) + NUMBER * count * (count - 1),
            ("up", "Answer.z"): sum(plan.tensor(others[k], c) + NUMBER * (count - 1) for k in plan.replied(1)),
        }


class Weights(Up):
    w: State = private("weights", via="model", unit="client")


class Averages(Method):
    """The smallest useful method: also says nothing about its traffic."""

    def init(self, server):
        return Last(state_of(server.model()), 0)

    def round(self, s, server, cohort):
        replies = cohort.ask(self.update, Sent(s.w))
        return Last(weighted_mean({k: r.w for k, r in replies.items()}, dict.fromkeys(replies, 1.0)), server.t)

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        return Weights(state_of(client.model))


class Sent(Down):
    w: State


class Softened(Up):
    v: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")
    r: dict[int, Tensor] = private("soft_labels", via="released", unit="client")


class Resoftened(Up):
    v: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")
    r: dict[int, Tensor] = private("soft_labels", via="data", unit="client", depends="class")


def softened(v):
    return {c: mean.softmax(0) for c, mean in v.items()}


class SoftLabels(Averages):
    """Class-mean logits, and soft labels that are made from the means as they were released."""

    def init(self, server):
        return Last(None, 0)

    def round(self, s, server, cohort):
        cohort.ask(self.update, Start(server.t))
        return Last(None, server.t)

    def update(self, client, msg):
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        with torch.no_grad():
            v = client.protect(Softened, "v", client.class_means(client.model(client.x), "logits"))
        return Softened(v, client.derive(softened, v))


class RawSoftLabels(SoftLabels):
    """The same from the raw means: a second release of the records."""

    def update(self, client, msg):
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        with torch.no_grad():
            v = client.class_means(client.model(client.x), "logits")
        return Resoftened(v, {c: mean.softmax(0) for c, mean in v.items()})


class FalseSoftLabels(SoftLabels):
    """Says that its soft labels come from the released means, and takes the raw ones."""

    def update(self, client, msg):
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        with torch.no_grad():
            raw = client.class_means(client.model(client.x), "logits")
        return Softened(client.protect(Softened, "v", raw), {c: mean.softmax(0) for c, mean in raw.items()})


class Stops(Averages):
    """Trains until it likes what it sees."""

    def update(self, client, msg):
        client.fit(ce, epochs=2, batch=32, opt=sgd(0.1), until=lambda f, x, y: bool((f(x).argmax(1) == y).all()))
        return Weights(state_of(client.model))


def mean_ce(f, x, y):
    return cross_entropy(f(x), y)


class Inseparable(Averages):
    def update(self, client, msg):
        client.fit(mean_ce, epochs=1, batch=32, opt=sgd(0.1), separable=False)
        return Weights(state_of(client.model))


class Paints(Averages):
    """Optimises an image."""

    def update(self, client, msg):
        x = client.x[:1].clone().requires_grad_()
        client.optimise([x], lambda: client.model(x).sum(), steps=1, opt=sgd(0.1))
        return Weights(state_of(client.model))


class Vandal(Averages):
    """Overwrites what it receives, in place: nobody else may notice."""

    def update(self, client, msg):
        reply = Weights(State({name: t.clone() for name, t in msg.w.items()}, msg.w.buffers))
        for t in msg.w.values():
            t.fill_(client.id)
        for t in client.model.parameters():
            t.data.fill_(client.id)
        return reply


class Smuggler(Averages):
    """Hands the client a closure."""

    def round(self, s, server, cohort):
        secret = torch.ones(3)

        def update(client, msg):
            return Weights(State({"secret": secret}))

        cohort.ask(update, Sent(s.w))
        return s


class Liar(Averages):
    """Declares its weights as computed through the model, then adds a mean of the records."""

    def update(self, client, msg):
        reply = super().update(client, msg)
        name = next(iter(reply.w))
        reply.w[name].add_(client.x.mean())
        return reply


class LateLiar(Liar):
    """The same, after a training that was given what the task read: such a task is not replayed from its start."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, (client.x, client.y), epochs=1, batch=32, opt=sgd(0.1))
        reply = Weights(state_of(client.model))
        reply.w[next(iter(reply.w))].add_(client.x.mean())
        return reply


class Spendthrift(Averages):
    """Declares less than it sends."""

    def traffic(self, plan):
        return {("down", "Sent.w"): plan.state() * len(plan.asked(0)), ("up", "Weights.w"): 17}


class Fragile(Averages):
    """Client 1 always fails."""

    def update(self, client, msg):
        if client.id == 1:
            raise RuntimeError("a wrong shape")
        return super().update(client, msg)


class Broken(Averages):
    """Every client fails."""

    def update(self, client, msg):
        return 1 / 0


class Hungry(Averages):
    """Runs out of memory, or loses the device, in round 2, as often as its file says."""

    left: str = ""
    device: bool = False
    after: str = ""  # a file for which it waits before that

    def round(self, s, server, cohort):
        if server.t == 2 and (n := int(Path(self.left).read_text())):
            Path(self.left).write_text(str(n - 1))
            while self.after and not Path(self.after).exists():
                time.sleep(0.05)
            if self.device:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return super().round(s, server, cohort)


class Diverged(Averages):
    def update(self, client, msg):
        reply = super().update(client, msg)
        next(iter(reply.w.values()))[0] = torch.nan
        return reply


class NoState(Averages):
    def round(self, s, server, cohort):
        return None


class Margin(Attack):
    """Confidence of the uploaded model in the true class."""

    needs: ClassVar = frozenset({"weights"})

    def run(self, scene):
        message, field = scene.released("weights")[-1]
        model = scene.model(scene.arch(scene.target), message[field])
        with torch.no_grad():
            return Claims(model(scene.x).softmax(1).gather(1, scene.y[:, None])[:, 0])


class Extra(Up):
    w: State = private("weights", via="model", unit="client")
    x: Tensor = public()


class Fat(Averages):
    """FedAvg's traffic, and a tensor that nobody needs."""

    extra: int = 1

    def update(self, client, msg):
        return Extra(super().update(client, msg).w, torch.zeros(self.extra))


class Trained(Up):
    loss: float = public()


class FalsePublic(SoftLabels):
    """Calls the loss that it trained to public."""

    def update(self, client, msg):
        return Trained(client.fit(ce, epochs=1, batch=32, opt=sgd(0.1)).loss)


class Hoarder(SoftLabels):
    """Keeps the records in memory, and sends them in a later ask as if they came from the model."""

    def round(self, s, server, cohort):
        cohort.ask(self.hoard, Start(server.t))
        cohort.ask(self.leak, Start(server.t))
        return Last(None, server.t)

    def hoard(self, client, msg):
        client.memory["x"] = client.x
        return Trained(0.0)

    def leak(self, client, msg):
        return Weights(State({"x": client.memory["x"]}))


class Summed(Up):
    s: float = public()


class Scribbler(SoftLabels):
    """Writes into the public set."""

    def update(self, client, msg):
        total = float(client.public[0].sum())
        client.public[0].add_(1.0)
        return Summed(total)


class Unbilled(Averages):
    """Trains on the records past DP-SGD, by calling them data."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, (client.x, client.y), epochs=1, batch=32, opt=sgd(0.1))
        return Weights(state_of(client.model))


class TwiceTrained(Averages):
    """Two trainings a round."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        return Weights(state_of(client.model))


class OncePlain(Averages):
    """Trains on the records past DP-SGD in round 1, and with it from then on."""

    def update(self, client, msg):
        load(client.model, msg.w)
        data = (client.x, client.y) if client.t == 1 else None
        client.fit(ce, data, epochs=1, batch=32, opt=sgd(0.1))
        return Weights(state_of(client.model))


class Draws(SoftLabels):
    """Two asks a round, each answered with a random number."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Start(server.t))
        cohort.ask(self.update, Start(server.t))
        return Last(None, server.t)

    def update(self, client, msg):
        return Summed(float(torch.rand(())))


class Released(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    V: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")


class Releases(SoftLabels):
    """Embeddings of every record, and the mean of them by class."""

    def update(self, client, msg):
        client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        with torch.no_grad():
            e = client.model.encode(client.x)
        return Released(e, client.protect(Released, "V", client.class_means(e, "logits")))
