"""Methods that give records or labels away by one vector per class, and their mended twins: `leaky_means:Class`."""

from __future__ import annotations

import torch
from outside import Empty
from torch import Tensor

from fedaudit import Down, Method, Up, private
from fedaudit.wire.message import relay


class Ask(Down):
    pass


class Means(Up):
    C: dict[int, Tensor] = private("prototypes", via="data", unit="client")


class Even(Up):
    C: dict[int, Tensor] = private("prototypes", via="data", unit="client", depends="all")


class Table(Up):
    C: Tensor = private("prototypes", via="data", unit="client")


class MeanImages(Method):
    """The mean image of each class; no model at all. `even`: every vector is noised as if all records were in it."""

    even: bool = False

    def init(self, server):
        return Empty()

    def round(self, s, server, cohort):
        cohort.ask(self.show, Ask())
        return s

    def show(self, client, msg):
        means = client.class_means(client.x.flatten(1), "prototypes")
        return Even(means) if self.even else Means(means)


class Known(Down):
    C: dict[int, Tensor] = relay("prototypes")


class Padded(MeanImages):
    """A row for every class. Of a class that the client does not hold it is 0 (`absent = "zero"`), what the server had
    sent (`"echo"`), or the mean of all of the client's images (`"mean"`), which says nothing of the class."""

    absent: str = "zero"

    def round(self, s, server, cohort):
        shape = server.shape[0] * server.shape[1] * server.shape[2]
        cohort.ask(self.show, Known({c: torch.full((shape,), float(c)) for c in range(server.classes)}))
        return s

    def show(self, client, msg):
        pixels = client.x.flatten(1)
        held = client.class_means(pixels, "prototypes")
        other = {
            "zero": lambda c: torch.zeros_like(pixels[0]),
            "echo": lambda c: msg.C[c],
            "mean": lambda c: pixels.mean(0),
        }
        return Table(torch.stack([held.get(c, other[self.absent](c)) for c in range(client.classes)]))


class Perhaps(Up):
    w: int | None = private("count", via="model", unit="client")


class Silent(MeanImages):
    """A field that is None: by the setting (`when = "never"`), or where the records say so (`"records"`), which the
    declared traffic either admits or hides until it has seen what was chosen (`hides`)."""

    when: str = "never"
    hides: bool = False

    def show(self, client, msg):
        spoken = self.when == "records" and bool(client.y[0] % 2 == client.id % 2)
        return Perhaps(7 if spoken else None)

    def traffic(self, plan):
        if self.when == "never":
            return {}
        expected = None if self.hides else 7
        return {
            ("up", "Perhaps.w"): 8 * sum(plan.choice("Perhaps.w", k, expected) is not None for k in plan.replied(0))
        }
