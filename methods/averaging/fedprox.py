"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2.

    client k: min_w  h_k(w; w^t) = F_k(w) + mu / 2 ||w - w^t||^2                                       (2)

FedAvg with a term that holds a client's model near the one it received; with mu = 0 it is FedAvg, to the bit.

These points are left open, or done otherwise here:

- The inexact solver that Definition 2 allows (gamma) is E epochs of SGD, as in FedAvg. Stragglers that do less work
  would be clients with another E. There are none here.
- Algorithm 2 draws clients with probability p_k, and all of them weigh the same in the average. Here all records weigh
  the same, as in FedAvg and in its rivals.
- ||w - w^t||^2 is over parameters; batch-norm statistics are averaged as in FedAvg.
- As a rival: mu = 0.001 in FedAF (Appendix A), 0.01 in FedFree (Table A2). FedFree's E is 5 in Section 4.1 and 30 in
  its Table A2; the preset has 5. PFLlib's default is mu = 0, which is FedAvg: its preset leaves mu alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from fedaudit import Client, ce, load, register, state_of
from fedaudit.methods.averaging.fedavg import FedAvg, Global, Local
from fedaudit.methods.shared._libraries import PFLIB


def proximal(f: Any, x: Tensor, y: Tensor, w_t: Mapping[str, Tensor], mu: float) -> Tensor:
    """Return Eq. 2, one value per record: the second term is the same for all of them."""
    apart = sum(((w - w_t[name]) ** 2).sum() for name, w in f.params.items() if name in w_t)
    return ce(f, x, y) + mu / 2 * apart


@register("fedprox", tables="FedAF FedFree")
class FedProx(FedAvg):
    """Average models that are held near the global one while they train.

    A client sends its weights and its number of records.
    """

    mu: float = 0.01  # weight of the proximal term

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9, "mu": 0.001},
        "fedfree": {"E": 5, "B": 10, "eta": 0.01, "mu": 0.01},
        "pflib": PFLIB,
    }

    def client_update(self, client: Client, msg: Global) -> Local:  # on client k
        load(client.model, msg.w, self.part)
        given = {"w_t": msg.w.parameters, "mu": self.mu}
        client.fit(proximal, **self.local_training, batch=self.B, opt=self.optimiser(self.eta), given=given)  # Eq. 2
        return Local(state_of(client.model, self.part), len(client))
