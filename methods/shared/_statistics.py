"""Batch-norm statistics of a global model, measured by the clients on their records: a release of kind `statistics`.

HeteroFL's static batch norm asks for them in each round; a distillation asks where `statistics = "recalibrated"`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from fedaudit import NUMBER, Client, Down, Plan, Size, State, Up, private, state_of
from fedaudit.shape import Shape
from fedaudit.training import models
from fedaudit.training.fit import batches


class Query(Down):
    w: State  # the global model's parameters


class Statistics(Up):
    s: State = private("statistics", via="data", unit="client")  # running means and variances
    n: int = private("count", via="data", unit="client")


def batch_norms(net: nn.Module) -> dict[str, nn.BatchNorm2d]:
    return {name: m for name, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}


def measured(client: Client, net: nn.Module, B: int) -> Statistics:
    """Return the statistics of `net` on this client's records: a cumulative mean over batches."""
    for m in batch_norms(net.eval()).values():
        m.train()
        m.momentum = None  # a cumulative mean over batches
        m.reset_running_stats()
    with torch.no_grad():
        for index in batches(len(client), B, client.rng("statistics")):
            net(client.x[index])
    after = state_of(net)
    names = (f"{m}.{part}" for m in batch_norms(net) for part in ("running_mean", "running_var"))
    return Statistics(State({name: after[name] for name in names}), len(client))


def settled(w: State, means: State) -> State:
    """Return w with the mean of the clients' statistics."""
    fresh = {name: t.clamp_min(0) if name.endswith("running_var") else t for name, t in means.items()}
    return State({**w, **fresh}, w.buffers)  # clamped: noise could have made a variance negative


@lru_cache
def statistics_size(arch: str, shape: Shape, classes: int) -> int:
    """Return the bytes of all running means and variances."""
    with torch.device("meta"):
        net = models.build(arch, shape=shape, classes=classes)
    return sum(2 * 4 * m.num_features for m in batch_norms(net).values())


def statistics_traffic(plan: Plan, ask: int) -> dict[tuple[str, str], Size | int]:
    """Return the cost of one such ask: the parameters down to each client, a mean and a variance per channel back."""
    replies = len(plan.replied(ask))
    return {
        ("down", "Query.w"): Size(plan.state().payload) * len(plan.asked(ask)),
        ("up", "Statistics.s"): statistics_size(plan.server_arch, plan.shape, plan.classes) * replies,
        ("up", "Statistics.n"): NUMBER * replies,
    }
