"""Privacy losses: log P/Q of a pair of outputs that no two neighbours' outputs tell apart better.

The accountants (fedaudit.privacy.accounting) know the Gaussian pair by itself. A mechanism with another pair hands them
a `Loss`: its distribution under P for the numerical accountant, its Renyi divergence for the other. All pairs here are
symmetric: P against Q costs the same as Q against P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from fedaudit.stats import Floats

POINTS = 4000  # of a curve (epsilon, delta) that stands for a pair
FARTHEST = 60.0  # the largest loss on such a curve; what may lie beyond it counts as delta


class Loss:
    """The privacy loss of one release. A subclass is a frozen dataclass, so that equal losses are one in a history."""

    pure: float | None = None  # the epsilon that holds with delta = 0

    @property
    def largest(self) -> float:
        """Return the largest loss that is not infinite."""
        raise NotImplementedError

    @property
    def infinite(self) -> float:
        """Return the probability of an infinite loss."""
        return 0.0

    def cdf(self, t: Floats) -> Floats:
        """Return P[loss <= t], given that the loss is finite."""
        raise NotImplementedError

    def mean(self) -> float:
        """Return the expected loss, given that it is finite."""
        raise NotImplementedError

    def renyi(self, orders: Sequence[float]) -> Floats:
        """Return the Renyi divergence of the pair at each order above 1."""
        raise NotImplementedError


class Atoms(Loss):
    """A loss with finitely many values. A subclass gives `atoms`: ascending values, and their probabilities under P."""

    @cached_property
    def atoms(self) -> tuple[Floats, Floats]:
        raise NotImplementedError

    @property
    def largest(self) -> float:
        return float(np.abs(self.atoms[0]).max())

    @property
    def infinite(self) -> float:
        return max(0.0, 1.0 - math.fsum(self.atoms[1]))

    @cached_property
    def _below(self) -> Floats:
        chances = self.atoms[1]
        return np.concatenate([[0.0], np.cumsum(chances) / chances.sum()])

    def cdf(self, t: Floats) -> Floats:
        return self._below[np.searchsorted(self.atoms[0], t, side="right")]

    def mean(self) -> float:
        values, chances = self.atoms
        return float(values @ chances / chances.sum())

    def renyi(self, orders: Sequence[float]) -> Floats:
        """D_a = log sum_i p_i e^((a - 1) l_i) / (a - 1)."""
        values, chances = self.atoms
        a = np.asarray(orders, dtype=np.float64)[:, None] - 1
        exponent = a * values[None]
        top = exponent.max(1, keepdims=True)
        return (top[:, 0] + np.log((chances[None] * np.exp(exponent - top)).sum(1))) / a[:, 0]


class RenyiBounded(Atoms):
    """A pair of which a bound on the Renyi divergence is all that is known. A subclass gives `renyi`.

    The bound gives a curve delta(epsilon) above the pair's own. The pair's own is convex in e^epsilon, so that it lies
    below the convex hull of the curve as well; and the hull is the curve of a pair with atoms at its corners
    (Doroshenko et al. 2022, "connect the dots").
    """

    @cached_property
    def _curve(self) -> tuple[Floats, Floats]:
        """Return corners of the hull: x = e^epsilon, ascending from 0, and delta."""
        orders = np.concatenate([1 + np.geomspace(1e-3, 1, 60)[:-1], np.geomspace(2, 1e5, 400)])
        divergence = self.renyi(orders.tolist())
        # Conversion of Canonne, Kamath and Steinke 2020, Proposition 12.
        constant = orders * np.log1p(-1 / orders) - np.log(orders - 1)
        up = np.linspace(0, FARTHEST, POINTS)
        log_delta = ((orders - 1)[None] * (divergence[None] - up[:, None]) + constant[None]).min(1)
        delta = np.minimum(np.exp(np.minimum(log_delta, 0.0)), 1.0)
        # The pair is symmetric: delta(-e) = 1 - e^-e (1 - delta(e)).
        down = 1 - np.exp(-up[:0:-1]) * (1 - delta[:0:-1])
        return _hull(np.concatenate([[0.0], np.exp(-up[:0:-1]), np.exp(up)]), np.concatenate([[1.0], down, delta]))

    @cached_property
    def atoms(self) -> tuple[Floats, Floats]:
        """Return the corners as atoms: between corners the curve falls by S = sum of p_j e^-l_j over those above."""
        x, delta = self._curve
        slope = np.append((delta[:-1] - delta[1:]) / np.diff(x), 0.0)
        chances = x[1:] * (slope[:-1] - slope[1:])
        kept = chances > 0
        return np.log(x[1:])[kept], chances[kept]

    @property
    def infinite(self) -> float:
        return float(self._curve[1][-1])


def _hull(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the corners of the largest convex function below the points; x ascends."""
    corners: list[int] = []
    for i in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) / (x[b] - x[a]) < (y[i] - y[b]) / (x[i] - x[b]):
                break
            corners.pop()
        corners.append(i)
    return x[corners], y[corners]
