"""Computes convolutions as products with the neighbours of each pixel.

A stack of models is one convolution with as many groups as there are models, and GPUs are slow at those in float32.
Written as products of matrices there is one large product for each model, at which GPUs are fast. The neighbours have
to be copied for it, which takes nine times an image's memory for 3 x 3. The faster of the two ways is measured (see
`stack`), except in runs that promise the same bits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def neighbours(x: Tensor, kernel: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """Return what each output pixel looks at, in the order of a weight (k, l, channel).

    x is (row, channels, height, width); the result is (row, height, width, k l channels).
    """
    (k, w), (up, left) = kernel, padding
    if torch.compiler.is_compiling():
        inner = _framed(_framed(x.permute(0, 2, 3, 1), 1, up), 2, left)
        return _shifted(_shifted(inner, 1, k, 3), 2, w, 4).flatten(3)
    inner = _framed(_framed(x.permute(0, 2, 3, 1).contiguous(), 1, up), 2, left)
    return inner.unfold(1, k, 1).unfold(2, w, 1).permute(0, 1, 2, 4, 5, 3).flatten(3)


def _shifted(x: Tensor, dim: int, size: int, new: int) -> Tensor:
    """Return `size` copies of x, each shifted by one place more along one dimension, side by side in a new one.

    It is `unfold` for a compiler. The gradient of this is a sum of shifted copies, which a compiler joins with what is
    around it. It makes a scatter of that of `unfold`, for which torch sorts all places where bits are promised.
    """
    left = x.shape[dim] - size + 1
    if left < 1:
        raise RuntimeError(f"A kernel of {size} pixels is larger than an image of {x.shape[dim]} with its edges.")
    return torch.stack([x.narrow(dim, at, left) for at in range(size)], new)


def _framed(x: Tensor, dim: int, width: int) -> Tensor:
    """Return x with zeros before and after, along one dimension.

    torch's own padding asks for memory formats, which not every version answers inside a map over models.
    """
    if width == 0:
        return x
    edge = x.new_zeros([width if d == dim else n for d, n in enumerate(x.shape)])
    return torch.cat([edge, x, edge], dim)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """Return the convolution with stride 1. Its channels are the innermost dimension in memory."""
    seen = neighbours(x, (weight.shape[2], weight.shape[3]), padding)
    flat = seen.flatten(0, 2) @ weight.permute(2, 3, 1, 0).flatten(0, 2)
    if bias is not None:
        flat = flat + bias
    return flat.unflatten(0, seen.shape[:3]).permute(0, 3, 1, 2)


def instead_of(args: Any, kwargs: Any) -> Tensor | None:
    """Return what torch's conv2d would give for these arguments, or None if `conv2d` above does not cover them."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {
        "bias": None,
        "stride": 1,
        "padding": 0,
        "dilation": 1,
        "groups": 1,
        **dict(zip(names, args, strict=False)),
    }
    given |= kwargs
    one = all(given[name] in (1, (1, 1), [1, 1]) for name in ("stride", "dilation", "groups"))
    padding = given["padding"]
    if not one or isinstance(padding, str) or given["input"].dim() != 4:
        return None
    pair = (padding, padding) if isinstance(padding, int) else (padding[0], padding[1])
    # Contiguous: a batch norm after it would ask for another memory format, which a map over models cannot answer.
    return conv2d(given["input"], given["weight"], given["bias"], pair).contiguous()
