"""Tests of the scale of noise, and how surely they find too little of it.

A `ScaleTest` says whether noise is as large as promised. A `ScoreSum` is one for noise of finitely many values: a score
is added up over all numbers. Under the promise each number takes each value with a known probability, so that the sum's
cumulants are known, and its tails follow from them by a saddlepoint (Lugannani and Rice 1980). If the sum is almost a
count, half a step is added to it, as for counts, so that the p-value is rather too large than too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import scipy

from fedaudit.stats import Floats

GRID = (0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01)  # scales of which it is said whether they would be found


class ScaleTest(Protocol):
    """A test of the scale of noise: the noise found over the noise promised."""

    @property
    def scale(self) -> float: ...

    def p_values(self) -> tuple[float, float]:
        """Return the p-values of the scale being smaller, and being larger."""

    def limits(self, level: float, each: float) -> tuple[float, float]:
        """Return limits of the scale: below by half of `level`, and above by `each`."""

    def finds(self, each: float, power: float) -> float:
        """Return the largest scale that would be found too small at level `each`, with probability `power`."""

    def level(self, scale: float, power: float) -> float:
        """Return the level at which noise of this scale would be found too small, with probability `power`."""


class ScoreSum:
    """The sum of scores of many numbers. A subclass sets `value`, `_scores`, `_chances`, and gives `_at`.

    Each matrix has a row for a number, or for several alike, and a column for each value that it may take.
    `_times` says how many numbers a row stands for.
    """

    value: float
    _scores: Sequence[Floats]
    _chances: Sequence[Floats]
    _times: Sequence[Floats] | None = None

    def _at(self, scale: float) -> list[Floats]:
        """Return, for each number, the probability of each value with noise of so many times the promised."""
        raise NotImplementedError

    def _rows(self, chances: Sequence[Floats]) -> list[tuple[Floats, Floats, Floats | float]]:
        """Return scores, probabilities and weights of all rows."""
        times = [1.0] * len(self._scores) if self._times is None else [t[:, None] for t in self._times]
        return list(zip(self._scores, chances, times, strict=True))

    # --- the sum's distribution under the promise ---

    def _cumulants(self, t: float) -> tuple[float, float, float]:
        """Return K(t) = sum of log E exp(t s), and its first two derivatives."""
        k = k1 = k2 = 0.0
        for s, p, n in self._rows(self._chances):
            exponent = np.where(p > 0, t * s, -np.inf)
            top = exponent.max(1, keepdims=True)
            weight = p * np.exp(exponent - top)
            total = weight.sum(1, keepdims=True)
            mean = (weight * s).sum(1, keepdims=True) / total
            k += float((n * (top + np.log(total))).sum())
            k1 += float((n * mean).sum())
            k2 += float((n * weight * (s - mean) ** 2 / total).sum())
        return k, k1, k2

    @cached_property
    def _step(self) -> float:
        """Return how coarse the sum is: of two draws of a number, E (s - s')^2 / E |s - s'|. A step, of two values."""
        squares = apart = 0.0
        for s, p, n in self._rows(self._chances):
            order = np.argsort(s, axis=1)
            s, p = np.take_along_axis(s, order, 1), np.take_along_axis(p, order, 1)
            below = np.cumsum(p, 1)
            apart += 2 * float((n * below[:, :-1] * (1 - below[:, :-1]) * np.diff(s, axis=1)).sum())
            mean = (p * s).sum(1, keepdims=True)
            squares += 2 * float((n * p * (s - mean) ** 2).sum())
        return squares / apart if apart > 0 else 0.0

    @cached_property
    def _range(self) -> tuple[float, float]:
        """Return the least and the largest sum that can come about."""
        least = most = 0.0
        for s, p, n in self._rows(self._chances):
            least += float((n * np.where(p > 0, s, np.inf).min(1, keepdims=True)).sum())
            most += float((n * np.where(p > 0, s, -np.inf).max(1, keepdims=True)).sum())
        return least, most

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """Return mean and variance."""
        return self._cumulants(0.0)[1:]

    def below(self, value: float) -> float:
        """Return P[the sum is at most this]."""
        value += self._step / 2
        (mean, variance), (least, most) = self._moments, self._range
        if variance <= 0 or value >= most:
            return 1.0
        x = (value - mean) / math.sqrt(variance)
        if abs(x) < 0.1:  # at the mean itself Lugannani and Rice divide by 0
            return float(scipy.special.ndtr(x))
        t, k, k2 = self._tilt(max(value, least + 1e-9 * (most - least)))
        w = math.copysign(math.sqrt(max(2 * (t * value - k), 0.0)), t)
        u = t * math.sqrt(k2)
        density = math.exp(-(w**2) / 2) / math.sqrt(2 * math.pi)
        return min(1.0, max(0.0, float(scipy.special.ndtr(w)) + (density * (1 / w - 1 / u) if w * u > 0 else 0.0)))

    def _tilt(self, value: float) -> tuple[float, float, float]:
        """Return t with K'(t) = value, and K and K'' there: Newton's steps, kept between values on either side."""
        mean, variance = self._moments
        low, high = (-math.inf, 0.0) if value < mean else (0.0, math.inf)
        t = (value - mean) / variance
        for _ in range(100):
            k, k1, k2 = self._cumulants(t)
            low, high = (t, high) if k1 < value else (low, t)
            ahead = t + (value - k1) / k2 if k2 > 0 else math.nan
            if not low < ahead < high:
                ahead = (low + high) / 2 if math.isfinite(low + high) else 2 * t
            if abs(ahead - t) <= 1e-7 * abs(t) or abs(ahead) > max(abs(t), 1e4):
                break
            t = ahead
        return t, k, k2

    def p_values(self) -> tuple[float, float]:
        """Return the p-values of the scale being smaller, and being larger."""
        return self.below(self.value), 1 - self.below(self.value - self._step)

    # --- what would be found ---

    def level(self, scale: float, power: float) -> float:
        """Return the level at which noise of this scale would be found too small, with that probability."""
        mean, variance = self._moments_at(scale)
        return self.below(mean + float(scipy.special.ndtri(power)) * math.sqrt(variance))

    def _moments_at(self, scale: float) -> tuple[float, float]:
        """Return mean and variance of the sum with noise of another scale."""
        mean = variance = 0.0
        for s, p, n in self._rows(self._at(scale)):
            of_each = (p * s).sum(1, keepdims=True)
            mean += float((n * of_each).sum())
            variance += float((n * p * (s - of_each) ** 2).sum())
        return mean, variance

    def finds(self, each: float, power: float) -> float:
        return next((scale for scale in GRID if self.level(scale, power) < each), 0.0)


class ScoredScale(ScoreSum):
    """The scale of noise whose score falls with it: the estimate is where the expected score is the one found."""

    SCALES = np.geomspace(0.05, 3.0, 48)

    @cached_property
    def _profile(self) -> tuple[Floats, Floats]:
        """Return mean and deviation of the score at each scale."""
        moments = np.array([self._moments_at(scale) for scale in self.SCALES])
        return moments[:, 0], np.sqrt(moments[:, 1])

    @property
    def scale(self) -> float:
        return self._where(0.0)

    def limits(self, level: float, each: float) -> tuple[float, float]:
        """Return the scales at which the score lies just so far above, or below, its mean: asymptotic."""
        low = self._where(-float(scipy.special.ndtri(level / 2)))
        return low, self._where(float(scipy.special.ndtri(each)), math.inf)

    def _where(self, deviations: float, beyond: float | None = None) -> float:
        """Return the scale at which mean + deviations is the score, between the scales; `beyond` if none reaches it."""
        mean, deviation = self._profile
        curve = np.maximum.accumulate(mean + deviations * deviation)
        if beyond is not None and curve[-1] < self.value:
            return beyond
        return float(np.exp(np.interp(self.value, curve, np.log(self.SCALES))))
