"""Two networks of one client that learn side by side: its own, which stays, and the shared one, which travels.

FML and FedKD train both on the same batches, in one fit over both networks' parameters. The output that one network
learns from the other is held fixed (detached). So each network's loss reaches that network alone, and one optimiser
over both does what one for each would do. HtFLlib detaches nothing: there each network's gradient is that of both
losses added, which one optimiser over both does too. It also clips the gradient of each network by itself (`Clipped`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit import Opt
from fedaudit.training.models import Net


class Pair(nn.Module):
    """Returns the logits of the own and of the shared network, and their embeddings, the shared one's through W_h."""

    def __init__(self, own: Net, shared: Net, W_h: nn.Module | None = None) -> None:
        super().__init__()
        self.own, self.shared, self.W_h = own, shared, W_h or nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, h_s = self.own.encode(x), self.shared.encode(x)
        return self.own.classify(h), self.shared.classify(h_s), h, self.W_h(h_s)

    def sizes(self) -> tuple[int, ...]:
        """Return how many parameter tensors each of the three parts has, in their order."""
        return tuple(len(list(part.parameters())) for part in (self.own, self.shared, self.W_h))


class ClippedSGD(torch.optim.SGD):
    """SGD that first scales the gradient of each part of a model down to the norm `clip`, if it is longer.

    `sizes` says how many of the parameters belong to each part.
    """

    def __init__(self, params: Iterable[Tensor], clip: float = 10.0, sizes: Sequence[int] = (), **options: Any):
        super().__init__(params, **options)
        self.clip, self.sizes = clip, tuple(sizes)

    def step(self, closure: Any = None) -> Any:
        left = [p for group in self.param_groups for p in group["params"]]
        for size in self.sizes:
            part, left = left[:size], left[size:]
            if part:
                nn.utils.clip_grad_norm_(part, self.clip)
        return super().step(closure)


def clipped(opt: Opt, clip: float | None, pair: Pair) -> Opt:
    """Return the optimiser with each network's gradient clipped; as it is if `clip` is None."""
    return opt if clip is None else Opt(ClippedSGD, {**opt.options, "clip": clip, "sizes": pair.sizes()})
