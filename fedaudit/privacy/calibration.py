"""Calibration: the Gaussian noise that (epsilon, delta) needs, and the (epsilon, delta) that a given noise meets.

All of it is closed form, for one Gaussian mechanism or several composed, without sub-sampling (see `accounting`).
A mechanism with noise `sigma` on a query of L2 sensitivity `Delta` is mu-GDP with mu = Delta / sigma (Dong, Roth and
Su 2019, Theorem 2.7): delta and epsilon below depend on mu alone. The neighbouring relation is the one in which
`sensitivity` was measured.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import scipy

from fedaudit.errors import PrivacyError, unknown

Kind = Literal["classical", "analytic", "total"]

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


# -- validation ---------------------------------------------------------------------------------------------------


def _real(name: str, value: object, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise PrivacyError(f"{name} = {value!r} is not a number: {remedy}.")
    return float(value)


def check_epsilon(epsilon: object) -> float:
    remedy = "give a finite number above 0 (an unprotected release has no epsilon to calibrate for)"
    value = _real("epsilon", epsilon, remedy)
    if not 0 < value < math.inf:
        raise PrivacyError(f"epsilon = {value:g} cannot be met by Gaussian noise: {remedy}.")
    return value


def check_delta(delta: object) -> float:
    remedy = "give a number strictly between 0 and 1, at most 1/n for n records"
    value = _real("delta", delta, remedy)
    if not 0 < value < 1:
        raise PrivacyError(f"delta = {value:g} is not a failure probability of a Gaussian mechanism: {remedy}.")
    return value


def check_sensitivity(sensitivity: object) -> float:
    remedy = "give a finite number above 0, for example by clipping each record to a norm above 0"
    value = _real("sensitivity", sensitivity, remedy)
    if not 0 < value < math.inf:
        raise PrivacyError(f"sensitivity = {value:g} cannot scale the noise: {remedy}.")
    return value


def check_releases(releases: object) -> int:
    if isinstance(releases, bool) or not isinstance(releases, numbers.Integral) or releases < 1:
        raise PrivacyError(f"releases = {releases!r} is not a number of releases: give a whole number from 1 up.")
    return int(releases)


def _check_mu(mu: object) -> float:
    remedy = "give sensitivity / sigma, a number from 0 up"
    value = _real("mu", mu, remedy)
    if value < 0:
        raise PrivacyError(f"mu = {value:g} is not a ratio of a sensitivity to a noise: {remedy}.")
    return value


# -- the Gaussian mechanism, exactly ------------------------------------------------------------------------------


def _mills(x: float) -> float:
    """Return the Mills ratio (1 - Phi(x)) / phi(x), without underflow."""
    return math.sqrt(math.pi / 2) * float(scipy.special.erfcx(x / math.sqrt(2)))


def _slope(x: np.ndarray) -> np.ndarray:
    """Return minus the derivative of the Mills ratio, 1 - x M(x).

    Beyond 40 it is the leading term 1 / (x^2 + 3): there phi is below the smallest double, and only the sign of a
    bracket depends on it.
    """
    x = np.minimum(x, 1e150)  # keeps the square finite
    near = 1 - x * math.sqrt(math.pi / 2) * scipy.special.erfcx(x / math.sqrt(2))
    return np.where(x < 40, near, 1 / (x * x + 3))


def _log_delta(s: float, mu: float) -> float:
    """Return log delta(epsilon = s mu) of a mu-GDP Gaussian. The relative error of delta is about 1e-13.

    Balle and Wang 2018, Theorem 8: delta = Phi(mu/2 - s) - e^epsilon Phi(-mu/2 - s). Taken literally, the two terms
    cancel for small mu. With u, v = s -+ mu/2 we have e^epsilon phi(v) = phi(u), hence
    delta = phi(u) (M(u) - M(v)) with the Mills ratio M; and for small mu that difference is the integral of -M'.
    """
    u, v = s - mu / 2, s + mu / 2
    log_phi = -0.5 * u * u - _LOG_SQRT_2PI
    if u <= 0 and mu >= 0.5:  # Phi(-u) >= 1/2 and M(u) may overflow; nothing cancels here
        return math.log(float(scipy.special.ndtr(-u)) - math.exp(log_phi) * _mills(v))
    gap = 0.5 * mu * float(_WEIGHTS @ _slope(s + 0.5 * mu * _NODES)) if mu < 0.5 else _mills(u) - _mills(v)
    return log_phi + math.log(gap) if gap > 0 else -math.inf


def _root(f: Callable[[float], float], guess: float) -> float:
    """Return the positive root of a monotone f, to machine precision, from any positive guess."""
    from scipy.optimize import brentq  # the slow part of importing scipy

    lo = hi = guess
    rising = f(2 * guess) > f(guess)
    while (f(hi) < 0) == rising:
        lo, hi = hi, 2 * hi
    while (f(lo) > 0) == rising:
        lo, hi = lo / 2, lo
    return float(brentq(f, lo, hi, xtol=1e-300, rtol=4 * np.finfo(float).eps, maxiter=500))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the exact delta at `epsilon` of a Gaussian, mu = sensitivity / sigma (Balle and Wang 2018, Theorem 8)."""
    mu = _check_mu(mu)
    epsilon = _real("epsilon", epsilon, "give a number from 0 up")
    if epsilon < 0:
        raise PrivacyError(f"epsilon = {epsilon:g} is below 0: give a number from 0 up.")
    if epsilon == math.inf or mu == 0:
        return 0.0
    return 1.0 if mu == math.inf else math.exp(_log_delta(epsilon / mu, mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon at `delta` of a Gaussian with mu = sensitivity / sigma; 0 if delta alone covers it."""
    mu, delta = _check_mu(mu), check_delta(delta)
    if mu == 0 or mu == math.inf:
        return mu
    target = math.log(delta)
    if _log_delta(0.0, mu) <= target:
        return 0.0
    # delta <= Phi(mu/2 - s), hence s <= mu/2 - Phi^-1(delta): the place to start from.
    start = max(mu / 2 - float(scipy.special.ndtri(delta)), 1e-3)
    return mu * _root(lambda s: _log_delta(s, mu) - target, start)


def compose_mu(mus: Iterable[float]) -> float:
    """Return mu of composed Gaussians: sqrt(sum mu_i^2) (Dong, Roth and Su 2019, Corollary 3.3)."""
    return math.hypot(*(_check_mu(mu) for mu in mus))


# -- noise for a promise ------------------------------------------------------------------------------------------


def classical(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return sigma = sqrt(2 ln(1.25 / delta)) Delta / epsilon (Dwork and Roth 2014, Theorem A.1; DFFKE Eq. 15)."""
    epsilon, delta, sensitivity = check_epsilon(epsilon), check_delta(delta), check_sensitivity(sensitivity)
    if epsilon > 1:
        raise PrivacyError(
            f"classical calibration at epsilon = {epsilon:g}: its proof needs epsilon <= 1, and for large epsilon the "
            "formula gives too little noise (it falls as 1/epsilon, but 1/sqrt(2 epsilon) is needed). Use the "
            "analytic calibration, which is exact for every epsilon."
        )
    return math.sqrt(2 * math.log(1.25 / delta)) * sensitivity / epsilon


def analytic(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the least sigma for (epsilon, delta) in one release (Balle and Wang 2018, Theorem 8 and Algorithm 1)."""
    epsilon, delta, sensitivity = check_epsilon(epsilon), check_delta(delta), check_sensitivity(sensitivity)
    return sensitivity / _largest_mu(epsilon, delta)


@lru_cache(maxsize=1024)
def _largest_mu(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian with the least noise that meets (epsilon, delta).

    It is cached, because every release of a run asks for the same.
    """
    target = math.log(delta)
    # Start from the larger of two lower bounds on mu: delta <= Phi(mu/2 - epsilon/mu) and delta <= 2 Phi(mu/2) - 1.
    z = float(scipy.special.ndtri(delta))
    root = math.sqrt(z * z + 2 * epsilon)
    start = max(2 * epsilon / (root - z) if z < 0 else root + z, 2 * float(scipy.special.ndtri(0.5 + delta / 2)))
    return _root(lambda mu: _log_delta(epsilon / mu, mu) - target, start)


def total(epsilon: float, delta: float, sensitivity: float, releases: int) -> float:
    """Return the sigma of each release for which `releases` releases together meet (epsilon, delta), exactly.

    mu_total = sqrt(releases) Delta / sigma (`compose_mu`), so the joint release is one Gaussian of that mu.
    """
    return analytic(epsilon, delta, sensitivity) * math.sqrt(check_releases(releases))


def calibrate(kind: Kind, epsilon: float, delta: float, sensitivity: float, releases: int = 1) -> float:
    """Return the sigma of each release by the named calibration.

    `classical` and `analytic` meet (epsilon, delta) in each release by itself, whatever `releases` is. All releases
    together then cost more, and the ledger says how much. `total` meets (epsilon, delta) over all of them.
    """
    releases = check_releases(releases)
    if kind == "classical":
        return classical(epsilon, delta, sensitivity)
    if kind == "analytic":
        return analytic(epsilon, delta, sensitivity)
    if kind == "total":
        return total(epsilon, delta, sensitivity, releases)
    raise PrivacyError(unknown("calibration", str(kind), get_args(Kind)))
