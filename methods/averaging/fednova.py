"""FedNova. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, Section 5.

    client i: tau_i local steps; G_i a_i = (x - y_i) / eta is a sum of its gradients with the weights a_i
    server:   d_i = (x - y_i) / ||a_i||_1;  x <- x - tau_eff sum_i p_i d_i;  tau_eff = sum_i p_i ||a_i||_1

A client that makes more steps than others does not pull the average towards its own minimum. p_i = n_i / n over those
that answered. If all make the same number of steps it is FedAvg. ||a_i||_1 of tau steps is (Section 4.1):

    plain SGD             tau
    momentum rho          (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)
    proximal term mu      (1 - (1 - eta mu)^tau) / (eta mu)

These points are left open, or done otherwise here:

- A client uploads y_i and the number of its steps: the server computes d_i. As many bytes travel as with d_i, and 8
  for the number.
- tau_eff is the choice under which a round goes as far as FedAvg's would (Section 5); for the proximal local solver the
  paper's code takes the mean number of steps instead.
- Momentum and the proximal term together have other weights a_i, which the paper does not give: refused. So is Adam,
  whose steps are no weighted sum of gradients.
- The server needs sums alone: of d_i, of ||a_i||_1 and of batch-norm statistics, by n_i. Under a guarantee for clients
  it does not learn how many steps they made. tau_eff is then a number that you choose (`tau_eff`).
- The paper's server momentum is not here.
- Batch-norm statistics are averaged by p_i as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import nn

from fedaudit import (
    NUMBER,
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
    load,
    private,
    register,
    state_of,
)
from fedaudit.errors import SettingError
from fedaudit.methods.averaging.fedprox import proximal
from fedaudit.methods.shared._optimiser import WithOptimiser
from fedaudit.methods.shared._travelling import SendsTrained


class Global(Down):
    x: State


class Local(Up):
    y: State = private("weights", via="model", unit="client")
    tau: int = private("count", via="model", unit="client")  # local steps, which n determines
    n: int = private("count", via="data", unit="client")


class Step(Up):
    """A client's part in the server's sums."""

    d: State = private("gradients", via="model", unit="client")  # -d_i, and the change of batch-norm statistics
    a: float | None = private("count", via="model", unit="client")  # ||a_i||_1 in thousands: sums have a bound
    n: int = private("count", via="data", unit="client")


class Normalised(Record):
    x: State


@register("fednova")
class FedNova(SendsTrained, WithOptimiser):
    """Average normalised updates of unequal length. A client sends its update and how many steps it took."""

    E: int = Field(default=1, ge=1)  # local epochs
    B: int = 64  # local batch size
    eta: float = Field(default=0.01, gt=0)  # local learning rate
    mu: float = Field(default=0.0, ge=0)  # weight of FedProx's proximal term
    tau_eff: float | None = Field(default=None, gt=0)  # None: the clients' mean, sum_i p_i ||a_i||_1

    quick: ClassVar[Mapping[str, Any]] = {"B": 16, "eta": 0.05}

    @model_validator(mode="after")
    def _known(self) -> FedNova:
        if self.opt == "adam":
            raise ValueError('a step of Adam is not a weighted sum of gradients. Choose opt = "sgd"')
        if self.mu and self.momentum:
            raise ValueError("mu and momentum together have no weights a_i in the paper. Set one of them to 0")
        return self

    def init(self, server: Server) -> Normalised:
        return Normalised(state_of(server.model(), self.part))

    def round(self, s: Normalised, server: Server, cohort: Cohort) -> Normalised:
        found: Any = cohort.mean(self.client_update, Global(s.x), by="n")
        mean: Step = found.value
        if mean.a is None and self.tau_eff is None:
            raise SettingError(
                "Under a guarantee for clients FedNova's server does not learn how many steps they make, and needs "
                "tau_eff from you: --set tau_eff=5, about as many steps as a client makes in a round."
            )
        tau_eff = self.tau_eff or 1000 * (mean.a or 0.0)  # sum_i p_i ||a_i||_1
        statistics = {name: s.x[name] + mean.d[name] for name in s.x.buffers}
        x = {name: t + tau_eff * mean.d[name] for name, t in s.x.parameters.items()}
        return Normalised(State({**s.x, **statistics, **x}, s.x.buffers))

    def summand(self, sender: Sender, reply: Local, message: Global) -> Step:
        a = self.norm(reply.tau)
        change = {name: t - message.x[name] for name, t in reply.y.items()}
        d = {name: t if name in reply.y.buffers else t / a for name, t in change.items()}
        return Step(State(d, reply.y.buffers), a / 1000, reply.n)

    def norm(self, tau: int) -> float:
        """Return ||a_i||_1 of so many local steps."""
        if self.mu:
            alpha = self.eta * self.mu
            return float((1 - (1 - alpha) ** tau) / alpha)
        rho = self.momentum
        return float((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))

    def client_update(self, client: Client, msg: Global) -> Local:  # on client i
        load(client.model, msg.x, self.part)
        options: dict[str, Any] = {"epochs": self.E, "batch": self.B, "opt": self.optimiser(self.eta)}
        if self.mu:
            fitted = client.fit(proximal, given={"w_t": msg.x.parameters, "mu": self.mu}, **options)
        else:
            fitted = client.fit(ce, **options)
        return Local(state_of(client.model, self.part), fitted.steps, len(client))

    def predictor(self, s: Normalised, server: Server) -> nn.Module:
        return load(server.model(), s.x, self.part)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Global.x"): plan.state(part=self.part) * len(plan.asked(0)),
            ("up", "Local.y"): plan.state(part=self.part) * len(plan.replied(0)),
            ("up", "Local.tau"): NUMBER * len(plan.replied(0)),
            ("up", "Local.n"): NUMBER * len(plan.replied(0)),
        }
