"""Sub-models of digits' small CNN by hand: 16 and 32 filters and 64 hidden units, with or without batch norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from by_hand import epoch, rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

MODEL = "cnn:1,cnn@0.5:1,cnn@0.25:1"
WIDTHS = {0: (16, 32, 64), 1: (8, 16, 32), 2: (4, 8, 16)}  # of the three clients
Taken = Sequence[Tensor]  # the filters and units that a client has, by layer


def places(name: str, taken: Taken) -> tuple[Tensor, ...]:
    """Where a sub-model's entries of this tensor lie in the global model's."""
    one, two, three = taken
    layer, part = name.removeprefix("encoder.").split(".")
    if layer == "conv1" or layer == "bn1":
        return (one,)
    if layer == "bn2" or name == "encoder.conv2.bias":
        return (two,)
    if layer == "conv2":
        return two[:, None], one
    if layer == "fc1":  # two poolings leave 2 x 2 pixels of each filter
        pixels = (two[:, None] * 4 + torch.arange(4)).flatten()
        return (three[:, None], pixels) if part == "weight" else (three,)
    every = torch.arange(10)
    return (every[:, None], three) if part == "weight" else (every,)


def cut(w: Mapping[str, Tensor], taken: Taken) -> dict[str, Tensor]:
    return {name: t[places(name, taken)] if t.dim() else t for name, t in w.items()}


def put_together(
    w: Mapping[str, Tensor], parts: Mapping[int, Mapping[str, Tensor]], taken: Mapping[int, Taken], n: Mapping[int, int]
) -> dict[str, Tensor]:
    """DFRD, Eq. 1, entry by entry: sum_i p_i theta_i / sum_j p_j over the clients that hold it; else as it was."""
    new = {}
    for name, old in w.items():
        if name not in parts[0] or not old.dim():
            continue
        total, weight = torch.zeros_like(old), torch.zeros_like(old)
        for k, part in parts.items():
            total[places(name, taken[k])] += n[k] * part[name]
            weight[places(name, taken[k])] += n[k]
        new[name] = torch.where(weight > 0, total / weight.clamp_min(1), old)
    return new


def trained(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    k: int,
    t: int,
    B: int,
    eta: float,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> dict[str, Tensor]:
    """One epoch of SGD as client k in round t."""
    for index in epoch(rng(f"client {k}", "fit 1", t), len(y), B):
        net.zero_grad()
        loss(net(x[index]), y[index]).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= eta * p.grad
    return {name: v.detach().clone() for name, v in net.state_dict().items()}
