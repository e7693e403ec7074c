"""FedMD. Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop,
Algorithm 1.

    once:      each client trains on the public set D_0, then on its own records D_k
    a round:   communicate  f_k(d_j), d_j a part of D_0, goes to the server
               aggregate    f~(d_j) = 1/m sum_k f_k(d_j)
               distribute   f~(d_j) goes back
               digest       f_k learns to answer f~(d_j) on d_j
               revisit      f_k trains on D_k for a few epochs

Everybody holds D_0, and models may differ. There is no global model; a client deploys its own.

We do not have the paper; this is written from its published description and code. That leaves these points open, and
we chose:

- f_k are logits, and the digest is their mean absolute difference, as in the authors' code; the paper says "class
  scores". `digest = "kl"` is the KL divergence of the softmax, the usual distillation.
- d_j is drawn anew by the server in each round, B_0 rows without repetition, and sent as row numbers: 4 bytes a row.
- The paper trains on D_0 and then on D_k until convergence (early stopping on validation records); here for E_0 and
  E_k epochs. A client does so when it is first asked. Labels of another data set are not labels of the task: then the
  training on D_0 is left out.
- Each training has its own Adam, which starts anew.
- A client that answers and does not come back for the digest keeps the model of its last training.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit import (
    Client,
    Cohort,
    Down,
    Method,
    Plan,
    Record,
    Server,
    Size,
    Up,
    adam,
    ce,
    kl,
    private,
    register,
)
from fedaudit.methods.shared._ensemble import predict


class Chosen(Down):
    d: Tensor  # d_j, row numbers of the public set


class Scores(Up):
    f: Tensor = private("logits", via="model", unit="client", depends="all")


class Consensus(Down):
    f: Tensor  # f~(d_j)


class Digested(Up):
    """A client has learned from the consensus and from its records. The message is empty."""


class Nothing(Record):
    pass


def apart(f: Any, x: Tensor, consensus: Tensor) -> Tensor:
    """Return the mean absolute difference of the logits, one value per row."""
    return (f(x) - consensus).abs().mean(-1)


def divergence(f: Any, x: Tensor, consensus: Tensor) -> Tensor:
    """Return KL[softmax(consensus) || softmax(f(x))], one value per row."""
    return kl(consensus, f(x))


@register("fedmd")
class FedMD(Method):
    """Learn from mean answers on public records. A client sends its logits on them."""

    E_0: int = Field(default=20, ge=0)  # epochs on the public set, once
    E_k: int = Field(default=20, ge=0)  # epochs on the client's records, once, after those on the public set
    B_0: int = Field(default=5000, ge=1)  # public rows in a round
    E_digest: int = Field(default=1, ge=0)  # epochs on the consensus in a round
    E: int = Field(default=4, ge=0)  # epochs on the client's records in a round
    B: int = Field(default=64, ge=1)  # batch size of all trainings
    eta: float = Field(default=1e-3, gt=0)  # learning rate of Adam in all trainings
    digest: Literal["mae", "kl"] = "mae"

    on_digits: ClassVar = {"E_0": 10, "E_k": 10, "E": 2, "B": 16}
    needs_public: ClassVar = True
    quick: ClassVar = {"E_0": 1, "E_k": 1, "B_0": 32, "E": 1, "B": 32}

    def init(self, server: Server) -> Nothing:
        return Nothing()

    def round(self, s: Nothing, server: Server, cohort: Cohort) -> Nothing:
        n = len(server.public[0])
        d = torch.randperm(n, generator=server.rng("d_j"), device=server.device)[: self.B_0]
        f = cohort.mean(self.communicate, Chosen(d.to(torch.int32))).value.f  # aggregate
        cohort.ask(self.digest_and_revisit, Consensus(f))
        return s

    def communicate(self, client: Client, msg: Chosen) -> Scores:  # on client k
        x, y = client.public
        if not client.memory.get("transferred"):
            labelled = bool((y >= 0).all())
            if labelled and self.E_0:
                client.fit(ce, (x, y), epochs=self.E_0, batch=self.B, opt=adam(self.eta))
            client.fit(ce, epochs=self.E_k, batch=self.B, opt=adam(self.eta))
            client.memory["transferred"] = True
        client.memory["d"] = msg.d
        return Scores(predict(client.model, x[msg.d.long()]))

    def digest_and_revisit(self, client: Client, msg: Consensus) -> Digested:  # on client k, in the same round
        d = client.memory.pop("d")
        rows = (client.public[0][d.long()], msg.f)
        loss = {"mae": apart, "kl": divergence}[self.digest]
        client.fit(loss, rows, epochs=self.E_digest, batch=self.B, opt=adam(self.eta))
        client.fit(ce, epochs=self.E, batch=self.B, opt=adam(self.eta))
        return Digested()

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        rows = min(self.B_0, plan.public) if plan.public else self.B_0
        f = plan.tensor(rows, plan.classes)
        return {
            ("down", "Chosen.d"): plan.tensor(rows) * len(plan.asked(0)),
            ("up", "Scores.f"): f * len(plan.replied(0)),
            ("down", "Consensus.f"): f * len(plan.asked(1)),
        }
