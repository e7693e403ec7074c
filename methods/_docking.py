"""The docking layers of DFFKE, z(.; theta_k^z): R^{h_k} -> R^h (Section 3.1), one linear layer per client."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit.wire.codec import State


class Docking(nn.Module):
    """z(.; theta_k^z) of all clients side by side, and the temporary head l(.; theta_global^l).

    Narrower embeddings are padded with zeros, whose weights get no gradient; so one product serves a mixed batch.
    """

    def __init__(self, layers: list[nn.Linear], classes: int) -> None:
        super().__init__()
        width = max(layer.in_features for layer in layers)
        padded = [F.pad(layer.weight.detach().T, (0, 0, 0, width - layer.in_features)) for layer in layers]
        self.weight = nn.Parameter(torch.stack(padded))  # client, h_k, h
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))
        self.head = nn.Linear(layers[0].out_features, classes)

    def forward(self, e: Tensor, k: Tensor) -> Tensor:
        own = F.one_hot(k, len(self.weight)).to(e.dtype)
        return self.head(torch.einsum("bk,bi,kih->bh", own, e, self.weight) + own @ self.bias)

    def layer(self, position: int, width: int) -> State:
        return State({"weight": self.weight.detach()[position, :width].T, "bias": self.bias.detach()[position]})


def z(e: Tensor, theta_z: State) -> Tensor:
    return F.linear(e, theta_z["weight"], theta_z["bias"])
