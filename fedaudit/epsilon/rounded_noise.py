"""The scale of noise on releases that travelled rounded: what is left to see of it, and how surely.

The statistic is the likelihood's derivative at the promised scale: E[e^2 - 1 | the cell that a number fell into], added
up. Under the promise each number falls into each cell with a known probability, so that the sum's cumulants are known,
and its tails follow from them by a saddlepoint (Lugannani and Rice 1980). Nearly clamped releases make the sum almost a
count; half a step is added to it then, as for counts, so that the p-value is rather too large than too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from fedaudit.stats import Floats

MOST = 1 << 23  # cells of all numbers together: beyond it every other number (every third, ...) is looked at
GRID = (0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01)  # scales of which it is said whether they would be found


@dataclass(frozen=True)
class Rounded:
    """A release that travelled rounded: a residual lies between `low` and `high`, and any cell was possible.

    `edges` are the limits of all cells before the noise-free number is taken off, the outermost infinite: values beyond
    the range were clamped to it.
    """

    low: Floats
    high: Floats
    clean: Floats  # the noise-free numbers, in units of sigma
    edges: Floats  # in units of sigma


def within(low: Floats, high: Floats, u: Floats) -> Floats:
    """The normal number at share u of a cell. Cells above 0 are mirrored: far out, 1 - Phi is exact and Phi is not."""
    turn, a, b = _mirrored(low, high)
    z = ndtri(ndtr(a) + u * (ndtr(b) - ndtr(a)))
    return np.where(turn, -1, 1) * np.clip(z, np.maximum(a, -40), np.minimum(b, 40))


def _mirrored(low: Floats, high: Floats) -> tuple[NDArray[np.bool_], Floats, Floats]:
    turn = low > 0
    return turn, np.where(turn, -high, low), np.where(turn, -low, high)


def _mass(low: Floats, high: Floats) -> Floats:
    _, a, b = _mirrored(low, high)
    return ndtr(b) - ndtr(a)


class RoundedScale:
    """Tests of the scale of noise, and what they could find."""

    def __init__(self, cells: Sequence[Rounded]):
        self.cells = cells
        step = max(1, -(-sum(c.clean.size * (len(c.edges) - 1) for c in cells) // MOST))
        self._parts = [(c.clean.ravel()[::step, None], c.edges[None, :]) for c in cells]
        self.value = sum(float(_scores(c.low.ravel()[::step], c.high.ravel()[::step]).sum()) for c in cells)
        self._scores = [_scores(e[:, :-1] - x, e[:, 1:] - x) for x, e in self._parts]
        self._chances = self._at(1.0)

    def _at(self, scale: float) -> list[Floats]:
        """Return, for each number, the probability of each cell with noise of so many sigma."""
        return [_mass((e[:, :-1] - x) / scale, (e[:, 1:] - x) / scale) for x, e in self._parts]

    # --- the sum's distribution under the promise ---

    def _cumulants(self, t: float) -> tuple[float, float, float]:
        """K(t) = sum of log E exp(t s), and its first two derivatives."""
        k = k1 = k2 = 0.0
        for s, p in zip(self._scores, self._chances, strict=True):
            exponent = np.where(p > 0, t * s, -np.inf)
            top = exponent.max(1, keepdims=True)
            weight = p * np.exp(exponent - top)
            total = weight.sum(1, keepdims=True)
            mean = (weight * s).sum(1, keepdims=True) / total
            k += float((top + np.log(total)).sum())
            k1 += float(mean.sum())
            k2 += float((weight * (s - mean) ** 2 / total).sum())
        return k, k1, k2

    @cached_property
    def _step(self) -> float:
        """Return how coarse the sum is: of two draws of a number, E (s - s')^2 / E |s - s'|. A step, of two values."""
        squares = apart = 0.0
        for s, p in zip(self._scores, self._chances, strict=True):
            order = np.argsort(s, axis=1)
            s, p = np.take_along_axis(s, order, 1), np.take_along_axis(p, order, 1)
            below = np.cumsum(p, 1)
            apart += 2 * float((below[:, :-1] * (1 - below[:, :-1]) * np.diff(s, axis=1)).sum())
            mean = (p * s).sum(1, keepdims=True)
            squares += 2 * float((p * (s - mean) ** 2).sum())
        return squares / apart if apart > 0 else 0.0

    @cached_property
    def _range(self) -> tuple[float, float]:
        """The least and the largest sum that can come about."""
        pairs = list(zip(self._scores, self._chances, strict=True))
        least = sum(float(np.where(p > 0, s, np.inf).min(1).sum()) for s, p in pairs)
        return least, sum(float(np.where(p > 0, s, -np.inf).max(1).sum()) for s, p in pairs)

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """Mean and variance."""
        return self._cumulants(0.0)[1:]

    def below(self, value: float) -> float:
        """P[the sum is at most this]."""
        value += self._step / 2
        (mean, variance), (least, most) = self._moments, self._range
        if variance <= 0 or value >= most:
            return 1.0
        x = (value - mean) / math.sqrt(variance)
        if abs(x) < 0.1:  # at the mean itself Lugannani and Rice divide by 0
            return float(ndtr(x))
        t, k, k2 = self._tilt(max(value, least + 1e-9 * (most - least)))
        w = math.copysign(math.sqrt(max(2 * (t * value - k), 0.0)), t)
        u = t * math.sqrt(k2)
        density = math.exp(-(w**2) / 2) / math.sqrt(2 * math.pi)
        return min(1.0, max(0.0, float(ndtr(w)) + (density * (1 / w - 1 / u) if w * u > 0 else 0.0)))

    def _tilt(self, value: float) -> tuple[float, float, float]:
        """t with K'(t) = value, and K and K'' there: Newton's steps, kept between values that lie on either side."""
        mean, variance = self._moments
        low, high = (-math.inf, 0.0) if value < mean else (0.0, math.inf)
        t = (value - mean) / variance
        for _ in range(100):
            k, k1, k2 = self._cumulants(t)
            low, high = (t, high) if k1 < value else (low, t)
            ahead = t + (value - k1) / k2 if k2 > 0 else math.nan
            if not low < ahead < high:
                ahead = (low + high) / 2 if math.isfinite(low + high) else 2 * t
            if abs(ahead - t) <= 1e-7 * abs(t) or abs(t) > 1e4:
                break
            t = ahead
        return t, k, k2

    def p_values(self) -> tuple[float, float]:
        """Return the p-values of the scale being smaller, and being larger."""
        return self.below(self.value), 1 - self.below(self.value - self._step)

    # --- what would be found ---

    def level(self, scale: float, power: float) -> float:
        """The level at which noise of so many sigma would be found too small, with that probability."""
        mean = variance = 0.0
        for s, p in zip(self._scores, self._at(scale), strict=True):
            of_each = (p * s).sum(1, keepdims=True)
            mean += float(of_each.sum())
            variance += float((p * (s - of_each) ** 2).sum())
        return self.below(mean + float(ndtri(power)) * math.sqrt(variance))

    def finds(self, each: float, power: float) -> float:
        return next((scale for scale in GRID if self.level(scale, power) < each), 0.0)

    # --- the scale itself ---

    @property
    def scale(self) -> float:
        return self._profile[0]

    @cached_property
    def _profile(self) -> tuple[float, Floats, Floats]:
        grid = np.geomspace(0.01, 4.0, 200)
        value = np.array([sum(_likelihood(c, r) for c in self.cells) for r in grid])
        return float(grid[int(value.argmax())]), grid, value

    def limits(self, level: float, each: float) -> tuple[float, float]:
        """From the profile of the likelihood: asymptotic."""
        best, grid, value = self._profile
        drop = value.max() - value
        low = grid[(grid <= best) & (drop <= float(ndtri(level / 2)) ** 2 / 2)]
        high = grid[(grid >= best) & (drop <= float(ndtri(each)) ** 2 / 2)]
        return float(low.min()), float(high.max()) if high.max() < grid[-1] else math.inf


def _scores(low: Floats, high: Floats) -> Floats:
    """E[e^2 - 1 | low < e < high] for standard normal e: (low phi(low) - high phi(high)) / (Phi(high) - Phi(low))."""
    _, a, b = _mirrored(low, high)
    mass = ndtr(b) - ndtr(a)
    up = _times_density(a) - _times_density(b)
    middle = np.clip((a + b) / 2, -40, 40)
    return np.where(mass > 1e-290, up / np.maximum(mass, 1e-300), middle**2 - 1)


def _times_density(x: Floats) -> Floats:
    finite = np.where(np.isfinite(x), x, 0.0)
    return finite * np.exp(-(finite**2) / 2) / math.sqrt(2 * math.pi)


def _likelihood(cells: Rounded, scale: float) -> float:
    _, a, b = _mirrored(cells.low / scale, cells.high / scale)
    upper, lower = log_ndtr(b), log_ndtr(a)
    return float((upper + np.log1p(-np.exp(np.minimum(lower - upper, -1e-16)))).sum())
