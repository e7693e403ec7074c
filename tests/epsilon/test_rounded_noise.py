"""The scale of noise that travelled rounded: cells, scores and limits by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from fedaudit.epsilon import rounded_noise
from fedaudit.epsilon.rounded_noise import Rounded, RoundedScale, _scores, within


def fine(values: np.ndarray, width: float = 1e-3) -> Rounded:
    """Numbers in cells so narrow that nothing is lost; the edges are of two cells only, which the limits do not use."""
    return Rounded(values - width / 2, values + width / 2, np.zeros_like(values), np.array([-np.inf, 0.0, np.inf]))


@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.5), (1.0, 2.5), (-math.inf, -1.0), (3.0, math.inf)])
def test_a_cells_score_is_the_mean_of_its_squares_less_one(low, high):
    normal = stats.norm.pdf
    top, _ = integrate.quad(lambda e: (e * e - 1) * normal(e), max(low, -12), min(high, 12))
    mass = stats.norm.cdf(high) - stats.norm.cdf(low)
    assert _scores(np.array([low]), np.array([high])) == pytest.approx([top / mass])


def test_a_cell_far_out_counts_as_its_middle():
    assert _scores(np.array([39.0, -39.5]), np.array([39.5, -39.0])) == pytest.approx([39.25**2 - 1] * 2)


def test_a_number_within_its_cell():
    """The middle of the whole line is 0; three quarters of the upper half lie below the quantile at 7/8."""
    low, high = np.array([-math.inf, 0.0, 1.0, -2.0]), np.array([math.inf, math.inf, 2.0, -1.0])
    found = within(low, high, np.array([0.5, 0.75, 0.0, 0.0]))
    assert found[0] == pytest.approx(0, abs=1e-12)
    assert np.all((found >= low) & (found <= high))
    assert found[1] == pytest.approx(stats.norm.ppf(7 / 8))
    assert (found[2], found[3]) == pytest.approx((2.0, -2.0)), "cells above 0 count from their far end"


def test_scale_and_limits_of_normal_noise_by_hand():
    """400 numbers of mean square 1 in narrow cells: log L(s) = -400 log s - 200 / s^2. The limits are where it falls by
    z^2 / 2 below its largest value, at s = 1: below by half of the level, and above by `each`."""
    values = stats.norm.ppf((np.arange(400) + 0.5) / 400)
    values /= np.sqrt((values**2).mean())
    of = RoundedScale([fine(values)])
    assert of.scale == pytest.approx(1, rel=1e-4)
    low, high = of.limits(0.05, 0.05)

    def drop(s):
        return 400 * math.log(s) + 200 / s**2 - 200

    assert drop(low) == pytest.approx(stats.norm.ppf(0.975) ** 2 / 2, rel=1e-3)
    assert drop(high) == pytest.approx(stats.norm.ppf(0.95) ** 2 / 2, rel=1e-3)
    assert low < 1 < high


def test_noise_beyond_the_grid_of_scales_has_no_upper_limit():
    """The grid ends at 4. Numbers of deviation 6 could have any scale above; those of deviation 2 could not."""
    values = stats.norm.ppf((np.arange(50) + 0.5) / 50)
    assert RoundedScale([fine(6 * values)]).limits(0.05, 0.05)[1] == math.inf
    low, high = RoundedScale([fine(2 * values)]).limits(0.05, 0.05)
    assert 1.2 < low < 2 < high < 3.5


def test_too_many_cells_are_looked_at_one_in_some(monkeypatch):
    """Two numbers in two cells each are four cells. With room for three, every other number is looked at."""
    cells = fine(np.array([0.3, 0.7]))
    assert RoundedScale([cells])._parts[0][0].tolist() == [[0.0], [0.0]]
    monkeypatch.setattr(rounded_noise, "MOST", 4)
    assert len(RoundedScale([cells])._parts[0][0]) == 2
    monkeypatch.setattr(rounded_noise, "MOST", 3)
    assert len(RoundedScale([cells])._parts[0][0]) == 1
    assert RoundedScale([cells]).value == pytest.approx(0.3**2 - 1, abs=1e-3)


def test_probabilities_of_cells():
    """A clean number of 1 and edges at -inf, 0, 2, inf: residual cells below -1, to 1, above; twice the noise: 1/2."""
    cells = Rounded(np.array([-1.0]), np.array([1.0]), np.array([1.0]), np.array([-np.inf, 0.0, 2.0, np.inf]))
    of = RoundedScale([cells])
    tail = stats.norm.cdf(-1)
    assert of._at(1.0)[0] == pytest.approx(np.array([[tail, 1 - 2 * tail, tail]]))
    half = stats.norm.cdf(-0.5)
    assert of._at(2.0)[0] == pytest.approx(np.array([[half, 1 - 2 * half, half]]))


# uint8: 256 levels of [-1, 1], all beyond clamped; int8: 255 levels of the largest number. In units of sigma: fine
# cells, cells of one sigma and a half, and a range of a third of sigma, where hardly anything arrives but the ends.
GRIDS = {
    "uint8, fine": np.arange(256) / 127.5 * 3 - 3,
    "int8, coarse": np.arange(-127, 128) * 1.5,
    "uint8, clamped": (np.arange(256) / 127.5 - 1) / 3,
}


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_the_limits_of_rounded_noise_cover_the_truth(grid, scale):
    """800 numbers with clean parts of their own, 100 times: each side is missed in 2.5 % (9 or more of 100 have a
    probability of 0.1 %); and the limits are no wider than that, so that one is missed at all."""
    levels = GRIDS[grid]
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    rng, found = np.random.default_rng(5), []
    for _ in range(100):
        clean = rng.uniform(levels[0] / 2, levels[-1] / 2, 800) if "int8" not in grid else rng.normal(0, 4, 800)
        cell = np.searchsorted(edges[1:-1], clean + scale * rng.standard_normal(800))
        one = Rounded(edges[cell] - clean, edges[cell + 1] - clean, clean, edges)
        of = object.__new__(RoundedScale)
        of.cells = [one]  # the limits use nothing else; the test of the promised scale goes over all cells
        found.append(of.limits(0.05, 0.025))
    below, above = sum(high < scale for _, high in found), sum(low > scale for low, _ in found)
    assert below <= 8
    assert above <= 8
    assert below + above >= 1
    assert np.median([low for low, _ in found]) < scale < np.median([high for _, high in found])


def test_a_cell_that_begins_at_zero_counts_from_there():
    """Only cells above 0 are mirrored. Far out, where nothing is left of Phi, a number stays in its cell."""
    found = within(np.array([0.0, 45.0, -46.0]), np.array([2.0, 46.0, -45.0]), np.array([0.0, 0.5, 0.5]))
    assert found[0] == 0.0
    assert found[1] == 45.0
    assert found[2] == -45.0
    whole = within(np.array([-math.inf] * 2), np.array([math.inf] * 2), np.array([0.0, 1.0]))
    assert whole.tolist() == [-40.0, 40.0]


def test_the_likelihood_of_a_scale_is_that_of_all_cells():
    """Cells from -1 to 1/2 and above 2, of two releases, at noise of 1.5 sigma."""
    edges = np.array([-np.inf, 0.0, np.inf])
    one, other = (
        Rounded(np.array([low]), np.array([high]), np.zeros(1), edges) for low, high in ((-1.0, 0.5), (2.0, np.inf))
    )
    of = RoundedScale([one, other])
    cdf = stats.norm.cdf
    wanted = math.log(cdf(0.5 / 1.5) - cdf(-1 / 1.5)) + math.log(cdf(-2 / 1.5))
    assert of._likelihood(1.5) == pytest.approx(wanted)
    assert isinstance(one.test([one, other]), RoundedScale)
    assert one.test([one, other]).cells == [one, other]


def test_the_test_sums_the_scores_of_all_cells_of_all_numbers():
    """Clean numbers of 1 and -2, cells split at 0: residuals below -1 or above, and below 2 or above."""
    edges = np.array([-np.inf, 0.0, np.inf])
    cells = Rounded(np.array([[-1.0, -np.inf]]), np.array([[np.inf, 2.0]]), np.array([[1.0, -2.0]]), edges)
    of = RoundedScale([cells])
    density, cdf = stats.norm.pdf, stats.norm.cdf

    def score(low, high):
        ends = [x * density(x) if math.isfinite(x) else 0.0 for x in (low, high)]
        return (ends[0] - ends[1]) / (cdf(high) - cdf(low))

    wanted = np.array([[score(-math.inf, at), score(at, math.inf)] for at in (-1.0, 2.0)])
    assert of._scores[0] == pytest.approx(wanted)
    assert of.value == pytest.approx(score(-1.0, math.inf) + score(-math.inf, 2.0))
    assert of._chances[0] == pytest.approx(np.array([[cdf(-1), cdf(1)], [cdf(2), cdf(-2)]]))
    assert (of._chances[0] * of._scores[0]).sum(1) == pytest.approx([0.0, 0.0], abs=1e-12)


def test_next_to_no_noise_is_at_the_end_of_the_grid():
    """The grid of scales begins at 0.01: less is not looked for, and there is no limit below it."""
    values = 1e-4 * stats.norm.ppf((np.arange(50) + 0.5) / 50)
    of = RoundedScale([fine(values, 1e-7)])
    assert of.scale == pytest.approx(0.01, rel=1e-4)
    low, high = of.limits(0.05, 0.05)
    assert low == pytest.approx(0.01)
    assert 0.01 < high < 0.02


@pytest.mark.parametrize("off", [0.99, 1.01])
def test_the_likeliest_scale_is_looked_for_on_either_side_of_the_nearest_of_the_grid(off):
    wanted = 0.01 * 400 ** (150 / 199) * off
    values = stats.norm.ppf((np.arange(60) + 0.5) / 60)
    values *= wanted / np.sqrt((values**2).mean())
    assert RoundedScale([fine(values)]).scale == pytest.approx(wanted, rel=1e-3)


def test_the_likeliest_scale_lies_between_two_of_the_grid():
    """Numbers of mean square 1.7^2 exactly, in narrow cells: log L = -n log s - n 1.7^2 / (2 s^2) is largest there."""
    values = stats.norm.ppf((np.arange(400) + 0.5) / 400)
    values *= 1.7 / np.sqrt((values**2).mean())
    best, most, grid, value = RoundedScale([fine(values)])._profile
    assert best == pytest.approx(1.7, rel=1e-4)
    assert most >= value.max()
    constant = 400 * math.log(1e-3 / math.sqrt(2 * math.pi))
    assert most == pytest.approx(constant - 400 * math.log(1.7) - 200, abs=0.01)
    assert (len(grid), grid[0], grid[-1]) == (200, pytest.approx(0.01), pytest.approx(4.0))
    at = constant - 400 * np.log(grid[100:]) - 200 * 1.7**2 / grid[100:] ** 2
    assert value[100:] == pytest.approx(at, rel=1e-3)


def test_a_limit_in_the_last_cell_of_the_grid_is_found():
    """log L has fallen by z^2 / 2 at r times the likeliest scale s, where n (log r + 1 / (2 r^2) - 1/2) is that. The
    grid ends at 4 and 3.88: with s = 3.95 / r its last scale alone lies outside."""
    z = stats.norm.ppf(0.95)
    r = optimize.brentq(lambda r: 50 * (math.log(r) + 1 / (2 * r * r) - 0.5) - z * z / 2, 1.0001, 3)
    values = stats.norm.ppf((np.arange(50) + 0.5) / 50)
    values *= 3.95 / r / np.sqrt((values**2).mean())
    assert RoundedScale([fine(values)]).limits(0.05, 0.05)[1] == pytest.approx(3.95, rel=1e-3)
