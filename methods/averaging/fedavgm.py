"""FedAvgM, FedAvg with momentum on the server. Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification", 2019, Section 4.3.

    server: Delta w = sum_k n_k / n (w - w_k);  v <- beta v + Delta w;  w <- w - eta_s v

Clients train as FedAvg's. With beta = 0 and eta_s = 1 it is FedAvg but for rounding.

We do not have the paper; this is written from its published description. These points are left open, or chosen here:

- The step is v itself. FedAF's text says that FedAvgM has Nesterov's momentum: `nesterov = true` takes
  beta v + Delta w instead, as optimisers write it.
- The paper's step has no rate of its own: eta_s = 1. A server rate came with later work (FedOpt).
- beta = 0.9 is one of the values that the paper tries, which go up to 0.997: the best one falls with the local rate and
  with the number of local steps.
- v is over parameters; batch-norm statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from fedaudit import Cohort, Record, Server, State, register, state_of
from fedaudit.methods.averaging.fedavg import FedAvg, Global, Local  # noqa: F401


class Moving(Record):
    w: State
    v: State


@register("fedavgm")
class FedAvgM(FedAvg):
    """Average models with momentum on the server. A client sends its weights and its number of records."""

    beta: float = Field(default=0.9, ge=0, lt=1)  # momentum of the server
    eta_s: float = 1.0  # rate of the server
    nesterov: bool = False

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def init(self, server: Server) -> Moving:
        w = state_of(server.model(), self.part)
        return Moving(w, State({name: torch.zeros_like(t) for name, t in w.parameters.items()}))

    def round(self, s: Moving, server: Server, cohort: Cohort) -> Moving:
        found: Any = cohort.mean(self.client_update, Global(s.w), by="n")
        mean = found.value.w
        delta = {name: s.w[name] - mean[name] for name in s.v}
        v = {name: self.beta * s.v[name] + delta[name] for name in s.v}
        step = {name: self.beta * v[name] + delta[name] for name in v} if self.nesterov else v
        w = {name: s.w[name] - self.eta_s * step[name] for name in v}
        return Moving(State({**mean, **w}, mean.buffers), State(v))
