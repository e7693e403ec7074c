"""Two networks of one client that learn side by side: its own, which stays, and the shared one, which travels.

FML and FedKD train both on the same batches, in one fit over both networks' parameters. The output that one network
learns from the other is held fixed (detached). So each network's loss reaches that network alone, and one optimiser
over both does what one for each would do.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedaudit.training.models import Net


class Pair(nn.Module):
    """Returns the logits of the own and of the shared network, and their embeddings, the shared one's through W_h."""

    def __init__(self, own: Net, shared: Net, W_h: nn.Module | None = None) -> None:
        super().__init__()
        self.own, self.shared, self.W_h = own, shared, W_h or nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, h_s = self.own.encode(x), self.shared.encode(x)
        return self.own.classify(h), self.shared.classify(h_s), h, self.W_h(h_s)
