"""Layers that a stack of models runs in another way than torch would, because torch's way is slow there.

- A convolution of one or a few channels becomes, for a stack of models, a convolution with as many groups as models and
  hardly a channel in each. GPUs have no fast kernel for that. Here it is a product with the neighbours of each pixel.
  The bias is one more neighbour that is always 1.
- The mean of each 2 x 2 pixels: torch computes its gradient pixel by pixel; here one copy spreads it. Where steps are
  compiled it is a mean over dimensions, which a compiler joins with what is around it.
- The output of both already lies in memory as the next layer takes it: by rows, and then by models. vmap would copy in
  between.
- A wide kernel on few channels (5 x 5 on at most 32) has no fast grouped kernel either, not even in TF32. Each model
  multiplies the neighbours of its pixels with its weights (see `convolution_products`).
- A linear layer's gradient comes out of a compiled product with rows and columns exchanged. An optimiser then copies it
  to turn it round. So where steps are compiled, the product itself is turned round. A GPU's fast products want numbers
  of rows that 8 divides, so that rows of zeros are added.
- Where layers round to 16 bits, batch norms do not. That is done by layers of their own, which a compiler takes.
- Other convolutions of many groups are slow in float32, and fast in TF32. In float32 those of a stack are done model by
  model (`apart`). A recorded step still starts all of them at once.

The numbers are the same to rounding.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit.training.cuda_graphs import halves
from fedaudit.training.model_copies import copied
from fedaudit.training.stacked import convolution_products
from fedaudit.training.stacked.convolution_products import _framed

NARROW = 4  # a convolution of at most so many input channels is done as a product
FEW = 32  # with a wide kernel, one of at most so many is too
WIDE = 25  # pixels of a wide kernel
EIGHT = 8  # divides the rows of products for which GPUs have fast kernels
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
        if torch.compiler.is_compiling():
            return torch.bmm(weight.expand(n, *weight.shape), seen).view(n, -1, h, w)
        return cast(Tensor, _Product.apply(weight, seen)).view(n, -1, h, w)


class WideConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return convolution_products.conv2d(input, self.weight, self.bias, cast(tuple[int, int], self.padding))


class TurnedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 2:
            return super().forward(input)
        rows = len(input)
        seen = F.pad(input, (0, 0, 0, -rows % EIGHT)) if rows % EIGHT else input
        out = (self.weight @ seen.mT).mT[:rows].contiguous()  # whoever comes next may take a view of it
        return out if self.bias is None else out + self.bias


class FullNorm:
    """A batch norm that computes in the type of its own numbers, whatever type the layer before it computes in. What it
    returns has 16 bits where layers round to them."""

    def forward(self, input: Tensor) -> Tensor:
        norm = cast(Any, self)
        own = norm.weight if norm.weight is not None else norm.running_mean
        full = torch.float32 if own is None else own.dtype
        out: Tensor = super().forward(input.to(full))  # type: ignore[misc]
        return out.to(halves() or input.dtype)


class FullNorm1d(FullNorm, nn.BatchNorm1d):
    pass


class FullNorm2d(FullNorm, nn.BatchNorm2d):
    pass


class FullNorm3d(FullNorm, nn.BatchNorm3d):
    pass


_FULL = {nn.BatchNorm1d: FullNorm1d, nn.BatchNorm2d: FullNorm2d, nn.BatchNorm3d: FullNorm3d}


def in_full(model: M) -> M:
    """Return a copy of the model whose batch norms keep their precision where other layers round to 16 bits.

    Hooks would do the same, but a compiler refuses them. The model itself comes back if it has no batch norm of torch's
    own kinds, or if somebody listens to a layer.
    """
    layers = list(model.modules())
    if any(map(heard, layers)) or not any(type(m) in _FULL for m in layers):
        return model
    mine = copied(model)
    for m in mine.modules():
        if type(m) in _FULL:
            m.__class__ = _FULL[type(m)]  # type: ignore[index]
    return mine


def heard(layer: nn.Module) -> bool:
    """Return whether a hook is registered on a layer."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


class _Product(torch.autograd.Function):
    """Multiplies weight (out, in) with each of seen (row, in, pixel).

    For a stack the result lies by rows and then by models. A batch norm over all models takes it that way, and would
    otherwise copy it.
    """

    @staticmethod
    def forward(weight: Tensor, seen: Tensor) -> Tensor:
        return torch.matmul(weight, seen)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        weight, seen = ctx.saved_tensors
        of_weight = torch.matmul(grads[0], seen.mT).sum(0) if ctx.needs_input_grad[0] else None
        return of_weight, torch.matmul(weight.mT, grads[0]) if ctx.needs_input_grad[1] else None

    @staticmethod
    def vmap(info: Any, in_dims: Any, weight: Tensor, seen: Tensor) -> tuple[Tensor, int]:
        weight, seen = (
            t[None].expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((weight, seen), in_dims, strict=True)
        )
        return torch.matmul(weight, seen.transpose(0, 1)), 1


class HalvingPool2d(nn.AvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        h, w = input.shape[-2] // 2, input.shape[-1] // 2
        even = input if input.shape[-2:] == (2 * h, 2 * w) else input[..., : 2 * h, : 2 * w]
        return even.reshape(*input.shape[:-2], h, 2, w, 2).mean((-3, -1))


class SpreadingPool2d(nn.AvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, _Halved.apply(input))


class _Halved(torch.autograd.Function):
    """Takes the mean of each 2 x 2 pixels; an odd last row or column is left out.

    For a stack the result lies in memory as its input does: by rows, or by models.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.odd = inputs[0].shape[-2] % 2, inputs[0].shape[-1] % 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        g = grads[0] / 4
        *rows, h, w = g.shape
        spread = g[..., :, None, :, None].expand(*rows, h, 2, w, 2).reshape(*rows, 2 * h, 2 * w)
        down, right = ctx.odd
        return F.pad(spread, (0, right, 0, down)) if down or right else spread

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        by_rows = not x.is_contiguous() and x.transpose(0, 1).is_contiguous()
        x = x.transpose(0, 1) if by_rows else x
        return cast(Tensor, _Halved.apply(x.flatten(0, 1))).unflatten(0, x.shape[:2]), int(by_rows)


class ApartConv2d(nn.Conv2d):
    """A convolution that is done model by model when it is mapped over models."""

    def forward(self, input: Tensor) -> Tensor:
        how = tuple(self.stride), tuple(cast(tuple[int, int], self.padding)), tuple(self.dilation)
        out = cast(Tensor, _Convolution.apply(input, self.weight, how))
        return out if self.bias is None else out + self.bias[:, None, None]


How = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # stride, padding, dilation


class _Convolution(torch.autograd.Function):
    """The convolution of one model. Mapped over models it becomes `_Convolutions`."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, how: How) -> Tensor:
        return F.conv2d(x, w, None, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, ctx.how = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        return *_gradients(grads[0], x, w, ctx.how, ctx.needs_input_grad[:2]), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, how: How) -> tuple[Tensor, int]:
        n = info.batch_size
        x, w = (
            t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((x, w), in_dims[:2], strict=True)
        )
        return cast(Tensor, _Convolutions.apply(x, w, how)), 0


class _Convolutions(torch.autograd.Function):
    """The convolutions of several models, one by one: x (model, row, channel, h, w), w (model, out, in, k, k)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: How) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(x, w)
        return torch.stack([F.conv2d(a, b, None, *how) for a, b in zip(x, w, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        each = [_gradients(g, a, b, ctx.how, wanted) for g, a, b in zip(grads[0], x, w, strict=True)]
        of_x, of_w = (torch.stack([cast(Tensor, e[i]) for e in each]) if wanted[i] else None for i in (0, 1))
        return of_x, of_w, None


def _gradients(g: Tensor, x: Tensor, w: Tensor, how: How, wanted: Any) -> tuple[Tensor | None, Tensor | None]:
    stride, padding, dilation = (list(part) for part in how)
    mask = [bool(wanted[0]), bool(wanted[1]), False]
    found = torch.ops.aten.convolution_backward(g, x, w, None, stride, padding, dilation, False, [0, 0], 1, mask)
    return found[0] if mask[0] else None, found[1] if mask[1] else None


def quicker(model: M, *, apart: bool = False, compiled: bool = False) -> M:
    """Return a copy of the model whose layers run in the ways above.

    The model itself comes back if it has none of these layers, or if a hook is registered on one of its layers.
    """
    layers = list(model.modules())
    if any(map(heard, layers)) or not any(_other(m, apart, compiled) for m in layers):
        return model
    mine = copied(model)
    for m in mine.modules():
        if (kind := _other(m, apart, compiled)) is not None:
            m.__class__ = kind
    return mine


def _other(m: nn.Module, apart: bool, compiled: bool) -> type[nn.Module] | None:
    if type(m) is nn.Conv2d and m.groups == 1 and not isinstance(m.padding, str) and m.padding_mode == "zeros":
        if set(m.stride) | set(m.dilation) == {1}:
            if m.in_channels <= NARROW:
                return NarrowConv2d
            if m.in_channels <= FEW and m.kernel_size[0] * m.kernel_size[1] >= WIDE:
                return WideConv2d
        return ApartConv2d if apart else None
    if type(m) is nn.Linear and compiled:
        return TurnedLinear
    if type(m) is nn.AvgPool2d:
        plain = not m.ceil_mode and m.divisor_override is None and m.padding in (0, (0, 0))
        if plain and m.kernel_size in (2, (2, 2)) and m.stride in (2, (2, 2)):
            return HalvingPool2d if compiled else SpreadingPool2d
    return None
