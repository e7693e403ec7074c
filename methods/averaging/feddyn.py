"""FedDyn. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1.

    client k: theta_k = argmin  L_k(theta) - <g_k, theta> + alpha / 2 ||theta - theta^{t-1}||^2
              g_k <- g_k - alpha (theta_k - theta^{t-1}),  which is grad L_k(theta_k) at the minimum
    server:   h <- h - alpha / m sum_{k in P} (theta_k - theta^{t-1});  theta^t = mean_P theta_k - h / alpha

g_k stays in client k's memory, h on the server; m counts all clients, P those that answered.

These points are left open, or worth knowing:

- The argmin is E epochs of SGD.
- alpha -> 0 is *not* FedAvg. A client's training becomes FedAvg's, but h / alpha has no alpha left in it: it is minus
  the sum over all rounds of (|P| / m) times the clients' mean step, and the server goes on in the direction of all
  steps so far. At alpha = 0 itself h / alpha is 0 / 0. There we leave the correction out, which gives FedAvg with equal
  weights.
- g_k and h are over parameters; batch-norm statistics are plainly averaged.
- As a rival: alpha = 0.01 in FedAF (Appendix A). The paper's own code divides alpha by client k's share of the records,
  and clips gradients and decays weights: none of it is in Algorithm 1, and none is here. PFLlib leaves the square of
  ||theta - theta^{t-1}|| out; its default is alpha = 1.
- A client deploys its model after local training; theta^t is the global model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
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
    state_of,
)
from fedaudit.methods.shared._libraries import PFLIB
from fedaudit.methods.shared._optimiser import WithOptimiser
from fedaudit.methods.shared._travelling import SendsTrained


class Global(Down):
    theta: State


class Local(Up):
    theta: State = private("weights", via="model", unit="client")


class Dynamic(Record):
    theta: State
    h: State


def regularised(
    f: Any, x: Tensor, y: Tensor, g: Mapping[str, Tensor], theta_t: Mapping[str, Tensor], alpha: float
) -> Tensor:
    """Return the loss of line 6, one value per record: the regulariser is the same for all of them."""
    linear = sum((g[name] * theta).sum() for name, theta in f.params.items() if name in g)
    apart = sum(((theta - theta_t[name]) ** 2).sum() for name, theta in f.params.items() if name in theta_t)
    return ce(f, x, y) - linear + alpha / 2 * apart


@register("feddyn", tables="FedAF")
class FedDyn(SendsTrained, WithOptimiser):
    """Average models that a moving penalty pulls together. A client sends its weights."""

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    alpha: float = 0.01  # strength of the regulariser

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9, "alpha": 0.01},
        "pflib": {**PFLIB, "alpha": 1.0},
    }

    def init(self, server: Server) -> Dynamic:
        theta = state_of(server.model(), self.part)
        return Dynamic(theta, zeros(theta))

    def round(self, s: Dynamic, server: Server, cohort: Cohort) -> Dynamic:
        mean = cohort.mean(self.client_update, Global(s.theta))  # k in P
        theta = mean.value.theta
        if not self.alpha:
            return Dynamic(theta, s.h)
        step = self.alpha / server.clients * mean.count  # sum_P (theta_k - theta^{t-1}) = |P| (mean - theta^{t-1})
        h = State({name: s.h[name] - step * (theta[name] - s.theta[name]) for name in s.h})  # line 13
        corrected = {name: theta[name] - h[name] / self.alpha for name in h}  # line 14
        return Dynamic(State({**theta, **corrected}, theta.buffers), h)

    def client_update(self, client: Client, msg: Global) -> Local:  # on client k
        load(client.model, msg.theta, self.part)
        g = client.memory.get("g") or zeros(msg.theta)
        given = {"g": dict(g), "theta_t": msg.theta.parameters, "alpha": self.alpha}
        client.fit(regularised, epochs=self.E, batch=self.B, opt=self.optimiser(self.eta), given=given)  # line 6
        theta = state_of(client.model, self.part)
        client.memory["g"] = State({name: g[name] - self.alpha * (theta[name] - msg.theta[name]) for name in g})  # 7
        return Local(theta)

    def predictor(self, s: Dynamic, server: Server) -> torch.nn.Module:
        return load(server.model(), s.theta, self.part)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Global.theta"): plan.state(part=self.part) * len(plan.asked(0)),
            ("up", "Local.theta"): plan.state(part=self.part) * len(plan.replied(0)),
        }


def zeros(theta: State) -> State:
    return State({name: torch.zeros_like(t) for name, t in theta.parameters.items()})
