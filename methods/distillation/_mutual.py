"""Two networks of one client that learn side by side: its own, which stays, and the shared one, which travels.

FML and FedKD train both on the same batches, in one fit over both networks' parameters. The output that one network
learns from the other is held fixed (detached). So each network's loss reaches that network alone, and one optimiser
over both does what one for each would do. HtFLlib detaches nothing: there each network's gradient is that of both
losses added, which one optimiser over both does too. It also clips the gradient of each network by itself (`clip`). In
DFFKE's code, which is built on HtFLlib, the own network has Adam and the shared one plain SGD (`eta_shared`).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from fedaudit import Opt, sgd
from fedaudit.methods.shared._local_training import WithViews
from fedaudit.training.models import Net
from fedaudit.training.optimiser_parts import ByParts


class Pair(nn.Module):
    """Returns the logits of the own and of the shared network, and their embeddings, the shared one's through W_h."""

    def __init__(self, own: Net, shared: Net, W_h: nn.Module | None = None) -> None:
        super().__init__()
        self.own, self.shared, self.W_h = own, shared, W_h or nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, h_s = self.own.encode(x), self.shared.encode(x)
        return self.own.classify(h), self.shared.classify(h_s), h, self.W_h(h_s)

    def sizes(self) -> tuple[int, ...]:
        """Return how many tensors of each of the three parts are trained, in their order."""
        parts = (self.own, self.shared, self.W_h)
        return tuple(sum(p.requires_grad for p in part.parameters()) for part in parts)


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
        own = self.optimiser(eta)
        if self.eta_shared is None and self.clip is None:
            return own
        others = own if self.eta_shared is None else sgd(self.eta_shared)
        parts = [(size, opt.make, opt.options) for size, opt in zip(pair.sizes(), (own, others, others), strict=True)]
        return Opt(ByParts, {"parts": parts, "clip": self.clip}, own.schedule)
