"""Noise that only looks like noise: each trick is found by its test, and honest numbers in any format are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedaudit.epsilon import noise_values as values
from fedaudit.epsilon.noise_tests import Residual, examine

POOL = np.random.default_rng(99).normal(size=1000)


def floats(noise, seed=0, shape=(20, 25), releases=4, dtype=torch.float32):
    """Releases in a floating-point format, of two clients in two rounds: 2,000 numbers."""
    rng, found = np.random.default_rng(seed), []
    for i in range(releases):
        clean = torch.from_numpy(rng.normal(size=shape)).to(dtype)
        sent = clean + torch.from_numpy(noise(rng, shape)).to(dtype)
        clean, sent = (t.double().numpy() for t in (clean, sent))
        grain = 2 * values.spacing(sent, torch.finfo(dtype).eps)
        found.append(Residual(i % 2, i // 2, "E", sent - clean, clean, grain=grain))
    return found


def honest(rng, shape):
    return rng.normal(size=shape)


def by_name(finding):
    return {test.name: test.p for test in finding.tests}


def in_format(dtype):
    return lambda rng, shape: torch.from_numpy(honest(rng, shape)).to(dtype).double().numpy()


def mirrored(rng, shape):
    flat = rng.normal(size=shape[0] * shape[1])
    order = rng.permutation(len(flat))
    half = len(flat) // 2
    flat[order[half:]] = -flat[order[:half]]
    return flat.reshape(shape)


def smooth(rng, shape):
    flat = rng.normal(size=shape[0] * shape[1] + 1)
    return ((flat[1:] + flat[:-1]) / np.sqrt(2)).reshape(shape)


def without(rng, shape):
    return np.where(rng.random(shape) < 1 / 50, 0.0, honest(rng, shape) * np.sqrt(50 / 49))


def column(rng, shape):
    made = honest(rng, shape)
    made[:, 3] *= 0.3
    return made


@pytest.mark.parametrize(
    ("noise", "test"),
    [
        (lambda rng, shape: np.round(honest(rng, shape) / 0.1) * 0.1, "repeated"),
        (lambda rng, shape: np.round(honest(rng, shape) / 0.001) * 0.001, "grid"),
        (in_format(torch.bfloat16), "repeated"),
        (in_format(torch.float16), "grid"),
        (lambda rng, shape: rng.choice(POOL, shape), "repeated"),
        (lambda rng, shape: np.resize(rng.normal(size=50), shape), "repeated"),
        (lambda rng, shape: np.resize(rng.normal(size=50), shape), "lags"),
        (mirrored, "repeated"),
        (smooth, "lags"),
        (smooth, "waves"),
        (without, "bare"),
        (column, "coordinate"),
        (lambda rng, shape: rng.standard_t(3, size=shape) / np.sqrt(3), "distribution"),
        (lambda rng, shape: rng.uniform(-np.sqrt(3), np.sqrt(3), size=shape), "distribution"),
    ],
)
def test_each_trick_is_found_by_its_test(noise, test):
    finding = examine(floats(noise), exact=True)
    assert finding.p < 1e-3
    assert by_name(finding)[test] < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_honest_noise_in_any_format_is_no_grid(dtype):
    """20 repetitions each: that one of 20 tests has p < 1e-4 has a probability of 4 %; below 1e-5, 0.4 %."""
    found = [by_name(examine(floats(honest, seed, dtype=dtype, shape=(10, 25)), exact=False)) for seed in range(20)]
    for name in ("repeated", "bare", "grid", "lags", "coordinate", "along"):
        ps = np.array([tests[name] for tests in found])
        assert ps.min() > 1e-5, name
        assert (ps < 0.05).mean() <= 0.2, name


def test_the_same_noise_in_another_field_is_found():
    """The numbers come in another order and with other signs; one in five is enough."""
    rng = np.random.default_rng(1)
    one, other = floats(honest, 1), floats(honest, 2)
    assert by_name(examine(one, others=other))["elsewhere"] > 1e-3
    taken = rng.permutation(np.concatenate([r.z.ravel() for r in one]))[:400] * rng.choice([-1, 1], 400)
    other[0].z.ravel()[:400] = taken
    assert by_name(examine(one, others=other))["elsewhere"] < 1e-6


def test_noise_that_leaves_the_release_itself_free_is_found():
    residuals = floats(honest)
    for r in residuals:
        r.z[:] -= (r.z * r.clean).sum() / (r.clean**2).sum() * r.clean
    finding = examine(residuals, exact=True)
    assert finding.p < 1e-6
    assert finding.strongest.name == "along"


def test_near_counts_what_lies_in_the_union_of_places():
    """Two of three lie near one of 0.2, 0.2004 (overlapping) and 0.9: a share of 0.0034 + 0.002 of all."""
    p = values.near(np.array([0.1995, 0.9005, 0.5]), np.array([0.2004, 0.9, 0.2]), 0.001)
    share = 0.0024 + 0.002
    assert p == pytest.approx(3 * share**2 * (1 - share) + share**3, rel=1e-9)


def test_the_statistic_of_anderson_and_darling_has_the_p_value_that_simulation_gives():
    rng = np.random.default_rng(0)
    ps = np.array([values.distribution(rng.normal(size=100)) for _ in range(4000)])
    assert 0.03 < (ps < 0.05).mean() < 0.062
    assert (ps < 0.002).mean() <= 0.005


def test_frequencies_without_noise_are_found():
    """One of 50 frequencies has none: the noise is x 0.98 in all, and of normal shape."""
    rng = np.random.default_rng(0)
    blocks = []
    for _ in range(8):
        spectrum = np.fft.rfft(rng.normal(size=100))
        spectrum[17] = 0
        blocks.append(np.fft.irfft(spectrum, 100))
    assert values.waves(blocks) < 1e-9
    assert values.waves(rng.normal(size=(8, 100))) > 1e-3
    assert values.waves(rng.normal(size=(40, 7))) == 1.0, "releases of a few numbers have no waves, and are not accused"


# --- whole functions, on unequal numbers, against code of the test's own


def test_the_spacing_of_a_format_by_next_numbers():
    numbers = np.array([0.75, 1.0, -3.5, 1000.0, 2.0**-20])
    wanted = [float(np.spacing(np.abs(np.float32(x)))) for x in numbers]
    np.testing.assert_allclose(values.spacing(numbers, float(np.finfo(np.float32).eps)), wanted)
    assert values.spacing(np.array([0.0]), 1.0)[0] == pytest.approx(2.0**-100, rel=1e-9)  # as of 1e-30


def test_numbers_are_spread_evenly_over_their_grain():
    z, grain = np.array([1.0, -2.0, 3.0]), np.array([0.1, 0.2, 0.4])
    made = values.spread(z, grain, np.random.default_rng(5))
    np.testing.assert_allclose(made, z + grain * (np.random.default_rng(5).random(3) - 0.5))
    np.testing.assert_allclose(values.folded(z), 2 * stats.norm.cdf(np.abs(z)) - 1)
    assert [values.equal_within(g) for g in (0.0, 1e-9, 1e-3)] == [1e-7, 1e-7, 2e-3]


def test_near_by_a_count_over_the_union():
    """Others at 0.005, 0.3, 0.31, 0.6, 0.995, each 0.02 wide: places from 0, up to 1, and two that overlap."""
    others = np.array([0.6, 0.005, 0.31, 0.995, 0.3])
    mine = np.array([0.01, 0.29, 0.329, 0.45, 0.581, 0.64, 0.7, 0.99, 0.1])
    length = 0.025 + (0.33 - 0.28) + 0.04 + 0.025
    hits = sum(any(abs(m - o) <= 0.02 for o in others) for m in mine)
    assert hits == 5
    assert values.near(mine, others, 0.02) == pytest.approx(stats.binom.sf(hits - 1, 9, length), rel=1e-9)
    assert values.near(np.array([0.5]), np.array([0.1, 0.12]), 0.02) == 1.0
    assert values.near(np.array([0.05]), np.array([0.1, 0.12]), 0.02) == 1.0  # below the first one
    assert values.near(np.array([0.5]), np.array([0.2, 0.8]), 0.6) == 1.0  # they are everywhere
    assert values.near(mine, np.array([]), 0.02) == values.near(np.array([]), others, 0.02) == 1.0


def test_repeated_numbers_are_sought_in_one_half_and_elsewhere_in_all(monkeypatch):
    asked = []
    monkeypatch.setattr(values, "near", lambda mine, others, width: asked.append((mine, others, width)) or 0.3)
    monkeypatch.setattr(values, "MOST", 7)
    rng = np.random.default_rng(2)
    z, theirs = rng.normal(size=11), rng.normal(size=4)
    assert values.repeated(z, 1e-3, np.random.default_rng(6)) == 0.3
    assert values.elsewhere(z, theirs, 1e-2, np.random.default_rng(6)) == 0.3
    u = 2 * stats.norm.cdf(np.abs(np.random.default_rng(6).permutation(z)[:7])) - 1
    again = np.random.default_rng(6)
    both = [again.permutation(z)[:7], again.permutation(theirs)]
    for (mine, others, width), (m, o, w) in zip(
        asked, [(u[3:], u[:3], 2e-3), (*(2 * stats.norm.cdf(np.abs(x)) - 1 for x in both), 2e-2)], strict=True
    ):
        np.testing.assert_allclose(mine, m)
        np.testing.assert_allclose(others, o)
        assert width == w


def test_bare_numbers_by_their_own_grain():
    """Five of ten lie below twice their grain, or below 1e-6 where that is finer."""
    grain = np.array([0.0, 0.0, 0.01, 0.01, 0.02, 0.02, 0.03, 0.03, 0.0, 0.04])
    z = np.array([5e-7, 3e-6, 0.019, -0.021, -0.039, 0.5, 0.05, 2.0, -9e-7, 1.0])
    width = np.maximum(1e-6, 2 * grain)
    chances = 2 * stats.norm.cdf(width) - 1
    assert values.bare(z, grain) == pytest.approx(stats.binom.sf(5 - 1, 10, chances.mean()), rel=1e-9)
    assert values.bare(np.array([0.1, 0.019]), 0.01) == 1.0  # one is no more than one too many
    assert values.so_many(3, np.array([0.1, 0.3])) == pytest.approx(0.0)
    assert values.so_many(2, np.array([0.5, 0.25, 0.3])) == 1.0
    assert values.so_many(2, np.array([0.5, 0.5])) == 1.0, "exactly one more than are expected says nothing"
    assert values.so_many(3, np.full(4, 0.25)) == pytest.approx(4 * 0.75 / 64 + 1 / 256)


def test_a_grid_by_the_sum_of_phases():
    """The largest |sum of e^(2 pi i f z)|^2 / n over the frequencies k / 16, from 1.2 in a deviation on."""
    rng = np.random.default_rng(3)
    z = np.append(np.round(rng.normal(size=45) / 0.37) * 0.37 + 0.05 * rng.normal(size=45), [9.0, -8.5])
    inside = z[np.abs(z) < 8]
    cells = np.floor((inside + 8) / 16 * 2**18)
    k = np.arange(20, 2**16)
    sums = np.array([abs(np.exp(-2j * np.pi * f * cells / 2**18).sum()) ** 2 for f in k[:400]]) / 45
    p = (2**16 - 20) * np.exp(-sums.max())
    assert 1e-12 < p < 0.1
    assert values.grid(z) == pytest.approx(p, rel=1e-6)
    assert values.grid(np.zeros(19)) == 1.0
    assert values.grid(np.append(z, [8.0, -8.0])) == values.grid(z), "the ends are outside"
    assert values.grid(np.zeros(20)) == pytest.approx((2**16 - 20) * np.exp(-20))


def test_lags_by_a_loop_over_distances(monkeypatch):
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=33), rng.normal(size=6), rng.normal(size=1), rng.normal(size=9)]
    blocks[0][5:] = 0.1 * blocks[0][5:] + np.resize(blocks[0][:5], 28)

    def by_loop(most: int) -> tuple[float, int]:
        found = {}
        for lag in range(1, most + 1):
            top = sum((b[lag:] * b[:-lag]).sum() for b in blocks if len(b) > lag)
            weight = sum(((b[lag:] * b[:-lag]) ** 2).sum() for b in blocks if len(b) > lag)
            if weight > 0:
                found[lag] = top**2 / weight
        at = max(found, key=lambda lag: found[lag])
        return min(1.0, 2 * len(found) * np.exp(-found[at] / 2)), at

    for most in (2048, 7, 3):
        monkeypatch.setattr(values, "LAGS", most)
        p, at = values.lags(blocks)
        wanted, place = by_loop(min(most, 32))
        assert (p, at) == (pytest.approx(wanted, rel=1e-9), place)
    assert by_loop(32)[1] == 10
    assert by_loop(32)[0] < 1
    assert values.lags([np.array([1.0]), np.zeros(5)]) == (1.0, 0)
    assert values.lags([np.ones(3000)])[0] < 1e-280


@pytest.mark.parametrize("loud", [0.0, 6.0])
def test_waves_by_a_sum_over_releases_of_one_length(loud):
    """Without a hum the quietest frequency decides, with one the loudest."""
    rng = np.random.default_rng(1)
    blocks = [rng.normal(size=n) for n in (8, 9, 8, 7, 9, 9)]
    blocks[1] += loud * np.cos(2 * np.pi * 2 * np.arange(9) / 9)
    tails = []
    for n in (8, 9):
        group = [b for b in blocks if len(b) == n]
        for k in range(1, 4 if n == 8 else 5):
            turn = np.exp(-2j * np.pi * k * np.arange(n) / n)
            power = sum(abs((b * turn).sum()) ** 2 / n for b in group)
            tails += [stats.gamma.sf(power, len(group)), stats.gamma.cdf(power, len(group))]
    assert len(tails) == 14
    assert values.waves(blocks) == pytest.approx(min(1.0, 14 * min(tails)), rel=1e-9)
    assert values.waves(blocks) < 1
    assert values.waves([np.ones(7)]) == 1.0
    quiet = [b - b.mean() for b in (np.tile([1.0, -1.0], 4), np.tile([-1.0, 1.0], 4))]
    assert values.waves(quiet) == pytest.approx(0.0, abs=1e-9)


def test_coordinates_by_a_loop_over_places():
    rng = np.random.default_rng(7)
    blocks = [(part, rng.normal(size=shape)) for part, shape in (
        ("a", (3, 4)), ("a", (3, 4)), ("a", (2, 4)), ("b", (1, 5)), ("b", (1, 5)), ("b", (1, 5)), ("c", (1, 2)),
    )]  # fmt: skip
    for b in blocks[3:6]:
        b[1][0, 3] *= 0.1
    places = {}
    for part, z in blocks:
        for (i, j), value in np.ndenumerate(z):
            places.setdefault(f"entry {i * z.shape[1] + j} of {part}|{z.shape}", []).append(value)
            if len(z) > 1:
                places.setdefault(f"column {j} of {part}|{z.shape[1]}", []).append(value)
    each = {at: stats.chi2.cdf(np.square(of).sum(), len(of)) for at, of in places.items() if len(of) > 1}
    assert len(each) == 12 + 4 + 5
    worst = min(each, key=lambda at: each[at])
    size = np.sqrt(np.square(places[worst]).mean())
    p, where = values.coordinate(blocks)
    assert p == pytest.approx(21 * each[worst], rel=1e-9)
    assert where == f"{worst.partition('|')[0]}: x {size:.3g}" == f"entry 3 of b: x {size:.3g}"
    assert values.coordinate(blocks[6:]) == (1.0, "")
    columns = values.coordinate([("d", np.array([[1.0, 0.01], [0.8, 0.02], [1.1, -0.02]]))])
    assert columns[0] == pytest.approx(2 * stats.chi2.cdf(9e-4, 3), rel=1e-6)
    assert columns[1].startswith("column 1 of d: x 0.0173")


def test_noise_along_the_release_by_projections():
    rng = np.random.default_rng(4)
    pairs = [(rng.normal(size=n), rng.normal(size=n)) for n in (3, 8, 5)]
    shares = [(z @ c) ** 2 / (c @ c) for z, c in pairs]
    assert values.along([*pairs, (np.ones(3), np.zeros(3))]) == pytest.approx(stats.chi2.cdf(sum(shares), 3))
    assert values.along([(np.ones(3), np.zeros(3))]) == 1.0


def test_the_statistic_of_anderson_and_darling_by_its_sum():
    z = np.array([1.3, -0.2, 2.9, 0.4, 1.7, 0.9, 2.2])
    ordered, n = np.sort(z), 7
    terms = [(2 * i + 1) * (stats.norm.logcdf(ordered[i]) + stats.norm.logsf(ordered[n - 1 - i])) for i in range(n)]
    value = -n - sum(terms) / n
    wanted = 1.15 * np.sqrt(3) * stats.chi2.sf(2 * value, 1)
    assert 0 < wanted < 1
    assert values.distribution(z) == pytest.approx(wanted, rel=1e-9)
    assert values.distribution(stats.norm.ppf((np.arange(30) + 0.5) / 30)) == 1.0


def test_pairs_of_numbers_have_one_distance():
    """Six blocks of two equal numbers, and one of a single number: sum 6, weight 6, Hoeffding 2 e^-3."""
    p, lag = values.lags([np.ones(2)] * 6 + [np.full(1, 9.0)])
    assert (p, lag) == (pytest.approx(2 * math.exp(-3)), 1)
    assert values.lags([np.full(1, 9.0)]) == (1.0, 0)


def test_the_place_with_the_least_noise_counts_and_not_a_place_of_quiet_neighbours():
    """Three releases of two parts: `a` has one entry next to nothing and one that is large, `b` has two usual ones."""
    blocks = [("a", np.array([[0.01, 3.0]])), ("b", np.array([[1.0, -1.0]]))] * 3
    p, where = values.coordinate(blocks)
    assert p == pytest.approx(4 * stats.chi2.cdf(3e-4, 3))
    assert where == "entry 0 of a: x 0.01"
