"""Tests of noise that only looks like noise: its size and shape may be right, and its numbers are not free.

Noise protects because nobody can guess it. Numbers on a grid, from a pool, with a period or of low precision have the
promised size, and whoever knows the trick takes them off again: a value modulo the grid is sent in clear. These tests
look at single values and at their order.

    repeated      a number that another one equals, up to its sign     binomial, given one half of the numbers
    elsewhere     the same, against the noise of other fields          binomial, given the others
    bare          numbers without noise                                binomial: |z| below what the format resolves
    grid          all numbers on a grid                                largest Fourier coefficient of the values
    lags          numbers that follow from earlier ones                products at each distance, signs being fair
    waves         a hum, or frequencies without noise                  periodogram, exponential numbers
    coordinate    a coordinate or column with too little noise         chi-square by place, over rows and releases
    along         too little noise along the release itself            chi-square of the projections
    distribution  tails that are too heavy or too light                Anderson and Darling 1954, all parameters known

What travelled as a floating-point number has a `grain`, the spacing of its format. Each number is spread evenly over
its grain first (seeded), so that the format of an honest release is no grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import bdtrc, chdtr, erf, erfc, gammainc, gammaincc, log_ndtr

from fedaudit.stats import Floats

LEAST = 20  # numbers from which on values are looked at
FINEST = 1e-7  # the least distance, as a share of all noise, below which two numbers count as equal
MOST = 400_000  # numbers that are looked at
REACH, BINS = 8.0, 1 << 18  # deviations to either side, and cells, of the Fourier transform of values
SLOWEST = 1.2  # cycles in a deviation: below it honest noise has a Fourier coefficient of its own
LAGS = 2048  # distances at which numbers are multiplied


def spacing(values: Floats, eps: float) -> Floats:
    """Return the distance of each number from the next one in a binary format, whose numbers above 1 are eps apart."""
    return eps * 2.0 ** np.floor(np.log2(np.maximum(np.abs(values), 1e-30)))


def spread(z: Floats, grain: Floats | float, rng: np.random.Generator) -> Floats:
    """Return numbers that are spread evenly over the grain of their format."""
    return z + grain * (rng.random(z.shape) - 0.5)


def folded(z: Floats) -> Floats:
    """Return the share of normal numbers that are smaller in size: even between 0 and 1 if z is normal."""
    return erf(np.abs(z) / math.sqrt(2))


def equal_within(grain: float) -> float:
    """Return the distance, as a share of all noise, up to which two numbers may be the same number, rounded twice."""
    return max(FINEST, 2 * grain)


def near(mine: Floats, others: Floats, width: float) -> float:
    """P[so many of `mine` lie as near to one of `others`]. Both are shares; `mine` are even if all is as promised.

    Given the others, the places near them have a known length together, and each of mine falls there by that chance.
    """
    if not len(mine) or not len(others):
        return 1.0
    low, high = np.maximum(others - width, 0.0), np.minimum(others + width, 1.0)
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    begins = np.maximum(low[1:], high[:-1])
    length = float(high[0] - low[0] + np.maximum(high[1:] - begins, 0.0).sum())
    at = np.searchsorted(low, mine, "right") - 1
    hits = int(((at >= 0) & (mine <= high[np.maximum(at, 0)])).sum())
    return float(bdtrc(hits - 1, len(mine), min(length, 1.0))) if hits else 1.0


def repeated(z: Floats, grain: float, rng: np.random.Generator) -> float:
    """P[so many equal numbers, up to the sign]. A random half of the numbers is given, the other half is looked at."""
    u = folded(rng.permutation(z)[:MOST])
    half = len(u) // 2
    return near(u[half:], u[:half], equal_within(grain))


def elsewhere(z: Floats, others: Floats, grain: float, rng: np.random.Generator) -> float:
    """P[so many numbers that other noise has too, up to the sign]."""
    mine, theirs = (rng.permutation(x)[:MOST] for x in (z, others))
    return near(folded(mine), folded(theirs), equal_within(grain))


def bare(z: Floats, grain: Floats | float) -> float:
    """P[so many numbers next to 0], each by its own grain.

    A count of events with several chances is no more often far above its mean than one with their mean chance
    (Hoeffding 1956).
    """
    width = np.maximum(10 * FINEST, 2 * np.broadcast_to(np.asarray(grain, dtype=np.float64), z.shape))
    return so_many(int((np.abs(z) < width).sum()), folded(width))


def so_many(hits: int, chances: Floats) -> float:
    """P[at least so many of events with these chances]."""
    n, chance = chances.size, float(chances.mean())
    return float(bdtrc(hits - 1, n, chance)) if hits > n * chance + 1 else 1.0


def grid(z: Floats) -> float:
    """P[so large a Fourier coefficient of the values]: all frequencies from a deviation's size to a 10,000th of it.

    Values on a grid add up at its frequency; those of honest noise have random phases, and |sum|^2 / n has a tail of
    at most e^-x (Rayleigh).
    """
    inside = z[np.abs(z) < REACH]
    if len(inside) < LEAST:
        return 1.0
    counts = np.bincount(((inside + REACH) / (2 * REACH) * BINS).astype(np.int64), minlength=BINS)[:BINS]
    found = np.fft.rfft(counts.astype(np.float64))
    first, last = math.ceil(SLOWEST * 2 * REACH), BINS // 4
    power = np.abs(found[first:last]) ** 2 / len(inside)
    return float(min(1.0, (last - first) * math.exp(-min(float(power.max()), 700.0))))


def lags(blocks: Iterable[Floats]) -> tuple[float, int]:
    """P[numbers at some distance agree so often], and at which distance.

    Given their sizes, the products of signs at one distance are independent fair signs, so that Hoeffding's bound on
    their weighted sum holds as it stands, whatever the distribution.
    """
    sums, weights = np.zeros(LAGS), np.zeros(LAGS)
    for block in blocks:
        n = len(block)
        if n < 2:
            continue
        size = 1 << (2 * n - 1).bit_length()
        reach = min(n, LAGS + 1)
        for values, into in ((block, sums), (block**2, weights)):
            spectrum = np.abs(np.fft.rfft(values, size)) ** 2
            into[: reach - 1] += np.fft.irfft(spectrum, size)[1:reach]
    tried = weights > 1e-9
    if not tried.any():
        return 1.0, 0
    t2 = np.where(tried, sums**2 / np.where(tried, weights, 1.0), 0.0)
    at = int(t2.argmax())
    return float(min(1.0, int(tried.sum()) * 2 * math.exp(-min(t2[at] / 2, 700.0)))), at + 1


def waves(blocks: Iterable[Floats]) -> float:
    """P[a frequency with so much, or so little, of the noise]: over all releases of one length, exponential numbers."""
    groups: dict[int, list[Floats]] = {}
    for block in blocks:
        if len(block) >= 8:
            groups.setdefault(len(block), []).append(block)
    lowest, tried = 1.0, 0
    for n, group in groups.items():
        power = (np.abs(np.fft.rfft(np.stack(group), axis=1)) ** 2 / n)[:, 1 : (n + 1) // 2].sum(0)
        lowest = min(lowest, float(gammaincc(len(group), power.max())), float(gammainc(len(group), power.min())))
        tried += 2 * len(power)
    return min(1.0, lowest * tried) if tried else 1.0  # releases too short to have waves


def coordinate(blocks: Sequence[tuple[str, Floats]]) -> tuple[float, str]:
    """P[so little noise at one place], and where: each entry of releases of one shape, and each column of a width."""
    places: dict[tuple[object, ...], tuple[int, Floats]] = {}
    for part, z in blocks:
        for key, squares, times in (
            ((part, "entry", z.shape), (z**2).ravel(), 1),
            ((part, "column", z.shape[1]), (z**2).sum(0), len(z)),
        ):
            if key[1] == "column" and len(z) == 1:
                continue
            n, total = places.get(key, (0, np.zeros(len(squares))))
            places[key] = n + times, total + squares
    places = {key: found for key, found in places.items() if found[0] > 1}
    if not places:
        return 1.0, ""
    each = {key: chdtr(n, total) for key, (n, total) in places.items()}
    worst = min(each, key=lambda key: float(each[key].min()))
    at, tried = int(each[worst].argmin()), sum(len(p) for p in each.values())
    n, total = places[worst]
    where = f"{worst[1]} {at} of {worst[0]}: x {math.sqrt(total[at] / n):.3g}"
    return min(1.0, tried * float(each[worst][at])), where


def along(pairs: Iterable[tuple[Floats, Floats]]) -> float:
    """P[so little noise along what was released]: the direction that a projection of the noise would leave free."""
    squares, n = 0.0, 0
    for z, clean in pairs:
        if (length := float(np.linalg.norm(clean))) > 0:
            squares, n = squares + (float(z @ clean) / length) ** 2, n + 1
    return float(chdtr(n, squares)) if n else 1.0


def distribution(z: Floats) -> float:
    """P[so large a statistic of Anderson and Darling 1954] for standard normal numbers.

    The statistic is a sum of chi-square numbers with weights 1 / (j (j + 1)). Far out the first one decides: sqrt(3)
    P[chi-square > 2 x] (Zolotarev 1961), which is 12 % too small at 0.05; 15 % are added.
    """
    z = np.sort(z)
    n = len(z)
    odd = 2 * np.arange(n) + 1
    value = -n - float((odd * (log_ndtr(z) + log_ndtr(-z[::-1]))).mean())
    return min(1.0, 1.15 * math.sqrt(3) * float(erfc(math.sqrt(value)))) if value > 0.5 else 1.0
