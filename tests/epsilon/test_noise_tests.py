"""Tests of noise: at most 5 % of honest noise is accused, and each way of being dishonest is found by its test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats

from fedaudit.epsilon import noise_tests
from fedaudit.epsilon.noise_tests import Finding, Residual, examine, residual
from fedaudit.epsilon.rounded_noise import Rounded, RoundedScale
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
        ((0.5, 0.25, 0.9), "test 0"),  # exactly its share
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


# --- all tests at once, on releases of which no two are alike, against code of the test's own


def uneven() -> list[Residual]:
    """Return releases of unequal clients, rounds, steps, parts and shapes; some numbers are far too small or shared."""
    rng = np.random.default_rng(8)
    shapes = [
        (3, 1, "W", (4, 6), None), (5, 1, "W", (4, 6), None), (3, 2, "W", (4, 6), None), (5, 2, "b", (1, 7), 1),
        (3, 2, "b", (1, 7), 2), (7, 2, "V", (3, 5), None), (7, 3, "V", (2, 5), None), (7, 3, "b", (1, 9), None),
    ]  # fmt: skip
    found = []
    for client, t, part, shape, step in shapes:
        z = rng.normal(0.2, 1.1, shape)
        z[-1] *= 0.4 + 0.1 * client
        found.append(Residual(client, t, part, z, rng.normal(0.5, 1.0, shape), step=step))
    return found


def two_sided(t: float) -> float:
    return 2 * stats.norm.sf(abs(t))


def scale_p(groups: dict[str, list[np.ndarray]]) -> tuple[float, str]:
    """Return the least p of a chi-square, times their number, and where it is."""
    every = {name: np.concatenate([z.ravel() for z in of]) for name, of in groups.items()}
    each = {name: stats.chi2.cdf((z**2).sum(), len(z)) for name, z in every.items()}
    worst = min(each, key=lambda name: each[name])
    size = np.sqrt((every[worst] ** 2).mean())
    return min(1.0, len(each) * each[worst]), f"{worst}: x {size:.3g}"


def common_p(groups: list[np.ndarray]) -> float:
    """Return the F test of common parts: each array's rows are draws of the same places."""
    between = within = df1 = df2 = 0
    for draws in groups:
        if len(draws) > 1:
            means = draws.mean(0)
            between += len(draws) * (means**2).sum()
            within += ((draws - means) ** 2).sum()
            df1, df2 = df1 + draws.shape[1], df2 + draws.shape[1] * (len(draws) - 1)
    return stats.f.sf((between / df1) / (within / df2), df1, df2)


def grouped(residuals, key) -> dict:
    found: dict = {}
    for r in residuals:
        found.setdefault(key(r), []).append(r.z)
    return found


def test_every_test_of_uneven_releases_by_hand():
    residuals = uneven()
    finding = examine(residuals, 0.9, exact=True, more=[noise_tests.Test("extra", 0.7)])
    found = {test.name: test for test in finding.tests}
    z = np.concatenate([r.z.ravel() for r in residuals])
    clean = np.concatenate([r.clean.ravel() for r in residuals])
    n, squares = len(z), (z**2).sum()
    assert finding.numbers == n == 120
    chi2 = stats.chi2(n)
    wanted = {
        "scale": chi2.cdf(squares), "excess": chi2.sf(squares), "mean": two_sided(z.sum() / np.sqrt(n)),
        "signal": two_sided(z @ clean / np.linalg.norm(clean)), "extra": 0.7,
    }  # fmt: skip
    places = {
        "client": lambda r: f"client {r.client}",
        "part": lambda r: r.part,
        "round": lambda r: f"client {r.client} in round {r.round}" + ("" if r.step is None else f", step {r.step}"),
    }
    worst = {}
    for name, key in places.items():
        wanted[name], worst[name] = scale_p(grouped(residuals, key))
    rows = {}
    for r in residuals:
        for i, row in enumerate(r.z if len(r.z) > 1 else ()):
            rows.setdefault((f"row {i} of {r.part} of client {r.client}", r.z.shape), []).append(row)
    wanted["row"], where = scale_p({f"{place}|{shape}": of for (place, shape), of in rows.items()})
    worst["row"] = where.partition("|")[0] + where[where.index(": x") :]
    wanted["rows"] = common_p([r.z.T for r in residuals if len(r.z) > 1])
    wanted["columns"] = common_p([r.z for r in residuals])
    wanted["shared"] = common_p(
        [np.stack([z.ravel() for z in of]) for of in grouped(residuals, lambda r: (r.part, r.z.shape)).values()]
    )
    pairs = {}
    for i, a in enumerate(residuals):
        for b in residuals[i + 1 :]:
            m = min(a.z.size, b.z.size)
            x, y = a.z.ravel()[:m], b.z.ravel()[:m]
            ratio = ((x - y) ** 2).sum() / ((x + y) ** 2).sum()
            pairs[id(a), id(b)] = 2 * stats.f.cdf(min(ratio, 1 / ratio), m, m), a, b
    p, a, b = min(pairs.values(), key=lambda pair: pair[0])
    wanted["reused"] = min(1.0, len(pairs) * p)
    worst["reused"] = " and ".join(f"{r.part} of {places['round'](r)}" for r in (a, b))
    for name, p in wanted.items():
        assert found[name].p == pytest.approx(p, rel=1e-9), name
    for name, where in worst.items():
        assert found[name].worst == where, name
    assert {"lags", "distribution", "waves", "along", "coordinate", "repeated", "bare", "grid", "shape"} <= set(found)
    assert len(found) == len(finding.tests) == len(wanted) + 9
    others = [test.p for name, test in found.items() if name != "scale"]
    assert finding.p == pytest.approx(min(1.0, 2 * wanted["scale"], 2 * len(others) * min(others)))
    assert finding.scale == pytest.approx(np.sqrt(squares / n))
    assert finding.low == pytest.approx(np.sqrt(squares / chi2.ppf(0.95)))
    assert finding.high == pytest.approx(np.sqrt(squares / chi2.ppf(0.05)))
    assert finding.p_more == pytest.approx(chi2.sf(squares))
    assert finding.finds == pytest.approx(np.sqrt(chi2.ppf(0.0005) / chi2.ppf(0.99)))
    assert finding.tells_at == pytest.approx(min(1.0, 2 * chi2.cdf(0.81 * chi2.ppf(0.99))))


def test_which_tests_there_are_depends_on_what_there_is():
    def named(residuals, **options) -> list[str]:
        return [test.name for test in examine(residuals, **options).tests]

    rng = np.random.default_rng(1)
    one = Residual(2, 4, "W", rng.normal(size=(1, 19)), np.zeros((1, 19)))
    assert named([one]) == ["scale", "mean", "lags"]
    assert named([replace(one, z=one.z[:, :0]), one], exact=True) == ["scale", "mean", "excess", "lags"]
    twenty = replace(one, z=rng.normal(size=(1, 20)), clean=np.ones((1, 20)))
    assert named([twenty]) == [
        "scale",
        "mean",
        "signal",
        "shape",
        "lags",
        "along",
        "coordinate",
        "repeated",
        "bare",
        "grid",
    ]
    assert "distribution" in named([twenty], exact=True)
    assert "waves" in named([twenty], exact=True)
    assert "elsewhere" in named([twenty], others=[one])
    assert "elsewhere" not in named([twenty], others=[replace(one, free=False)])
    assert named([replace(twenty, free=False)])[-2:] == ["coordinate", "grid"]
    assert "shape" not in named([replace(twenty, z=np.ones((1, 20)))])
    levels = np.arange(-9.0, 10.0)
    cells = residual(np.round(3 * twenty.z), 0 * twenty.z, 3.0, client=2, round=4, part="W", levels=levels)
    assert named([cells])[-4:] == ["lags", "along", "bare", "grid"]
    both = [twenty, replace(twenty, client=3)]
    assert "round" not in named(both)
    assert "round" in named([twenty, replace(twenty, round=5)])
    assert "round" in named([replace(twenty, step=0), replace(twenty, step=1)])
    assert "part" in named([twenty, replace(twenty, part="b")])
    assert "part" not in named(both)
    assert "client" in named(both)


def test_residuals_of_rounded_numbers_by_hand():
    """Levels -1, 0.5, 1, 4 have borders at -0.25, 0.75 and 2.5; sigma is 2, and seeds give the share of a cell."""
    sent, clean = np.array([[-1.0, 0.5], [1.0, 4.0], [0.5, -1.0]]), np.array([[0.3, -0.2], [0.1, 1.0], [0.7, 0.4]])
    found = residual(sent, clean, 2.0, client=4, round=6, part="E", levels=np.array([-1.0, 0.5, 1.0, 4.0]), seed=9)
    low = (np.array([[-np.inf, -0.25], [0.75, 2.5], [-0.25, -np.inf]]) - clean) / 2
    high = (np.array([[-0.25, 0.75], [2.5, np.inf], [0.75, -0.25]]) - clean) / 2
    u = np.random.default_rng(9).random((3, 2))
    turned = low > 0  # cells above 0 are mirrored
    wanted = stats.norm.ppf(stats.norm.cdf(low) + u * (stats.norm.cdf(high) - stats.norm.cdf(low)))
    mirrored = -stats.norm.ppf(stats.norm.cdf(-high) + u * (stats.norm.cdf(-low) - stats.norm.cdf(-high)))
    np.testing.assert_allclose(found.z, np.where(turned, mirrored, wanted))
    np.testing.assert_allclose(found.sizes.low, low)
    np.testing.assert_allclose(found.sizes.high, high)
    np.testing.assert_allclose(found.sizes.clean, clean / 2)
    np.testing.assert_allclose(found.sizes.edges, [-np.inf, -0.125, 0.375, 1.25, np.inf])
    np.testing.assert_allclose(found.clean, clean)
    assert (found.client, found.round, found.part, found.free) == (4, 6, "E", False)
    plain = residual(sent.ravel(), clean.ravel(), 2.0, client=4, round=6, part="E")
    np.testing.assert_allclose(plain.z, (sent - clean).reshape(1, 6) / 2)
    assert (plain.clean.shape, plain.free, plain.sizes, plain.grain, plain.step) == ((1, 6), True, None, 0.0, None)
    cube = residual(np.ones((2, 3, 4)), np.zeros((2, 3, 4)), 0.5, client=0, round=1, part="E")
    assert cube.z.shape == (2, 12)
    assert residual(np.ones(3), np.zeros(3), 0.0, client=0, round=1, part="E").z.min() > 1e300


def test_bare_numbers_of_rounded_releases_by_hand(monkeypatch):
    """Those within the range count: of six numbers two lie in an outermost cell. The chance of each is its cell's."""
    asked = []
    monkeypatch.setattr(noise_tests.noise_values, "so_many", lambda hits, chances: asked.append((hits, chances)) or 0.5)
    sent, clean = np.array([[-1.0, 0.5, 1.0, 4.0, 0.5, 1.0]]), np.array([[0.3, 0.6, 0.1, 2.6, 0.7, -0.3]])
    found = residual(sent, clean, 2.0, client=4, round=6, part="E", levels=np.array([-1.0, 0.5, 1.0, 4.0]))
    assert noise_tests._bare_cells([found.sizes]) == 0.5
    ((hits, chances),) = asked
    inside = np.array([0.3, 0.6, 0.1, 0.7])
    np.testing.assert_allclose(chances, stats.norm.cdf((0.75 - inside) / 2) - stats.norm.cdf((-0.25 - inside) / 2))
    assert hits == 2  # 0.6 and 0.7 arrived at 0.5
    outside = residual(sent[:, :1], np.array([[-3.0]]), 2.0, client=4, round=6, part="E", levels=np.array([-1.0, 0, 1]))
    assert noise_tests._bare_cells([outside.sizes]) == 1.0


def test_a_bare_number_lies_from_its_cells_lower_edge_to_below_the_upper_one(monkeypatch):
    """Five cells with edges at 0, 1, 2 and 3. A number at the edge 1 or 2 is bare in the cell above it alone."""
    asked = []
    monkeypatch.setattr(noise_tests.noise_values, "so_many", lambda hits, chances: asked.append((hits, chances)) or 0.5)
    edges = np.array([-np.inf, 0.0, 1.0, 2.0, 3.0, np.inf])
    clean = np.array([[1.0, 1.0, 2.0, 1.5, 0.5, 2.5, 0.5]])
    arrived = np.array([[2, 1, 2, 2, 2, 3, 1]])
    low, high = edges[arrived] - clean, edges[arrived + 1] - clean
    assert noise_tests._bare_cells([Rounded(low, high, clean, edges)]) == 0.5
    assert asked[0][0] == 4  # at 1 and in [1, 2); 1.5, 2.5 and 0.5 in their own
    assert asked[0][1].shape == (7,)


def test_single_values_are_spread_over_their_own_grain(monkeypatch):
    rng, asked = np.random.default_rng(3), {}
    for name, result in (("repeated", 0.1), ("bare", 0.2), ("grid", 0.3), ("elsewhere", 0.4)):
        monkeypatch.setattr(
            noise_tests.noise_values, name, lambda *a, name=name, result=result: asked.update({name: a}) or result
        )
    grains = rng.random((5, 40)) * 1e-3
    mine = [
        Residual(1, 1, "a", rng.normal(size=(5, 40)), np.zeros((5, 40)), grain=grains),
        Residual(1, 1, "b", rng.normal(size=(1, 50)), np.zeros((1, 50)), grain=2e-4),
    ]
    others = [Residual(1, 1, "c", rng.normal(size=(1, 9)), np.zeros((1, 9)), grain=g) for g in (0.02, 0.01)]
    found = noise_tests._single_values(mine, others)
    assert [(t.name, t.p) for t in found] == [("repeated", 0.1), ("bare", 0.2), ("grid", 0.3), ("elsewhere", 0.4)]
    z, grain = np.concatenate([r.z.ravel() for r in mine]), np.concatenate([grains.ravel(), np.full(50, 2e-4)])
    loose = z + grain * (np.random.default_rng(20).random(250) - 0.5)
    coarsest = np.quantile(grain, 0.99)
    np.testing.assert_allclose(asked["repeated"][0], loose)
    assert asked["repeated"][1] == pytest.approx(coarsest)
    np.testing.assert_allclose(asked["bare"][0], z)
    np.testing.assert_allclose(asked["bare"][1], grain)
    np.testing.assert_allclose(asked["grid"][0], loose)
    np.testing.assert_allclose(asked["elsewhere"][0], loose)
    np.testing.assert_allclose(asked["elsewhere"][1], np.concatenate([r.z.ravel() for r in others]))
    assert asked["elsewhere"][2] == pytest.approx(0.02)
    assert len(noise_tests._single_values(mine, [])) == 3


def test_the_shape_of_numbers_by_hand():
    """Geary's ratio has the moments of |z| over those of the root mean square; its tails are a gamma's."""
    z = stats.norm.ppf((np.arange(37) + 0.5) / 37) ** 3 + 0.3
    n, m = 37, np.sqrt(2 / np.pi)
    a = np.abs(z).mean() / np.sqrt((z**2).mean())
    log = special.gammaln
    rms = [np.exp(log((n + k) / 2) - log(n / 2)) * (2 / n) ** (k / 2) for k in (1, 2, 3)]
    mean_abs = [
        m, (1 + (n - 1) * m**2) / n, (2 * m + 3 * m * (n - 1) + (n - 1) * (n - 2) * m**3) / n**2
    ]  # fmt: skip
    one, two, three = (top / bottom for top, bottom in zip(mean_abs, rms, strict=True))
    variance = two - one**2
    skew = (three - 3 * one * two + 2 * one**3) / variance**1.5
    left = stats.pearson3.cdf((a - one) / np.sqrt(variance), skew)
    low, high = noise_tests._geary(a, n)
    assert (low, high) == (pytest.approx(left, rel=1e-4), pytest.approx(1 - left, rel=1e-4))
    signs = two_sided((z * np.abs(z)).sum() / np.sqrt((z**4).sum()))
    assert noise_tests._shape(z) == pytest.approx(min(1.0, 2 * min(2 * left, 2 * (1 - left), signs)), rel=1e-4)
    lopsided = np.abs(stats.norm.ppf((np.arange(37) + 0.5) / 37 * 0.7 + 0.25))
    signs = two_sided((lopsided**2).sum() / np.sqrt((lopsided**4).sum()))
    assert noise_tests._shape(lopsided) == pytest.approx(2 * signs)


def test_how_many_numbers_tell_by_trying_them():
    needed = noise_tests.numbers_to_tell(0.001)
    tells = [2 * stats.chi2.cdf(0.81 * stats.chi2.ppf(0.99, n), n) for n in (needed - 1, needed)]
    assert tells[1] < 0.001 <= tells[0]
    assert noise_tests.numbers_to_tell(0.05) < needed


def test_many_releases_are_compared_one_in_some_on_their_first_numbers(monkeypatch):
    monkeypatch.setattr(noise_tests, "MOST", 3)
    monkeypatch.setattr(noise_tests, "PREFIX", 6)
    rng = np.random.default_rng(0)
    residuals = [Residual(k, 1, "W", rng.normal(size=(1, 8)), np.zeros((1, 8))) for k in range(5)]
    found = noise_tests._reused(residuals)
    chosen = [residuals[i].z[0, :6] for i in (0, 2, 4)]
    ps = {}
    for i, j in ((0, 1), (0, 2), (1, 2)):
        ratio = ((chosen[i] - chosen[j]) ** 2).sum() / ((chosen[i] + chosen[j]) ** 2).sum()
        ps[i, j] = 3 * 2 * stats.f.cdf(min(ratio, 1 / ratio), 6, 6)
    i, j = min(ps, key=lambda at: ps[at])
    assert found.p == pytest.approx(min(1.0, ps[i, j]))
    assert found.worst == f"W of client {2 * i} in round 1 and W of client {2 * j} in round 1"
    assert noise_tests._reused(residuals[:1]) is None
    same = noise_tests._reused([residuals[0], replace(residuals[0], client=9)])
    assert same.p < 1e-10
    nothing = [replace(r, z=np.zeros((1, 8))) for r in residuals[:2]]
    assert noise_tests._reused(nothing).p == 1.0


def test_every_pair_of_releases_is_compared_on_all_that_both_have():
    """By loops. Two releases of nothing tell nothing, and do not hide the pair that was drawn alike. The pair differs
    from the fourth number on, which the shortest release has not."""
    rng = np.random.default_rng(4)
    drawn = rng.normal(size=9)
    alike = np.r_[rng.normal(size=3), drawn[3:] + 0.2 * rng.normal(size=6)]
    values = [np.zeros(5), rng.normal(size=3), drawn, np.zeros(4), alike]
    residuals = [Residual(i, 1, "E", z.reshape(1, -1), np.zeros((1, len(z)))) for i, z in enumerate(values)]
    found = noise_tests._reused(residuals)
    each = {}
    for i, a in enumerate(values):
        for j, b in enumerate(values[:i]):
            m = min(len(a), len(b))
            if a[:m].any() or b[:m].any():
                f = ((a[:m] - b[:m]) ** 2).sum() / ((a[:m] + b[:m]) ** 2).sum()
                each[j, i] = 2 * min(stats.f.cdf(f, m, m), stats.f.sf(f, m, m))
    assert min(each, key=each.get) == (2, 4)
    assert each[2, 4] * 10 < 0.9
    assert found.p == pytest.approx(each[2, 4] * 10)
    assert found.worst == "E of client 2 in round 1 and E of client 4 in round 1"


def test_the_upper_tail_of_f_by_hand():
    """With one degree on either side P[F > f] = 1 - 2 / pi atan(sqrt(f)): a third at 3. Nothing is no evidence."""
    assert noise_tests._f_upper(3.0, 1, 1.0, 1) == pytest.approx(1 / 3)
    assert noise_tests._f_upper(2.0, 3, 4.0, 5) == pytest.approx(stats.f.sf((2 / 3) / (4 / 5), 3, 5))
    assert noise_tests._f_upper(2.0, 0, 4.0, 5) == noise_tests._f_upper(2.0, 3, 4.0, 0) == 1.0
    assert noise_tests._f_upper(0.0, 3, 0.0, 5) == noise_tests._f_upper(0.0, 3, 4.0, 5) == 1.0
    assert noise_tests._f_upper(2.0, 3, 0.0, 5) == 0.0
