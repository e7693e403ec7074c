"""MOON. Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1.

    client k: min_w  l_sup(w; x, y) + mu l_con                                                         (4)
    l_con = -log e^{sim(z, z_glob) / tau} / (e^{sim(z, z_glob) / tau} + e^{sim(z, z_prev) / tau})       (3)

z = R_w(x) is the representation of the model in training, z_glob of the model received, z_prev of the client's own
model after its last local training; sim is the cosine. FedAvg otherwise; with mu = 0 it is FedAvg, to the bit.

These points are left open, or done otherwise here:

- R_w ends in a projection head (two layers, 256 wide) that the paper puts between encoder and classifier. Here it is
  the input of the classifier, whatever the model: FedAF does not say that its ConvNet got such a head. A model with a
  projection of its own (`--model cnn/p256`) is the nearest.
- A client that has no model of its own yet uses the received one. Then l_con is log 2 for every w, and has no
  influence.
- The two fixed models run in evaluation mode, on their batch-norm statistics; so z_glob and z_prev are computed once
  for each record and serve all epochs.
- As a rival: mu = 1.0 in FedAF (Appendix A); tau = 0.5 is the paper's. PFLlib's defaults are tau = 1 and mu = 0, which
  is FedAvg: its preset leaves mu alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, softplus

from fedaudit import Client, load, register, state_of
from fedaudit.methods.averaging.fedavg import FedAvg, Global, Local
from fedaudit.methods.shared._libraries import PFLIB


def l_con(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Return Eq. 3, one value per record: -log 1 / (1 + e^{(sim_prev - sim_glob) / tau})."""
    return softplus((cosine_similarity(z, z_prev) - cosine_similarity(z, z_glob)) / tau)


def contrastive(f: Any, x: Tensor, y: Tensor, z_glob: Tensor, z_prev: Tensor, mu: float, tau: float) -> Tensor:
    """Return Eq. 4, one value per record."""
    z = f.encode(x)
    return cross_entropy(f.classify(z), y, reduction="none") + mu * l_con(z, z_glob, z_prev, tau)


@register("moon", tables="FedAF")
class MOON(FedAvg):
    """Average models whose embeddings stay near the global model's.

    A client sends its weights and its number of records.
    """

    mu: float = 1.0  # weight of the contrastive loss
    tau: float = 0.5  # its temperature

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9, "mu": 1.0},
        "pflib": {**PFLIB, "tau": 1.0},
    }

    def client_update(self, client: Client, msg: Global) -> Local:  # on client k
        w_glob = load(copy.deepcopy(client.model), msg.w, self.part).eval()
        w_prev = copy.deepcopy(client.model).eval() if client.memory.get("trained") else w_glob
        load(client.model, msg.w, self.part)
        opt, given = self.optimiser(self.eta), {"mu": self.mu, "tau": self.tau}
        fixed = (w_glob.encode, w_prev.encode)
        client.fit(contrastive, beside=fixed, **self.local_training, batch=self.B, opt=opt, given=given)  # Eq. 4
        client.memory["trained"] = True
        return Local(state_of(client.model, self.part), len(client))
