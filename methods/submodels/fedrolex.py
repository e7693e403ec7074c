"""FedRolex. Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022; as DFRD's rolling scheme (Luo et al., NeurIPS 2023, Section 2).

The window of a layer of width n begins at unit (t - 1) mod n in round t and wraps around, so over any n rounds a client
of any width trains every unit. It follows from the round's number: nothing about it travels.

DFRD leaves these points open, and we chose (see also fedaudit/methods/submodels/_submodel.py):

- All layers and all clients roll by one unit a round, as in FedRolex; a narrow client's window is the beginning of a
  wide one's.
- FedRolex averages without weights; Eq. 1 of DFRD weights by p_i (`weighted`).
"""

from __future__ import annotations

from fractions import Fraction

import torch

from fedaudit import Sender, Server, register
from fedaudit.methods.submodels._submodel import Layout, Part, SubModels, Units, choose


@register("fedrolex", tables="DFRD")
class FedRolex(SubModels):
    """Average sub-models whose window rolls on in each round. A client sends the weights of its sub-model."""

    def units(self, plan: Layout, R: Fraction, server: Server | Sender, k: int) -> tuple[Units, type[Part]]:
        def rolling(width: int, m: int) -> torch.Tensor:
            return ((torch.arange(m) + server.t - 1) % width).sort().values

        return choose(plan, R, rolling), Part
