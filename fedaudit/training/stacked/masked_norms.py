"""Batch norms that leave out the rows that fill a batch up, and that count their batches together.

In a stack of models, batches of unequal size are filled up to one size. A batch norm in training would count the
filling rows in its statistics. Here the mean and variance, and the running ones too, are those of the real rows alone.

A batch norm also counts its batches. On a GPU each count is a kernel of its own, twenty in a step of a ResNet-18.
`CountingTogether` counts for all of them by one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

COUNT = "num_batches_tracked"  # the name that torch gives a batch norm's count


class Unmaskable(RuntimeError):
    """A batch norm saw other rows than those of the batch, so it is unknown which of them count."""


def maskable(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm whose statistics can leave rows out.

    This holds for torch's own kinds. A kind from elsewhere may compute something else.
    """
    return type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and cast(Any, layer).momentum is not None


def one_channel(model: nn.Module) -> bool:
    """Return whether a batch norm of one channel takes its statistics from the batch.

    Mapped over models on a GPU, torch hands it a view that is not contiguous, which cuDNN refuses."""
    return any(
        isinstance(m, _BatchNorm) and m.num_features == 1 and (m.training or m.running_mean is None)
        for m in model.modules()
    )


class MaskedNorms(TorchFunctionMode):
    """While entered, makes batch norms in training take the statistics of the rows in `mask` (True: the row counts)."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self._mask = mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(_NAMES, args, strict=False)), **(kwargs or {})} if func is F.batch_norm else {}
        if given.get("training"):
            return batch_norm(self._mask, **given)
        return func(*args, **(kwargs or {}))


def counts_of(model: nn.Module) -> list[str]:
    """Return the names of the counts of a model's batch norms that nobody reads while the model runs.

    A batch norm without a momentum divides by its count at once.
    """
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.momentum is not None]
    buffers = {name for name, _ in model.named_buffers()}
    return [place for name, _ in norms if (place := f"{name}.{COUNT}".lstrip(".")) in buffers]


class CountingTogether(TorchFunctionMode):
    """While entered, leaves out what batch norms add to these counts. `add` then adds all of it at once."""

    def __init__(self, counts: Iterable[Tensor]):
        super().__init__()
        self._counts = list(counts)
        self._seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next((count for count in self._counts if args and count is args[0]), None)
        if func is torch.Tensor.add_ and mine is not None and args[1:] == (1,) and not kwargs:
            self._seen.append(mine)
            return mine
        return func(*args, **(kwargs or {}))

    def add(self) -> None:
        """Add one to each count, as often as a batch norm has done so."""
        while self._seen:
            once = list({id(count): count for count in self._seen}.values())
            torch._foreach_add_(once, 1)
            for count in once:
                self._seen.pop(next(i for i, seen in enumerate(self._seen) if seen is count))


_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def batch_norm(
    mask: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return what torch's batch norm in training gives for the rows in `mask` alone. The others are normalised
    likewise.
    """
    if len(input) != len(mask):
        raise Unmaskable(f"a batch norm saw {len(input)} rows of a batch of {len(mask)}")
    over = [0, *range(2, input.dim())]
    counts = mask.view(-1, *[1] * (input.dim() - 1))
    n = mask.sum().to(input.dtype) * input[0, 0].numel()
    mean = torch.where(counts, input, 0.0).sum(over, keepdim=True) / n
    apart = input - mean
    var = torch.where(counts, apart, 0.0).square().sum(over, keepdim=True) / n
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.mul_(1 - momentum).add_(momentum * mean.detach().flatten())
            running_var.mul_(1 - momentum).add_(momentum * (var.detach().flatten() * (n / (n - 1))))
    out = apart * (var + eps).rsqrt()
    shape = (-1, *[1] * (input.dim() - 2))
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)
