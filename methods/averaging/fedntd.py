"""FedNTD. Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, Section 4.

    client k: min_w  L_CE(q, y) + beta L_NTD                                                            (3)
    L_NTD = KL[q~^g_tau || q~_tau],  q~_tau(c) = e^{z_c / tau} / sum_{c' != y} e^{z_c' / tau},  c != y   (4, 5)

z are the logits of the model in training, q^g is of the model received: what it says of the classes that are not the
true one is kept, and the true one is left to the labels. FedAvg otherwise; with beta = 0 it is FedAvg, to the bit.

We do not have the paper; this is written from its published description and its published settings. We chose:

- L_NTD has no factor tau^2, which the authors' code has; with tau = 1, the paper's value, they are the same. Set
  beta to beta tau^2 for another tau.
- PFLlib's defaults are tau = 1 and beta = 0, which is FedAvg: its preset leaves beta alone.
- The model received runs in evaluation mode, on its batch-norm statistics; q^g is computed once for each record.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedaudit import Client, kl, load, register, state_of
from fedaudit.methods.averaging.fedavg import FedAvg, Global, Local
from fedaudit.methods.shared._libraries import PFLIB


def not_true(z: Tensor, y: Tensor) -> Tensor:
    """Return the logits of all classes but y, in their order."""
    c = torch.arange(z.shape[-1] - 1, device=z.device)
    return z.gather(-1, c + (c >= y[:, None]))


def not_true_distillation(f: Any, x: Tensor, y: Tensor, z_g: Tensor, beta: float, tau: float) -> Tensor:
    """Return Eq. 3, one value per record."""
    z = f(x)
    return cross_entropy(z, y, reduction="none") + beta * kl(not_true(z_g, y), not_true(z, y), tau)


@register("fedntd")
class FedNTD(FedAvg):
    """Distil the global model's view of the classes that are not true. A client sends its weights and its size."""

    beta: float = Field(default=1.0, ge=0)  # weight of the distillation
    tau: float = Field(default=1.0, gt=0)  # its temperature

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"pflib": {**PFLIB, "tau": 1.0}}

    def client_update(self, client: Client, msg: Global) -> Local:  # on client k
        w_g = load(copy.deepcopy(client.model), msg.w, self.part).eval()
        load(client.model, msg.w, self.part)
        opt, given = self.optimiser(self.eta), {"beta": self.beta, "tau": self.tau}
        client.fit(
            not_true_distillation, beside=(w_g.forward,), **self.local_training, batch=self.B, opt=opt, given=given
        )
        return Local(state_of(client.model, self.part), len(client))
