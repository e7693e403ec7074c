"""Runs in double precision: what a test retells by hand, or compares over processors, is then not about rounding.

In single precision two processors differ by 1e-7 after one step, and Adam's first steps divide a gradient that is 0 but
for rounding by its own size: after three rounds the difference can be 1e-1. In double precision it stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

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
