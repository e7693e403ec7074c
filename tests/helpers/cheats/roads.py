"""Ways by which what a task saw of its records could reach its reply past the mechanism: reached as `roads:Class`.

Each method puts its haul into a field that costs nothing by itself (a number that is called public, the structure or
the order of a protected field, its absence). None of them tells a client from its twin.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict

import road_box
import torch
from outside import Averages, Last, Sent, Weights, ce
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import Down, State, Up, adam, load, private, public, sgd, state_of
from fedaudit.runtime.party import Client
from fedaudit.training import models

STEP = {"steps": 2, "batch": 16, "opt": sgd(0.1)}


class Marked(Up):
    w: State = private("weights", via="model", unit="client")
    seen: list[float] = public()


class Rows(Up):
    e: Tensor = private("embeddings", via="data", unit="record")


class ListOfRows(Up):
    e: list[Tensor] = private("embeddings", via="data", unit="client")


class Table(Up):
    e: Tensor = private("embeddings", via="data", unit="client")


class Lengths(Down):
    w: State
    known: list[int]


class Haul(Exception):
    pass


def pixels(x):
    """The first numbers of a record, also where a step computes gradients of many records at once."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return [float(v) for v in x.detach().reshape(-1)[:16]]


# --- what runs inside fit ---------------------------------------------------------------------------------------------


class Inside(Averages):
    """Trains as it should, with a function inside that puts what it sees somewhere, and sends that."""

    into: str = "module"
    through: str = "beside"

    def update(self, client, msg):
        load(client.model, msg.w)
        there().box.clear()
        put = PUT[self.into]
        if self.through == "beside":

            def fixed(x):
                put(client, pixels(x))
                return x.flatten(1)[:, :1]

            caught = trained(client, lambda f, x, y, b: ce(f, x, y), beside=(fixed,))
        else:
            caught = trained(client, LOSS[self.into])
        return Marked(state_of(client.model), caught or GET[self.into](client))


def telling(put):
    """A loss that closes over nothing: what it writes to is a module's."""

    def loss(f, x, y):
        put(None, pixels(x))
        return ce(f, x, y)

    return loss


def trained(client, loss, **more):
    try:
        client.fit(loss, **STEP, **more)
    except Haul as e:
        return list(e.args[0])
    return []


def raises(client, seen):
    raise Haul(seen)


def there():
    """The module, by a way that does not name it: what a task names is looked at before and after it."""
    return sys.modules["road_box"]


PUT = {
    "error": raises,
    "module": lambda client, seen: there().box.append(seen),
    "first in module": lambda client, seen: there().box.append(seen) if not there().box else None,
    "deque": lambda client, seen: there().queue.extend(seen),
    "array": lambda client, seen: there().numbers.extend(seen),
    "environment": lambda client, seen: os.environ.__setitem__("SEEN", repr(seen)),
    "seed": lambda client, seen: torch.manual_seed(int(1e6 * abs(sum(seen)))),
    "attribute": lambda client, seen: setattr(Client, "_seen", seen),
}
LOSS = {name: telling(put) for name, put in PUT.items()}
GET = defaultdict(
    lambda: lambda client: [],
    {
        "module": lambda client: there().box[-1],
        "first in module": lambda client: there().box[0],
        "deque": lambda client: [there().queue.pop() for _ in range(16)],
        "array": lambda client: list(there().numbers[-16:]),
        "environment": lambda client: [float(v) for v in os.environ["SEEN"].strip("[]").split(",")],
        "seed": lambda client: [float(torch.initial_seed())],
        "attribute": lambda client: Client._seen,
    },
)


class LeavesForServer(Averages):
    """Leaves what its loss saw in a module, where the server takes it: nothing of it is in the reply."""

    def round(self, s, server, cohort):
        replies = cohort.ask(self.update, Sent(s.w))
        assert road_box.box
        return Last(replies[min(replies)].w, server.t)

    def update(self, client, msg):
        load(client.model, msg.w)

        def loss(f, x, y):
            road_box.box.append(pixels(x))
            return ce(f, x, y)

        client.fit(loss, **STEP)
        return Weights(state_of(client.model))


class LeavesBeside(LeavesForServer):
    """The same from a function beside the training."""

    def update(self, client, msg):
        load(client.model, msg.w)

        def fixed(x):
            road_box.box.append(pixels(x))
            return x.flatten(1)[:, :1]

        client.fit(lambda f, x, y, b: ce(f, x, y), beside=(fixed,), **STEP)
        return Weights(state_of(client.model))


class Tells(nn.Flatten):
    """A layer that tells a module what goes through it."""

    def forward(self, x):
        there().box.append(pixels(x))
        return super().forward(x)


class Forward(Averages):
    """Sends what its network saw."""

    def build(self, arch):
        return models.Net(
            nn.Sequential(Tells(), nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 10), width=16, arch="tells"
        )

    def update(self, client, msg):
        load(client.model, msg.w)
        there().box.clear()
        client.fit(ce, **STEP)
        return Marked(state_of(client.model), there().box[-1])


class RawSteps(torch.optim.SGD):
    """Steps with the sum before the noise, wherever that lies."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.summed_grad.view_as(p) / 16


class OwnOptimiser(Averages):
    def update(self, client, msg):
        from fedaudit.training.fit import Opt

        load(client.model, msg.w)
        client.fit(ce, steps=2, batch=16, opt=Opt(RawSteps, {"lr": 0.1}))
        return Weights(state_of(client.model))


# --- noise, steps, absences -------------------------------------------------------------------------------------------


class DrawsItsNoise(Averages):
    """Draws the noise of its own DP-SGD, and subtracts it."""

    def update(self, client, msg):
        load(client.model, msg.w)
        before = {name: p.detach().clone() for name, p in client.model.named_parameters()}
        client.fit(ce, steps=1, batch=16, opt=sgd(1.0))
        rng = client.rng("0/dp-sgd 1")
        guess = {name: torch.normal(0.0, 1.0, p.shape, generator=rng) / 16 for name, p in before.items()}
        moved = {n: before[n] - p.detach() for n, p in client.model.named_parameters()}
        road_box.box.append((moved, guess))
        return Weights(state_of(client.model))


class StopsHalfway(Averages):
    """Forty steps whose loss then fails, which it catches, and a training of one step that returns."""

    def update(self, client, msg):
        load(client.model, msg.w)
        calls = []

        class Stop(Exception):
            pass

        class Watch(torch.optim.SGD):
            def step(self, closure=None):
                calls.append(1)
                if len(calls) == 41:
                    raise Stop
                return super().step(closure)

        from fedaudit.training.fit import Opt

        with contextlib.suppress(Stop):
            client.fit(ce, steps=60, batch=16, opt=Opt(Watch, {"lr": 0.1}))
        client.fit(ce, steps=1, batch=16, opt=sgd(0.1))
        return Weights(state_of(client.model))


class AbsentByRecords(Averages):
    """Is absent if the function beside its training says so."""

    def update(self, client, msg):
        load(client.model, msg.w)

        def fixed(x):
            if client.id == 0:
                raise Haul
            return x.flatten(1)[:, :1]

        client.fit(lambda f, x, y, b: ce(f, x, y), beside=(fixed,), **STEP)
        return Weights(state_of(client.model))


# --- what a protected field has beside its numbers --------------------------------------------------------------------


class Releases(Averages):
    """Sends something of its records that is protected, and no weights."""

    def round(self, s, server, cohort):
        cohort.ask(self.update, Lengths(s.w, list(range(200))))
        return s


class Structure(Releases):
    """The structure of a protected field follows the records; the server makes every length known first."""

    what: str = "rows"

    def update(self, client, msg):
        with torch.no_grad():
            e = client.model.encode(client.x)
        n = 3 + int(client.y[:8].sum()) % 17
        if self.what == "rows":
            return Rows(e[:n])
        if self.what == "width":
            return Table(torch.ones(n, 4) * e[0, :1])
        if self.what == "list":
            return ListOfRows([e[0] for _ in range(n)])
        return Table(e[:4].double() if bit(client.y) else e[:4])


def bit(y):
    """One bit of the labels."""
    return (3 + int(y[:8].sum()) % 17) % 2


class Replays(Releases):
    """Says itself what the mechanism is to give back."""

    def update(self, client, msg):
        with torch.no_grad():
            e = client.model.encode(client.x)
        client.replay = [e]
        return Rows(client.protect(Rows, "e", e))


class Mixed(Releases):
    """A row for each record, which holds another record's label, too, or is where the labels put it."""

    how: str = "scaled"

    def update(self, client, msg):
        with torch.no_grad():
            e = client.model.encode(client.x)
        e = e / e.norm(dim=1, keepdim=True) / 20
        return Rows(e * (1 + client.y[0]) if self.how == "scaled" else e[client.y.argsort(stable=True)])


class Later(Averages):
    """Keeps in round 1 what its loss saw, and sends it in round 2."""

    def update(self, client, msg):
        load(client.model, msg.w)
        kept = client.memory.get("seen", [0.0])
        client.fit(ce, **STEP)
        client.memory["seen"] = [float(v) for v in client._site.own()[0].reshape(-1)[:16]]
        return Marked(state_of(client.model), kept)


class LaterStill(Later):
    """The same, but only from round 4 on, or only on client 5."""

    when: str = "late"

    def update(self, client, msg):
        told = super().update(client, msg)
        now = client.t >= 4 if self.when == "late" else client.id == 5
        return told if now else Marked(told.w, [0.0])


# --- honest code that looked guilty -----------------------------------------------------------------------------------


class Counted(Up):
    w: State = private("weights", via="model", unit="client")
    c: Tensor = private("label_counts", via="data", unit="client")


class Honest(Averages):
    """Sends protected counts, and trains with what it likes."""

    how: str = "steps"

    def update(self, client, msg):
        load(client.model, msg.w)
        counts = client.protect(Counted, "c", torch.bincount(client.y, minlength=client.classes).float())
        options = {"batch": 16, "opt": adam(0.01)}
        if self.how == "steps":
            client.fit(ce, steps=2, **options)
        elif self.how == "epochs":
            client.fit(ce, epochs=1, **options)
        elif self.how == "batch":
            client.fit(ce, steps=3, batch=min(64, len(client)), opt=sgd(0.1))
        else:
            client.fit(proximal, steps=2, given={"w": dict(msg.w)}, **options)
        return Counted(state_of(client.model), counts)


def proximal(f, x, y, w):
    far = sum(((p - w[name]) ** 2).sum() for name, p in f.params.items())
    return cross_entropy(f(x), y, reduction="none") + 0.01 * far
