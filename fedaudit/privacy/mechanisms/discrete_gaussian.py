"""The discrete Gaussian mechanism (Canonne, Kamath and Steinke 2020): P[k] proportional to exp(-k^2 / (2 sigma^2)).

Its Renyi divergence under a shift of L2 norm D is at most that of the Gaussian, a D^2 / (2 sigma^2) (Proposition 5 and
Theorem 4 there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedaudit.privacy.losses import Loss, RenyiBounded
from fedaudit.privacy.mechanisms.discrete import WholeNoise, reach
from fedaudit.stats import Floats


class DiscreteGaussian(WholeNoise):
    name = "discrete-gaussian"
    summary = "counts, or rows clipped in L2 on a grid; Gaussian noise of whole steps: (epsilon, delta)"
    noun = "discrete Gaussian noise"

    def chances(self, sigma: float) -> Floats:
        return _chances(sigma)

    def of_rows(self, multiplier: float, steps: float) -> Loss:
        return DiscreteGaussianRows(multiplier)

    def unit_renyi(self, orders: Sequence[float], sigma: float) -> Floats:
        return np.asarray(orders, dtype=np.float64) / (2 * sigma**2)


@lru_cache(maxsize=512)
def _chances(sigma: float) -> Floats:
    k = np.arange(-reach(sigma), reach(sigma) + 1)
    weight = np.exp(-0.5 * (k / sigma) ** 2)
    return np.maximum(weight / weight.sum(), 1e-300)


@dataclass(frozen=True)
class DiscreteGaussianRows(RenyiBounded):
    """Rows whose shift has an L2 norm of sigma / multiplier."""

    multiplier: float

    def renyi(self, orders: Sequence[float]) -> Floats:
        return np.asarray(orders, dtype=np.float64) / (2 * self.multiplier**2)
