"""MHAT. Hu et al., "MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme for Federated Learning",
Information Sciences 2021, as the baseline of FedZGE (Ma et al., AAAI 2025).

Outputs on a labelled auxiliary set travel instead of models; the server trains a model of its own on them and sends
that model's outputs back. We have MHAT only as FedZGE describes it (Tables 1 and 8, Eqs. 1 and 2). Chosen:

- Table 8 sends x_p, y_p and f(x_p) down in every round and f_k(x_p) up. Beyond it there travels N_k (Eq. 2 needs it), 8
  bytes a client.
- Labels travel as 32-bit numbers: only then does the formula give the 28.81 and 30.48 GB of Tables 9 and 10.
- What y_p is for is not said. Since clients get it, both sides add cross-entropy against it to the distillation of
  Eq. 2, with weight `lam` (0: the labels travel and are not used).
- FedZGE gives no settings for its baselines; they get FedZGE's own (E_k, E'_k, E, batch sizes, Adam, tau), so that the
  methods differ in nothing else. Optimisers start anew in each round.
- FedZGE's auxiliary set is another data set with other classes (CIFAR-100 for CIFAR-10), whose labels mean nothing to
  the models. Here it is the setting's `public` share of the same data: an easier task.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedaudit import NUMBER, Down, Method, Record, State, Up, adam, ce, load, private, register, state_of
from fedaudit.methods._ensemble import auxiliary, distil_labelled, ensemble, predict


class LabelledBatch(Down):
    x_p: Tensor
    y_p: Tensor


class LocalOutputs(Up):
    f: Tensor = private("logits", via="model", unit="client", depends="all")
    N: int = private("count", via="data", unit="client")


class GlobalOutputs(Down):
    f: Tensor  # f(x_p; theta), of the server's model


class Distilled(Up):
    pass


class Learned(Record):
    theta: State
    order: Tensor  # in which the auxiliary set is walked through


@register("mhat")
class MHAT(Method):
    E_k: int = 10  # local training epochs
    B_k: int = 256  # local batch size
    E_prime: int = 10  # E'_k, local distillation epochs
    E: int = 10  # global distillation epochs, each one step on the whole batch x_p
    B: int = 500  # auxiliary rows a round
    eta_k: float = 0.01
    eta: float = 0.01
    tau: float = 5.0
    lam: float = 1.0  # weight of the auxiliary set's labels

    quick: ClassVar = {"E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 32}
    presets: ClassVar = {name: {"B": 500, "E_k": 10, "E_prime": 10, "E": 10} for name in ("cifar10", "cifar100")}

    def init(self, server):
        n = len(server.public[0])
        return Learned(state_of(server.model()), torch.randperm(n, generator=server.rng("order"), device=server.device))

    def round(self, s, server, cohort):
        batch = auxiliary(s.order, server.t, min(self.B, len(s.order)))
        x_p, y_p = (column[batch] for column in server.public)
        replies = cohort.ask(self.update_and_predict, LabelledBatch(x_p, y_p.to(torch.int32)))
        e = ensemble({k: r.f for k, r in replies.items()}, {k: r.N for k, r in replies.items()})
        f = load(server.model(), s.theta)
        rows, teaching = (x_p, e, y_p), {"tau": self.tau, "lam": self.lam}
        server.fit(f, distil_labelled, rows, epochs=self.E, batch=len(x_p), opt=adam(self.eta), given=teaching)  # Eq. 2
        cohort.ask(self.distillation, GlobalOutputs(predict(f, x_p)))
        return Learned(state_of(f), s.order)

    def update_and_predict(self, client, msg):  # on client k
        client.fit(ce, epochs=self.E_k, batch=self.B_k, opt=adam(self.eta_k))  # FedZGE, Eq. 1
        client.memory["x_p"], client.memory["y_p"] = msg.x_p, msg.y_p
        return LocalOutputs(predict(client.model, msg.x_p), len(client))

    def distillation(self, client, msg):  # on client k, in the same round
        x_p, y_p = client.memory.pop("x_p"), client.memory.pop("y_p").long()
        rows, teaching = (x_p, msg.f, y_p), {"tau": self.tau, "lam": self.lam}
        client.fit(distil_labelled, rows, epochs=self.E_prime, batch=self.B_k, opt=adam(self.eta_k), given=teaching)
        return Distilled()

    def predictor(self, s, server):
        return load(server.model(), s.theta)

    def traffic(self, plan):  # FedZGE, Table 8
        rows = min(self.B, plan.public) if plan.public else self.B
        f = plan.tensor(rows, plan.classes)
        return {
            ("down", "LabelledBatch.x_p"): plan.tensor(rows, *plan.shape) * len(plan.asked(0)),
            ("down", "LabelledBatch.y_p"): plan.tensor(rows) * len(plan.asked(0)),
            ("up", "LocalOutputs.f"): f * len(plan.replied(0)),
            ("up", "LocalOutputs.N"): NUMBER * len(plan.replied(0)),
            ("down", "GlobalOutputs.f"): f * len(plan.asked(1)),
        }
