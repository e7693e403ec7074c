"""pFedLA. Ma, Zhang, Guo, Xu, "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022,
Algorithm 1.

The server keeps every client's last model and, for each client, a hypernetwork that says layer by layer how much of
whose model goes into the one that this client trains next.

Where the paper is silent or was not at hand, we chose:

- A layer is a module with its own tensors: weight, bias and batch-norm statistics share their weights alpha.
- The hypernetwork: an embedding v_i of 100 numbers, `depth` linear layers of width 100 with ReLU, and one linear output
  of (layers x clients), whose softmax over the clients is alpha_i, so that each layer's weights sum to 1.
- The sign of the update: Delta theta_i = theta_i - theta-bar_i points where client i wants its model to go, so v_i and
  psi_i move along (d theta-bar_i)^T Delta theta_i.
- All clients begin with one common model; until a client has answered, that is what the others can take from it.
- A client deploys its model after local training. There is no global model.
- HeurpFedLA, the variant that spares some downloads, is not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from fedaudit import (
    Client,
    Cohort,
    Down,
    Method,
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
    sgd,
    state_of,
)


class Personalised(Down):
    theta_bar: State


class Update(Up):
    delta_theta: State = private("gradients", via="model", unit="client")


class Hyper(Record):
    """The server's state. Row j of every tensor belongs to client j."""

    theta: State
    v: Tensor
    psi: State


def layers(names: Iterable[str]) -> list[list[str]]:
    """Return the tensors of each layer: those that lie in one module."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(name.rpartition(".")[0], []).append(name)
    return list(grouped.values())


def HN(v: Tensor, psi: Mapping[str, Tensor], clients: int) -> Tensor:
    """Return alpha: hypernetworks x layers x clients; over the clients it sums to 1. All hypernetworks run at once."""
    h = v[:, None]
    depth = len(psi) // 2
    for d in range(depth):
        h = torch.baddbmm(psi[f"{d}.bias"][:, None], h.relu() if d else h, psi[f"{d}.weight"])
    return h.view(len(v), -1, clients).softmax(2)


def mixed(theta: Mapping[str, Tensor], alpha: Tensor, name: str) -> Tensor:
    """Return sum_j alpha_j theta_j; counters are rounded."""
    exact = theta[name].dtype if theta[name].is_floating_point() else torch.float64
    mean = torch.tensordot(alpha.to(exact), theta[name].to(exact), dims=1)
    return mean if theta[name].is_floating_point() else mean.round().to(theta[name].dtype)


def agreement(theta: State, delta: State, grouped: Sequence[Sequence[str]]) -> Tensor:
    """Return <theta_j, Delta theta_i> for each layer and client j: the slope of <theta-bar_i, Delta theta_i> in
    alpha_j.
    """
    inner = {name: theta[name].flatten(1) @ delta[name].flatten() for name in delta.parameters}
    zero = torch.zeros_like(next(iter(inner.values())))
    return torch.stack([sum((inner[name] for name in group if name in inner), zero) for group in grouped])


@register("pfedla", tables="FedFree")
class PFedLA(Method):
    """Weigh each layer of each client by a hypernetwork. A client sends its update of the weights."""

    single_replies: ClassVar[str] = "the server keeps each client's model and mixes them anew for everyone"

    on_digits: ClassVar = {"E": 5, "B": 16, "eta": 0.1}
    quick: ClassVar = {"E": 1, "B": 64, "eta": 0.1, "width": 16}
    # As FedFree ran it: Section 4.1 and Table A2.
    presets: ClassVar = {name: {"E": 5, "B": 10, "eta": 0.01, "eta_h": 0.005} for name in ("cifar10", "cifar100")}

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    eta_h: float = 0.005  # learning rate of hypernetworks and embeddings
    width: int = 100  # of the embedding and of the hidden layers
    depth: int = 3  # hidden layers

    def init(self, server: Server) -> Hyper:
        N = server.clients
        w = state_of(server.model())
        theta = State({name: torch.stack([t] * N) for name, t in w.items()}, w.buffers)
        rng, psi = server.rng("hypernetworks"), {}
        sizes = [self.width] * (self.depth + 1) + [len(layers(w)) * N]
        for d, (inputs, outputs) in enumerate(pairwise(sizes)):
            bound = inputs**-0.5  # as torch initialises a linear layer
            for part, shape in (("weight", (N, inputs, outputs)), ("bias", (N, outputs))):
                psi[f"{d}.{part}"] = (torch.rand(shape, generator=rng, device=server.device) * 2 - 1) * bound
        v = torch.randn(N, self.width, generator=rng, device=server.device)
        return Hyper(theta, v, State(psi))

    def round(self, s: Hyper, server: Server, cohort: Cohort) -> Hyper:
        N, grouped = server.clients, layers(s.theta)
        alpha = HN(s.v, s.psi, N)
        theta_bar = {
            i: State(
                {name: mixed(s.theta, alpha[i, n], name) for n, group in enumerate(grouped) for name in group},
                s.theta.buffers,
            )  # theta-bar_i^l = sum_j alpha_i^{l,j} theta_j^l
            for i in cohort.ids
        }
        replies = cohort.ask(self.client_update, {i: Personalised(t) for i, t in theta_bar.items()})
        answered = list(replies)
        slope = torch.stack([agreement(s.theta, replies[i].delta_theta, grouped) for i in answered])
        v = s.v.clone().requires_grad_()
        psi = {name: t.clone().requires_grad_() for name, t in s.psi.items()}

        def away() -> Tensor:  # - sum_i <theta-bar_i, Delta theta_i>, as a function of v and psi
            return -(HN(v, psi, N)[answered] * slope).sum()

        server.optimise([v, *psi.values()], away, steps=1, opt=sgd(self.eta_h))  # Delta v_i, Delta psi_i
        theta = State({name: t.clone() for name, t in s.theta.items()}, s.theta.buffers)
        for i, reply in replies.items():
            for name, t in reply.delta_theta.items():
                theta[name][i] = theta_bar[i][name] + t  # theta_i, which stays here until i answers again
        return Hyper(theta, v.detach(), State({name: t.detach() for name, t in psi.items()}))

    def client_update(self, client: Client, msg: Personalised) -> Update:  # on client i
        load(client.model, msg.theta_bar)
        client.fit(ce, epochs=self.E, batch=self.B, opt=sgd(self.eta))
        theta = state_of(client.model)
        return Update(State({name: t - msg.theta_bar[name] for name, t in theta.items()}, theta.buffers))

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Personalised.theta_bar"): plan.state() * len(plan.asked(0)),
            ("up", "Update.delta_theta"): plan.state() * len(plan.replied(0)),
        }
