"""An exact test of two counts against (epsilon, delta): how probable are such counts at most, if the claim holds?

(epsilon, delta)-DP demands TPR <= e^epsilon FPR + delta, and the same of TNR and FNR. Two separate limits, one on each
rate, treat both as if they could be unlucky at once. Here the pair of counts is tested as a whole. Pairs are ordered by
a score: the excess TPR - e^epsilon FPR - delta over its deviation, both rates taken as they would have to be at the
edge of the claim. The p-value is the probability of all pairs with at least that score, at the worst FPR that the
observations allow (Barnard 1947; Berger and Boos 1994, whose share of the level is added). No approximation enters but
the grid of rates: at n = 50, 200 and 1,000 its coverage is in docs/results/epsilon.md.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import bdtrc, gammaln

from fedaudit.stats import Floats, cp_lower, cp_upper

SPARED = 1e-9  # probability with which the rate lies where it is not looked for (Berger and Boos)
RATES = 96  # that are tried
LEAST = 1e-300


def claim_p(tp: int, fp: int, n1: int, n0: int, epsilon: float, delta: float) -> float:
    """Return how probable counts like these are, at most, if (epsilon, delta) holds: both demands, corrected."""
    first = excess_p(tp, fp, n1, n0, epsilon, delta)
    second = excess_p(n0 - fp, n1 - tp, n0, n1, epsilon, delta)
    return min(1.0, 2 * min(first, second))


def excess_p(x: int, y: int, n1: int, n0: int, epsilon: float, delta: float) -> float:
    """P[a pair of counts with such a score] at the worst rate, where x of n1 has a rate of at most e^epsilon times
    that of y of n0, plus delta."""
    ratio = math.exp(min(epsilon, 300.0))
    seen = _score(np.array([float(x)]), np.array([float(y)]), n1, n0, ratio, delta)[0]
    if seen <= 0:
        return 1.0
    low, high = (float(limit(y, n0, SPARED / 2)) for limit in (cp_lower, cp_upper))
    top = (1 - delta) / ratio  # beyond it the claim allows every count
    if low >= top:
        return 1.0
    angle = np.linspace(math.asin(math.sqrt(low)), math.asin(math.sqrt(min(high, top))), RATES)
    rates = np.sin(angle) ** 2
    spread = 9 * np.sqrt(n0 * rates.max() * (1 - rates.min()) + 9)
    fewest = max(0, math.floor(n0 * rates.min() - spread))
    most = min(n0, math.ceil(n0 * rates.max() + spread))
    others = np.arange(fewest, most + 1)
    least = _least_counts(others.astype(np.float64), seen, n1, n0, ratio, delta)
    p1 = np.minimum(ratio * rates + delta, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = np.exp(
            gammaln(n0 + 1) - gammaln(others + 1) - gammaln(n0 - others + 1)
            + others * np.log(np.maximum(rates[:, None], LEAST)) + (n0 - others) * np.log1p(-rates[:, None])
        )  # fmt: skip
    tail = np.where(least <= 0, 1.0, np.where(least > n1, 0.0, bdtrc(np.clip(least - 1, 0, n1), n1, p1[:, None])))
    return min(1.0, float((chance * tail).sum(1).max()) + SPARED)


def _score(x: Floats, y: Floats, n1: int, n0: int, ratio: float, delta: float) -> Floats:
    """Return the excess over its deviation, with rates that lie at the edge of the claim and fit both counts."""
    rate = np.maximum(x + y - n1 * delta, 0.5) / (n1 * ratio + n0)
    rate = np.minimum(rate, (1 - delta) / ratio)
    larger = np.minimum(ratio * rate + delta, 1.0)
    deviation = np.sqrt(larger * (1 - larger) / n1 + ratio**2 * rate * (1 - rate) / n0 + 1e-300)
    return (x / n1 - ratio * y / n0 - delta) / deviation


def _least_counts(y: Floats, seen: float, n1: int, n0: int, ratio: float, delta: float) -> np.ndarray:
    """Return, for each y, the least x with a score of at least `seen`; n1 + 1 where there is none."""
    low, high = np.full(len(y), -1.0), np.full(len(y), n1 + 1.0)
    while float((high - low).max()) > 1:
        middle = np.floor((low + high) / 2)
        found = _score(middle, y, n1, n0, ratio, delta) >= seen * (1 - 1e-12)
        low, high = np.where(found, low, middle), np.where(found, middle, high)
    return high
