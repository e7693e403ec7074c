"""FedDistill, or federated distillation (FD). Jeong et al., "Communication-Efficient On-Device Machine Learning:
Federated Distillation and Augmentation under Non-IID Private Data", 2018, Algorithm 1.

    client k: F_k^y = mean of the outputs on its records of label y
    server:   G_k^y = sum_{i != k} F_i^y / (M_y - 1), over the clients that sent one for y
    client k: min  phi(f(x), y) + gamma phi(f(x), G_k^y)

Only one vector of logits per label travels; models stay with the clients and may differ in everything.

The paper leaves these points open or contradicts itself, and we chose:

- Outputs: the paper says logits and normalises them. Logits travel here, and `distance` says what the second phi is:
  `"ce"`, the cross-entropy of the two softmax outputs, as the paper's phi is; or `"mse"`, the mean squared difference
  of logits.
- DFFKE ran HtFLlib's code of some date. It had the squared difference until 22 April 2024, the cross-entropy against
  the softmax until 29 November 2025, and against the raw logits since. DFFKE is of 2025: its preset has `"ce"`.
- The paper averages outputs over all steps of a round, and HtFLlib does. Here they are the outputs of the model after
  local training, on all records: a class mean to which clipping and noise can be applied.
- `others`: the receiver's own vector is left out of the mean, as in Algorithm 1; HtFLlib leaves it in (false).
- Labels for which nobody else sent a vector have no second term. G^y of a label that nobody sent in a round is
  forgotten.
- Federated augmentation (FAug), the paper's other half, is not here.
- gamma is not given in the paper; here it is 1, as in HtFLlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedaudit import Client, Cohort, Down, Plan, Record, Server, Size, Up, in_chunks, private, register, relay
from fedaudit.methods.prototypes.fedproto import DFFKE
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB
from fedaudit.methods.shared._local_training import WithViews
from fedaudit.methods.shared._prototypes import ByClass, bill, mean_by_class, table


class GlobalLogits(Down):
    G: ByClass = relay("logits")  # where one other client alone holds a label, its mean is that client's


class LocalLogits(Up):
    F: ByClass = private("logits", via="data", unit="client", depends="class")


class Heard(Record):
    F: dict[int, ByClass]  # of the last round's clients


def distilled(f: Any, x: Tensor, y: Tensor, G: Tensor, held: Tensor, gamma: float, distance: str) -> Tensor:
    """Return phi(f(x), y) + gamma phi(f(x), G^y), one value per record."""
    z = f(x)
    apart = cross_entropy(z, G[y].softmax(1), reduction="none") if distance == "ce" else (z - G[y]).square().mean(1)
    return cross_entropy(z, y, reduction="none") + gamma * held[y] * apart


@register("feddistill", tables="DFFKE")
class FedDistill(WithViews):
    """Learn from the mean logits of each class. A client sends one vector of logits for each class."""

    single_replies: ClassVar[str] = "what a client hears leaves out its own logits, so they are kept one by one"

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    gamma: float = 1.0  # weight of the others' outputs
    distance: Literal["ce", "mse"] = "ce"
    others: bool = True  # leave the receiver's own vector out of the mean

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": {**DFFKE, "distance": "ce", "others": False},
        "dffke_authors": {**DFFKE_AUTHORS, "gamma": 1.0, "distance": "ce", "others": False},
        "htfllib": {**HTFLLIB, "gamma": 1.0, "distance": "ce", "others": False},
    }

    def init(self, server: Server) -> Heard:
        return Heard({})

    def round(self, s: Heard, server: Server, cohort: Cohort) -> Heard:
        every = GlobalLogits(mean_by_class(s.F))
        G = {k: self.without(s.F, k) if self.others and k in s.F else every for k in cohort.ids}
        replies = cohort.ask(self.local_update, G)
        return Heard({k: r.F for k, r in replies.items()})

    def without(self, F: dict[int, ByClass], k: int) -> GlobalLogits:
        return GlobalLogits(mean_by_class({i: of_client for i, of_client in F.items() if i != k}))

    def local_update(self, client: Client, msg: GlobalLogits) -> LocalLogits:  # on client k
        G, held = table(msg.G, client.classes, torch.zeros(client.classes, device=client.device))
        given = {"G": G, "held": held, "gamma": self.gamma, "distance": self.distance}
        opt = self.optimiser(self.eta)
        client.fit(distilled, epochs=self.E, batch=self.B, opt=opt, given=given, augment=self.augment)
        return LocalLogits(client.class_means(in_chunks(client.model.eval(), client.x), "logits"))

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        first = plan.t == 1
        return {
            ("down", "GlobalLogits.G"): bill(plan, "GlobalLogits.G", plan.asked(0), plan.classes, nobody=first),
            ("up", "LocalLogits.F"): bill(plan, "LocalLogits.F", plan.replied(0), plan.classes),
        }
