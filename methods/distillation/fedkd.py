"""FedKD. Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications
2022, Algorithm 1: on each client a mentor of its own and a small shared mentee teach each other, and what travels of
the mentee's update are its largest singular values.

    mentor:  L_t = L_t^c + [KL(y_s || y_t) + MSE(H_t, W_h H_s)] / (L_t^c + L_s^c)
    mentee:  L_s = L_s^c + [KL(y_t || y_s) + MSE(H_t, W_h H_s)] / (L_t^c + L_s^c)
    g = U S V, of which the K largest with sum_{i <= K} s_i^2 >= T(t) sum_i s_i^2, T(t) = T_start + (T_end - T_start) t

Mentors may differ in everything. The mentee is the server's model (`--server-model`); each client keeps a copy, which
it brings up to date by the server's update, compressed too.

We do not have the paper; this is written from its published description. That leaves these points open, and we chose:

- t is the share of rounds already done: the first round has T_start, the one after the last would have T_end.
- g is the mentee's change over a round's local training. HtFLlib, with which DFFKE ran it, decomposes the mentee's
  weights instead, and a convolution as a stack of kernels; here a convolution is a matrix with a row for each output
  channel.
- U, s and V travel where they are smaller than the matrix; vectors travel whole. At T = 1 everything does.
- A client that has no copy of the mentee before the server's update, because it is new or missed a round, gets it
  whole.
- 1 / (L_t^c + L_s^c) is a weight, per record, through which no gradient goes (`intensity = "weight"`). As written, a
  gradient does go through it (`"literal"`). The output of one network is fixed while the other learns from it.
- HtFLlib (preset `htfllib`) takes the losses over the batch, fixes neither network's output and divides the divergence
  by the number of classes (`"batch"`); it clips gradients at 10, each network's by itself (`clip`), and averages all
  clients alike (`weights = "equal"`). If all singular values were needed, its loop ends without a rank and sends rank
  0, a matrix of zeros; here the matrix is sent whole.
- In DFFKE's code, which is built on HtFLlib, the mentor has Adam, and mentee and W_h have SGD at 0.01 (`eta_shared`;
  preset `dffke_authors`).
- Attention maps, the other half of the hidden loss for transformers, are left out; W_h stays with the client.
- Updates are averaged by records.
- Two papers are called FedKD. FedFree cites Gong et al., AAAI 2022, "Preserving Privacy in Federated Learning with
  Ensemble Cross-Domain Knowledge Distillation", as its rival ("adapted for comparison"): there the server distils an
  ensemble on unlabelled public data. FedFree's Table A2 gives FedKD a "distillation temperature [0.95, 0.98]": these
  are T_start and T_end of Wu et al. and no setting of Gong et al. This file is Wu et al., as in DFFKE. By the table it
  stands for FedFree's rival, too. The method of Gong et al. is not here.
- A client deploys its mentor; the mentee on the server is the global model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedaudit import (
    NUMBER,
    Client,
    Cohort,
    Down,
    LowRank,
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
from fedaudit.methods.distillation._mutual import Pair, WithPair
from fedaudit.methods.prototypes.fedproto import DFFKE, FEDFREE
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB

IN_HTFLLIB: dict[str, Any] = {
    "T_start": 0.95, "T_end": 0.98, "intensity": "batch", "weights": "equal", "clip": 10.0,
}  # fmt: skip


class Mentee(Down):
    theta: State | None  # whole, for a client that has no copy
    g: State | None  # the server's last update


class Update(Up):
    g: State = private("gradients", via="model", unit="client")
    n: int | None = private("count", via="data", unit="client")


class Shared(Record):
    theta: State  # before g
    g: State | None  # the clients' mean update
    T: float  # the energy with which it travels
    current: list[int]  # who holds theta


def mutual(f: Any, x: Tensor, y: Tensor, intensity: str) -> Tensor:
    """Return L_t + L_s, one value per record. Each reaches its own network only, and L_s reaches W_h too."""
    z_t, z_s, H_t, H_s = f(x)
    L_t, L_s = cross_entropy(z_t, y, reduction="none"), cross_entropy(z_s, y, reduction="none")

    def learned(own: Tensor, other: Tensor, taught: Tensor, hidden: Tensor) -> Tensor:
        both = (own + other.detach()).clamp_min(1e-6)
        return own + (taught + hidden.square().mean(1)) / (both.detach() if intensity == "weight" else both)

    mentor = learned(L_t, L_s, kl(z_s.detach(), z_t), H_t - H_s.detach())
    return mentor + learned(L_s, L_t, kl(z_t.detach(), z_s), H_t.detach() - H_s)


def by_batch(f: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return L_t + L_s of a batch as HtFLlib has them: each reaches both networks and W_h."""
    z_t, z_s, H_t, H_s = f(x)
    L_t, L_s = cross_entropy(z_t, y), cross_entropy(z_s, y)
    taught = (kl(z_s, z_t) + kl(z_t, z_s)).mean() / z_t.shape[1]
    return (L_t + L_s + (taught + 2 * mse_loss(H_t, H_s)) / (L_t + L_s)).reshape(1)


@register("fedkd", tables="DFFKE FedFree")
class FedKD(WithPair):
    """Share a small student in compressed form. A client sends the student's gradients and its number of records."""

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate, of both networks and W_h
    T_start: float = 0.95  # energy of the singular values that travel, in the first round
    T_end: float = 0.98  # and after the last
    intensity: Literal["weight", "literal", "batch"] = "weight"
    weights: Literal["samples", "equal"] = "samples"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "fedfree": FEDFREE,
        "htfllib": {**HTFLLIB, **IN_HTFLLIB},
        "dffke_authors": {**DFFKE_AUTHORS, **IN_HTFLLIB, "eta_shared": 0.01},
    }

    def energy(self, party: Server | Client) -> float:
        return self.T_start + (self.T_end - self.T_start) * (party.t - 1) / party.rounds

    def init(self, server: Server) -> Shared:
        return Shared(state_of(server.model()), None, self.T_start, [])

    def round(self, s: Shared, server: Server, cohort: Cohort) -> Shared:
        g = None if s.g is None else LowRank(s.g, s.T)
        theta = changed(s.theta, g)
        whole, change = Mentee(theta, None), Mentee(None, g)
        messages = {k: change if k in s.current else whole for k in cohort.ids}
        by = "n" if self.weights == "samples" else None
        mean = cohort.mean(self.local_update, messages, by=by).value.g
        return Shared(theta, mean, self.energy(server), sorted(cohort.ids))

    def local_update(self, client: Client, msg: Mentee) -> Update:  # on client k
        theta = msg.theta if msg.theta is not None else changed(client.memory["theta"], msg.g)
        mentee = client.server_model(state=theta)
        W_h = nn.Linear(mentee.width, client.model.width, bias=False).to(client.device)
        if "W_h" in client.memory:
            load(W_h, client.memory["W_h"])
        pair = Pair(client.model, mentee, W_h)
        how: dict[str, Any] = {"opt": self.of_pair(self.eta, pair), "augment": self.augment}
        if self.intensity == "batch":
            client.fit(by_batch, epochs=self.E, batch=self.B, model=pair, separable=False, **how)
        else:
            given = {"intensity": self.intensity}
            client.fit(mutual, epochs=self.E, batch=self.B, given=given, model=pair, **how)
        client.memory["theta"], client.memory["W_h"] = theta, state_of(W_h)
        after = state_of(mentee)
        g = State({name: after[name] - theta[name] for name in after}, after.buffers)
        return Update(LowRank(g, self.energy(client)), len(client) if self.weights == "samples" else None)

    def predictor(self, s: Shared, server: Server) -> nn.Module:
        return server.model(state=changed(s.theta, None if s.g is None else LowRank(s.g, s.T)))

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        """Return the bytes of the singular values that the run chose. A plan assumes that none can be left out."""
        new = [k for k in plan.asked(0) if plan.choice("Mentee.theta", k, None if plan.t > 1 else True) is not None]
        return {
            ("down", "Mentee.theta"): plan.state() * len(new),
            ("down", "Mentee.g"): sum((plan.low_rank("Mentee.g", k) for k in plan.asked(0) if k not in new), Size()),
            ("up", "Update.g"): sum((plan.low_rank("Update.g", k) for k in plan.replied(0)), Size()),
            ("up", "Update.n"): NUMBER * len(plan.replied(0)) if self.weights == "samples" else 0,
        }


def changed(theta: State, g: State | None) -> State:
    """Return theta after the update g, as everybody knows it who received the compressed g."""
    if g is None:
        return theta
    left = g.recovered() if isinstance(g, LowRank) else g
    return State({name: t + left[name].to(t.dtype) for name, t in theta.items()}, theta.buffers)
