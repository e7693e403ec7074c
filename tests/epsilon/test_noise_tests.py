"""Tests of noise: at most 5 % of honest noise is accused, and each way of being dishonest is found by its test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedaudit.epsilon import noise_tests
from fedaudit.epsilon.noise_tests import Finding, examine, residual
from fedaudit.epsilon.rounded_noise import RoundedScale
from fedaudit.errors import ContractError

LEVELS = np.arange(256) / 127.5 - 1


def rounded(values):
    return LEVELS[np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, values)]


def releases(noise, sigma=2.0, levels=None, shape=(10, 10), clients=10, seed=0):
    """`clients` releases of 100 numbers: 1,000 in all. `noise(rng, k)` gives client k's, in units of sigma."""
    rng = np.random.default_rng(seed)
    found = []
    for k in range(clients):
        clean = rng.normal(size=shape) * 0.3
        sent = clean + sigma * noise(rng, k)
        sent = sent if levels is None else rounded(sent)
        found.append(residual(sent, clean, sigma, client=k, round=1, part="E", levels=levels, seed=k))
    return found


def honest(rng, k):
    return rng.normal(size=(10, 10))


def rejected(noise, n, **options) -> int:
    exact = options.pop("exact", False)
    return sum(examine(releases(noise, seed=seed, **options), exact=exact).p < 0.05 for seed in range(n))


def test_honest_noise_is_accused_in_five_percent_at_most():
    """120 repetitions: 5 % gives at most 13 with a probability of 99.7 %."""
    assert rejected(honest, 120, exact=True) <= 13


def test_noise_times_nine_tenths_is_found_in_a_thousand_numbers():
    """chi-square, 1,000 degrees: 0.81 (1000 +- 45) against its 0.05 % quantile, 859 (half of the level, 0.001, is the
    scale's): refuted with 91 %, suspicious (its 2.5 % quantile, 914) with 99.9 %. 1,500 numbers refute it with 99 %.
    """
    found = [examine(releases(lambda rng, k: 0.9 * honest(rng, k), seed=seed)).p for seed in range(60)]
    assert sum(p < 0.05 for p in found) >= 58
    assert sum(p < 0.001 for p in found) >= 46
    finding, more = examine(releases(honest)), examine(releases(honest, clients=15))
    assert (finding.numbers, more.numbers) == (1000, 1500)
    assert finding.finds == pytest.approx(np.sqrt(stats.chi2.ppf(0.0005, 1000) / stats.chi2.ppf(0.99, 1000)))
    assert finding.tells_at == pytest.approx(2 * stats.chi2.cdf(0.81 * stats.chi2.ppf(0.99, 1000), 1000))
    assert finding.tells_at > 0.001 > more.tells_at
    assert finding.finds < 0.9 < more.finds


@pytest.mark.parametrize("factor", [0.95, 1.0, 1.1])
@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_the_figures_of_a_finding_by_hand(factor, confidence):
    """The sum of squares of 1,000 numbers against chi-squared. Half of the failure probability is the scale's, the
    other half is shared by all other tests; too much noise counts where the release is known to the bit."""
    made = releases(lambda rng, k: factor * honest(rng, k), seed=3)
    squares = float(sum((r.z**2).sum() for r in made))
    finding, exact = examine(made, confidence), examine(made, confidence, exact=True)
    level = 1 - confidence
    assert finding.scale == pytest.approx(np.sqrt(squares / 1000))
    assert finding.low == pytest.approx(np.sqrt(squares / stats.chi2.isf(level / 2, 1000)))
    assert finding.high == pytest.approx(np.sqrt(squares / stats.chi2.ppf(level / 2, 1000)))
    assert finding.tests[0].p == pytest.approx(stats.chi2.cdf(squares, 1000))
    assert finding.p_more == pytest.approx(stats.chi2.sf(squares, 1000))
    for one in (finding, exact):
        rest = [test.p for test in one.tests[1:]]
        assert one.p == pytest.approx(min(1.0, 2 * one.tests[0].p, 2 * len(rest) * min(rest)))
        assert [test.p for test in one.tests if test.name == "excess"] == ([one.p_more] if one is exact else [])


def test_the_scales_limits_hold():
    """One-sided 97.5 % above (half of the failure probability is the scale's), 97.5 % below."""
    found = [examine(releases(lambda rng, k: 0.7 * honest(rng, k), seed=seed)) for seed in range(100)]
    assert sum(f.high < 0.7 for f in found) <= 7
    assert sum(f.low > 0.7 for f in found) <= 7
    assert np.mean([f.high for f in found]) < 0.75


def common(rng, k):
    """Numbers that all releases share: drawn from a generator that does not know k."""
    return np.random.default_rng(99).normal(size=(10, 10))


@pytest.mark.parametrize(
    ("noise", "by"),
    [
        (lambda rng, k: honest(rng, k) + 0.2, {"mean", "distribution"}),
        (lambda rng, k: rng.laplace(size=(10, 10)) / np.sqrt(2), {"shape"}),
        (lambda rng, k: rng.choice([-1.0, 1.0], size=(10, 10)), {"shape"}),
        (lambda rng, k: np.repeat(rng.normal(size=(10, 1)), 10, axis=1), {"rows"}),
        (lambda rng, k: np.repeat(rng.normal(size=(1, 10)), 10, axis=0), {"columns"}),
        (lambda rng, k: 0.4 * common(rng, k) + np.sqrt(1 - 0.16) * honest(rng, k), {"shared"}),
        (lambda rng, k: common(rng, k) if k in (2, 7) else honest(rng, k), {"reused"}),
        (lambda rng, k: {2: 1, 7: -1}[k] * common(rng, k) if k in (2, 7) else honest(rng, k), {"reused"}),
        (lambda rng, k: (0.5 if k == 3 else 1.0) * honest(rng, k), {"client", "scale"}),
        (lambda rng, k: 1.2 * honest(rng, k), {"excess"}),
    ],
)
def test_each_dishonesty_is_found_by_its_test(noise, by):
    finding = examine(releases(noise), exact=True)
    assert finding.p < 0.05
    assert finding.strongest.name in by
    if by == {"reused"}:
        assert finding.strongest.worst == "E of client 2 in round 1 and E of client 7 in round 1"


def over_rounds(noise, seed=0):
    """Ten rounds of one client of three, 100 numbers each; `noise(rng, t)`."""
    rng = np.random.default_rng(seed)
    made = [(k, t, rng.normal(size=(10, 10))) for k in range(3) for t in range(10)]
    return [
        residual(clean + (noise(rng, t) if k == 1 else honest(rng, t)), clean, 1.0, client=k, round=t, part="E")
        for k, t, clean in made
    ]


def test_one_record_without_noise_is_found_among_many():
    """One row of 300 in ten rounds: noise x 0.9983 over all of it, x 0.995 over its client."""

    def but_one(rng, t):
        made = honest(rng, t)
        made[7] *= 0.2
        return made

    finding = examine(over_rounds(but_one), exact=True)
    assert finding.strongest.name == "row"
    assert finding.strongest.worst.startswith("row 7 of E of client 1: x 0.2")
    assert finding.p < 1e-15
    assert min(t.p for t in finding.tests if t.name in ("scale", "client", "part")) > 0.001


def test_one_round_with_less_noise_is_found_among_many():
    finding = examine(over_rounds(lambda rng, t: (0.6 if t == 4 else 1.0) * honest(rng, t)), exact=True)
    assert (finding.strongest.name, finding.p < 0.001) == ("round", True)
    assert finding.strongest.worst.startswith("client 1 in round 4: x 0.")


def test_honest_noise_over_rounds_is_accused_in_five_percent_at_most():
    found = [examine(over_rounds(honest, seed), exact=True) for seed in range(60)]
    assert sum(f.p < 0.05 for f in found) <= 8
    for name in ("row", "round"):  # each by itself, too
        assert sum(t.p < 0.05 for f in found for t in f.tests if t.name == name) <= 8


def test_a_release_that_is_not_what_it_should_be_is_found_along_itself():
    """Twice the release: residuals along the noise-free one, though their size hardly changes."""
    rng = np.random.default_rng(0)
    clean = rng.normal(size=(10, 100))
    finding = examine([residual(2 * clean + 3 * rng.normal(size=(10, 100)), clean, 3.0, client=0, round=1, part="E")])
    assert (finding.strongest.name, finding.p < 1e-6) == ("signal", True)


def test_the_shapes_tails_are_right_far_out():
    """Of 300,000 times 20 normal numbers, one in 2,000 has a p-value below that, on either side: 150 +- 12 of each. The
    first three moments of Geary's ratio by themselves: exact, so that those of a simulation agree."""
    z = np.random.default_rng(5).normal(size=(300_000, 20))
    ratio = np.abs(z).mean(1) / np.sqrt((z**2).mean(1))
    tails = np.array([noise_tests._geary(a, 20) for a in np.sort(ratio)[[149, -150]]])
    assert tails[0, 0] == pytest.approx(150 / 300_000, rel=0.3)
    assert tails[1, 1] == pytest.approx(150 / 300_000, rel=0.3)
    assert sum(noise_tests._geary(float(np.median(ratio)), 20)) == pytest.approx(1)


def test_a_lopsided_distribution_is_found_by_its_shape():
    """Exponential noise, centred and of the right size."""
    finding = examine(releases(lambda rng, k: rng.exponential(size=(10, 10)) - 1))
    assert finding.p < 1e-6
    assert {t.name: t.p for t in finding.tests}["shape"] < 1e-8


# -- rounded releases ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.3, pytest.param(20.0, marks=pytest.mark.long)])
def test_rounding_and_clamping_do_not_accuse_honest_noise(sigma):
    """With sigma = 20 nearly every number arrives as 1 or -1."""
    assert rejected(honest, 3, sigma=sigma, levels=LEVELS) <= 1


def test_residuals_within_their_cells_are_normal():
    """Of numbers that arrived as three levels only: their residuals are standard normal all the same."""
    z = np.concatenate([r.z.ravel() for r in releases(honest, sigma=1.0, levels=LEVELS, clients=40)])
    assert stats.kstest(z, "norm").pvalue > 0.01


def test_less_noise_is_found_through_rounding():
    found: list[Finding] = [
        examine(releases(lambda rng, k: 0.5 * honest(rng, k), sigma=sigma, levels=LEVELS)) for sigma in (0.3, 2.0)
    ]
    assert all(f.p < 0.05 and f.high < 1 for f in found)
    assert found[0].scale == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("sigma", "n"), [(0.5, 60), (20.0, 400)])
def test_the_scale_of_rounded_noise_has_the_p_value_that_simulation_gives(sigma, n):
    """The lower tail's p-value at quantiles of 40,000 simulated sums: not smaller than it should be but for chance, nor
    more than about twice as large. With sigma = 20 all but some 16 of 400 numbers are clamped: it is a count."""
    rng = np.random.default_rng(0)
    clean = rng.normal(size=(1, n)) * (0.3 if sigma < 1 else 0.0)
    made = residual(rounded(clean + sigma * rng.normal(size=(1, n))), clean, sigma, client=0, round=1, part="E",
                    levels=LEVELS)  # fmt: skip
    scale = RoundedScale([made.sizes])
    score, edges = scale._scores[0], scale._parts[0][1][0]
    cells = (np.searchsorted(edges[1:-1], clean[0] / sigma + rng.normal(size=(2000, n))) for _ in range(20))
    sums = np.sort(np.concatenate([score[np.arange(n), c].sum(1) for c in cells]))
    for share, room in ((0.5, 0.02), (0.05, 0.05), (0.002, 0.25)):
        value = sums[int(share * len(sums))]
        truth = (sums <= value + 1e-9).mean()
        assert truth * (1 - room) <= scale.below(value) <= 2.2 * truth


def test_of_three_levels_the_sum_is_a_count():
    """400 numbers that arrive as -1, 0 or 1: the sum tells how many are 0, which is binomial. P-values down to 1e-6:
    within 7 %, and not below them."""
    levels, n, sigma = np.array([-1.0, 0.0, 1.0]), 400, 20.0
    made = residual(np.zeros((1, n)), np.zeros((1, n)), sigma, client=0, round=1, part="E", levels=levels)
    scale = RoundedScale([made.sizes])
    zero = stats.norm.cdf(0.5 / sigma) - stats.norm.cdf(-0.5 / sigma)
    ends, middle = scale._scores[0][0, 0], scale._scores[0][0, 1]
    for k in range(8, 25):
        exact = stats.binom.sf(k - 1, n, zero)
        assert exact * 0.999 <= scale.below(k * middle + (n - k) * ends) <= 1.07 * exact


def test_what_can_be_found_through_clamping_is_said():
    """sigma = 200: of 1,000 numbers about 4 lie inside the range. Half of the noise makes that 8: nobody could tell."""
    finding = examine(releases(honest, sigma=200.0, levels=LEVELS))
    assert finding.finds < 0.5


def test_what_cannot_be_examined():
    with pytest.raises(ContractError, match="no residuals"):
        examine([])
    with pytest.raises(ContractError, match="was sent"):
        residual(np.zeros((2, 3)), np.zeros((3, 2)), 1.0, client=0, round=1, part="E")


def finding_of(*p: float) -> Finding:
    made = tuple(noise_tests.Test(f"test {i}", one) for i, one in enumerate(p))
    return Finding(1, 1.0, 1.0, 1.0, 0.95, 1.0, 1.0, made, 1.0, 1.0)


@pytest.mark.parametrize(
    ("p", "strongest"),
    [
        ((0.02, 0.5, 0.01, 0.9), "test 0"),  # three others share what the first has for itself: 0.02 <= 3 x 0.01
        ((0.031, 0.5, 0.01, 0.9), "test 2"),
        ((0.5, 0.6), "test 0"),
        ((0.6, 0.5), "test 1"),
    ],
)
def test_the_strongest_test_has_its_share_of_the_failure_probability(p, strongest):
    assert finding_of(*p).strongest.name == strongest


def test_numbers_that_lie_between_two_levels_and_arrive_next_to_them_are_bare():
    """Levels -3.5, -2.5, ..., 3.5, and a noise-free 0, which is half-way between two of them. 40 numbers of 40 arrive
    at 0.5, where a standard normal would be in 34 of 100: 0.3413^40."""
    levels = np.arange(8) - 3.5
    made = residual(np.full(40, 0.5), np.zeros(40), 1.0, client=0, round=1, part="z", levels=levels)
    chance = stats.norm.cdf(1) - 0.5
    assert noise_tests._bare_cells([made.sizes]) == pytest.approx(chance**40, rel=1e-3)
    other = residual(np.full(40, 2.5), np.zeros(40), 1.0, client=0, round=1, part="z", levels=levels)
    assert noise_tests._bare_cells([other.sizes]) == pytest.approx(1.0)


def test_one_rounded_release_is_enough_for_the_test_of_its_scale():
    made = residual(np.full(40, 0.5), np.zeros(40), 1.0, client=0, round=1, part="z", levels=np.arange(8) - 3.5)
    assert isinstance(noise_tests._scale_test([made]), RoundedScale)
