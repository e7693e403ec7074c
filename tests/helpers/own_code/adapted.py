"""A small model of a user's own: a frozen layer of random weights, a low-rank adapter on it, and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """Rank 2 on a frozen layer from 64 to 16 numbers."""

    def __init__(self, shape, classes):
        super().__init__()
        self.base = nn.Linear(64, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.up.weight)
        self.head = nn.Linear(16, classes)

    def encode(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return torch.relu(self.base(x) + self.up(self.down(x)))

    def classify(self, e: Tensor) -> Tensor:
        return self.head(e)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.encode(x))


FROZEN = 64 * 16 + 16
TRAINED = 64 * 2 + 2 * 16 + 16 * 10 + 10
