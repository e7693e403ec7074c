"""Folds frozen batch norms into the convolutions before them.

In evaluation mode a batch norm is a line, a z + c for each channel, which the convolution before it can absorb: a (w *
x + b) + c = (a w) * x + (a b + c). The folded network reads and writes a GPU's memory half as often. The numbers are
the same to rounding, so folding is only for networks that are run stacked, which promise no more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fedaudit.training.model_copies import copied

Tensors = dict[str, Tensor]


def folded(networks: Sequence[nn.Module]) -> tuple[nn.Module, list[Tensors], list[nn.BatchNorm2d]]:
    """Return one network without the batch norms that could be folded, each network's tensors for it, and those norms.

    The networks have one architecture. The batch norms that come back are those of the first network.
    """
    found = pairs(networks[0])
    states = [{**dict(net.named_parameters()), **dict(net.named_buffers())} for net in networks]
    if not found:
        return networks[0], states, []
    bare = copied(networks[0])
    for conv, norm in found:
        above, _, name = norm.rpartition(".")
        setattr(bare.get_submodule(above), name, nn.Identity())
        layer = cast(nn.Conv2d, bare.get_submodule(conv))
        if layer.bias is None:
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
    norms = [cast(nn.BatchNorm2d, networks[0].get_submodule(norm)) for _, norm in found]
    return bare, [_folded(net, state, found) for net, state in zip(networks, states, strict=True)], norms


@torch.no_grad()
def _folded(net: nn.Module, state: Tensors, found: Sequence[tuple[str, str]]) -> Tensors:
    state = dict(state)
    for conv, norm in found:
        eps = cast(nn.BatchNorm2d, net.get_submodule(norm)).eps
        mean, var = (state.pop(f"{norm}.{which}") for which in ("running_mean", "running_var"))
        a, c = (var + eps).rsqrt(), torch.zeros_like(mean)
        if f"{norm}.weight" in state:
            a, c = a * state.pop(f"{norm}.weight"), state.pop(f"{norm}.bias")
        state.pop(f"{norm}.num_batches_tracked", None)
        b = state.get(f"{conv}.bias", torch.zeros_like(mean))
        state[f"{conv}.weight"] = state[f"{conv}.weight"] * a[:, None, None, None]
        state[f"{conv}.bias"] = (b - mean) * a + c
    return state


def pairs(net: nn.Module) -> list[tuple[str, str]]:
    """Return the names of convolutions, each with the batch norm that follows it, in sequences and in ResNet blocks."""
    places = Counter(id(layer) for _, layer in net.named_modules(remove_duplicate=False))
    places += Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
    found = []
    for prefix, layer in net.named_modules():
        children = dict(layer.named_children())
        if isinstance(layer, nn.Sequential):
            names = list(zip(list(children)[:-1], list(children)[1:], strict=True))
        elif _is_block(layer):
            names = [(f"conv{i}", f"bn{i}") for i in (1, 2, 3)]
        else:
            continue
        for conv, norm in names:
            a, b = children.get(conv), children.get(norm)
            if type(a) is not nn.Conv2d or type(b) is not nn.BatchNorm2d or b.running_mean is None or b.training:
                continue
            if all(places[id(part)] == 1 for part in (a, b, *a.parameters(), *b.parameters())):
                found.append((f"{prefix}.{conv}".lstrip("."), f"{prefix}.{norm}".lstrip(".")))
    return found


def _is_block(layer: nn.Module) -> bool:
    """Return whether a layer is one of torchvision's ResNets or their blocks: conv1, bn1, ReLU, conv2, bn2, ..."""
    return (type(layer).__module__, type(layer).__name__) in [
        ("torchvision.models.resnet", name) for name in ("ResNet", "BasicBlock", "Bottleneck")
    ]
