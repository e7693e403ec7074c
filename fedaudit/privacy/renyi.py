"""The Renyi divergence of one sub-sampled Gaussian step (Mironov, Talwar and Zhang 2019, Section 3.3).

It is opacus' series, term for term, but at all orders at once: opacus' Python loops took most of the time of every
calibration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import scipy

from fedaudit.stats import Floats

SMALL = -30.0  # a series ends at the first term whose logarithm is below this, as in opacus
FIRST = 64  # terms that are computed at once in the first pass
MOST = 1 << 22  # the most terms of one order before the series is given up


def renyi_divergence(sigma: float, q: float, orders: Sequence[float]) -> Floats:
    """Return the divergence at each order above 1, for noise `sigma` times the sensitivity on a Poisson sample.

    The rate q of the sample is in 0 < q < 1.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    whole = alphas == np.floor(alphas)
    log_A = np.empty_like(alphas)
    log_A[whole] = [_whole(sigma, q, int(alpha)) for alpha in alphas[whole]]
    log_A[~whole] = _fractional(sigma, q, alphas[~whole])
    return log_A / (alphas - 1)


def renyi_epsilon(orders: Sequence[float], divergence: Floats, delta: float) -> float:
    """Return the least epsilon at `delta` over all orders (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    a = np.asarray(orders, dtype=np.float64)
    epsilon = divergence + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)
    return max(0.0, float(epsilon.min()))


def _whole(sigma: float, q: float, alpha: int) -> float:
    """Return log A_alpha, A = sum_i binom(alpha, i) (1 - q)^(alpha - i) q^i exp((i^2 - i) / (2 sigma^2))."""
    i, log_c = _coefficients(alpha)
    return _log_sum(log_c + i * math.log(q) + (alpha - i) * math.log1p(-q) + (i * i - i) / (2 * sigma**2))


@functools.cache
def _coefficients(alpha: int) -> tuple[Floats, Floats]:
    """Return the numbers from 0 to alpha, and the logarithms of their binomial coefficients."""
    i = np.arange(alpha + 1, dtype=np.float64)
    return i, np.log(scipy.special.binom(alpha, i))


def _log_sum(terms: Floats) -> float:
    """Return log sum exp to the bit as scipy does, whose care for other arrays takes ten times as long as the sum."""
    top = terms.max()
    at_top = terms == top
    count, rest = at_top.sum(dtype=np.float64), np.exp(np.where(at_top, -np.inf, terms) - top).sum()
    found = float(np.log1p(rest / count) + np.log(count) + top)
    return found if math.isfinite(found) else float(scipy.special.logsumexp(terms))


def _fractional(sigma: float, q: float, alphas: Floats) -> Floats:
    """Return log A_alpha of fractional orders: two alternating series, for the integral below z0 and above it."""
    log_ndtr = scipy.special.log_ndtr
    z0 = sigma**2 * math.log(1 / q - 1) + 0.5
    log_A, sign = np.full(len(alphas), -np.inf), np.ones(len(alphas))
    active, begin, count = np.arange(len(alphas)), 0, FIRST
    while len(active):
        if begin > MOST:
            raise ArithmeticError(f"the series of order {alphas[active[0]]} does not end")
        i = np.arange(begin, begin + count, dtype=np.float64)[None]
        alpha = alphas[active, None]
        j = alpha - i
        coefficient = scipy.special.binom(alpha, i)
        log_c = np.log(np.abs(coefficient))
        terms = [
            log_c + a * math.log(q) + b * math.log1p(-q) + (a * a - a) / (2 * sigma**2) + log_ndtr(up / sigma)
            for a, b, up in ((i, j, z0 - i), (j, i, j - z0))
        ]
        last = np.maximum(*terms) < SMALL
        ended = last.any(1)
        kept = np.arange(count)[None] <= np.where(ended, last.argmax(1), count)[:, None]  # the first small one counts
        signs = np.where(kept, np.sign(coefficient), 0.0)
        log_A[active], sign[active] = scipy.special.logsumexp(
            np.concatenate([log_A[active, None], *terms], axis=1), axis=1, return_sign=True,
            b=np.concatenate([sign[active, None], signs, signs], axis=1),
        )  # fmt: skip
        active, begin, count = active[~ended], begin + count, 2 * count
    if (sign <= 0).any() or not np.isfinite(log_A).all():
        raise ArithmeticError("a series cancels to nothing")
    return log_A
