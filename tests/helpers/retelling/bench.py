"""A server without a run behind it: for tests of what a method computes on it."""

from __future__ import annotations

from typing import Any

import torch

from fedaudit.runtime.meter import Meter
from fedaudit.runtime.party import Party

DIGITS: dict[str, Any] = {"shape": (1, 8, 8), "classes": 10}


class Bench(Party):
    def __init__(self, **facts: Any):
        self._meter = Meter("server", 1, torch.device("cpu"))
        self.device = torch.device("cpu")
        self.__dict__.update(facts)

    def rng(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(0)
