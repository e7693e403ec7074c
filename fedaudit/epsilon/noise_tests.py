"""Tests if noise is what the ledger says, on residuals, (what was sent - the release without noise) / sigma.

If the mechanism added independent Gaussian noise of deviation sigma, residuals are independent standard normal numbers,
whatever the records, the model and the method. Every test below is exact under that hypothesis, except two whose tails
are approximated, and measured to be right where claims are refuted (docs/results/epsilon.md): `shape`, and the scale of
rounded releases (fedaudit.epsilon.rounded_noise).

    scale     too little noise in all of it              sum of squares, chi-square, lower tail
    excess    more noise than promised, where the release without noise is exact: something else was sent
    client    too little noise of one client             the same by client, the worst, Bonferroni
    part      too little noise in one tensor (a layer)   the same by part
    round     too little noise in one round or step      the same by client and round, and step of a training
    row       too little noise of one row (a record)     the same by row, over all rounds where rows stay in their place
    mean      noise that is off centre                   normal
    signal    more or less of the release than its share (clipping left out)   normal, along the noise-free release
    shape     noise of another distribution              mean of |z| over their root mean square; signs against squares
    rows      one draw for all numbers of a row          F: row means against the rest
    columns   one draw for all rows                      F: column means against the rest
    shared    a common part in releases of one shape     F: means over releases against the rest
    reused    two releases with the same noise, or with correlated noise       F: |a - b|^2 / |a + b|^2, all pairs

Noise of the right size and shape may still be no noise: its values and their order are tested in
fedaudit.epsilon.noise_values.

The F tests compare residuals with each other, so that they say nothing of their scale. All p-values together are
corrected for how many tests there are (Bonferroni; `scale` has half of the failure probability), and so are the limits
of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, chdtr, chdtrc, chdtri, gammainc, gammaincc, ndtr

from fedaudit.epsilon import noise_values
from fedaudit.epsilon.rounded_noise import Rounded, RoundedScale, within
from fedaudit.errors import ContractError
from fedaudit.privacy.mechanisms.base import Sizes
from fedaudit.privacy.score_sums import ScaleTest
from fedaudit.significance import level_of
from fedaudit.stats import Floats, check_confidence

SEED = 20  # of the choices that tests of single values make
LEAST = 20  # numbers from which on a shape is tested
PREFIX = 4096  # numbers of a release that are compared with those of another
MOST = 1000  # releases that are compared with one another: a million pairs
POWER = 0.99  # with which an audit that says it could find something would find it
SEEKS = 0.9  # noise of so many times what is promised should be found


@dataclass(frozen=True)
class Residual:
    """One tensor of one release."""

    client: int
    round: int
    part: str  # which tensor: the same for all clients and rounds
    z: Floats  # (rows, columns), standard normal if all is as promised
    clean: Floats  # the release without noise, of the same shape
    sizes: Sizes | None = None  # where something else than the squares of z tells the scale
    grain: Floats | float = 0.0  # spacing of the format in which it travelled, in deviations of the noise
    free: bool = True  # each value can be any number: it was not rounded, and its noise is not on a grid
    step: int | None = None  # of a training

    @property
    def when(self) -> str:
        """Return whose it is, and of when."""
        of_step = "" if self.step is None else f", step {self.step}"
        return f"client {self.client} in round {self.round}{of_step}"


@dataclass(frozen=True)
class Test:
    name: str
    p: float
    worst: str = ""  # where, of several places


@dataclass(frozen=True)
class Finding:
    """The result of a test of residuals: what they say of the noise."""

    numbers: int
    scale: float  # the noise found over the noise promised
    low: float
    high: float  # with probability `confidence` the scale is no larger: one-sided, corrected for all tests
    confidence: float
    p: float  # of all tests together
    p_more: float  # of the scale being no larger than promised
    tests: tuple[Test, ...]
    finds: float  # noise of so many times what is promised would be refuted with a probability of 99 %
    tells_at: float  # the strictest level at which noise x 0.9 would be

    @property
    def strongest(self) -> Test:
        """The one that decides, each at its share of the failure probability."""
        others = min(self.tests[1:], key=lambda test: test.p)
        return self.tests[0] if self.tests[0].p <= others.p * (len(self.tests) - 1) else others


def residual(
    sent: Floats, clean: Floats, sigma: float, *, client: int, round: int, part: str, levels: Floats | None = None,
    seed: int = 0,
) -> Residual:  # fmt: skip
    """The residuals of one tensor. `levels`: the values that can travel, ascending, where the release was rounded to
    them; a residual is then drawn from the normal distribution within its cell (Dunn and Smyth 1996), which keeps it
    standard normal."""
    if sent.shape != clean.shape:
        raise ContractError(f"{part}: {sent.shape} was sent, and {clean.shape} comes out again.")
    sigma = max(sigma, np.finfo(np.float64).tiny)
    if levels is None:
        return Residual(client, round, part, _matrix((sent - clean) / sigma), _matrix(clean))
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]]) / sigma
    cell = np.searchsorted(edges[1:-1], _matrix(sent) / sigma)
    low, high = edges[cell] - _matrix(clean) / sigma, edges[cell + 1] - _matrix(clean) / sigma
    u = np.random.default_rng(seed).random(low.shape)
    return Residual(
        client,
        round,
        part,
        within(low, high, u),
        _matrix(clean),
        Rounded(low, high, _matrix(clean) / sigma, edges),
        free=False,
    )


def _matrix(values: Floats) -> Floats:
    values = np.asarray(values, dtype=np.float64)
    return values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(1, -1)


# --- the tests ----------------------------------------------------------------------------------------------------


def examine(
    residuals: Sequence[Residual],
    confidence: float = 0.95,
    *,
    exact: bool = False,
    others: Sequence[Residual] = (),
    more: Sequence[Test] = (),
) -> Finding:
    """All tests on the residuals of one kind of release: all clients, all rounds.

    `exact`: the release without noise is known to the bit, so that more noise than promised is no rounding either.
    `others`: noise of other fields, which must not be the same. `more`: tests of the same noise that were made
    elsewhere, and count among these.
    """
    level = 1 - check_confidence(confidence)
    residuals = [r for r in residuals if r.z.size]
    if not residuals:
        raise ContractError("There are no residuals to examine: nothing was sent.")
    z = np.concatenate([r.z.ravel() for r in residuals])
    clean = np.concatenate([r.clean.ravel() for r in residuals])
    of_scale = _scale_test(residuals)
    p_scale, p_more = of_scale.p_values()
    tests = [Test("scale", float(p_scale)), Test("mean", _two_sided(z.sum() / math.sqrt(len(z))))]
    if exact:
        tests.append(Test("excess", float(p_more)))
    if (length := float(np.linalg.norm(clean))) > 0:
        tests.append(Test("signal", _two_sided(float(z @ clean) / length)))
    if len(z) >= LEAST and np.ptp(z) > 0:
        tests.append(Test("shape", _shape(z)))
    if not isinstance(of_scale, RoundedScale):
        for name, key in (("client", lambda r: f"client {r.client}"), ("part", lambda r: r.part)):
            tests += _worst_scale(name, residuals, key)
        if len({(r.round, r.step) for r in residuals}) > 1:
            tests += _worst_scale("round", residuals, lambda r: r.when)
        tests += _worst_row(residuals)
    tests += [t for t in (_rows(residuals), _columns(residuals), _shared(residuals), _reused(residuals)) if t]
    tests += [*_values(residuals, others, exact), *more]
    each, strict = level / 2, level_of(confidence) / 2
    low, high = of_scale.limits(level, each)
    finds, tells_at = of_scale.finds(strict, POWER), of_scale.level(SEEKS, POWER)
    rest = min(test.p for test in tests[1:]) * (len(tests) - 1)
    p = min(1.0, 2 * tests[0].p, 2 * rest)
    return Finding(
        len(z), of_scale.scale, low, high, confidence, p, float(p_more), tuple(tests), finds, min(1.0, 2 * tells_at)
    )  # fmt: skip


def _values(residuals: Sequence[Residual], others: Sequence[Residual], exact: bool) -> list[Test]:
    """Return the tests of single values and of their order: see fedaudit.epsilon.noise_values."""
    blocks = [r.z.ravel() for r in residuals]
    p, lag = noise_values.lags(blocks)
    tests = [Test("lags", p, f"at a distance of {lag}")]
    z = np.concatenate(blocks)
    if len(z) < LEAST:
        return tests
    if exact:
        tests += [Test("distribution", noise_values.distribution(z)), Test("waves", noise_values.waves(blocks))]
    tests.append(Test("along", noise_values.along((r.z.ravel(), r.clean.ravel()) for r in residuals)))
    cells = [r.sizes for r in residuals if isinstance(r.sizes, Rounded)]
    if cells:
        tests.append(Test("bare", _bare_cells(cells)))
    else:
        tests.append(Test("coordinate", *noise_values.coordinate([(r.part, r.z) for r in residuals])))
    if not residuals[0].free:  # normal scores, chosen at random within what a value stands for: a coarse grid shows
        tests.append(Test("grid", noise_values.grid(z)))
    free = [r for r in residuals if r.free]
    if sum(r.z.size for r in free) >= LEAST:
        tests += _single_values(free, [r for r in others if r.free])
    return tests


def _bare_cells(cells: Sequence[Rounded]) -> float:
    """P[so many numbers that arrived at the level next to the noise-free one], of those that lie within the range."""
    hits, chances = 0, []
    for c in cells:
        at = np.searchsorted(c.edges[1:-1], c.clean)
        inside = (at > 0) & (at < len(c.edges) - 2)
        hits += int(((c.low <= 0) & (c.high > 0))[inside].sum())
        chances.append((ndtr(c.edges[at + 1] - c.clean) - ndtr(c.edges[at] - c.clean))[inside])
    together = np.concatenate(chances)
    return noise_values.so_many(hits, together) if together.size else 1.0


def _single_values(residuals: Sequence[Residual], others: Sequence[Residual]) -> list[Test]:
    rng = np.random.default_rng(SEED)
    z = np.concatenate([r.z.ravel() for r in residuals])
    grain = np.concatenate([np.broadcast_to(r.grain, r.z.shape).ravel() for r in residuals])
    coarsest = float(np.quantile(grain, 0.99))
    loose = noise_values.spread(z, grain, rng)
    tests = [
        Test("repeated", noise_values.repeated(loose, coarsest, rng)),
        Test("bare", noise_values.bare(z, grain)),
        Test("grid", noise_values.grid(loose)),
    ]
    if theirs := [r.z.ravel() for r in others]:
        coarsest = max(coarsest, *(float(np.quantile(r.grain, 0.99)) for r in others))
        tests.append(Test("elsewhere", noise_values.elsewhere(loose, np.concatenate(theirs), coarsest, rng)))
    return tests


def _two_sided(t: float) -> float:
    return float(2 * ndtr(-abs(t)))


@dataclass(frozen=True)
class NormalScale:
    """The test of the scale of n normal numbers, by the sum of their squares, which is a chi-square number."""

    n: int
    squares: float

    @property
    def scale(self) -> float:
        return math.sqrt(self.squares / self.n)

    def p_values(self) -> tuple[float, float]:
        return float(chdtr(self.n, self.squares)), float(chdtrc(self.n, self.squares))

    def limits(self, level: float, each: float) -> tuple[float, float]:
        """Return the limits: two-sided below, and above what the scale test's share of the failure probability
        allows."""
        low, high = float(chdtri(self.n, level / 2)), float(chdtri(self.n, 1 - each))
        return math.sqrt(self.squares / low), math.sqrt(self.squares / high)

    def finds(self, each: float, power: float) -> float:
        """Return r, for which r^2 X < the limit with that probability, X chi-square."""
        return math.sqrt(float(chdtri(self.n, 1 - each)) / float(chdtri(self.n, 1 - power)))

    def level(self, scale: float, power: float) -> float:
        """Return P[X < scale^2 times the quantile of X]: the level at which the sum would be found too small."""
        return float(chdtr(self.n, scale**2 * float(chdtri(self.n, 1 - power))))


def numbers_to_tell(level: float) -> int:
    """Return how many normal numbers it takes to find noise x 0.9 at this level, with a probability of 99 %."""
    low, high = 1, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        found = 2 * NormalScale(middle, 0.0).level(SEEKS, POWER) < level
        low, high = (low, middle) if found else (middle, high)
    return high


def _scale_test(residuals: Sequence[Residual]) -> ScaleTest:
    """Return the test of the scale: that of the mechanism's noise, or of normal numbers."""
    parts = [r.sizes for r in residuals if r.sizes is not None]
    if parts and len(parts) != len(residuals):
        raise ContractError("Rounded releases and others do not belong in one test: examine each field by itself.")
    if parts:
        return parts[0].test(parts)
    z = np.concatenate([r.z.ravel() for r in residuals])
    return NormalScale(len(z), float(z @ z))


def _shape(z: Floats) -> float:
    """Tails that are too heavy or too light, and a lack of symmetry; neither depends on the scale."""
    low, high = _geary(float(np.abs(z).mean() / math.sqrt(float(z @ z) / len(z))), len(z))
    # Given their sizes, symmetric numbers have fair signs: a sum of signs has lighter tails than the normal's.
    lopsided = _two_sided(float(z @ np.abs(z)) / math.sqrt(float((z**4).sum())))
    return min(1.0, 2 * min(2 * low, 2 * high, lopsided))


def _geary(a: float, n: int) -> tuple[float, float]:
    """P[A <= a] and P[A >= a] of A = mean |z| / root mean square of n normal numbers (Geary 1935).

    A is independent of the root mean square (Basu 1955), so that E A^k = E (mean |z|)^k / E rms^k exactly; the tails
    are those of the gamma distribution with A's first three moments.
    """
    m, e = math.sqrt(2 / math.pi), 1 / n
    r1 = 1 - e / 4 + e**2 / 32 + 5 * e**3 / 128 - 21 * e**4 / 2048  # E rms = sqrt(2 / n) G((n + 1) / 2) / G(n / 2)
    one = m / r1
    two = e + (1 - e) * m**2
    three = (2 * m * e**2 + 3 * m * e * (1 - e) + m**3 * (1 - e) * (1 - 2 * e)) / (r1 * (1 + e))
    variance = two - one**2
    skewness = min((three - 3 * one * two + 2 * one**3) / variance**1.5, -1e-3)
    x = (a - one) / math.sqrt(variance)
    k = 4 / skewness**2  # -A is gamma-like: its longer tail points to small values
    y = max(k - x * math.sqrt(k), 0.0)
    return float(gammaincc(k, y)), float(gammainc(k, y))


def _worst_scale(name: str, residuals: Sequence[Residual], key: Callable[[Residual], str]) -> list[Test]:
    sums: dict[str, tuple[int, float]] = {}
    for r in residuals:
        n, squares = sums.get(key(r), (0, 0.0))
        sums[key(r)] = n + r.z.size, squares + float((r.z**2).sum())
    if len(sums) < 2:
        return []
    each = {place: float(chdtr(*sum_)) for place, sum_ in sums.items()}
    place = min(each, key=lambda at: each[at])
    n, squares = sums[place]
    return [Test(name, min(1.0, len(each) * each[place]), f"{place}: x {math.sqrt(squares / n):.3g}")]


def _worst_row(residuals: Sequence[Residual]) -> list[Test]:
    """Rows are records where a release has a row for each, and these are what the noise is to hide. What one client
    sends in one shape over the rounds has its records in the same places, so that a record's rows count together."""
    rows: dict[tuple[int, str, tuple[int, ...]], tuple[int, Floats]] = {}
    for r in residuals:
        if len(r.z) > 1:
            times, squares = rows.get((r.client, r.part, r.z.shape), (0, np.zeros(len(r.z))))
            rows[r.client, r.part, r.z.shape] = times + 1, squares + (r.z**2).sum(1)
    if not rows:
        return []
    each = {at: chdtr(times * at[2][1], squares) for at, (times, squares) in rows.items()}
    at = min(each, key=lambda place: float(each[place].min()))
    row, count = int(each[at].argmin()), sum(len(p) for p in each.values())
    times, squares = rows[at]
    scale = math.sqrt(squares[row] / (times * at[2][1]))
    where = f"row {row} of {at[1]} of client {at[0]}: x {scale:.3g}"
    return [Test("row", min(1.0, count * float(each[at][row])), where)]


def _f_upper(between: float, df1: int, within: float, df2: int) -> float:
    """P[F(df1, df2) is larger]."""
    if df1 < 1 or df2 < 1 or between + within <= 0:
        return 1.0
    return float(betainc(df2 / 2, df1 / 2, within / (within + between)))


def _means(blocks: Iterable[tuple[Floats, int]], name: str) -> Test | None:
    """Return if numbers that share a place have a common part. A block is (places, draws), its second entry the axis of
    the draws; sums of squares are pooled over blocks."""
    between = within = 0.0
    df1 = df2 = 0
    for block, axis in blocks:
        draws = block.shape[axis]
        if draws < 2:
            continue
        common = float((block.mean(axis) ** 2).sum()) * draws
        between, within = between + common, within + float((block**2).sum()) - common
        df1, df2 = df1 + block.size // draws, df2 + block.size - block.size // draws
    return Test(name, _f_upper(between, df1, max(within, 0.0), df2)) if df1 else None


def _rows(residuals: Sequence[Residual]) -> Test | None:
    return _means(((r.z, 1) for r in residuals if len(r.z) > 1), "rows")


def _columns(residuals: Sequence[Residual]) -> Test | None:
    return _means(((r.z, 0) for r in residuals), "columns")


def _shared(residuals: Sequence[Residual]) -> Test | None:
    groups: dict[tuple[object, ...], list[Floats]] = {}
    for r in residuals:
        groups.setdefault((r.part, r.z.shape), []).append(r.z.ravel())
    return _means(((np.stack(group), 0) for group in groups.values()), "shared")


def _reused(residuals: Sequence[Residual]) -> Test | None:
    """Test all pairs, on the numbers that both have: |a - b|^2 / |a + b|^2 is F(m, m) if they are independent and of
    one scale, small if one was drawn like the other, large if it is its negative."""
    step = -(-len(residuals) // MOST)
    chosen = residuals[::step]
    if len(chosen) < 2:
        return None
    length = min(PREFIX, max(r.z.size for r in chosen))
    table, mask = (np.zeros((len(chosen), length)) for _ in range(2))
    for i, r in enumerate(chosen):
        values = r.z.ravel()[:length]
        table[i, : len(values)], mask[i, : len(values)] = values, 1
    own = (table**2) @ mask.T
    both, cross = own + own.T, 2 * (table @ table.T)
    m = mask @ mask.T
    minus, plus = np.maximum(both - cross, 0), np.maximum(both + cross, 0)
    with np.errstate(invalid="ignore"):
        share = np.where(both > 0, minus / (minus + plus), 0.5)
    lower = betainc(m / 2, m / 2, np.minimum(share, 1 - share))
    rows, columns = np.triu_indices(len(chosen), 1)
    at = int(np.argmin(lower[rows, columns]))
    a, b = chosen[rows[at]], chosen[columns[at]]
    p = min(1.0, 2 * float(lower[rows[at], columns[at]]) * len(rows))
    return Test("reused", p, f"{_place(a)} and {_place(b)}")


def _place(r: Residual) -> str:
    return f"{r.part} of {r.when}"
