"""Two networks of one client that learn side by side: its own, which stays, and the shared one, which travels.

FML and FedKD train both on the same batches, in one fit over both networks' parameters. The output that one network
learns from the other is held fixed (detached). So each network's loss reaches that network alone, and one optimiser
over both does what one for each would do. HtFLlib detaches nothing: there each network's gradient is that of both
losses added, which one optimiser over both does too. It also clips the gradient of each network by itself (`clip`). In
DFFKE's code, which is built on HtFLlib, the own network has Adam and the shared one plain SGD (`eta_shared`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedaudit import Opt
from fedaudit.methods.shared._local_training import WithViews
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
        clip_parts([p for group in self.param_groups for p in group["params"]], self.sizes, self.clip)
        return super().step(closure)


class AdamAndSGD(torch.optim.Optimizer):
    """Adam for the first part of a model and plain SGD for the others, after each part's gradient was clipped.

    `lr` and `weight_decay` are Adam's, `eta_shared` is the rate of SGD. Without `clip` nothing is clipped.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, weight_decay: float, eta_shared: float, clip: float | None,
        sizes: Sequence[int],
    ):  # fmt: skip
        every = list(params)
        own, others = every[: sizes[0]], every[sizes[0] :]
        super().__init__([{"params": own, "lr": lr}, {"params": others, "lr": eta_shared}], {})
        self.clip, self.sizes = clip, tuple(sizes)
        self.parts = torch.optim.Adam(own, lr, weight_decay=weight_decay), torch.optim.SGD(others, eta_shared)

    def step(self, closure: Any = None) -> Any:
        if self.clip is not None:
            clip_parts([p for group in self.param_groups for p in group["params"]], self.sizes, self.clip)
        for part in self.parts:
            part.step()


def clip_parts(parameters: Sequence[Tensor], sizes: Sequence[int], clip: float) -> None:
    """Scale the gradient of each part down to the norm `clip`, if it is longer. A part has so many of the tensors."""
    left = list(parameters)
    for size in sizes:
        part, left = left[:size], left[size:]
        if part:
            nn.utils.clip_grad_norm_(part, clip)


def clipped(opt: Opt, clip: float | None, pair: Pair) -> Opt:
    """Return the optimiser with each network's gradient clipped; as it is if `clip` is None."""
    return opt if clip is None else Opt(ClippedSGD, {**opt.options, "clip": clip, "sizes": pair.sizes()})


class WithPair(WithViews):
    clip: float | None = Field(default=None, gt=0)  # longest gradient of each network, W_h; with SGD or eta_shared
    eta_shared: float | None = Field(default=None, gt=0)  # rate of SGD for all but the own network, which has Adam

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.eta_shared is not None and self.opt != "adam":
            raise ValueError('eta_shared belongs to opt = "adam", of the own network. Leave it out, or choose adam')
        if self.clip is not None and self.opt == "adam" and self.eta_shared is None:
            raise ValueError(
                'clip belongs to opt = "sgd" or to eta_shared. Leave it out, choose sgd, or set eta_shared'
            )
        return self

    def of_pair(self, eta: float, pair: Pair) -> Opt:
        """Return the optimiser of both networks, at the learning rate eta."""
        if self.eta_shared is None:
            return clipped(self.optimiser(eta), self.clip, pair)
        of = {"eta_shared": self.eta_shared, "clip": self.clip, "sizes": pair.sizes()}
        return Opt(AdamAndSGD, {"lr": eta, "weight_decay": self.weight_decay, **of})
