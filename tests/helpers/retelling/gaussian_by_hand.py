"""What Gaussian noise guarantees, by the formula of Balle and Wang (2018) and by nothing of the package."""

from __future__ import annotations

import math

from scipy import optimize, stats


def delta_of(epsilon: float, multiplier: float) -> float:
    """Phi(1 / 2m - epsilon m) - e^epsilon Phi(-1 / 2m - epsilon m), m = sigma / sensitivity."""
    a, b = 1 / (2 * multiplier), epsilon * multiplier
    return float(stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b))


def multiplier_for(epsilon: float, delta: float) -> float:
    """The least multiplier that gives (epsilon, delta)."""
    return optimize.brentq(lambda m: delta_of(epsilon, m) - delta, 0.05, 500)


def epsilon_of(multiplier: float, delta: float) -> float:
    """The least epsilon that a multiplier gives at this delta."""
    return optimize.brentq(lambda e: delta_of(e, multiplier) - delta, 0, 200)
