"""Confidence intervals. Every statistic that the project reports has one.

scipy imports scipy.special when it is first used, which takes longer than all else that a run without noise does. Such
a run has proportions alone to give intervals for, at the usual confidence, whose quantile stands here.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from pydantic import model_validator

from fedaudit.errors import ContractError, SettingError
from fedaudit.stored_model import AsGiven

QUANTILES = {0.95: 1.959963984540054}  # of the standard normal distribution, at 0.5 + confidence / 2
ROUNDING = 1e-9  # by how much a value may lie outside of its interval, relative to its size: limits are rounded, too


def check_interval(name: str, value: float | None, low: float | None, high: float | None) -> None:
    """Raise ValueError if a value lies outside of its own interval: no computation of ours leaves such a figure.

    A value or a limit that is NaN lies nowhere.
    """
    if value is None or (low is None and high is None):
        return
    if any(number is not None and math.isnan(number) for number in (value, low, high)):
        raise ValueError(f"{name} = {value:.6g} has an interval, and it or a limit of it is not a number (NaN)")
    room = ROUNDING * max(1.0, abs(value)) if math.isfinite(value) else 0.0
    if (low is not None and value < low - room) or (high is not None and value > high + room):
        raise ValueError(f"{name} = {value:.6g} lies outside of its own interval [{low:.6g}, {high:.6g}]")


class Estimate(AsGiven):
    """A statistic with its interval, or the reason why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    interval: str = ""  # the name of the interval
    reason: str = ""  # why there is no value
    n: int | None = None

    @model_validator(mode="after")
    def _lies_within_its_interval(self) -> Estimate:
        check_interval("value", self.value, self.low, self.high)
        return self

    def shown(self) -> str:
        """Return the value with its interval as text, to three decimal places."""
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Measured(Estimate):
    """A statistic that has a value and an interval."""

    value: float
    low: float
    high: float


def wilson(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval for a proportion, such as an accuracy on n records."""
    if n == 0:
        return 0.0, 1.0
    z, p = _quantile(confidence), successes / n  # the p' with |p - p'| = z sqrt(p' (1 - p') / n)
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = (centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)
    return low if successes else 0.0, high if successes < n else 1.0


def _quantile(confidence: float) -> float:
    return QUANTILES[confidence] if confidence in QUANTILES else float(scipy.special.ndtri(0.5 + confidence / 2))


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation of the given values. They are all clients, not a sample of them."""
    if not values:
        return math.nan, math.nan
    mean = statistics.fmean(values)
    return mean, math.sqrt(_squares(values, mean) / len(values))


def _squares(values: Sequence[float], mean: float) -> float:
    """Return the sum of squared differences from the mean. An infinite value gives NaN; `statistics` would raise."""
    return math.fsum((v - mean) ** 2 for v in values)


def student_t(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Return the mean with Student's interval. It treats the values as independent draws; one value has no interval."""
    if not values:
        return Estimate(value=None, reason="there are no values")
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Estimate(value=mean, low=None, high=None, interval="none: one value has no spread", n=1)
    spread = math.sqrt(_squares(values, mean) / (n - 1) / n)
    half = float(scipy.special.stdtrit(n - 1, 0.5 + confidence / 2)) * spread
    return Estimate(value=mean, low=mean - half, high=mean + half, interval="Student's t", n=n)


def mean_in_range(values: Sequence[float], lowest: float, highest: float, confidence: float = 0.95) -> Estimate:
    """Return the mean of values that cannot lie outside of a range, with an interval that does not leave it either.

    It is Student's interval of the mean's place in the range on the scale of log odds (by the delta method: the
    deviation there is that of the mean, divided by u (1 - u) for a mean at u of the way).
    """
    found = student_t(values, confidence)
    if found.value is None or found.high is None:
        return found
    lowest, highest = min(lowest, *values), max(highest, *values)  # no more than the values themselves
    half, width = found.high - found.value, highest - lowest
    if half == 0 or width == 0:
        return found
    u = (found.value - lowest) / width
    reach = math.exp(min(half / width / (u * (1 - u)), 700.0))  # the odds at the upper end over those of the mean
    odds = u / (1 - u)
    low, high = (lowest + width * o / (1 + o) for o in (odds / reach, min(odds * reach, 1e300)))
    return Estimate(value=found.value, low=low, high=high, interval="Student's t of the log odds", n=found.n)


def sampled_mean(values: Sequence[float], of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval for the mean over `of` numbers from 0 to 1, of which `values` were drawn without replacement.

    It is Student's interval, narrowed by sqrt(1 - n / of), because the drawn numbers are known. If all were drawn, it
    is a point. Values that are all equal show no spread. Then at most a share p of all numbers differs from them (the
    upper limit of Clopper and Pearson for 0 of n, and no more than the share that was not drawn), and each of those
    may be anything from 0 to 1.
    """
    n, mean = len(values), statistics.fmean(values)
    if n >= of:
        return mean, mean
    if min(values) == max(values):
        p = min(float(cp_upper(0, n, (1 - confidence) / 2)), 1 - n / of)
        return mean - p * mean, mean + p * (1 - mean)
    error = math.sqrt(_squares(values, mean) / (n - 1) / n * (1 - n / of))
    half = float(scipy.special.stdtrit(n - 1, 0.5 + confidence / 2)) * error
    return max(0.0, mean - half), min(1.0, mean + half)


def pseudo_median(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Return the median of all means of two values (Hodges and Lehmann 1963) with the interval of the signed-rank test.

    The interval is exact for values that spread alike to both sides, as the difference of two equal noises does. Single
    values that are far off hardly move it. Too few values have no interval.
    """
    if not values:
        return Estimate(value=None, reason="there are no values")
    given, n = np.asarray(values, float), len(values)
    rows, columns = np.triu_indices(n)
    means = np.sort((given[rows] + given[columns]) / 2)
    # The k-th smallest and the k-th largest mean enclose the centre unless the sum of signed ranks is below k.
    k = int(np.searchsorted(np.cumsum(_signed_rank(n)), (1 - confidence) / 2, side="right"))
    middle = float(np.median(means))
    if k == 0:
        return Estimate(value=middle, interval=f"none: {n} values are too few", n=n)
    return Estimate(value=middle, low=float(means[k - 1]), high=float(means[-k]), interval="signed ranks", n=n)


@functools.cache
def _signed_rank(n: int) -> Floats:
    """Return the probabilities of Wilcoxon's sum of ranks with positive sign: every rank up to n counts or does not."""
    p = np.zeros(n * (n + 1) // 2 + 1)
    p[0] = 1.0
    for rank in range(1, n + 1):
        p[rank:] += p[: len(p) - rank].copy()
        p /= 2
    return p


Floats = NDArray[np.float64]


Counts = NDArray[np.int64]


def check_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:  # NaN too
        raise SettingError(f"confidence = {confidence} is out of range: give a number strictly between 0 and 1.")
    return float(confidence)


def as_column(values: ArrayLike, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ContractError(f"The {what} are not an array ({error}): give one value per candidate.") from error
    if array.ndim != 1:
        raise ContractError(f"The {what} have shape {array.shape}: give one value per candidate.")
    return array


def checked(scores: ArrayLike, member: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the scores as finite floats and the membership as booleans, both of one length. Raise if they are not."""
    s, m = as_column(scores, "scores"), as_column(member, "member flags")
    if len(s) != len(m):
        raise ContractError(f"There are {len(s)} scores but {len(m)} member flags: give one of each per candidate.")
    if s.dtype.kind not in "biuf":
        raise ContractError(f"The scores are of type {s.dtype}: give numbers, higher for members.")
    if m.dtype.kind not in "biuf" or not ((m == 0) | (m == 1)).all():
        raise ContractError("The member flags hold other values than 0 and 1: give 0 or 1 (false or true).")
    s = s.astype(np.float64)
    if bad := int((~np.isfinite(s)).sum()):
        raise ContractError(
            f"{bad} of {len(s)} scores are NaN or infinite, which no threshold can rank: fix the attack, or clip them."
        )
    return s, m.astype(bool)


def split_classes(scores: ArrayLike, member: ArrayLike) -> tuple[Floats, Floats]:
    """Return the scores of members and those of non-members, each in ascending order."""
    s, m = checked(scores, member)
    inside, outside = np.sort(s[m]), np.sort(s[~m])
    if reason := missing_class(len(inside), len(outside)):
        raise ContractError(f"Membership cannot be scored: {reason}. Give candidates of both classes.")
    return inside, outside


def missing_class(members: int, nonmembers: int) -> str | None:
    missing = [name for name, n in (("members", members), ("non-members", nonmembers)) if n == 0]
    return f"there are no {' and no '.join(missing)} among the candidates" if missing else None


def cp_lower(k: ArrayLike, n: ArrayLike, alpha: float) -> Floats:
    """Return the one-sided lower limit of Clopper and Pearson (1934), elementwise: P[Bin(n, p) >= k] = alpha."""
    k, n = np.asarray(k), np.asarray(n)
    return np.where(k > 0, scipy.special.betaincinv(np.maximum(k, 1), n - k + 1, alpha), 0.0)


def cp_upper(k: ArrayLike, n: ArrayLike, alpha: float) -> Floats:
    """Return the one-sided upper limit of Clopper and Pearson, elementwise: P[Bin(n, p) <= k] = alpha."""
    k, n = np.asarray(k), np.asarray(n)
    return np.where(k < n, scipy.special.betainccinv(k + 1, np.maximum(n - k, 1), alpha), 1.0)


def clopper_pearson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the two-sided interval of Clopper and Pearson for k of n. It is (0, 1) if n is 0."""
    if n == 0:
        return 0.0, 1.0
    tail = (1 - check_confidence(confidence)) / 2
    return float(cp_lower(k, n, tail)), float(cp_upper(k, n, tail))


def above(sorted_scores: Floats, t: ArrayLike) -> Counts:
    """Return the number of scores strictly above each t."""
    return len(sorted_scores) - np.searchsorted(sorted_scores, t, "right")


def parted(sorted_scores: Floats, rng: np.random.Generator, share: float) -> tuple[Floats, Floats]:
    """Return a random share of the scores (at least one) and the rest, both in ascending order."""
    order = rng.permutation(len(sorted_scores))
    cut = max(1, int(share * len(sorted_scores)))
    return sorted_scores[np.sort(order[:cut])], sorted_scores[np.sort(order[cut:])]
