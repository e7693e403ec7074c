"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, Algorithm 1.

The paper does not say what becomes of batch-norm statistics. Here they travel and are averaged like the parameters
(counters rounded), as in most implementations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from fedaudit import (
    NUMBER,
    Augment,
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

BLACK = -1.0  # in a record's units: what torchvision's RandomCrop has around an image


class Global(Down):
    w: State


class Local(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


class Averaged(Record):
    w: State


@register("fedavg", tables="FedAF FedFree FedZGE DFRD")
class FedAvg(SendsTrained, WithOptimiser):
    """Average the models that clients train. A client sends its weights and how many records it has."""

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    steps: int = Field(default=0, ge=0)  # local steps, in the place of epochs; 0: E epochs
    crop: int = Field(default=0, ge=0)  # in local training images are moved by so many pixels at most, over black
    flip: bool = False  # and mirrored every other time

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9},  # as the rival in that paper
        "pflib": PFLIB,
    }

    @property
    def local_training(self) -> dict[str, Any]:
        """Return how a client trains in a round, as `fit` takes it: for so many steps or epochs, on which images."""
        augment = Augment(crop=self.crop, flip=self.flip, fill=BLACK) if self.crop or self.flip else None
        return {**({"steps": self.steps} if self.steps else {"epochs": self.E}), "augment": augment}

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
