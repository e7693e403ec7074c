"""HeteroFL. Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021; as DFRD's static scheme (Luo et al., NeurIPS 2023, Section 2).

A client of width R trains the first ceil(R n) units of each layer. Three things go with it:

- Scaler: in local training the output of a hidden layer is divided by R, as in inverted dropout; the global model is
  used as it is. The paper does not say how a sub-model is used by itself. Here it is used with its scaler, as it was
  trained (`personal`, and as a teacher in a distillation), folded into the weights.
- Masked cross-entropy: the logits of classes that a client does not hold are set to 0. A record's loss then depends on
  the labels of all others, and DP-SGD refuses it: set `masked = false` there.
- Static batch norm: while training, batches are normalised by their own statistics, and none travel. Afterwards the
  clients are asked for the statistics of the *global* model on their records: a release of kind `statistics`.

These points are left open, and we chose (see also fedaudit/methods/submodels/_submodel.py):

- The paper queries once, after all rounds, one client after the other. A run is evaluated in each round, so we query
  at the end of each, and average the clients' cumulative means by n. One pass over all would weigh every batch alike,
  so that a client with one small batch would count for more than its records. Each client has to run the full model
  for it, whatever its budget. `sbn = false` does as the other two methods.
- The paper averages classifier rows over the clients that hold the class, which tells the server who holds what. Under
  the mask the other rows do not move; here they enter Eq. 1 as they were sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import Client, Cohort, Plan, Sender, Server, Size, State, ce, load, register, state_of
from fedaudit.methods.shared._statistics import (
    Query,
    Statistics,
    batch_norms,
    measured,
    settled,
    statistics_size,
    statistics_traffic,
)
from fedaudit.methods.submodels._submodel import Layout, Part, SubModels, TrainedPart, Units, Whole, choose, ratio_of
from fedaudit.training import models


def masked_ce(f: Any, x: Tensor, y: Tensor, held: Tensor) -> Tensor:
    """Return the cross-entropy with the logits of classes that are not held set to 0."""
    return cross_entropy(f(x) * held, y, reduction="none")


def hidden_layers(net: models.Net) -> list[nn.Module]:
    return [m for m in net.encoder.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


@contextmanager
def scaler(net: models.Net, R: float) -> Iterator[None]:
    """Divide the output of hidden layers by R, within this context."""
    handles = [m.register_forward_hook(lambda m, i, out: out / R) for m in hidden_layers(net)] if R < 1 else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def folded(net: models.Net, R: float) -> models.Net:
    """Return the network with the scaler inside its weights; it is changed in place."""
    with torch.no_grad():
        for p in (p for m in hidden_layers(net) for p in m.parameters()):
            p.div_(R)
    return net


@register("heterofl", tables="DFRD")
class HeteroFL(SubModels):
    """Average sub-models cut to clients' size. A client sends the weights of its sub-model."""

    on_digits: ClassVar[Mapping[str, Any]] = {"E": 10, "B": 16, "eta": 0.02}  # the scaler makes steps longer

    scaled: bool = True  # the scaler
    masked: bool = True  # masked cross-entropy
    sbn: bool = True  # static batch norm

    def units(self, plan: Layout, R: Fraction, server: Server | Sender, k: int) -> tuple[Units, type[Part]]:
        def static(width: int, m: int) -> Tensor:
            return torch.arange(m)

        return choose(plan, R, static), Part

    def travels(self, w: State) -> State:
        return State(w.parameters) if self.sbn else w

    def client_update(self, client: Client, msg: Part) -> TrainedPart:
        load(client.model, {**state_of(client.model), **msg.w})
        options = {**self.local_training, "batch": self.B, "opt": self.optimiser(self.eta)}
        with scaler(client.model, self.R(client.model)):
            if self.masked:
                held = torch.zeros(client.classes, device=client.device)
                held[client.y] = 1
                client.fit(masked_ce, given={"held": held}, separable=False, **options)
            else:
                client.fit(ce, **options)
        return TrainedPart(self.travels(state_of(client.model)), len(client))

    def measures_statistics(self) -> bool:
        return self.sbn

    def settle(self, s: Whole, server: Server, cohort: Cohort) -> Whole:
        if not (self.sbn and s.w.buffers):
            return s
        return Whole(
            settled(s.w, cohort.mean(self.statistics, Query(State(s.w.parameters)), by="n").value.s), s.trained
        )

    def statistics(self, client: Client, msg: Query) -> Statistics:
        net = client.server_model()
        return measured(client, load(net, {**state_of(net), **msg.w}), self.B)

    def R(self, net: models.Net) -> float:
        return float(ratio_of(net.arch)) if self.scaled else 1.0

    def personal(self, client: Client) -> nn.Module:
        return folded(copy.deepcopy(client.model), self.R(client.model))

    def teacher(self, server: Server, k: int, w: State) -> nn.Module:
        net = server.model(server.arch(k))
        load(net, {**state_of(net), **w})
        if self.sbn:  # no statistics came along: batches normalise themselves, as in training
            for m in batch_norms(net).values():
                m.track_running_stats, m.running_mean, m.running_var = False, None, None
        return folded(net, self.R(net))

    def summed_numbers(self, plan: Plan) -> list[int]:
        if not (self.sbn and plan.state().buffers):
            return super().summed_numbers(plan)
        statistics = statistics_size(plan.server_arch, plan.shape, plan.classes) // 4
        groups = len(set(self.groups(tuple(plan.archs.values()))))
        return [plan.state().payload // 4 + groups + 1, statistics + 1]

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        declared = super().traffic(plan)
        if not (self.sbn and plan.state().buffers):
            return declared
        whole = {
            ("down", "Part.w"): sum((plan.state(k).without_buffers() for k in plan.asked(0)), Size()),
            ("up", "TrainedPart.w"): sum((plan.state(k).without_buffers() for k in plan.replied(0)), Size()),
        }
        return {**declared, **whole, **statistics_traffic(plan, 1)}
