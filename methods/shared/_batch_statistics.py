"""Networks whose batch norms know no running statistics: every pass is normalised by its own rows.

FedZGE's authors answer and test in this way, because their code never leaves the training mode. DFRD's authors build
their networks so. A test then depends on which rows are tested together: here 256 at a time, in the order of the test
set.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedaudit.methods.shared._ensemble import single_precision

ROWS = 256  # rows that are normalised together in a test


class OnBatchStatistics(nn.Module):
    """A network that normalises `rows` rows at a time by their own statistics, in training and in tests.

    The running statistics stay as they are: nothing reads them.
    """

    def __init__(self, f: nn.Module, rows: int = ROWS) -> None:
        super().__init__()
        self.f, self.rows = f, rows
        self.train(f.training)

    def train(self, mode: bool = True) -> OnBatchStatistics:
        super().train(mode)
        for layer in self.f.modules():
            if isinstance(layer, _BatchNorm):
                layer.train()
                layer.momentum = 0.0
        return self

    def forward(self, x: Tensor) -> Tensor:
        parts = list(x.split(self.rows))
        if len(parts) > 1 and len(parts[-1]) == 1:  # one row has no statistics of its own
            parts[-2:] = [torch.cat(parts[-2:])]
        return torch.cat([self.f(part) for part in parts])


@torch.no_grad()
def predict_on_batches(model: nn.Module, *queries: Tensor) -> Tensor:
    """Return f(x) for each query, normalised by the query's own statistics, one after the other.

    A copy answers: in training mode a batch norm would count the passes and move its running statistics.
    """
    copied = copy.deepcopy(model).eval()
    with single_precision():
        return torch.cat([OnBatchStatistics(copied, max(len(x), 1))(x) for x in queries])
