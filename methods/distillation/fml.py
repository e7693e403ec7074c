"""FML. Shen et al., "Federated Mutual Learning", 2020, Algorithm 1: deep mutual learning between each client's own
network and a shared one ("meme" model), which is averaged.

    own:    L = alpha L_C + (1 - alpha) D_KL(p_meme || p_own)                                          (6)
    meme:   L = beta L_C + (1 - beta) D_KL(p_own || p_meme)                                            (7)

Own networks may differ in everything. The meme network is the server's model (`--server-model`).

The paper leaves these points open, and we chose:

- alpha and beta are 0.5 each. DFFKE gives none.
- The output of one network is fixed while the other learns from it; both step on the same batches.
- The average is plain over the clients that answered, as in Algorithm 1.
- A client deploys its own network; the averaged meme model is the global one.
- DFFKE bills FML with 559.18 "GB" (Section 4.3), which is 2.18 ResNet-18s up or down per client and round over its 300
  rounds: no reading of Algorithm 1 comes to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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
    load,
    private,
    register,
    state_of,
)
from fedaudit.methods.distillation._mutual import Pair
from fedaudit.methods.prototypes.fedproto import DFFKE
from fedaudit.methods.shared._optimiser import WithOptimiser


class Meme(Down):
    w: State


class Taught(Up):
    w: State = private("weights", via="model", unit="client")


class Averaged(Record):
    w: State


def mutual(f: Any, x: Tensor, y: Tensor, alpha: float, beta: float) -> Tensor:
    """Return Eqs. 6 and 7 added, one value per record: each reaches its own network only."""
    z, z_meme, _, _ = f(x)
    own = alpha * cross_entropy(z, y, reduction="none") + (1 - alpha) * kl(z_meme.detach(), z)  # Eq. 6
    return own + beta * cross_entropy(z_meme, y, reduction="none") + (1 - beta) * kl(z.detach(), z_meme)  # Eq. 7


@register("fml", tables="DFFKE")
class FML(WithOptimiser):
    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate, of both networks
    alpha: float = 0.5  # weight of the labels for the own network
    beta: float = 0.5  # weight of the labels for the meme network

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dffke": DFFKE}

    def init(self, server: Server) -> Averaged:
        return Averaged(state_of(server.model()))

    def round(self, s: Averaged, server: Server, cohort: Cohort) -> Averaged:
        return Averaged(cohort.mean(self.local_update, Meme(s.w)).value.w)

    def local_update(self, client: Client, msg: Meme) -> Taught:  # on client k
        pair = Pair(client.model, load(client.server_model(), msg.w))
        given = {"alpha": self.alpha, "beta": self.beta}
        opt = self.optimiser(self.eta)
        client.fit(mutual, epochs=self.E, batch=self.B, opt=opt, given=given, model=pair)
        return Taught(state_of(pair.shared))

    def predictor(self, s: Averaged, server: Server) -> nn.Module:
        return load(server.model(), s.w)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Meme.w"): plan.state() * len(plan.asked(0)),
            ("up", "Taught.w"): plan.state() * len(plan.replied(0)),
        }
