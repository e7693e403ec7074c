"""The scale of noise on releases that travelled rounded: what is left to see of it, and how surely.

The statistic is the likelihood's derivative at the promised scale: E[e^2 - 1 | the cell that a number fell into], added
up (fedaudit.privacy.score_sums). Nearly clamped releases make the sum almost a count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from fedaudit.privacy.score_sums import ScoreSum
from fedaudit.stats import Floats

MOST = 1 << 23  # cells of all numbers together: beyond it every other number (every third, ...) is looked at


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

    def test(self, parts: Sequence[Rounded]) -> RoundedScale:
        return RoundedScale(parts)


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


class RoundedScale(ScoreSum):
    """Tests of the scale of noise that travelled rounded, and what they could find."""

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

    # --- the scale itself ---

    @property
    def scale(self) -> float:
        return self._profile[0]

    def _likelihood(self, scale: float) -> float:
        return sum(_likelihood(c, scale) for c in self.cells)

    @cached_property
    def _profile(self) -> tuple[float, float, Floats, Floats]:
        """Return the likeliest scale, its log-likelihood, and a grid of scales with theirs.

        Between neighbours of the grid, which are 3 % apart, the scale is looked for: many numbers tell less than that.
        """
        from scipy.optimize import minimize_scalar  # slow to import, and not every command audits

        grid = np.geomspace(0.01, 4.0, 200)
        value = np.array([self._likelihood(r) for r in grid])
        top = int(value.argmax())
        near = float(grid[max(top - 1, 0)]), float(grid[min(top + 1, len(grid) - 1)])
        found = minimize_scalar(lambda r: -self._likelihood(r), bounds=near, method="bounded")
        if -found.fun > value[top]:
            return float(found.x), -float(found.fun), grid, value
        return float(grid[top]), float(value[top]), grid, value

    def limits(self, level: float, each: float) -> tuple[float, float]:
        """Return where the likelihood has fallen so far that level and each allow no more: asymptotic."""
        from scipy.optimize import brentq

        best, most, grid, value = self._profile

        def fallen(by: float, outside: Floats) -> float:
            """Return the scale between the likeliest and one outside at which it has fallen so far."""
            found = brentq(lambda r: most - self._likelihood(r) - by, best, float(outside[0]), xtol=1e-6)
            return float(found)

        down, up = float(ndtri(level / 2)) ** 2 / 2, float(ndtri(each)) ** 2 / 2
        below, above = grid[(grid < best) & (most - value > down)][::-1], grid[(grid > best) & (most - value > up)]
        return fallen(down, below) if len(below) else float(grid[0]), fallen(up, above) if len(above) else math.inf


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
