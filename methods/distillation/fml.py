"""FML. Shen et al., "Federated Mutual Learning", 2020, Algorithm 1: deep mutual learning between each client's own
network and a shared one ("meme" model), which is averaged.

    own:    L = alpha L_C + (1 - alpha) D_KL(p_meme || p_own)                                          (6)
    meme:   L = beta L_C + (1 - beta) D_KL(p_own || p_meme)                                            (7)

Own networks may differ in everything. The meme network is the server's model (`--server-model`).

The paper leaves these points open, and we chose:

- alpha and beta are 0.5 each. DFFKE gives none.
- The output of one network is fixed while the other learns from it (`teaching = "fixed"`); both step on the same
  batches. In HtFLlib neither is fixed, so that each network's steps lessen the sum of both losses, and the divergence
  is divided by the number of classes (`"joint"`); gradients are clipped at 10, each network's by itself (`clip`). The
  division matters: docs/results/baselines.md has FML 9 points below local training without it.
- In DFFKE's code, which is built on HtFLlib, the own network has Adam and the meme network SGD at 0.01 (`eta_shared`;
  preset `dffke_authors`).
- The average is plain over the clients that answered, as in Algorithm 1.
- A client deploys its own network; the averaged meme model is the global one.
- DFFKE bills FML with 559.18 "GB" (Section 4.3), which is 2.18 ResNet-18s up or down per client and round over its 300
  rounds: no reading of Algorithm 1 comes to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
    kl,
    private,
    register,
    state_of,
)
from fedaudit.methods.distillation._mutual import Pair, WithPair
from fedaudit.methods.prototypes.fedproto import DFFKE
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB

IN_HTFLLIB: dict[str, Any] = {"alpha": 0.5, "beta": 0.5, "teaching": "joint", "clip": 10.0}


class Meme(Down):
    w: State


class Taught(Up):
    w: State = private("weights", via="model", unit="client")


class Averaged(Record):
    w: State


def joint(f: Any, x: Tensor, y: Tensor, alpha: float, beta: float) -> Tensor:
    """Return Eqs. 6 and 7 added, one value per record, as HtFLlib has them: each reaches both networks, and the
    divergences are means over classes."""
    z, z_meme, _, _ = f(x)
    own = alpha * cross_entropy(z, y, reduction="none") + (1 - alpha) * kl(z_meme, z) / z.shape[1]
    return own + beta * cross_entropy(z_meme, y, reduction="none") + (1 - beta) * kl(z, z_meme) / z.shape[1]


def mutual(f: Any, x: Tensor, y: Tensor, alpha: float, beta: float) -> Tensor:
    """Return Eqs. 6 and 7 added, one value per record: each reaches its own network only."""
    z, z_meme, _, _ = f(x)
    own = alpha * cross_entropy(z, y, reduction="none") + (1 - alpha) * kl(z_meme.detach(), z)  # Eq. 6
    return own + beta * cross_entropy(z_meme, y, reduction="none") + (1 - beta) * kl(z.detach(), z_meme)  # Eq. 7


@register("fml", tables="DFFKE")
class FML(WithPair):
    """Let each client's own model and a shared one teach each other. A client sends the shared model's weights."""

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate, of both networks
    alpha: float = 0.5  # weight of the labels for the own network
    beta: float = 0.5  # weight of the labels for the meme network
    teaching: Literal["fixed", "joint"] = "fixed"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "htfllib": {**HTFLLIB, **IN_HTFLLIB},
        "dffke_authors": {**DFFKE_AUTHORS, **IN_HTFLLIB, "eta_shared": 0.01},
    }

    def init(self, server: Server) -> Averaged:
        return Averaged(state_of(server.model()))

    def round(self, s: Averaged, server: Server, cohort: Cohort) -> Averaged:
        return Averaged(cohort.mean(self.local_update, Meme(s.w)).value.w)

    def local_update(self, client: Client, msg: Meme) -> Taught:  # on client k
        pair = Pair(client.model, client.server_model(state=msg.w))
        given = {"alpha": self.alpha, "beta": self.beta}
        opt = self.of_pair(self.eta, pair)
        loss = joint if self.teaching == "joint" else mutual
        client.fit(loss, epochs=self.E, batch=self.B, opt=opt, given=given, model=pair, augment=self.augment)
        return Taught(state_of(pair.shared))

    def predictor(self, s: Averaged, server: Server) -> nn.Module:
        return server.model(state=s.w)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Meme.w"): plan.state() * len(plan.asked(0)),
            ("up", "Taught.w"): plan.state() * len(plan.replied(0)),
        }
