"""FedTGP. Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1.

FedProto, but the server trains the global prototypes P^^c = F(P~^c; theta_F) instead of averaging:

    delta = min(max_{c != c'} phi(Q^c, Q^c'), tau),   Q^c the mean of the clients' prototypes of class c          (6)
    L_P = - sum_i log e^{-(phi(P_i^c, P^^c) + delta)} /
                      (e^{-(phi(P_i^c, P^^c) + delta)} + sum_{c' != c} e^{-phi(P_i^c, P^^c')})                    (7)
    client i: min  l(f_i(x), y) + lambda phi(h_i(x), P^^y)                                                        (8)

phi is the Euclidean distance. We do not have the paper; the equations follow its published description. We chose:

- F: a linear layer, ReLU, a linear layer; P~^c and theta_F are kept over rounds, and trained by SGD with rate eta_s for
  S epochs (`start = "network"`). `start = "mean"` has no network: P^^c begins at Q^c in each round. With S = 0 that is
  FedProto, to the bit.
- The authors' code takes for delta the largest of the classes' distances to their *nearest* other class (`margin =
  "nearest"`), the paper the largest of all (`"farthest"`).
- Eq. 8's distance, the prediction and everything else of the clients: as in FedProto (`distance`, `predict`), whose
  mean squared difference the code has here, too.
- P^^c goes to the clients for classes of which a prototype has ever arrived.
- HtFLlib (preset `htfllib`): lambda = 10, 100 epochs, margin "nearest", a hidden layer as wide as the embedding (512
  there), prototypes of the model *before* its training: it saves the model after it has collected them. Here they are
  of the trained one. DFFKE's code has the same slip, and 100 prototypes in a batch (preset `dffke_authors`).
- As a rival in FedFree: eta_s = 0.01 and "contrastive temperature" 100 (Table A2), which we read as tau.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import Cohort, Record, Server, State, load, register, sgd, state_of
from fedaudit.methods.prototypes.fedproto import DFFKE, FEDFREE, FedProto, Global
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB
from fedaudit.methods.shared._prototypes import ByClass, common_width, mean_by_class

IN_HTFLLIB = {"lam": 10.0, "S": 100, "eta_s": 0.01, "tau": 100.0, "margin": "nearest", "hidden": 512}


class Trained(Record):
    C: ByClass  # P^^c
    net: State  # P~^c and theta_F


class GlobalPrototypes(nn.Module):
    """P^^c of all classes. Called with the clients' prototypes, it returns their distances phi to each P^^c."""

    def __init__(self, classes: int, width: int, hidden: int | None) -> None:
        super().__init__()
        self.P = nn.Parameter(torch.randn(classes, width))
        self.F: nn.Module = nn.Identity()
        if hidden is not None:
            self.F = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, P_i: Tensor) -> Tensor:
        return torch.linalg.vector_norm(P_i[:, None] - self.F(self.P), dim=2)


def L_P(f: Any, P_i: Tensor, c: Tensor, delta: Tensor) -> Tensor:
    """Return Eq. 7, one value per prototype that arrived."""
    phi = f(P_i)
    own = (c[:, None] == torch.arange(phi.shape[1], device=c.device)).to(phi)
    return cross_entropy(-(phi + delta * own), c, reduction="none")


def adaptive_margin(Q: ByClass, tau: float, margin: str) -> Tensor:
    """Return Eq. 6; it is 0 if there is one class only."""
    centres = torch.stack(list(Q.values()))
    phi = torch.linalg.vector_norm(centres[:, None] - centres, dim=2)
    if len(centres) < 2:
        return phi.new_zeros(())
    others = phi.masked_fill(torch.eye(len(phi), dtype=torch.bool, device=phi.device), torch.inf)
    return (phi.max() if margin == "farthest" else others.min(1).values.max()).clamp(max=tau)


@register("fedtgp", tables="DFFKE FedFree")
class FedTGP(FedProto):
    """Train class centres with a margin on the server. A client sends one mean embedding for each class."""

    single_replies: ClassVar[str] = "the centres are trained on each client's class means, one row each"

    S: int = 100  # epochs of the prototypes in a round
    B_s: int = 10  # prototypes in a batch
    eta_s: float = 0.01  # their learning rate
    tau: float = 100.0  # bound of the margin
    margin: Literal["farthest", "nearest"] = "farthest"
    hidden: int = 512  # width of F's hidden layer
    start: Literal["network", "mean"] = "network"

    quick: ClassVar[Mapping[str, Any]] = {"S": 2, "hidden": 16}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "dffke_authors": {**DFFKE_AUTHORS, **IN_HTFLLIB, "B_s": 100},
        "fedfree": FEDFREE,
        "htfllib": {**HTFLLIB, **IN_HTFLLIB, "B_s": 10},
    }

    def net(self, server: Server, width: int) -> GlobalPrototypes:
        hidden = self.hidden if self.start == "network" else None
        return GlobalPrototypes(server.classes, width, hidden).to(server.device)

    def init(self, server: Server) -> Trained:
        return Trained({}, state_of(self.net(server, common_width(server, self.registered_name))))

    def round(self, s: Trained, server: Server, cohort: Cohort) -> Trained:
        replies = cohort.ask(self.local_update, Global(s.C))
        Q = self.average(replies, server.classes)
        P_i = torch.stack([r.C[c] for r in replies.values() for c in sorted(r.C)])
        c = torch.tensor([c for r in replies.values() for c in sorted(r.C)], device=server.device)
        net = load(self.net(server, P_i.shape[1]), s.net)
        if self.start == "mean":
            for j, centre in Q.items():
                net.P.data[j] = centre
        given = {"delta": adaptive_margin(mean_by_class({k: r.C for k, r in replies.items()}), self.tau, self.margin)}
        server.fit(net, L_P, (P_i, c), epochs=self.S, batch=self.B_s, opt=sgd(self.eta_s), given=given)  # Eq. 7
        with torch.no_grad():
            trained = net.F(net.P)
        return Trained({j: trained[j] for j in sorted({*s.C, *Q})}, state_of(net))
