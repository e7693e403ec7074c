"""MHAT. Hu et al., "MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme for Federated Learning",
Information Sciences 2021, as the baseline of FedZGE (Ma et al., AAAI 2025).

Outputs on a labelled auxiliary set travel instead of models; the server trains a model of its own on them and sends
that model's outputs back. We have MHAT only as FedZGE describes it (Tables 1 and 8, Eqs. 1 and 2). We chose:

- Table 8 sends x_p, y_p and f(x_p) down in every round and f_k(x_p) up. Beyond it, N_k travels (Eq. 2 needs it): 8
  bytes a client.
- Labels travel as 32-bit numbers: only then does the formula give the 28.81 and 30.48 GB of Tables 9 and 10.
- FedZGE does not say what y_p is for. Since clients get it, both sides add cross-entropy against it to the distillation
  of Eq. 2, with weight `lam` (0: the labels travel and are not used).
- FedZGE gives no settings for its baselines; they get FedZGE's own (E_k, E'_k, E, batch sizes, Adam, tau), so that the
  methods differ in nothing else. Optimisers start anew in each round.
- FedZGE's auxiliary set is another data set with other classes (CIFAR-100 for CIFAR-10: the setting `public_dataset`),
  whose labels mean nothing to the models: they are not sent, and there is no cross-entropy. (Table 8 bills them all the
  same, and so does a plan that names no `public_dataset`.) Otherwise it is the `public` share of the same data: an
  easier task.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fedaudit import (
    NUMBER,
    Client,
    Cohort,
    Down,
    Method,
    Plan,
    Server,
    Size,
    Up,
    adam,
    ce,
    private,
    register,
    state_of,
)
from fedaudit.methods.shared._ensemble import (
    Auxiliary,
    Distilled,
    Walked,
    auxiliary,
    distil,
    distil_labelled,
    predict,
    set_out,
)
from fedaudit.training.fit import Loss


class LocalOutputs(Up):
    f: Tensor = private("logits", via="model", unit="client", depends="all")
    N: int = private("count", via="data", unit="client")


class GlobalOutputs(Down):
    f: Tensor  # f(x_p; theta), of the server's model


@register("mhat", tables="FedZGE")
class MHAT(Method):
    """Train the server's model on answers to public records. A client sends logits and its number of records."""

    E_k: int = 10  # local training epochs
    B_k: int = 256  # local batch size
    E_prime: int = 10  # E'_k, local distillation epochs
    E: int = 10  # global distillation epochs, each one step on the whole batch x_p
    B: int = 500  # auxiliary rows a round
    eta_k: float = 0.01
    eta: float = 0.01
    tau: float = 5.0
    lam: float = 1.0  # weight of the auxiliary set's labels

    on_digits: ClassVar = {"E_k": 5, "B_k": 64}
    needs_public: ClassVar = True
    quick: ClassVar = {"E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 32}
    presets: ClassVar = {name: {"B": 500, "E_k": 10, "E_prime": 10, "E": 10} for name in ("cifar10", "cifar100")}

    def init(self, server: Server) -> Walked:
        return set_out(server)

    def round(self, s: Walked, server: Server, cohort: Cohort) -> Walked:
        batch = auxiliary(s.order, server.t, min(self.B, len(s.order)))
        x_p = server.public[0][batch]
        y_p = server.public[1][batch].to(torch.int32) if server.public_labelled else None
        e = cohort.mean(self.update_and_predict, Auxiliary(x_p, y_p), by="N").value.f  # sum_k (N_k / N) f_k
        f = server.model(state=s.theta)
        loss, rows, given = self.teaching(x_p, e, y_p)
        server.fit(f, loss, rows, epochs=self.E, batch=len(x_p), opt=adam(self.eta), given=given)  # Eq. 2
        cohort.ask(self.distillation, GlobalOutputs(predict(f, x_p)))
        return Walked(state_of(f), s.order)

    def teaching(self, x_p: Tensor, e: Tensor, y_p: Tensor | None) -> tuple[Loss, tuple[Tensor, ...], dict[str, float]]:
        """Return the loss, rows and arguments of Eq. 2, with the labels beside it if there are any."""
        if y_p is None:
            return distil, (x_p, e), {"tau": self.tau}
        return distil_labelled, (x_p, e, y_p.long()), {"tau": self.tau, "lam": self.lam}

    def update_and_predict(self, client: Client, msg: Auxiliary) -> LocalOutputs:  # on client k
        client.fit(ce, epochs=self.E_k, batch=self.B_k, opt=adam(self.eta_k))  # FedZGE, Eq. 1
        client.memory["x_p"], client.memory["y_p"] = msg.x_p, msg.y_p
        return LocalOutputs(predict(client.model, msg.x_p), len(client))

    def distillation(self, client: Client, msg: GlobalOutputs) -> Distilled:  # on client k, in the same round
        loss, rows, given = self.teaching(client.memory.pop("x_p"), msg.f, client.memory.pop("y_p"))
        client.fit(loss, rows, epochs=self.E_prime, batch=self.B_k, opt=adam(self.eta_k), given=given)
        return Distilled()

    def predictor(self, s: Walked, server: Server) -> nn.Module:
        return server.model(state=s.theta)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:  # FedZGE, Table 8
        rows = min(self.B, plan.public) if plan.public else self.B
        f = plan.tensor(rows, plan.classes)
        return {
            ("down", "Auxiliary.x_p"): plan.rows(rows) * len(plan.asked(0)),
            ("down", "Auxiliary.y_p"): plan.tensor(rows) * len(plan.asked(0)) if plan.labelled else 0,
            ("up", "LocalOutputs.f"): f * len(plan.replied(0)),
            ("up", "LocalOutputs.N"): NUMBER * len(plan.replied(0)),
            ("down", "GlobalOutputs.f"): f * len(plan.asked(1)),
        }
