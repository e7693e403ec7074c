"""DS-FL. Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient
Collaborative Training With Non-IID Private Data", IEEE TMC 2021, as the baseline of FedZGE (Ma et al., AAAI 2025).

Outputs on an unlabelled auxiliary set travel instead of models. The papers leave these points open or contradict each
other, and we chose:

- FedZGE sends x_p in every round and bills it (Table 8); in DS-FL itself everybody holds the open set beforehand. It
  travels here. Beyond Table 8, N_k travels too: 8 bytes a client.
- FedZGE weighs clients by N_k / N (Table 8). DS-FL weighs all the same (`weights = "equal"`, then no N_k travels).
- Soft labels are averaged, as DS-FL's entropy reduction aggregation (ERA) needs; FedZGE writes f_k(x_p), which has the
  same size. `aggregate = "sa"` is the plain average.
- FedZGE gives no settings for its baselines; they get FedZGE's own (E_k, E'_k, E, batch sizes, Adam), so that the
  methods differ in nothing else. T = 0.1 is DS-FL's. Optimisers start anew in each round.
- FedZGE's auxiliary set is another data set (CIFAR-100 for CIFAR-10): the setting `public_dataset`. Without it, it is
  the `public` share of the same data, its labels unread: an easier task.
"""

from __future__ import annotations

from typing import ClassVar, Literal

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
    imitate,
    predict,
    set_out,
)


class SoftLabels(Up):
    p: Tensor = private("soft_labels", via="model", unit="client", depends="all")
    N: int | None = private("count", via="data", unit="client")


class GlobalLabels(Down):
    p: Tensor  # made from all clients' releases; nobody's own


@register("dsfl", tables="FedZGE")
class DSFL(Method):
    """Learn from sharpened mean answers on public records. A client sends soft labels and its number of records."""

    E_k: int = 10  # local training epochs
    B_k: int = 256  # local batch size
    E_prime: int = 10  # E'_k, local distillation epochs
    E: int = 10  # global distillation epochs, each one step on the whole batch x_p
    B: int = 500  # auxiliary rows a round
    eta_k: float = 0.01
    eta: float = 0.01
    T: float = 0.1  # temperature of ERA: below 1 sharpens
    aggregate: Literal["era", "sa"] = "era"
    weights: Literal["samples", "equal"] = "samples"

    on_digits: ClassVar = {"E_k": 5, "B_k": 64}
    needs_public: ClassVar = True
    quick: ClassVar = {"E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 32}
    presets: ClassVar = {name: {"B": 500, "E_k": 10, "E_prime": 10, "E": 10} for name in ("cifar10", "cifar100")}

    def init(self, server: Server) -> Walked:
        return set_out(server)

    def round(self, s: Walked, server: Server, cohort: Cohort) -> Walked:
        x_p = server.public[0][auxiliary(s.order, server.t, min(self.B, len(s.order)))]
        by = "N" if self.weights == "samples" else None
        p = self.era(cohort.mean(self.update_and_predict, Auxiliary(x_p, None), by=by).value.p)
        f = server.model(state=s.theta)
        server.fit(f, imitate, (x_p, p), epochs=self.E, batch=len(x_p), opt=adam(self.eta))
        cohort.ask(self.distillation, GlobalLabels(p))
        return Walked(state_of(f), s.order)

    def era(self, mean: Tensor) -> Tensor:
        """Return softmax(mean_k p_k / T): it has lower entropy than the mean itself if T is small enough."""
        return (mean / self.T).softmax(-1) if self.aggregate == "era" else mean

    def update_and_predict(self, client: Client, msg: Auxiliary) -> SoftLabels:  # on client k
        client.fit(ce, epochs=self.E_k, batch=self.B_k, opt=adam(self.eta_k))  # FedZGE, Eq. 1
        client.memory["x_p"] = msg.x_p
        N = len(client) if self.weights == "samples" else None
        return SoftLabels(predict(client.model, msg.x_p).softmax(-1), N)

    def distillation(self, client: Client, msg: GlobalLabels) -> Distilled:  # on client k, in the same round
        x_p = client.memory.pop("x_p")
        client.fit(imitate, (x_p, msg.p), epochs=self.E_prime, batch=self.B_k, opt=adam(self.eta_k))
        return Distilled()

    def predictor(self, s: Walked, server: Server) -> nn.Module:
        return server.model(state=s.theta)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:  # FedZGE, Table 8
        rows = min(self.B, plan.public) if plan.public else self.B
        p = plan.tensor(rows, plan.classes)
        numbers = NUMBER if self.weights == "samples" else 0
        return {
            ("down", "Auxiliary.x_p"): plan.rows(rows) * len(plan.asked(0)),
            ("up", "SoftLabels.p"): p * len(plan.replied(0)),
            ("up", "SoftLabels.N"): numbers * len(plan.replied(0)),
            ("down", "GlobalLabels.p"): p * len(plan.asked(1)),
        }
