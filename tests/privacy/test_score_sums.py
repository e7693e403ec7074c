"""Sums of scores: their tails against the binomial, and the scale that they tell, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtri

from fedaudit.privacy.score_sums import GRID, ScoredScale, ScoreSum


class Count(ScoreSum):
    """How many of n numbers are 1, each with probability p: a binomial number. With scale s it is p s."""

    def __init__(self, n: int, p: float, value: float):
        self.value, self._p = value, p
        self._scores, self._times = [np.array([[0.0, 1.0]])], [np.array([float(n)])]
        self._chances = self._at(1.0)

    def _at(self, scale: float) -> list[np.ndarray]:
        return [np.array([[1 - self._p * scale, self._p * scale]])]


class CountedScale(Count, ScoredScale):
    """n p s is expected with scale s, with variance n p s (1 - p s)."""


@pytest.mark.parametrize(("n", "p", "value"), [(200, 0.3, 40), (200, 0.3, 60), (200, 0.3, 85), (40, 0.5, 9)])
def test_tails_are_those_of_a_binomial(n, p, value):
    of = Count(n, p, value)
    exact = stats.binom(n, p)
    assert of.below(value) == pytest.approx(exact.cdf(value), rel=0.08)
    less, more = of.p_values()
    assert less == pytest.approx(exact.cdf(value), rel=0.08)
    assert more == pytest.approx(exact.sf(value - 1), rel=0.05), "P[at least this], itself included"


def test_rows_that_stand_for_many_count_as_many():
    """The same 30 numbers as one row that stands for 30, and as 30 rows."""
    together, each = Count(30, 0.4, 9), Count(30, 0.4, 9)
    each._scores, each._chances = [np.tile([[0.0, 1.0]], (30, 1))], [np.tile([[0.6, 0.4]], (30, 1))]
    each._times = None
    assert each._moments == pytest.approx((12.0, 7.2))
    assert together._moments == pytest.approx((12.0, 7.2))
    assert each._range == together._range == (0.0, 30.0)
    assert each._step == pytest.approx(1.0)
    assert together.p_values() == pytest.approx(each.p_values())


def test_impossible_values_are_outside_of_the_range():
    """A value of probability 0 is no limit, however far out it lies."""
    of = Count(10, 0.4, 3)
    of._scores, of._chances = [np.array([[-5.0, 0.0, 1.0, 9.0]])], [np.array([[0.0, 0.6, 0.4, 0.0]])]
    assert of._range == (0.0, 10.0)
    assert of.below(9.6) == 1.0


def test_the_step_of_unequal_values_by_hand():
    """Values 0, 1, 3 with probabilities 1/2, 1/4, 1/4, mean 1 and variance 3/2. Of two draws, E (s - s')^2 = 3 and
    E |s - s'| = 2 (1/8 + 3/8 + 2/16) = 5/4: 12/5."""
    of = Count(7, 0.5, 0)
    of._scores, of._chances = [np.array([[3.0, 0.0, 1.0]])], [np.array([[0.25, 0.5, 0.25]])]
    assert of._step == pytest.approx(12 / 5)
    assert of._moments == pytest.approx((7.0, 10.5))
    k, k1, k2 = of._cumulants(math.log(2))
    # E e^(ts) = 1/2 + 2/4 + 8/4 = 3, tilted probabilities 1/6, 1/6, 4/6: mean 13/6, E s^2 = 37/6.
    assert (k, k1, k2) == pytest.approx((7 * math.log(3), 7 * 13 / 6, 7 * (37 / 6 - (13 / 6) ** 2)))


def test_rare_values_do_not_stop_the_search():
    """At the first guess all the weight lies on one value, and the second derivative is 0."""
    of = Count(1000, 1e-6, 2)
    assert of.below(2) > 0.999
    assert of.p_values()[1] < 1e-4
    assert Count(10, 1e-6, 1).below(1) > 0.999, "the first guess lies far beyond the root"


def test_what_is_certain_has_no_tail():
    assert Count(5, 0.0, 0).p_values() == (1.0, 0.0)


def test_the_scale_and_its_limits_by_hand():
    """n = 10,000, p = 1/4, found 2000: scale 0.8. The lower limit s has n p s + z sqrt(n p s (1 - p s)) = 2000 with
    z = 1.96 (so many counts lie that far above their mean), the upper one with z = -1.645 or so."""
    of = CountedScale(10_000, 0.25, 2000.0)
    assert of.scale == pytest.approx(0.8, rel=1e-3)
    low, high = of.limits(0.05, 0.05)
    for s, z in ((low, -ndtri(0.025)), (high, ndtri(0.05))):
        assert 2500 * s + z * math.sqrt(2500 * s * (1 - s / 4)) == pytest.approx(2000, rel=1e-3)
    assert low < 0.8 < high


def test_a_score_beyond_the_largest_scale_has_no_upper_limit():
    """At scale 3, the largest, 7500 are expected with a deviation of 43: 1.645 deviations less are 7429."""
    low, high = CountedScale(10_000, 0.25, 7440.0).limits(0.05, 0.05)
    assert high == math.inf
    assert low == pytest.approx(2.94, abs=0.03)
    assert CountedScale(10_000, 0.25, 7400.0).limits(0.05, 0.05)[1] < 3


def test_the_level_at_which_a_scale_is_found():
    """Half the noise: 50 of 400 expected instead of 100, deviation sqrt(43.75); with probability 0.9 at most 58.5 are
    found, and a binomial number of 100 expected is at most 58 with a probability of 4e-7."""
    of = Count(400, 0.25, 0)
    expected = 50 + 1.2816 * math.sqrt(400 * 0.125 * 0.875)
    assert of.level(0.5, 0.9) == pytest.approx(of.below(expected), rel=1e-3)
    assert stats.binom(400, 0.25).cdf(57) < of.level(0.5, 0.9) < stats.binom(400, 0.25).cdf(59)
    assert of.level(0.5, 0.5) < of.level(0.5, 0.9) < of.level(0.5, 0.99)
    found = of.finds(0.01, 0.9)
    assert found in GRID
    assert of.level(found, 0.9) < 0.01
    assert of.level(GRID[GRID.index(found) - 1], 0.9) >= 0.01, "the next larger one would not be found"
    assert Count(2, 0.25, 0).finds(0.01, 0.9) == 0.0


@pytest.mark.parametrize("t", [-0.7, 0.0, 0.5])
def test_cumulants_by_hand_where_a_value_is_impossible(t):
    """Ten numbers that are 1 with 0.4, else 0; 9 and -5 have no probability: K = 10 log(0.6 + 0.4 e^t)."""
    of = Count(10, 0.4, 3)
    of._scores, of._chances = [np.array([[-5.0, 0.0, 1.0, 9.0]])], [np.array([[0.0, 0.6, 0.4, 0.0]])]
    q = 0.4 * math.exp(t) / (0.6 + 0.4 * math.exp(t))
    assert of._cumulants(t) == pytest.approx((10 * math.log(0.6 + 0.4 * math.exp(t)), 10 * q, 10 * q * (1 - q)))


class Uneven(ScoredScale):
    """Two tensors: rows of three values that stand for 2 and 3 numbers, and a row of two that stands for 4."""

    def __init__(self, value: float = 6.0):
        self.value = value
        self._scores = [np.array([[0.5, -1.0, 2.0], [1.5, 0.0, -0.5]]), np.array([[0.25, 1.75]])]
        self._times = [np.array([2.0, 3.0]), np.array([4.0])]
        self._chances = self._at(1.0)

    def _at(self, scale: float) -> list[np.ndarray]:
        tilted = [
            (np.array([[0.2, 0.5, 0.3], [0.4, 0.35, 0.25]]), self._scores[0]), (np.array([[0.6, 0.4]]), self._scores[1])
        ]  # fmt: skip
        made = [p * np.exp((scale - 1) * s) for p, s in tilted]
        return [m / m.sum(1, keepdims=True) for m in made]

    def numbers(self, scale: float = 1.0) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the nine numbers, each with its values and chances."""
        return [
            (s, p)
            for scores, chances, times in zip(self._scores, self._at(scale), self._times, strict=True)
            for s, p, n in zip(scores, chances, times, strict=True)
            for _ in range(int(n))
        ]

    def moments(self, scale: float = 1.0) -> tuple[float, float]:
        means = [(s * p).sum() for s, p in self.numbers(scale)]
        return sum(means), sum((p * (s - m) ** 2).sum() for (s, p), m in zip(self.numbers(scale), means, strict=True))


@pytest.mark.parametrize("t", [-0.8, 0.0, 0.6])
def test_a_sum_of_uneven_numbers_one_by_one(t):
    of = Uneven()
    tilted = [p * np.exp(t * s) for s, p in of.numbers()]
    k = sum(math.log(w.sum()) for w in tilted)
    k1 = [(w * s).sum() / w.sum() for w, (s, _) in zip(tilted, of.numbers(), strict=True)]
    k2 = sum((w * (s - m) ** 2).sum() / w.sum() for w, (s, _), m in zip(tilted, of.numbers(), k1, strict=True))
    assert of._cumulants(t) == pytest.approx((k, sum(k1), k2))
    squares = sum((p[:, None] * p * (s[:, None] - s) ** 2).sum() for s, p in of.numbers())
    apart = sum((p[:, None] * p * np.abs(s[:, None] - s)).sum() for s, p in of.numbers())
    assert of._step == pytest.approx(squares / apart)
    assert of._range == (-2 - 1.5 + 1.0, 4 + 4.5 + 7.0)
    assert of._moments == pytest.approx(of.moments())
    assert of._moments_at(1.3) == pytest.approx(of.moments(1.3))


@pytest.mark.parametrize("value", [-0.5, 2.0, 9.0, 12.0])
def test_a_sums_tail_by_lugannani_and_rice(value):
    """The tilt solves K' = value; the tail is that of the saddle point, with half a step added."""
    of = Uneven()
    at = value + of._step / 2
    t = brentq(lambda t: of._cumulants(t)[1] - at, -60, 60, xtol=1e-13)
    k, _, k2 = of._cumulants(t)
    w, u = math.copysign(math.sqrt(2 * (t * at - k)), t), t * math.sqrt(k2)
    wanted = stats.norm.cdf(w) + stats.norm.pdf(w) * (1 / w - 1 / u)
    assert of.below(value) == pytest.approx(wanted, rel=1e-5)
    assert of._tilt(at) == pytest.approx((t, k, k2), rel=1e-5)
    again = Uneven(value)
    assert again.p_values() == pytest.approx((wanted, 1 - of.below(value - of._step)), rel=1e-5)


def test_near_its_mean_and_at_its_ends_a_sum_has_a_simple_tail():
    of = Uneven()
    mean, variance = of.moments()
    near = mean + 0.05 * math.sqrt(variance) - of._step / 2
    assert of.below(near) == pytest.approx(stats.norm.cdf(0.05))
    assert of.below(15.5) == 1.0
    assert 0 <= of.below(-4.0) < 1e-4
    at = of.moments(0.7)
    assert of.level(0.7, 0.9) == pytest.approx(of.below(at[0] + stats.norm.ppf(0.9) * math.sqrt(at[1])))


def test_scales_and_limits_of_uneven_numbers_lie_where_the_score_does():
    of = Uneven()
    mean, deviation = np.array([of.moments(s) for s in of.SCALES]).T
    deviation = np.sqrt(deviation)
    for shift, found in ((0.0, of.scale), (1.96, of.limits(0.05, 0.1)[0]), (-1.2816, of.limits(0.05, 0.1)[1])):
        at = np.exp(np.interp(of.value, np.maximum.accumulate(mean + shift * deviation), np.log(of.SCALES)))
        assert found == pytest.approx(at, rel=1e-3)
    assert np.allclose([of.SCALES[0], of.SCALES[-1], len(of.SCALES)], [0.05, 3.0, 48])
    assert Uneven(15.4).limits(0.05, 0.1)[1] == math.inf
    assert Uneven(15.4).scale == pytest.approx(3.0)


def test_what_cannot_happen_has_no_part_in_the_sum_however_large_its_score():
    """Of three outcomes the third one has probability 0; with it K would be that of no outcome at all."""
    made = SimpleNamespace(
        _chances=None, _rows=lambda chances: [(np.array([[0.0, 1.0, 1e6]]), np.array([[0.5, 0.5, 0.0]]), 2.0)]
    )  # fmt: skip
    k, k1, k2 = ScoreSum._cumulants(made, 1.0)
    share = math.e / (1 + math.e)
    assert k == pytest.approx(2 * math.log((1 + math.e) / 2))
    assert k1 == pytest.approx(2 * share)
    assert k2 == pytest.approx(2 * share * (1 - share))


def test_at_the_largest_sum_nothing_is_above():
    """Ten numbers of 0 or 1: at 9.5 and half a step there is nothing beyond, and just below there is."""
    of = Count(10, 0.3, 3)
    assert of._step == pytest.approx(1.0)
    of.__dict__["_step"] = 1.0
    assert of.below(9.5) == 1.0
    assert of.below(9.5 - 1e-6) < 1.0


@pytest.mark.parametrize("value", [5.0, 40.0, 90.0, 150.0])
def test_a_tilt_is_found_in_a_few_steps(monkeypatch, value):
    """Newton's steps: of 200 numbers with p = 0.3 the tilt is log(x / (n - x)) - log(p / (1 - p))."""
    of, asked = Count(200, 0.3, value), []
    plain = ScoreSum._cumulants
    monkeypatch.setattr(Count, "_cumulants", lambda self, t: asked.append(t) or plain(self, t))
    t, k, k2 = of._tilt(value)
    wanted = math.log(value / (200 - value)) - math.log(0.3 / 0.7)
    assert t == pytest.approx(wanted, rel=1e-6)
    assert k == pytest.approx(200 * math.log(0.7 + 0.3 * math.exp(wanted)), rel=1e-6)
    assert k2 == pytest.approx(value * (1 - value / 200), rel=1e-6)
    assert len(asked) < 20
