"""SCAFFOLD. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1.

    client i: y_i <- y_i - eta_l (g_i(y_i) - c_i + c), K times, from y_i = x                            (3)
              c_i+ = c_i - c + (x - y_i) / (K eta_l)                                                (4, ii)
    server:   x <- x + eta_g / |S| sum_S (y_i - x);  c <- c + 1 / N sum_S (c_i+ - c_i)                  (5)

c_i stays in client i's memory, c on the server; N counts all clients, S those that answered. With eta_g = 1, c = 0 and
c_i = 0 it is FedAvg with equal weights: so is its first round.

These points are left open, or done otherwise here:

- Option I of Eq. 4 (c_i+ is the gradient of all records at x) is not here: it costs a pass more, and the paper's
  experiments run option II.
- A client uploads y_i, and the paper y_i - x: the server knows x, so nothing more is told and as many bytes travel.
- K is the number of steps that the client made: E epochs of its own number of batches, so that it differs from client
  to client. The paper has one K for all.
- Steps are plain SGD: with momentum or Adam, (x - y_i) / (K eta_l) is no mean gradient. Both are refused.
- c and c_i are over parameters; batch-norm statistics are plainly averaged.
- A client deploys y_i; x is the global model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedaudit import (
    Client,
    Cohort,
    Down,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    ce,
    load,
    private,
    register,
    sgd,
    state_of,
)
from fedaudit.methods.shared._travelling import SendsTrained


class Global(Down):
    x: State
    c: list[Tensor]  # by the names of x's parameters in their order; no State, for it is no model


class Local(Up):
    y: State = private("weights", via="model", unit="client")
    delta_c: State = private("gradients", via="model", unit="client")  # c_i+ - c_i


class Controlled(Record):
    x: State
    c: State


def controlled(f: Any, x: Tensor, y: Tensor, c: Mapping[str, Tensor], c_i: Mapping[str, Tensor]) -> Tensor:
    """Return a loss whose gradient is that of Eq. 3, one value per record: the second term is the same for all."""
    correction = sum(((c[name] - c_i[name]) * w).sum() for name, w in f.params.items() if name in c)
    return ce(f, x, y) + correction


@register("scaffold")
class SCAFFOLD(SendsTrained):
    """Correct local steps by control variates. A client sends its weights and its control variate."""

    E: int = Field(default=1, ge=1)  # local epochs
    B: int = 64  # local batch size
    eta_l: float = Field(default=0.01, gt=0)  # local learning rate
    eta_g: float = 1.0  # global step size
    weight_decay: float = Field(default=0.0, ge=0)  # of local training

    on_digits: ClassVar[Mapping[str, Any]] = {"E": 5, "B": 16, "eta_l": 0.1}
    quick: ClassVar[Mapping[str, Any]] = {"B": 16, "eta_l": 0.05}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"pflib": {"E": 1, "B": 10, "eta_l": 0.005, "eta_g": 1.0}}

    def init(self, server: Server) -> Controlled:
        x = state_of(server.model(), self.part)
        return Controlled(x, zeros(x))

    def round(self, s: Controlled, server: Server, cohort: Cohort) -> Controlled:
        mean = cohort.mean(self.client_update, Global(s.x, [s.c[n] for n in sorted(s.c)]))  # i in S
        y = mean.value.y
        x = State({**y, **{n: s.x[n] + self.eta_g * (y[n] - s.x[n]) for n in s.c}}, y.buffers)  # Eq. 5
        c = {n: s.c[n] + mean.count / server.clients * mean.value.delta_c[n] for n in s.c}  # Eq. 5: |S| / N
        return Controlled(x, State(c))

    def client_update(self, client: Client, msg: Global) -> Local:  # on client i
        load(client.model, msg.x, self.part)
        c = dict(zip(sorted(msg.x.parameters), msg.c, strict=True))
        c_i = client.memory.get("c_i") or zeros(msg.x)
        given = {"c": c, "c_i": dict(c_i)}
        opt = sgd(self.eta_l, weight_decay=self.weight_decay)
        K = client.fit(controlled, epochs=self.E, batch=self.B, opt=opt, given=given).steps  # Eq. 3
        y = state_of(client.model, self.part)
        delta_c = State({n: (msg.x[n] - y[n]) / (K * self.eta_l) - c[n] for n in c})  # Eq. 4, option II
        client.memory["c_i"] = State({n: c_i[n] + delta_c[n] for n in delta_c})
        return Local(y, delta_c)

    def predictor(self, s: Controlled, server: Server) -> torch.nn.Module:
        return load(server.model(), s.x, self.part)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Global.x"): plan.state(part=self.part) * len(plan.asked(0)),
            ("down", "Global.c"): plan.state(part=self.part).without_buffers() * len(plan.asked(0)),
            ("up", "Local.y"): plan.state(part=self.part) * len(plan.replied(0)),
            ("up", "Local.delta_c"): plan.state(part=self.part).without_buffers() * len(plan.replied(0)),
        }


def zeros(x: State) -> State:
    return State({name: torch.zeros_like(t) for name, t in x.parameters.items()})
