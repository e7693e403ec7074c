"""Tests for what is more than noise: intervals over seeds, tests between settings, corrected for their number.

Seeds are the sample. A run's own interval (over test records, over an attack's candidates) says how well that run was
measured, not how much another seed would differ. It is shown only if there is one seed, under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr, stdtrit

from fedaudit.significance import holm as holm
from fedaudit.stats import Estimate, student_t

LEVEL = 0.05
SEEDS = 3  # with fewer, no estimated difference counts: one degree of freedom relies too much on normality


def over_seeds(
    values: Sequence[float],
    bounds: tuple[float, float] = (-math.inf, math.inf),
    within: tuple[float, float, str] | None = None,
) -> Estimate:
    """Return the mean and 95 % interval over seeds (Student's t), cut to the values that are possible at all.

    `within` is the interval of a single run, with its name. It is used if there is one seed.
    """
    found = student_t(values)
    if found.value is None or not math.isfinite(found.value):
        return found.model_copy(update={"low": None, "high": None, "n": len(values)})
    if found.low is None or found.high is None:  # one value
        low, high, name = within or (None, None, "")
        why = f"{name}, of the one run; none over seeds" if name else "none: one seed"
        return Estimate(value=found.value, low=low, high=high, interval=why, n=1)
    low, high = max(bounds[0], found.low), min(bounds[1], found.high)
    return Estimate(value=found.value, low=low, high=high, interval="Student's t over seeds", n=found.n)


@dataclass(frozen=True)
class Test:
    """One comparison. `p` is None if nothing can be concluded; `how` says why, or names the test."""

    difference: float | None
    p: float | None
    how: str
    low: float | None = None
    high: float | None = None
    seeds: float = math.inf  # of the side with fewer seeds; infinite if nothing was estimated

    @property
    def more_than_noise(self) -> bool:
        return self.p is not None and self.p < LEVEL and self.seeds >= SEEDS


def compared(a: Mapping[Any, float], b: Mapping[Any, float]) -> Test:
    """Test if b is more than noise away from a. Both are given by seed.

    Seeds that both have are paired (a seed fixes data, split and initial weights, so it is a block): paired t-test.
    Otherwise it is Welch's t-test. One seed on either side tells nothing. Nor do differences that are equal to the last
    bit: with few seeds they happen by chance, as accuracies are multiples of 1/n.
    """
    if not a or not b:
        return Test(None, None, "no figure on one side")
    shared = sorted(a.keys() & b.keys())
    paired = len(shared) >= 2
    x, y = ([a[s] for s in shared], [b[s] for s in shared]) if paired else (list(a.values()), list(b.values()))
    if not all(math.isfinite(v) for v in (*x, *y)):
        return Test(None, None, "a figure is infinite")
    difference = math.fsum(y) / len(y) - math.fsum(x) / len(x)
    if not paired and min(len(x), len(y)) < 2:
        return Test(difference, None, "one seed: the spread is not known")
    if paired:
        apart = [v - u for u, v in zip(x, y, strict=True)]
        difference = math.fsum(apart) / len(apart)  # large figures beside small differences do not cancel in it
        if max(apart) - min(apart) <= 1e-12 * max(1.0, *map(abs, apart)):
            equal = abs(difference) <= 1e-12
            return Test(difference, 1.0 if equal else None, "equal in each seed" if equal else "no spread over seeds")
        error, freedom = math.sqrt(_variance(apart) / len(apart)), len(apart) - 1.0
        how = f"paired t-test, {len(shared)} seeds"
    else:
        if max(x) == min(x) and max(y) == min(y):
            return Test(difference, 1.0 if difference == 0 else None, "no spread over seeds")
        of_x, of_y = _variance(x) / len(x), _variance(y) / len(y)
        error = math.sqrt(of_x + of_y)
        freedom = (of_x + of_y) ** 2 / (of_x**2 / (len(x) - 1) + of_y**2 / (len(y) - 1))  # Welch and Satterthwaite
        how = f"Welch's t-test, {len(x)} and {len(y)} seeds"
    p = 2 * float(stdtr(freedom, -abs(difference) / error))
    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    return Test(difference, p, how, difference - half, difference + half, min(len(x), len(y)))


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
