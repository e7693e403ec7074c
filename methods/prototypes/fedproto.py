"""FedProto. Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, Algorithm 1.

    client i: C_i^(j) = mean of f_i(phi_i; x) over its records of class j                               (3)
    server:   C-^(j) = mean over the clients that hold class j                                          (6)
    client i: min  L_S(F_i; x, y) + lambda L_R(C-, C_i)                                                 (7)

Models stay with the clients and may differ, but for the width of their embeddings; only prototypes travel. A class mean
of embeddings is computed from the records again: a release of its own (kind `prototypes`).

The paper leaves these points open or contradicts itself, and we chose:

- L_R (Eq. 8) is a distance between class means; the authors' code takes the mean squared difference between each
  record's embedding and its class's C-^(j), which separates over records. `distance = "mse"` is that, `"squared"` the
  sum over entries instead of the mean, `"norm"` the Euclidean distance. Classes without C-^(j) count nothing.
- Eq. 6 weighs clients by their records of the class *and* divides by the number of clients: that shrinks a prototype
  with each client that has one. `weights = "literal"` is Eq. 6, and `"samples"` leaves the second division out. In the
  code all clients weigh the same (`"equal"`), and nothing but prototypes leaves the client. The other two send the
  label counts, too.
- A client predicts the class of the nearest prototype (Section 4.3) or by its own classifier, which L_S trains
  (`predict`). The first gains nine points on local training in docs/results/baselines.md, the second nothing. Both are
  evaluated in every run.
  The nearest is of the prototypes with which the client trained; those of the new average are a point of their own,
  "new prototypes". DFFKE's code tests with both, and reports the best of all its tests.
- C-^(j) of a class that nobody sent in a round stays as it was.
- The server needs sums over clients alone, of prototypes and of what they weigh. `literal` also counts the clients that
  hold a class, and is refused under secure aggregation.
- As a rival: lambda = 10 in FedFree (Table A2; its "prototype LR" 0.1 has nothing to set here), which says nothing on
  the distance. DFFKE gives no lambda; HtFLlib, which it ran, has 10, the mean square, equal weights and prediction by
  prototypes (preset `htfllib`; `dffke_authors` with the local training of DFFKE's code). It collects prototypes while
  the model trains, from all epochs' batches; here they are of the model after training.
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
    Up,
    in_chunks,
    private,
    register,
    relay,
)
from fedaudit.aggregation.mean import mean_of
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB
from fedaudit.methods.shared._local_training import WithViews
from fedaudit.methods.shared._prototypes import (
    ONE_HOLDER,
    ByClass,
    ClassSums,
    bill,
    class_sums,
    common_width,
    mean_by_class,
    means_of_sums,
    nearest,
    table,
    width_of,
)

Distance = Literal["mse", "squared", "norm"]
DFFKE = {"opt": "adam", "eta": 0.001, "B": 100}  # Section 4.1, for all methods
FEDFREE = {"E": 5, "B": 10, "eta": 0.01}  # Section 4.1
IN_HTFLLIB = {"lam": 10.0, "distance": "mse", "weights": "equal", "predict": "prototypes"}


class Global(Down):
    C: ByClass = relay("prototypes")  # where one client alone holds a class, its mean is that client's


class Prototypes(Up):
    C: ByClass = private("prototypes", via="data", unit="client")


class Counted(Prototypes):
    n: Tensor = private("label_counts", via="data", unit="client")


class Averaged(Record):
    C: ByClass


def L_R(h: Tensor, C: Tensor, distance: Distance) -> Tensor:
    """Return Eq. 8 by record: how far its embedding is from its class's prototype."""
    apart = h - C
    if distance == "norm":
        return torch.linalg.vector_norm(apart, dim=1)
    return apart.square().mean(1) if distance == "mse" else apart.square().sum(1)


def regularised(f: Any, x: Tensor, y: Tensor, C: Tensor, held: Tensor, lam: float, distance: Distance) -> Tensor:
    """Return Eq. 7, one value per record."""
    h = f.encode(x)
    return cross_entropy(f.classify(h), y, reduction="none") + lam * held[y] * L_R(h, C[y], distance)


@register("fedproto", tables="DFFKE FedFree")
class FedProto(WithViews):
    """Pull embeddings towards common class means. A client sends one mean embedding for each class."""

    alone_in_sums: ClassVar[str] = ONE_HOLDER

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    lam: float = 1.0  # lambda, weight of the prototypes
    distance: Distance = "mse"
    weights: Literal["equal", "samples", "literal"] = "equal"
    predict: Literal["classifier", "prototypes"] = "prototypes"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "dffke_authors": {**DFFKE_AUTHORS, **IN_HTFLLIB},
        "fedfree": {**FEDFREE, "lam": 10.0},
        "htfllib": {**HTFLLIB, **IN_HTFLLIB},
    }

    def init(self, server: Server) -> Record:
        common_width(server, self.registered_name)
        return Averaged({})

    def round(self, s: Any, server: Server, cohort: Cohort) -> Record:
        if self.weights == "literal":
            return Averaged({**s.C, **self.average(cohort.ask(self.local_update, Global(s.C)), server.classes)})
        mean: Any = cohort.mean(self.local_update, Global(s.C), by=None if self.weights == "equal" else "n")
        return Averaged({**s.C, **means_of_sums(mean)})  # Eq. 6

    def needs_single_replies(self) -> str:
        literal = "Eq. 6 as written divides by the number of clients that hold a class"
        return self.single_replies or (literal if self.weights == "literal" else "")

    def summand(self, sender: Sender, reply: Any, message: Any) -> ClassSums:
        return class_sums(reply.C, sender.classes, None if self.weights == "equal" else reply.n)

    def average(self, replies: Mapping[int, Any], classes: int) -> ByClass:
        """Return Eq. 6 over single replies."""
        if self.weights != "literal":
            counts = {i: None if self.weights == "equal" else r.n for i, r in replies.items()}
            sums = {i: class_sums(r.C, classes, counts[i]) for i, r in replies.items()}
            return means_of_sums(mean_of(sums, None if self.weights == "equal" else "n"))
        sent = {i: r.C for i, r in replies.items()}
        C = mean_by_class(sent, {i: r.n for i, r in replies.items()})
        return {j: c / sum(j in of_client for of_client in sent.values()) for j, c in C.items()}

    def local_update(self, client: Client, msg: Global) -> Prototypes:  # on client i
        client.memory["C"] = msg.C
        C, held = table(msg.C, client.classes, self.embedding(client))
        given = {"C": C, "held": held, "lam": self.lam, "distance": self.distance}
        opt = self.optimiser(self.eta)
        client.fit(regularised, epochs=self.E, batch=self.B, opt=opt, given=given, augment=self.augment)  # Eq. 7
        C_i = client.class_means(in_chunks(client.model.eval().encode, client.x), "prototypes")  # Eq. 3
        if self.weights == "equal":
            return Prototypes(C_i)
        return Counted(C_i, torch.bincount(client.y.cpu(), minlength=client.classes).float())

    def embedding(self, client: Client) -> Tensor:
        return torch.zeros(client.model.width, device=client.device)

    def points(self, client: Client) -> dict[str, nn.Module]:
        C, held = table(client.memory.get("C", {}), client.classes, self.embedding(client))
        by_prototypes = nearest(client.model, C, held) if held.any() else client.model
        return {"classifier": client.model, "prototypes": by_prototypes}

    def next_points(self, s: Any, client: Client) -> dict[str, nn.Module]:
        C, held = table(s.C, client.classes, self.embedding(client))
        return {"new prototypes": nearest(client.model, C, held) if held.any() else client.model}

    def personal(self, client: Client) -> nn.Module:
        return self.points(client)[self.predict]

    def summed_numbers(self, plan: Plan) -> list[int]:
        width = width_of(plan.archs[plan.participants[0]], plan.shape, plan.classes)
        return [plan.classes * (width + 1) + (self.weights != "equal")]

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        width = width_of(plan.archs[plan.participants[0]], plan.shape, plan.classes)
        up = "Prototypes.C" if self.weights == "equal" else "Counted.C"
        counts = plan.tensor(plan.classes) * len(plan.replied(0)) if self.weights != "equal" else Size()
        return {
            ("down", "Global.C"): bill(plan, "Global.C", plan.asked(0), width, nobody=plan.t == 1),
            ("up", up): bill(plan, up, plan.replied(0), width),
            ("up", "Counted.n"): counts,
        }
