"""Layers that a stack of models runs in another way than torch would, because torch's is slow there.

- A convolution that sees one or a few channels becomes, for a stack of models, one of as many groups as models with
  hardly a channel each, for which a GPU has no fast kernel. Here it is a product with the neighbours of each pixel,
  with the bias as one neighbour more that is always 1.
- The mean of each 2 x 2 pixels, whose gradient torch computes pixel by pixel, is a mean over dimensions.

The numbers are the same to rounding.
"""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from fedaudit.training.copying import copied
from fedaudit.training.products import _framed

NARROW = 4  # channels up to which a convolution is a product
M = TypeVar("M", bound=nn.Module)


class NarrowConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        (k, b), (up, left) = self.kernel_size, cast(tuple[int, int], self.padding)
        seen = _framed(_framed(input, 2, up), 3, left).unfold(2, k, 1).unfold(3, b, 1)  # row, channel, h, w, k, b
        n, _, h, w = seen.shape[:4]
        seen = seen.permute(0, 1, 4, 5, 2, 3).reshape(n, -1, h * w)
        weight = self.weight.flatten(1)
        if self.bias is not None:
            weight = torch.cat([weight, self.bias[:, None]], 1)
            seen = torch.cat([seen, seen.new_ones(n, 1, h * w)], 1)
        return torch.bmm(weight.expand(n, *weight.shape), seen).view(n, -1, h, w)


class HalvingPool2d(nn.AvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        h, w = input.shape[-2] // 2, input.shape[-1] // 2
        even = input if input.shape[-2:] == (2 * h, 2 * w) else input[..., : 2 * h, : 2 * w]
        return even.reshape(*input.shape[:-2], h, 2, w, 2).mean((-3, -1))


def quicker(model: M) -> M:
    """A copy whose layers run in these ways; the model itself where there is none of them, or somebody listens."""
    layers = list(model.modules())
    listened = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in layers)
    if listened or not any(_other(m) for m in layers):
        return model
    mine = copied(model)
    for m in mine.modules():
        if (kind := _other(m)) is not None:
            m.__class__ = kind
    return mine


def _other(m: nn.Module) -> type[nn.Module] | None:
    if type(m) is nn.Conv2d and m.in_channels <= NARROW and m.groups == 1 and not isinstance(m.padding, str):
        return NarrowConv2d if set(m.stride) | set(m.dilation) == {1} and m.padding_mode == "zeros" else None
    if type(m) is nn.AvgPool2d:
        plain = not m.ceil_mode and m.divisor_override is None and m.padding in (0, (0, 0))
        return HalvingPool2d if plain and m.kernel_size in (2, (2, 2)) and m.stride in (2, (2, 2)) else None
    return None
