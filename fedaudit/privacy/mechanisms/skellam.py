"""The Skellam mechanism (Agarwal, Kairouz and Liu 2021): the difference of two Poisson numbers, of variance sigma^2.

Sums of Skellam numbers are Skellam numbers: clients that each add a part of the noise add all of it together, which no
discrete Gaussian does. With whole shifts v and m = sigma / |v|_2, the Renyi divergence of a whole order a is at most
a / (2 m^2) + min(((2 a - 1) |v|_2^2 + 6 |v|_1) / (4 sigma^4), 3 |v|_1 / (2 sigma^2)) (Theorem 3.5 there), and
|v|_1 <= |v|_2^2 for whole v. The divergence grows with its order, so that other orders are rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ive

from fedaudit.privacy.losses import Loss, RenyiBounded
from fedaudit.privacy.mechanisms.discrete import WholeNoise, reach
from fedaudit.stats import Floats


class Skellam(WholeNoise):
    name = "skellam"
    summary = "counts, or rows clipped in L2 on a grid; Poisson differences, which add up: (epsilon, delta)"
    noun = "Skellam noise"

    def chances(self, sigma: float) -> Floats:
        return _chances(sigma)

    def of_rows(self, multiplier: float, steps: float) -> Loss:
        return SkellamRows(multiplier, steps)

    def unit_renyi(self, orders: Sequence[float], sigma: float) -> Floats:
        a, v = np.ceil(np.asarray(orders, dtype=np.float64)), sigma**2
        return a / (2 * v) + np.minimum((2 * a + 5) / (4 * v**2), 3 / (2 * v))


@lru_cache(maxsize=512)
def _chances(sigma: float) -> Floats:
    """Return e^-v I_k(v), v = sigma^2: the difference of two Poisson numbers of mean v / 2 each."""
    k = np.arange(reach(sigma) + 1)
    upper = ive(k, sigma**2)
    both = np.maximum(np.concatenate([upper[:0:-1], upper]), 1e-300)
    return both / both.sum()


@dataclass(frozen=True)
class SkellamRows(RenyiBounded):
    """Rows whose shift has an L2 norm of sigma / multiplier, where sigma is `steps` steps of the grid."""

    multiplier: float
    steps: float

    def renyi(self, orders: Sequence[float]) -> Floats:
        a, squared = np.ceil(np.asarray(orders, dtype=np.float64)), self.multiplier**2
        return a / (2 * squared) + (2 * a + 5) / (4 * squared * self.steps**2)
