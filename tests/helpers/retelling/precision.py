"""Precision: runs in double precision, and how far two ways to the same number may differ.

What a test retells by hand, or compares over processors, is in double precision not about rounding. In single precision
two processors differ by 1e-7 after one step, and Adam's first steps divide a gradient that is 0 but for rounding by its
own size: after three rounds the difference can be 1e-1. In double precision it stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from fedaudit import Method, registry
from fedaudit.runtime.world import world_of


@contextmanager
def double(method: str) -> Iterator[None]:
    """Within: records, models and everything drawn are float64. Serial runs only: a worker would know nothing of it.

    The papers' formulas of traffic, which the methods declare, count four bytes a number; they are not asked for here.
    """
    before = torch.get_default_dtype()
    world_of.cache_clear()  # it holds models and rows of the other precision
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(registry.find(method), "traffic", Method.traffic):
            yield
    finally:
        torch.set_default_dtype(before)
        world_of.cache_clear()


def rounding(terms: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> float:
    """How far two computations of one number may differ that round in another order.

    A sum of n terms, in whichever order, with or without fused steps, is off by n u / (1 - n u) times the sum of the
    terms' sizes at most, where u = eps / 2 is the error of one rounding (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1). Two such sums differ by twice that: n eps to first order. Layers follow each other, and
    their errors add up. So `terms` counts the roundings behind a number: for each layer the terms of one of its sums.

    `scale` stands for the sum of the terms' sizes. Take the largest number on the way: where terms cancel each other
    the sum of sizes is larger, but single errors cancel too, and grow with the root of n where the bound has n.
    """
    return terms * torch.finfo(dtype).eps * scale


def close(a: Tensor, b: Tensor, terms: int, scale: float | None = None) -> bool:
    """Whether two tensors are equal but for `rounding`; without a scale it is the largest number in either."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    if scale is None:
        scale = float(torch.maximum(a.abs(), b.abs()).max())
    return float((a - b).abs().max()) <= rounding(terms, a.dtype, scale)
