"""Methods that move what they saw of the records without paying, carelessly or slyly: reached as `cheats:Class`."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from outside import Averages, Last, Sent, SoftLabels, Weights, ce
from torch import Tensor

from fedaudit import State, Up, load, private, public, sgd, state_of
from fedaudit.errors import ContractError

STEP = {"steps": 2, "batch": 16, "opt": sgd(0.1)}


def first(state):
    return next(iter(state.values()))


class Told(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


class Other(Up):
    w: State = private("weights", via="model", unit="client")


class Rows(Up):
    e: Tensor = private("embeddings", via="data", unit="record")


class Means(Up):
    v: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")


class Follows(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    r: Tensor = private("soft_labels", via="released", unit="client")


class Only(Up):
    r: Tensor = private("soft_labels", via="released", unit="client")


class Marked(Up):
    w: State = private("weights", via="model", unit="client")
    t: int = public()


# --- weights ------------------------------------------------------------------------------------------------------


class OwnLoop(Averages):
    """Trains by itself."""

    def update(self, client, msg):
        load(client.model, msg.w)
        optimiser = torch.optim.SGD(client.model.parameters(), 0.1)
        ce(client.model, client.x, client.y).mean().backward()
        optimiser.step()
        return Weights(state_of(client.model))


class OwnLoopAndFit(Averages):
    """Trains by itself, and then a little as it should."""

    def update(self, client, msg):
        OwnLoop.update(self, client, msg)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class HeadFirst(Averages):
    """Sets weights from the records, then trains privately."""

    def update(self, client, msg):
        load(client.model, msg.w)
        with torch.no_grad():
            first(dict(client.model.named_parameters())).add_(client.x.mean())
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class ReadBefore(Averages):
    """Reads before the training, and writes after it."""

    def update(self, client, msg):
        load(client.model, msg.w)
        seen = client.x.mean()
        client.fit(ce, **STEP)
        with torch.no_grad():
            first(dict(client.model.named_parameters())).add_(seen)
        return Weights(state_of(client.model))


class ReadIntoReply(Averages):
    """Reads before the training, and writes into the reply alone."""

    def update(self, client, msg):
        seen = client.x.mean()
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        state = state_of(client.model)
        first(state).add_(seen)
        return Weights(state)


class NoFit(Averages):
    """Never trains, and does not say where its weights are from."""

    def update(self, client, msg):
        return Weights(msg.w)


class Remembers(Averages):
    """Keeps a whole number that it read, and sends it in the next task."""

    def round(self, s, server, cohort):
        cohort.ask(self.look, Sent(s.w))
        cohort.ask(self.tell, Sent(s.w))
        return s

    def look(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        client.memory["y"] = int(client.y.sum())
        return Weights(state_of(client.model))

    def tell(self, client, msg):
        w = state_of(client.model)
        first(w).add_(client.memory["y"])
        return Other(w)


class RemembersText(Remembers):
    def look(self, client, msg):
        client.fit(ce, **STEP)
        client.memory["y"] = str(int(client.y.sum()))
        return Weights(state_of(client.model))

    def tell(self, client, msg):
        return Other(State({"w": torch.tensor([float(client.memory["y"])])}))


class Launders(Remembers):
    """Writes into its model what it saw, answers with something else, and sends the model one task later."""

    def look(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        OwnLoop.update(self, client, msg)
        return Weights(msg.w)

    def tell(self, client, msg):
        return Other(state_of(client.model))


class PublicNumber(Averages):
    """A number read off the records, called public."""

    def update(self, client, msg):
        client.fit(ce, **STEP)
        return Marked(state_of(client.model), 1000 + int(client.y.sum()))


class PublicNumberOfOne(Averages):
    """A number read off the records, called public, for one client alone."""

    def update(self, client, msg):
        client.fit(ce, **STEP)
        return Marked(state_of(client.model), int(client.y.sum()) if client.id == 5 else 0)


class PublicNumberLater(Averages):
    """A number read off the records, called public, from the fourth round on."""

    def update(self, client, msg):
        client.fit(ce, **STEP)
        return Marked(state_of(client.model), int(client.y.sum()) if client.t >= 4 else 0)


class Layers(Averages):
    """Which layers it sends depends on the records."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Sent(s.w))  # unlike states have no mean
        return Last(s.w, server.t)

    def update(self, client, msg):
        client.fit(ce, **STEP)
        state = state_of(client.model)
        chosen = sorted(state)[: 1 + int(client.y[0]) % 2]
        return Weights(State({name: state[name] for name in chosen}))


# --- losses -------------------------------------------------------------------------------------------------------


class Listed(Averages):
    def update(self, client, msg):
        seen = [client.x.mean()]

        def loss(f, x, y):
            return ce(f, x, y) * seen[0]

        client.fit(loss, **STEP)
        return Weights(state_of(client.model))


class Called(Averages):
    class Loss:
        def __init__(self, seen):
            self.seen = {"deep": (seen,)}

        def __call__(self, f, x, y):
            return ce(f, x, y) * self.seen["deep"][0]

    def update(self, client, msg):
        client.fit(self.Loss(client.x.mean()), **STEP)
        return Weights(state_of(client.model))


class Keyword(Averages):
    def update(self, client, msg):
        def loss(f, x, y, *, seen=client.x.mean()):  # noqa: B008
            return ce(f, x, y) * seen

        client.fit(loss, **STEP)
        return Weights(state_of(client.model))


def scaled(f, x, y, by):
    return ce(f, x, y) * by


class Number(Averages):
    """The loss carries a plain number that was read off the records."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(functools.partial(scaled, by=float(client.x.mean())), **STEP)
        return Weights(state_of(client.model))


# --- protect and class_means ----------------------------------------------------------------------------------------


class Overwrites(Averages):
    def update(self, client, msg):
        with torch.no_grad():
            raw = client.model.encode(client.x)
        e = client.protect(Rows, "e", raw)
        e.copy_(raw)
        return Rows(e)


class Copies(Averages):
    """A mean over many copies of one record."""

    def update(self, client, msg):
        with torch.no_grad():
            rows = client.model(client.x)
        many, y = rows[:1].expand(10 * len(client), -1), client.y[:1].expand(10 * len(client))
        return Means(client.class_means(many, "logits", y))


class MeanOverwritten(Averages):
    def update(self, client, msg):
        with torch.no_grad():
            rows = client.model(client.x)
        means = client.class_means(rows, "logits")
        first(means).copy_(rows[0])
        return Means(means)


class FalseFollows(SoftLabels):
    """Says that it follows from what was released, and takes what it read before."""

    def update(self, client, msg):
        with torch.no_grad():
            raw = client.model.encode(client.x)
        return Follows(client.protect(Follows, "e", raw), raw.mean(0))


class LaterFollows(Remembers):
    """The same one task later, through memory."""

    def look(self, client, msg):
        with torch.no_grad():
            raw = client.model.encode(client.x)
        client.memory["r"] = raw.mean(0)
        return Rows(client.protect(Rows, "e", raw))

    def tell(self, client, msg):
        return Only(client.memory["r"])


# --- structure ------------------------------------------------------------------------------------------------------


class WhichClass(Averages):
    """One bit an ask: which message comes."""

    def update(self, client, msg):
        client.fit(ce, **STEP)
        return Weights(state_of(client.model)) if client.id % 2 else Other(state_of(client.model))


class NamedByData(Averages):
    def update(self, client, msg):
        client.fit(ce, **STEP)
        cls = type(f"Saw{int(client.y.sum())}", (Weights,), {"__module__": __name__, "__annotations__": {}})
        return cls(state_of(client.model))


class Switches(Averages):
    """Which message comes depends on the records, though in this run it is always the same."""

    def update(self, client, msg):
        before = float(client.x.sum())
        client.fit(ce, **STEP)
        return (Weights if float(client.x.sum()) == before else Other)(state_of(client.model))


class FailsByRecords(Averages):
    """Fails unless its records are those that it had first."""

    def update(self, client, msg):
        load(client.model, msg.w)
        before = float(client.x.sum())
        client.fit(ce, **STEP)
        if float(client.x.sum()) != before:
            raise ValueError
        return Weights(state_of(client.model))


class BothWrong(Averages):
    """Two fields, each of them untrue in its own way."""

    def update(self, client, msg):
        load(client.model, msg.w)
        seen = client.x.mean()
        client.fit(ce, **STEP)
        state = state_of(client.model)
        first(state).add_(seen)
        return Marked(state, int(1e6 * float(seen)))


class Annotated(Averages):
    def update(self, client, msg) -> Weights:
        client.fit(ce, **STEP)
        return Other(state_of(client.model))


class Fails(Averages):
    """Fails as its records say."""

    def update(self, client, msg):
        if client.id == 0 and int(client.y.sum()) >= 0:
            raise ValueError(f"my labels are {client.y.tolist()}")
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class Exits(Averages):
    def update(self, client, msg):
        if client.id == 0:
            raise SystemExit(0)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class Quiet(BaseException):
    """No Exception: a careless `except` lets it through."""


class FailsQuietly(Averages):
    def update(self, client, msg):
        if client.id == 0:
            raise Quiet(f"my labels are {client.y.tolist()}")
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class Agreeable(int):
    """Equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


class CountsAsItLikes(Averages):
    def update(self, client, msg):
        client.fit(ce, **STEP)
        return Told(state_of(client.model), Agreeable(12345))


class AllBuffers(Averages):
    """Nobody counts buffers."""

    def update(self, client, msg):
        client.fit(ce, **STEP)
        state = state_of(client.model)
        return Weights(State(state, buffers=state.keys()))


class Publishes(Averages):
    """What clients deploy has the records in it."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Sent(s.w))
        return Last(s.w, server.t)

    def personal(self, client):
        with torch.no_grad():
            first(dict(client.model.named_parameters())).fill_(float(client.x.mean()))
        return client.model


# --- slyer ones ---------------------------------------------------------------------------------------------------


class Order(Averages):
    """The order of the layers tells: a permutation holds many bits."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        state = state_of(client.model)
        turned = list(state)[:: -1 if float(client.x.sum()) else 1]
        return Weights(State({name: state[name] for name in turned}, buffers=state.buffers))


class MemoryOrder(Remembers):
    """Two keys in memory: which comes first is what it saw. The next task, which looks at nothing, tells."""

    def round(self, s, server, cohort):
        cohort.ask(self.keep, Sent(s.w))
        return super().round(s, server, cohort)

    def keep(self, client, msg):
        client.memory.update(a=1, b=2)
        client.fit(ce, **STEP)
        return Third(state_of(client.model))

    def look(self, client, msg):
        client.fit(ce, **STEP)
        if float(client.x.sum()):
            client.memory["a"] = client.memory.pop("a")
        return Weights(state_of(client.model))

    def tell(self, client, msg):
        client.fit(ce, **STEP)
        return Marked(state_of(client.model), int(next(iter(client.memory)) == "a"))


class Third(Up):
    w: State = private("weights", via="model", unit="client")


class Doubled(Averages):
    """Another precision, a shape with one more dimension, a sign of zero: the values are equal, and the bytes tell."""

    how: str = "dtype"

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        assert len(client.x)
        change = {
            "dtype": Tensor.double,
            "shape": lambda t: t[None],
            "zero": lambda t: torch.cat([t[:-1], -0.0 * t[-1:]]),
        }
        state = state_of(client.model)
        return Weights(State({name: change[self.how](t) for name, t in state.items()}, buffers=state.buffers))


class Rate(Averages):
    """The learning rate is read off the records."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, steps=2, batch=16, opt=sgd(abs(float(client.x.mean()))))
        return Weights(state_of(client.model))


class Steps(Averages):
    """So is how often it steps."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, steps=1 + int(client.y[0]), batch=16, opt=sgd(0.1))
        return Weights(state_of(client.model))


class OneByOne(Steps):
    """The same, asked of one client after another: within an ask there is nothing to compare with."""

    def round(self, s, server, cohort):
        for k in list(cohort.ids):
            cohort.ask(self.update, {k: Sent(s.w)})
        return Last(s.w, server.t)


class Again(Averages):
    """How often it trains is read off the records, each time with hyper-parameters only."""

    B: int = 16
    S: int = 1
    eta: float = 0.1

    def update(self, client, msg):
        load(client.model, msg.w)
        for _ in range(1 + client.id + int(client.y[0] < 0)):
            client.fit(ce, steps=self.S, batch=self.B, opt=sgd(self.eta))
        return Weights(state_of(client.model))


class AgainOneByOne(Again):
    """The same, asked of one client after another."""

    def round(self, s, server, cohort):
        for k in list(cohort.ids):
            cohort.ask(self.update, {k: Sent(s.w)})
        return Last(s.w, server.t)


class First(Averages):
    """Asks one client alone, which chooses by its records how it answers."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, {0: Sent(s.w)})
        return Last(s.w, server.t)

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        return (Weights if client.y[0] >= 0 else Other)(state_of(client.model))


class FirstRate(First):
    """Asks one client alone, and that one reads its rate off its records."""

    B: int = 16
    S: int = 2

    def update(self, client, msg) -> Weights:
        load(client.model, msg.w)
        client.fit(ce, steps=self.S, batch=self.B, opt=sgd(abs(float(client.x.mean()))))
        return Weights(state_of(client.model))


class FirstKnown(First):
    """Asks one client alone, which looks first, and trains with hyper-parameters only."""

    B: int = 16
    S: int = 2
    eta: float = 0.1

    def update(self, client, msg) -> Weights:
        load(client.model, msg.w)
        assert len(client.y)
        client.fit(ce, steps=self.S, batch=self.B, opt=sgd(self.eta))
        return Weights(state_of(client.model))


class FirstPlain(First):
    """Asks one client alone, which has one answer only, and looks after its training."""

    def update(self, client, msg) -> Weights:
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        assert len(client.y)
        return Weights(state_of(client.model))


class Later(Averages):
    """All answer alike, but otherwise in another round."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        return (Weights if client.t == 1 else Other)(state_of(client.model))


def beside_the_rest(f, x, y, extra):
    return ce(f, x, y) + 0 * extra.sum(-1)


class Beside(Averages):
    """What is computed beside the training sees the records, and keeps what it saw."""

    def update(self, client, msg):
        load(client.model, msg.w)
        seen = []

        def watch(x):
            seen.append(x)
            return x.flatten(1)

        client.fit(beside_the_rest, beside=[watch], **STEP)
        return Weights(state_of(client.model))


class BesideMixed(Averages):
    """What is computed beside the training would make every row of all records."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(self.checked, beside=[mixed], **STEP)
        return Weights(state_of(client.model))

    @staticmethod
    def checked(f, x, y, extra):
        away = (extra - x.flatten(1)).abs().sum(-1)
        return ce(f, x, y) / (away == 0).to(x.dtype)  # not finite where what came beside a record is not its own


def mixed(x):
    return x.flatten(1).mean(0, keepdim=True).expand(len(x), -1)


class Peeks(torch.nn.Module):
    """A network that keeps what goes through it."""

    def __init__(self, inner, where):
        super().__init__()
        self.inner, self.where, self.seen, self.passes = inner, where, [], 0.5
        self.register_buffer("last", torch.zeros(64), persistent=False)

    def forward(self, x):
        if self.where == "list":
            self.seen.append(x)
        elif self.where == "attribute":
            self.passes = self.passes + 1  # a number, which goes up with the batches drawn
        elif self.where == "buffer":
            self.last = x.detach()
        return self.inner(x)


class Peeking(Averages):
    where: str = "list"

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, model=Peeks(client.model, self.where), **STEP)
        return Weights(state_of(client.model))


KEPT = []
LAST = 0.0


class Leaves(Averages):
    """Leaves what it saw where a later task, or the server, finds it: not in its model, its memory or its reply."""

    shared: ClassVar[list[float]] = []
    where: str = "global"

    def update(self, client, msg, kept=[]):  # noqa: B006
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        leave(self, kept, float(client.x.mean()))
        return Weights(state_of(client.model))


def leave(method, kept, seen):
    global LAST
    match method.where:
        case "global":
            KEPT.append(seen)
        case "rebound":
            LAST = seen
        case "class":
            method.shared.append(seen)
        case "attribute":
            Leaves.seen = seen
        case "default":
            kept.append(seen)
        case "self":
            method.__dict__["seen"] = seen


COUNTED = []


class CountsItsTasks(Averages):
    """Notes that it was asked, in a module, and neither looks at a record nor trains: nothing of it tells of them."""

    def update(self, client, msg):
        COUNTED.append(client.t)
        return Weights(msg.w)


WATCHED = []


def watching(f, x, y):
    WATCHED.append(x)
    return ce(f, x, y)


class Watching(Averages):
    """The loss puts what it sees where the task finds it afterwards."""

    def update(self, client, msg):
        client.fit(watching, **STEP)
        return Weights(state_of(client.model))


class Into(Averages):
    """The loss writes into what it was given."""

    def update(self, client, msg):
        client.fit(into, given={"seen": [0.0]}, **STEP)
        return Weights(state_of(client.model))


def into(f, x, y, seen):
    seen.append(0.0)
    return ce(f, x, y)


class Hooked(Averages):
    """A hook on the model sees the records that a private training puts through it."""

    def update(self, client, msg):
        client.model.register_forward_hook(lambda *_: None)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class GradientHook(Averages):
    def update(self, client, msg):
        next(client.model.parameters()).register_hook(lambda g: None)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class TwoFaced(Tensor):
    """Shows another content each time it is looked at."""


class Changeling(Averages):
    def update(self, client, msg):
        client.fit(ce, **STEP)
        state = state_of(client.model)
        return Weights(State({name: t.as_subclass(TwoFaced) for name, t in state.items()}, buffers=state.buffers))


class FewerRows(SoftLabels):
    """How many rows leave is how many records are of class 0."""

    def update(self, client, msg):
        with torch.no_grad():
            raw = client.model.encode(client.x)
        return Rows(client.protect(Rows, "e", raw[client.y == 0]))


class FailsInFit(Averages):
    """Fails within the training, by the records that it finds there, and never looks at them itself."""

    def update(self, client, msg):
        if client.id == 0:
            client.fit(lambda f, x, y: 1 / 0, **STEP)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class NamesItsError(Averages):
    """The class of an error is made of the records; so may be what one of our own errors says."""

    ours: bool = False

    def update(self, client, msg):
        if client.id == 0:
            if self.ours:
                raise ContractError(f"labels {client.y.tolist()}")
            raise type(f"Saw{int(client.y.sum())}", (Exception,), {"__module__": __name__})
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class PublishesLater(Publishes):
    """Keeps what it saw, and publishes it when it looks at nothing any more."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        client.memory["seen"] = float(client.x.mean())
        return Weights(msg.w)

    def personal(self, client):
        with torch.no_grad():
            first(dict(client.model.named_parameters())).fill_(client.memory.get("seen", 0.0))
        return client.model


class Noted(Up):
    t: int = public()


class PublishesQuietly(Publishes):
    """Trains by itself, sends nothing of it, and deploys it."""

    def update(self, client, msg) -> Noted:
        opt = torch.optim.SGD(client.model.parameters(), lr=0.1)
        ce(client.model, client.x, client.y).mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return Noted(client.t)

    def personal(self, client):
        return client.model


class Asks(Averages):
    """Averages nothing."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Sent(s.w))
        return Last(s.w, server.t)


class Mixes(Asks):
    """A row for each record, and the first record in all of them."""

    def update(self, client, msg):
        e = client.model.eval().encode(client.x).detach()
        return Rows(e + e[:1])


class OwnRows(Asks):
    def update(self, client, msg):
        return Rows(client.model.eval().encode(client.x).detach())


class Repeats(Asks):
    """Class means of as many rows as there are records, all of them the first record's."""

    def update(self, client, msg):
        z = client.model.eval()(client.x).detach()
        return Means(client.class_means(z[:1].expand(len(z), -1), "logits"))


class FewMixedMeans(Asks):
    """Class means of some rows, in each of which are all records: many records move few rows, and so does one."""

    def update(self, client, msg):
        z = client.model.eval()(client.x).detach()
        few = len(z) // 3
        return Means(client.class_means(z[:few] + z.mean(0), "logits", client.y[:few]))


class FewOwnMeans(Asks):
    """Class means of some records."""

    def update(self, client, msg):
        few = len(client) // 3
        z = client.model.eval()(client.x).detach()
        return Means(client.class_means(z[:few], "logits", client.y[:few]))


class RepeatsRow(Asks):
    """As many rows as there are records, all of them the first record's."""

    def update(self, client, msg):
        e = client.model.eval().encode(client.x).detach()
        return Rows(e[:1].expand(len(e), -1).clone())


class OwnMeans(Asks):
    def update(self, client, msg):
        return Means(client.class_means(client.model.eval()(client.x).detach(), "logits"))


class Tallied(Up):
    n: Tensor = private("label_counts", via="data", unit="client")


class Tallies(Asks):
    """As many as there are records, of the first one's label: whole numbers, no more than records, and no counts."""

    def update(self, client, msg):
        n = torch.zeros(client.classes)
        n[client.y[0]] = len(client)
        return Tallied(n)


class OwnCounts(Asks):
    def update(self, client, msg):
        return Tallied(torch.bincount(client.y, minlength=client.classes).float())


# --- careful ones -----------------------------------------------------------------------------------------------------


class Plain(Averages):
    """Trains, and looks at nothing."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class Counts(Averages):
    """Looks at the records after its training, for a field that pays."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        assert len(client.y) == len(client)
        return Told(state_of(client.model), len(client))


class Books(Averages):
    """Keeps its books before it looks."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.memory["rounds"] = client.memory.get("rounds", 0) + 1
        client.fit(ce, **STEP)
        assert len(client.x)
        return Marked(state_of(client.model), client.t)


class Twice(Averages):
    """Looks between two private trainings, and changes nothing."""

    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        assert len(client.x)
        client.fit(ce, **STEP)
        return Weights(state_of(client.model))


class Weighs(Averages):
    """A loss with a hyper-parameter."""

    by: float = 0.5

    def update(self, client, msg):
        load(client.model, msg.w)
        assert len(client.x)
        client.fit(functools.partial(scaled, by=self.by), **STEP)
        return Weights(state_of(client.model))


def halved(e):
    return e.mean(0) / 2


class HonestFollows(SoftLabels):
    """Derives from what was released, in a task that looked."""

    def update(self, client, msg):
        with torch.no_grad():
            e = client.protect(Follows, "e", client.model.encode(client.x))
        return Follows(e, client.derive(halved, e))


def taken(e, by):
    return e.mean(0) * by


class DerivesAnything(HonestFollows):
    """Hands a number of the records to the derivation."""

    def update(self, client, msg):
        with torch.no_grad():
            e = client.protect(Follows, "e", client.model.encode(client.x))
        return Follows(e, client.derive(taken, e, by=float(client.x.mean())))


class DerivesFromRaw(HonestFollows):
    def update(self, client, msg):
        with torch.no_grad():
            raw = client.model.encode(client.x)
            e = client.protect(Follows, "e", raw)
        return Follows(e, client.derive(halved, raw))
