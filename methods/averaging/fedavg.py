"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, Algorithm 1.

The paper does not say what becomes of batch-norm statistics. Here they travel and are averaged like the parameters
(counters rounded), as in most implementations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fedaudit import (
    NUMBER,
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
from fedaudit.methods.shared._local_training import WithLocalTraining
from fedaudit.methods.shared._travelling import SendsTrained


class Global(Down):
    w: State


class Local(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


class Averaged(Record):
    w: State


@register("fedavg", tables="FedAF FedFree FedZGE DFRD")
class FedAvg(SendsTrained, WithLocalTraining):
    """Average the models that clients train. A client sends its weights and how many records it has."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9},  # as the rival in that paper
        "pflib": PFLIB,
    }

    def init(self, server: Server) -> Record:
        return Averaged(state_of(server.model(), self.part))  # w_0

    def round(self, s: Any, server: Server, cohort: Cohort) -> Record:  # on the server
        mean: Any = cohort.mean(self.client_update, Global(s.w), by="n")  # k in S_t, in parallel
        return Averaged(mean.value.w)  # w_{t+1} = sum_k n_k / n w^k_{t+1}

    def client_update(self, client: Client, msg: Any) -> Up:  # on client k
        load(client.model, msg.w, self.part)
        client.fit(ce, **self.local_training, batch=self.B, opt=self.optimiser(self.eta))  # w <- w - eta grad l(w; b)
        return Local(state_of(client.model, self.part), len(client))

    def predictor(self, s: Any, server: Server) -> nn.Module | None:
        return load(server.model(), s.w, self.part)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int] | None:
        return {
            ("down", "Global.w"): plan.state(part=self.part) * len(plan.asked(0)),
            ("up", "Local.w"): plan.state(part=self.part) * len(plan.replied(0)),
            ("up", "Local.n"): NUMBER * len(plan.replied(0)),
        }
