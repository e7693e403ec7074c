"""A plain encoder at weights that change in each step, with its frozen batch norms folded into the convolutions.

In evaluation mode a batch norm is a line, a z + c for each channel, which the convolution before it can absorb:
a (w * x + b) + c = (a w) * x + (a b + c). Convolution, ReLU and halving remain, which read and write a GPU's memory
half as often. Channels lie innermost. The first layer, which sees one or three channels, is a product with the nine
(or 27) neighbours of each pixel: no kernel for convolutions is made for so few channels.

Where steps are compiled, bias, ReLU and halving are one kernel. The first layer is part of that kernel too, so that its
output at full size never exists. For the gradient of its images it is computed once more (`_Narrow`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fedaudit.training.cuda_graphs import compiles, each_run, fall_back, halves
from fedaudit.training.models import Net
from fedaudit.training.stacked import convolution_products

Pool = Literal["average", "max", "none"]
Pair = tuple[int, int]
Folding = tuple[Tensor, Tensor]  # weight and bias of a convolution
FORMS = 64  # the most forms of images, with and without gradient, for which a kernel is compiled
# By these settings of the compiler a long sum is put into memory on its way, at full size, once it has read or computed
# much. Here it is to become one kernel.
AS_ONE = ("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold")
MANY = 1 << 20
NARROW = 4  # channels up to which a convolution is a product with each pixel's neighbours


@dataclass(frozen=True, eq=False)
class _Stage:
    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None
    pool: Pool

    def folded(self) -> Folding:
        """Return weight and bias of the convolution that does the batch norm's part as well."""
        w, b = self.conv.weight.detach(), cast(Tensor, self.conv.bias).detach()
        if self.norm is None:
            return w, b
        mean, var = cast(Tensor, self.norm.running_mean), cast(Tensor, self.norm.running_var)
        run = _compiled(fold, rows=False) if _fuses(w) else fold
        return run(w, b, mean, var, self.norm.weight.detach(), self.norm.bias.detach(), self.norm.eps)

    @property
    def padding(self) -> Pair:
        return cast(Pair, self.conv.padding)


class Folded:
    """Does `net.encode` for a network whose encoder is stages of convolution, norm, ReLU and halving; see `of`."""

    def __init__(self, stages: list[_Stage], rest: nn.Sequential):
        self._stages, self._rest = stages, rest

    @classmethod
    def of(cls, net: Net) -> Folded | None:
        """Return the folded network, or None if the encoder is of another form."""
        if not isinstance(net.encoder, nn.Sequential):
            return None
        layers, stages = list(net.encoder), []
        while layers and isinstance(layers[0], nn.Conv2d):
            conv = cast(nn.Conv2d, layers.pop(0))
            plain = conv.groups == 1 and set(conv.stride) == set(conv.dilation) == {1} and conv.bias is not None
            norm = layers.pop(0) if isinstance(layers[0], nn.BatchNorm2d) else None
            if not plain or isinstance(conv.padding, str) or conv.padding_mode != "zeros":
                return None
            if not isinstance(layers.pop(0), nn.ReLU) or (norm is not None and norm.running_mean is None):
                return None
            stages.append(_Stage(conv, norm, _pool(layers)))
        return cls(stages, nn.Sequential(*layers)) if stages else None

    @torch.no_grad()
    def weights(self) -> list[Folding]:
        """Return weight and bias of each stage at the network's present weights.

        They serve all images that go through before the weights change.
        """
        return [_laid_out(*stage.folded()) for stage in self._stages]

    def __call__(self, x: Tensor, weights: list[Folding]) -> Tensor:
        full = x.dtype
        x = x.to(halves() or full)
        for stage, (w, b) in zip(self._stages, weights, strict=True):
            x = _carry_out(x, w, b, stage.padding, stage.pool)
        return cast(Tensor, self._rest(x.to(full)))


def fold(w: Tensor, b: Tensor, mean: Tensor, var: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Folding:
    a = scale * (var + eps).rsqrt()
    return w * a[:, None, None, None], (b - mean) * a + shift


def _laid_out(w: Tensor, b: Tensor) -> Folding:
    """Return weight and bias in the type that is computed in. On a GPU, many channels are laid innermost."""
    dtype = halves() or w.dtype
    w, b = w.to(dtype), b.to(dtype)
    return w.contiguous(memory_format=torch.channels_last) if w.is_cuda and w.shape[1] > NARROW else w, b


def _pool(layers: list[nn.Module]) -> Pool:
    """Return how the stage ends. If it ends in a pooling layer, take that layer off the list."""
    first = layers[0]
    if isinstance(first, nn.AvgPool2d | nn.MaxPool2d) and first.kernel_size == first.stride == 2:
        layers.pop(0)
        return "average" if isinstance(first, nn.AvgPool2d) else "max"
    return "none"


def _fuses(x: Tensor) -> bool:
    return compiles() and x.is_cuda and not is_in_torch_dispatch_mode()


def _carry_out(x: Tensor, w: Tensor, b: Tensor, padding: Pair, pool: Pool) -> Tensor:
    fused = _fuses(x)
    if w.shape[1] > NARROW:
        return _finished(F.conv2d(x, w, padding=padding), b, pool, fused)
    if fused and pool == "average":
        taps = w.flatten(1).T.contiguous()
        if x.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Narrow.apply(x, taps, b, w.shape[2:], padding))
        return _compiled(narrow)(padded(x, padding), taps, b, w.shape[2:])
    return _finished(convolution_products.conv2d(x, w, None, padding), b, pool, fused)


def _finished(z: Tensor, b: Tensor, pool: Pool, fused: bool) -> Tensor:
    if fused and pool == "average":
        return cast(Tensor, _Finish.apply(z, b))
    z = z.add_(b[:, None, None]).relu_()
    return F.avg_pool2d(z, 2) if pool == "average" else F.max_pool2d(z, 2) if pool == "max" else z


def finish(z: Tensor, b: Tensor) -> Tensor:
    """Return z after bias, ReLU and the mean of each 2 x 2 pixels.

    z is (row, channel, height, width) with the channels innermost.
    """
    return _halved((z.permute(0, 2, 3, 1) + b).relu())


def finish_inside(g: Tensor, z: Tensor, b: Tensor) -> Tensor:
    """Return the gradient of z inside `finish`, from the gradient g of `finish`. The channels are innermost in it too.

    A last row or column of an odd number, which halving leaves out, has the gradient 0.
    """
    high, wide = z.shape[2] // 2 * 2, z.shape[3] // 2 * 2
    found = _where_passed(g, z.permute(0, 2, 3, 1)[:, :high, :wide] + b).flatten(3, 4).flatten(1, 2)
    return F.pad(found, (0, 0, 0, z.shape[3] - wide, 0, z.shape[2] - high)).permute(0, 3, 1, 2)


def _where_passed(g: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of z before ReLU and halving, from that of their result: (row, height / 2, 2, width / 2, 2,
    channel).
    """
    return torch.where(_in_pairs(z) > 0, g.permute(0, 2, 3, 1)[:, :, None, :, None] * 0.25, 0.0)


def _halved(z: Tensor) -> Tensor:
    """Return the mean of each 2 x 2 pixels as (row, channel, height, width); z has its channels as the last dimension.

    A last row or column of an odd number is left out.
    """
    z = z[:, : z.shape[1] // 2 * 2, : z.shape[2] // 2 * 2]
    return _in_pairs(z).mean((2, 4)).permute(0, 3, 1, 2)


def _in_pairs(z: Tensor) -> Tensor:
    """Return (row, height, width, channel) as (row, height / 2, 2, width / 2, 2, channel)."""
    return z.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))


def padded(x: Tensor, padding: Pair) -> Tensor:
    """Return the images with zeros around them. As part of a kernel this would be a question at each neighbour."""
    return F.pad(x, (padding[1], padding[1], padding[0], padding[0]))


def narrow(x: Tensor, w: Tensor, b: Tensor, kernel: Pair) -> Tensor:
    """Return convolution, bias, ReLU and the mean of each 2 x 2 pixels, written so that a compiler makes one kernel of
    it.

    The images x are padded. `w` is (neighbour, channel).
    """
    return _halved(_by_neighbours(x, w, b, kernel).relu())


def _by_neighbours(x: Tensor, w: Tensor, b: Tensor, kernel: Pair) -> Tensor:
    """Return convolution and bias as a sum over the neighbours of a pixel: (row, height, width, channel).

    A last row or column of an odd number is left out, as halving leaves it out.
    """
    high, wide = ((x.shape[2 + i] - kernel[i] + 1) // 2 * 2 for i in (0, 1))
    x, total = x[..., None], b
    for at in range(x.shape[1] * kernel[0] * kernel[1]):
        c, dy, dx = at // (kernel[0] * kernel[1]), at // kernel[1] % kernel[0], at % kernel[1]
        total = total + x[:, c, dy : dy + high, dx : dx + wide] * w[at]
    return total


def narrow_inside(g: Tensor, x: Tensor, w: Tensor, b: Tensor, kernel: Pair) -> Tensor:
    """Return the gradient of the convolution inside `narrow`, from the gradient g of `narrow`.

    It is (row, height / 2, 2, width / 2, 2, channel).
    """
    return _where_passed(g, _by_neighbours(x, w, b, kernel))


def narrow_images(g: Tensor, x: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """Return the gradient of the images x from that of each neighbour.

    g is (row, height / 2, 2, width / 2, 2, neighbour).
    """
    channels, height, width = x.shape[1:]
    full = g.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)  # (row, neighbour, y, x)
    bottom = height + 2 * padding[0] - kernel[0] + 1 - full.shape[2]  # a last row or column that `narrow` dropped
    right = width + 2 * padding[1] - kernel[1] + 1 - full.shape[3]
    more = kernel[1] - 1, kernel[1] - 1 + right, kernel[0] - 1, kernel[0] - 1 + bottom
    full = F.pad(full, more).unflatten(1, (channels, kernel[0] * kernel[1]))
    total = torch.zeros_like(x)
    for at in range(kernel[0] * kernel[1]):
        top, left = kernel[0] - 1 - at // kernel[1] + padding[0], kernel[1] - 1 - at % kernel[1] + padding[1]
        total = total + full[:, :, at, top : top + height, left : left + width]
    return total


class _Narrow(torch.autograd.Function):
    """`narrow`, with the gradient of its images alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, kernel: Pair, padding: Pair) -> Tensor:
        around = padded(x.detach(), padding)
        ctx.save_for_backward(x, around, w, b)
        ctx.form = kernel, padding
        return cast(Tensor, _compiled(narrow)(around, w, b, kernel))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, around, w, b = (t.detach() for t in ctx.saved_tensors)
        inside = _compiled(narrow_inside)(gradients[0], around, w, b, ctx.form[0])
        each = inside @ w.T  # of the neighbours
        return _compiled(narrow_images)(each, x, *ctx.form), None, None, None, None


class _Finish(torch.autograd.Function):
    """`finish`, with the gradient of z alone. Left to a compiler, each pixel's sign would be written and read as well,
    by a kernel of its own.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(z, b)
        return cast(Tensor, _compiled(finish)(z.detach(), b))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        z, b = (t.detach() for t in ctx.saved_tensors)
        return _compiled(finish_inside)(gradients[0], z, b), None


def _compiled(fn: Callable[..., Any], rows: bool = True) -> Callable[..., Any]:
    """Return the function compiled for each form of image; with `rows`, for any number of rows."""

    def call(x: Tensor, *rest: object) -> Any:
        from torch import _dynamo as dynamo  # takes a second to import

        for t in (x, *rest) if rows else ():
            if isinstance(t, Tensor) and t.dim() >= 4:
                dynamo.maybe_mark_dynamic(t, 0)
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, FORMS)
        try:
            return _kept(fn)(x, *rest) if fn not in _uncompiled else fn(x, *rest)
        except Exception as e:  # noqa: BLE001 (whatever the compiler has against it: the numbers are the same without)
            _uncompiled.add(fn)
            fall_back(f"not compiled: {type(e).__name__}: {e}".splitlines()[0])
            return fn(x, *rest)

    return call


_uncompiled: set[Callable[..., Any]] = set()
each_run(_uncompiled.clear)


@lru_cache
def _kept(fn: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import config

    return torch.compile(fn, dynamic=False, options={name: MANY for name in AS_ONE if hasattr(config, name)})
