"""FedAvg by hand as the host of a distillation in the code of DFRD's authors: nobody has running statistics, clients
go on from the plain average, and the distilled model is scored only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from by_hand import close
from conditional import still
from narrow import trained
from torch import Tensor, nn


class ByBatch:
    """A network that is normalised by its own batch, and whose running statistics stay."""

    def __init__(self, net: Any):
        self.net: Any = still(net)
        self.net.encoder.bn1.momentum = self.net.encoder.bn2.momentum = 0.0
        self.net.train()

    def __call__(self, s: Tensor) -> Tensor:
        return self.net(s)


def by_its_batch(f: Any) -> None:
    f.train()
    f.encoder.bn1.momentum = f.encoder.bn2.momentum = 0.0


def plain_averages(
    ran: Any, rounds: int, B: int, eta: float
) -> Iterator[tuple[int, nn.Module, list[Callable[[Tensor], Tensor]]]]:
    """Yield each round, the average, and the teachers. What clients got and the average are compared."""
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    w = dict(ran.states[0].host.w)
    for t in range(1, rounds + 1):
        up = {}
        for k, rows in ran.rows.items():
            close(w, ran.sent("Global", t)[k]["w"], f"to client {k}: the plain average")
            up[k] = trained(ran.net(w), *rows, k, t, B, eta)
        w = {name: sum(n[k] / sum(n.values()) * up[k][name] for k in up) for name in up[0]}
        w = {name: v.round().long() if "tracked" in name else v for name, v in w.items()}
        close(w, ran.states[t].host.w, "the average goes on")
        f = ran.net(w)
        f.encoder.bn1.momentum = f.encoder.bn2.momentum = 0.0
        yield t, f, [ByBatch(ran.net(up[k])) for k in up]


def distilled_apart(f: nn.Module, kept: Any) -> None:
    """Compare the distilled model with the one that was kept beside the average."""
    told = {name: v for name, v in f.state_dict().items() if "tracked" not in name}
    close(told, {name: v for name, v in kept.apart.items() if "tracked" not in name}, "the distilled model")


def taught(f: nn.Module, learns: bool) -> None:
    """Put f, which its own batch normalises, into the half of a turn in which it learns, or does not."""
    for p in f.parameters():
        p.requires_grad_(learns)
    by_its_batch(f)
