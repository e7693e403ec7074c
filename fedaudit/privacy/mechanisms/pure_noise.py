"""Pure noise: standard normal numbers take the place of the release, of which only the size is left.

It is no protection that anybody would use, but the zero of a comparison: what a method still learns with it, it did not
learn from the release (the last column of DFFKE's table).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanisms.additive import AddsNoise, as_matrix, check_finite_floats
from fedaudit.privacy.mechanisms.base import Noise, Prepared, Words, reason
from fedaudit.privacy.mechanisms.gaussian import normal_noise
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.sensitivity import Bounding, Context
from fedaudit.stats import Floats
from fedaudit.wire.message import Declared
from fedaudit.wire.release import Protection


class PureNoise(AddsNoise):
    name = "pure-noise"
    summary = "standard normal numbers instead of the release; only its size is left"
    rounds = True

    def check(self, where: str, kind: str, policy: Policy) -> None:
        """Accept all options: none of them changes the noise."""

    def label(self, policy: Policy) -> str:
        return "replaced by noise"

    def clip(self, policy: Policy) -> float | None:
        return None

    def prepare(self, value: Any, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
        leaves = check_finite_floats(value, where)
        return Prepared(leaves, [1.0] * len(leaves), 1.0, policy.delta_for(context.n), Bounding("any"))

    def noised(self, ready: Prepared, where: str, declared: Declared, policy: Policy, context: Context) -> list[Tensor]:
        return [normal_noise(leaf, 1.0, policy, (*context.key, where, i)) for i, leaf in enumerate(ready.leaves)]

    def entry(self, where: str, kind: str, policy: Policy, ready: Prepared) -> LedgerEntry:
        return LedgerEntry.free(where, kind, "the size only", self.name)

    def imitated(self, rows: Tensor, protection: Protection, rng: Generator) -> Tensor:
        return torch.randn(rows.shape, generator=rng, device=rows.device, dtype=rows.dtype)

    def smallest_class(self, protection: Protection) -> float | None:
        return None

    def epsilon(self, multiplier: float, delta: float) -> float:
        return 0.0

    def claim(self, policy: Policy, ready: Prepared) -> float:
        return 0.0

    def noise(self, sent: Floats, ready: Prepared, leaf: int, seed: int) -> Noise:
        return Noise(as_matrix(sent))

    def centre(self, clean: Floats) -> Floats:
        return 0 * clean

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        return f"replaced by noise{reason(entries[0])}", "free"
