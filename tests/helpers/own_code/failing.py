"""A method of which one client fails, for tests of engines: `failing:OneFails`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedaudit import Down, Method, Record, State, Up, ce, load, private, sgd, state_of


class Start(Down):
    w: State


class Trained(Up):
    w: State = private("weights", via="model", unit="client")


class Kept(Record):
    w: State


class OneFails(Method):
    """Client `who` fails: before it trains, in its training (in the loss), or after it."""

    who: int = -1
    when: str = "never"
    drop: bool = False

    def init(self, server: Any) -> Kept:
        return Kept(state_of(server.model()))

    def round(self, s: Any, server: Any, cohort: Any) -> Kept:
        replies = cohort.ask(self.train, Start(s.w))
        return Kept(replies[min(replies)].w)

    def train(self, client: Any, msg: Any) -> Trained:
        load(client.model, msg.w)
        fails = client.id == self.who
        if fails and self.when == "before":
            raise RuntimeError("it broke before")
        if self.drop:
            client.model.encoder.add_module("drop", nn.Dropout(0.5))
        wrong = torch.full((client.classes,), -1.0 if fails and self.when == "during" else 1.0)
        client.fit(picky, epochs=1, batch=8, opt=sgd(0.1), given={"sign": wrong})
        if fails and self.when == "after":
            raise RuntimeError("it broke after")
        return Trained(state_of(client.model))


def picky(f: Any, x: Tensor, y: Tensor, sign: Tensor) -> Tensor:
    """Refuses what it is given; in a stack nobody can tell whose fault it is."""
    if not bool((sign > 0).all()):
        raise ValueError("a wrong sign")
    return ce(f, x, y)
