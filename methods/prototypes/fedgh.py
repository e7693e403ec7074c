"""FedGH. Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023, Algorithm 1.

    client k: put the global header theta into the model; train it on its records; V_k^s = mean of the embeddings of its
              records of class s
    server:   theta <- theta - eta_theta grad l(H(V_k^s; theta), s) over what all clients sent

Encoders stay with the clients and may differ, but for the width of their embeddings. A class mean is computed from the
records again: a release of its own (kind `prototypes`).

We do not have the paper; this is written from its published description. That leaves these points open, and we chose:

- Steps of the header: Algorithm 1 goes once through the representations (`S = 1`), one at a time (`B_s = 1`).
  HtFLlib takes batches of 10: one epoch in `total.sh`, a hundred by default.
- A header that is random in round 1 replaces the clients' own in it as in every round.
- The header learns from each client's representations (`rows = "clients"`), so the server must see single replies.
  `rows = "classes"` is not in the paper: the header learns from the mean of each class over the clients, for which sums
  are enough. Secure aggregation and guarantees for clients go with it.
- A client deploys its model after local training. HtFLlib scores it with the new header, before the next training: the
  point "new head" of every evaluated round.
- As a rival in FedFree: eta_theta = 0.01 (Table A2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import (
    Client,
    Cohort,
    Down,
    Plan,
    Record,
    Sender,
    Server,
    Size,
    State,
    Up,
    ce,
    in_chunks,
    load,
    private,
    register,
    sgd,
    state_of,
)
from fedaudit.methods.prototypes.fedproto import DFFKE, FEDFREE
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB
from fedaudit.methods.shared._local_training import WithViews
from fedaudit.methods.shared._prototypes import (
    ONE_HOLDER,
    ByClass,
    ClassSums,
    bill,
    class_sums,
    common_width,
    head,
    means_of_sums,
    width_of,
    with_head,
)


class Header(Down):
    theta: State


class Representations(Up):
    V: ByClass = private("prototypes", via="data", unit="client")


class Generalised(Record):
    theta: State


def header_loss(H: Any, V: Tensor, s: Tensor) -> Tensor:
    return cross_entropy(H(V), s, reduction="none")


class HeaderNet(nn.Module):
    """The classifier of a client's model, under the names that it has there."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(width, classes)

    def forward(self, V: Tensor) -> Tensor:
        return self.classifier(V)


@register("fedgh", tables="DFFKE FedFree")
class FedGH(WithViews):
    """Train a shared head on class means. A client sends one mean embedding for each class."""

    alone_in_sums: ClassVar[str] = ONE_HOLDER

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    S: int = 1  # epochs of the header in a round
    B_s: int = 1  # representations in a step of the header
    eta_s: float = 0.01  # eta_theta, learning rate of the header
    rows: Literal["clients", "classes"] = "clients"  # a representation of each client and class, or of each class

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "dffke_authors": {**DFFKE_AUTHORS, "S": 1, "B_s": 100, "eta_s": 0.01},
        "fedfree": FEDFREE,
        "htfllib": {**HTFLLIB, "S": 1, "B_s": 10, "eta_s": 0.01},
    }

    def init(self, server: Server) -> Generalised:
        width = common_width(server, self.registered_name)
        return Generalised(state_of(HeaderNet(width, server.classes).to(server.device)))

    def round(self, s: Generalised, server: Server, cohort: Cohort) -> Generalised:
        if self.rows == "classes":
            mean: Any = cohort.mean(self.local_update, Header(s.theta))
            means = means_of_sums(mean)
            if not means:
                return s  # noise has left no class
            sent = list(means.items())
        else:
            replies = cohort.ask(self.local_update, Header(s.theta))
            sent = [(c, r.V[c]) for r in replies.values() for c in sorted(r.V)]
        V = torch.stack([of_class for _, of_class in sent])
        labels = torch.tensor([c for c, _ in sent], device=server.device)
        H = load(HeaderNet(V.shape[1], server.classes).to(server.device), s.theta)
        server.fit(H, header_loss, (V, labels), epochs=self.S, batch=self.B_s, opt=sgd(self.eta_s))
        return Generalised(state_of(H))

    def needs_single_replies(self) -> str:
        return "the header is trained on each client's class means, one row each" if self.rows == "clients" else ""

    def summand(self, sender: Sender, reply: Representations, message: Header) -> ClassSums:
        return class_sums(reply.V, sender.classes)

    def summed_numbers(self, plan: Plan) -> list[int]:
        return [plan.classes * (width_of(plan.archs[plan.participants[0]], plan.shape, plan.classes) + 1)]

    def local_update(self, client: Client, msg: Header) -> Representations:  # on client k
        load(client.model, msg.theta, head)
        client.fit(ce, epochs=self.E, batch=self.B, opt=self.optimiser(self.eta), augment=self.augment)
        return Representations(client.class_means(in_chunks(client.model.eval().encode, client.x), "prototypes"))

    def next_points(self, s: Generalised, client: Client) -> dict[str, nn.Module]:
        return {"new head": with_head(client.model, s.theta)}

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        width = width_of(plan.archs[plan.participants[0]], plan.shape, plan.classes)
        return {
            ("down", "Header.theta"): sum((plan.state(k, head) for k in plan.asked(0)), Size()),
            ("up", "Representations.V"): bill(plan, "Representations.V", plan.replied(0), width),
        }
