"""Intervals: no statistic leaves the project without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion: what an accuracy on n records is worth."""
    from scipy.stats import norm

    if n == 0:
        return 0.0, 1.0
    z = float(norm.ppf(0.5 + confidence / 2))
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over the given values themselves (they are all clients, no sample of them)."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def student_t(values: Sequence[float], confidence: float = 0.95) -> dict[str, Any]:
    """The mean with Student's interval, which takes the values for independent draws; one value has none."""
    from scipy.stats import t

    if not values:
        return {"value": None, "reason": "there are no values"}
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return {"value": mean, "low": None, "high": None, "interval": "none: one value has no spread", "n": 1}
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = float(t.ppf(0.5 + confidence / 2, n - 1)) * spread
    return {"value": mean, "low": mean - half, "high": mean + half, "interval": "Student's t", "n": n}
