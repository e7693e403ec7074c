"""LG-FedAvg. Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
2020, Algorithm 1.

Each client has a local part l(.; theta_k^l), which makes representations, and a global part g(.; theta^g) on top; only
the global part travels, and is averaged by the number of records.

These points are left open, or done otherwise here:

- The cut: the global part is the last linear layer, as in HtFLlib, with which DFFKE ran it. Encoders may differ, but
  for the width of their embeddings.
- The paper trains local representations also with auxiliary losses (self-supervised, adversarial fairness). There are
  none here.
- Both parts are trained together, E epochs a round.
- The paper ensembles the clients' models for new devices; a client deploys its own here, and there is no global model.
- A client deploys its model after local training. HtFLlib scores it with the new global part, before the next training:
  the point "new head" of every evaluated round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fedaudit import (
    NUMBER,
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
from fedaudit.methods.prototypes.fedproto import DFFKE
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB
from fedaudit.methods.shared._local_training import WithViews
from fedaudit.methods.shared._prototypes import common_width, head, with_head


class GlobalPart(Down):
    theta_g: State


class Trained(Up):
    theta_g: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


class Averaged(Record):
    theta_g: State


@register("lgfedavg", tables="DFFKE")
class LGFedAvg(WithViews):
    """Share the last layers and keep the first. A client sends its head and its number of records."""

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "dffke_authors": DFFKE_AUTHORS,
        "htfllib": HTFLLIB,
    }

    def init(self, server: Server) -> Averaged:
        common_width(server, self.registered_name)
        return Averaged(state_of(server.model(server.arch(0)), head))

    def round(self, s: Averaged, server: Server, cohort: Cohort) -> Averaged:
        return Averaged(cohort.mean(self.client_update, GlobalPart(s.theta_g), by="n").value.theta_g)

    def client_update(self, client: Client, msg: GlobalPart) -> Trained:  # on client k
        load(client.model, msg.theta_g, head)
        client.fit(ce, epochs=self.E, batch=self.B, opt=self.optimiser(self.eta), augment=self.augment)
        return Trained(state_of(client.model, head), len(client))

    def next_points(self, s: Averaged, client: Client) -> dict[str, nn.Module]:
        return {"new head": with_head(client.model, s.theta_g)}

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "GlobalPart.theta_g"): sum((plan.state(k, head) for k in plan.asked(0)), Size()),
            ("up", "Trained.theta_g"): sum((plan.state(k, head) for k in plan.replied(0)), Size()),
            ("up", "Trained.n"): NUMBER * len(plan.replied(0)),
        }
