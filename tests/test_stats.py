"""Intervals and checks of figures, by hand and at their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special
from scipy import stats as scipy_stats

from fedaudit.errors import ContractError, SettingError
from fedaudit.stats import (
    QUANTILES,
    Estimate,
    _quantile,
    _signed_rank,
    above,
    check_confidence,
    check_interval,
    checked,
    clopper_pearson,
    mean_in_range,
    mean_std,
    missing_class,
    parted,
    pseudo_median,
    sampled_mean,
    split_classes,
    student_t,
    wilson,
)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_a_value_may_lie_outside_by_rounding_and_no_more(size):
    """A billionth of the value, and of 1 where the value is smaller."""
    room = 1e-9 * max(1.0, size)
    check_interval("x", size, size + room / 2, None)
    check_interval("x", size, None, size - room / 2)
    check_interval("x", size, size, size)
    with pytest.raises(ValueError, match="outside of its own interval"):
        check_interval("x", size, size + 3 * room, size + 1)
    with pytest.raises(ValueError, match="outside of its own interval"):
        check_interval("x", size, size - 1, size - 3 * room)
    check_interval("x", None, 3.0, 1.0)
    nan = float("nan")
    for value, low, high in ((nan, 0.0, 1.0), (0.5, nan, 1.0), (0.5, 0.0, nan), (nan, None, 1.0)):
        with pytest.raises(ValueError, match=r"x = .* is not a number \(NaN\)"):
            check_interval("x", value, low, high)
    check_interval("x", nan, None, None)
    check_interval("x", math.inf, 1.0, math.inf)
    with pytest.raises(ValueError, match="outside"):
        Estimate(value=-2.0, low=-1.0, high=0.0)


def test_an_estimate_is_shown_with_its_interval():
    assert Estimate(value=0.5, low=0.25, high=0.75).shown() == "0.500 [0.250, 0.750]"
    assert Estimate(value=0.5, low=0.25).shown() == Estimate(value=0.5, high=0.75).shown() == "0.500"


def test_intervals_at_their_ends():
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 0) == clopper_pearson(0, 0) == (0.0, 1.0)
    assert clopper_pearson(0, 0, confidence=0.5) == (0.0, 1.0)
    assert 0 < wilson(1, 10)[0] < 0.1 < wilson(1, 10)[1] < 1
    assert clopper_pearson(0, 10) == (0.0, pytest.approx(1 - 0.025**0.1))
    assert clopper_pearson(10, 10) == (pytest.approx(0.025**0.1), 1.0)
    assert clopper_pearson(1, 10)[0] == pytest.approx(1 - 0.975**0.1)


def test_means_by_hand():
    """1, 2, 6: mean 3, squares 4 + 1 + 9 = 14; over all clients 14 / 3, of a sample 14 / 2 / 3."""
    assert mean_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(14 / 3)))
    found = student_t([1.0, 2.0, 6.0])
    half = scipy_stats.t.ppf(0.975, 2) * math.sqrt(14 / 2 / 3)
    assert (found.value, found.low, found.high, found.n) == (3.0, pytest.approx(3 - half), pytest.approx(3 + half), 3)
    one = student_t([4.0])
    assert (one.value, one.low, one.high, one.n) == (4.0, None, None, 1)
    assert student_t([]).value is None
    assert all(map(math.isnan, mean_std([])))


def test_a_mean_in_its_range_by_hand():
    """0.8 and 0.9 in [-1, 1]: the mean 0.85 is at 0.925 of the way, odds 12.333. Student's half width is 12.7062 * 0.05
    = 0.63531, 0.317655 of the range, by 0.925 * 0.075 = 0.069375: 4.57881 in log odds. Odds 12.333 / 97.398 = 0.126627
    and 1201.24: 0.112395 and 0.999168 of the way.
    """
    found = mean_in_range([0.8, 0.9], -1, 1)
    assert found.value == pytest.approx(0.85)
    assert (found.low, found.high) == (
        pytest.approx(2 * 0.112395 - 1, abs=1e-4),
        pytest.approx(2 * 0.999168 - 1, abs=1e-5),
    )
    assert student_t([0.8, 0.9]).high > 1, "which SSIM cannot be"
    same = mean_in_range([1.0, 1.0], -1, 1)
    assert (same.low, same.high) == (1.0, 1.0)
    assert mean_in_range([0.5], 0, 1).low is None
    assert mean_in_range([], 0, 1).value is None
    far = mean_in_range([0.0, 0.0, 1e-9], 0, 1)
    assert 0 <= far.low < far.value < far.high <= 1
    assert mean_in_range([0.5, 1.5], 0, 1).high <= 1.5, "values beyond the range widen it"


def test_intervals_in_a_range_hold_what_they_promise():
    """Means of skewed values in [0, 1], 400 samples: nearly as many intervals hold the mean as are to, everywhere."""
    rng = np.random.default_rng(7)
    for n, (a, b) in ((8, (2, 5)), (8, (8, 1.5)), (60, (1, 12))):
        held = 0
        for _ in range(400):
            found = mean_in_range(rng.beta(a, b, n).tolist(), 0, 1)
            held += found.low <= a / (a + b) <= found.high
        assert held >= 0.92 * 400, (n, a, b)


def test_a_sampled_mean_by_hand():
    """Three of twelve: mean 1/2, squares 0.02, error sqrt(0.02 / 2 / 3 (1 - 1/4)). All of them: a point. Equal ones
    show no spread: at most a share 1 - 0.025^(1/2) of all differs from two, and no more than were not drawn."""
    low, high = sampled_mean([0.4, 0.5, 0.6], 12)
    half = scipy_stats.t.ppf(0.975, 2) * math.sqrt(0.02 / 2 / 3 * (1 - 3 / 12))
    assert (low, high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert sampled_mean([0.2, 0.6], 2) == (0.4, 0.4)
    assert sampled_mean([0.0, 1.0], 8) == (0.0, 1.0)
    p = min(1 - 0.025 ** (1 / 2), 3 / 4)
    assert sampled_mean([0.5, 0.5], 8) == (pytest.approx(0.5 - p / 2), pytest.approx(0.5 + p / 2))
    for confidence, tail in ((0.95, 0.025), (0.8, 0.1)):
        p = 1 - tail ** (1 / 5)  # less than were not drawn
        wanted = (pytest.approx(0.3 - p * 0.3), pytest.approx(0.3 + p * 0.7))
        assert sampled_mean([0.3] * 5, 100, confidence) == wanted
    assert sampled_mean([0.2, 0.6], 1) == (0.4, 0.4), "more than there are cannot be drawn"
    few = 1 - 10 / 11  # of eleven, ten were drawn
    assert sampled_mean([0.8] * 10, 11) == (pytest.approx(0.8 - few * 0.8), pytest.approx(0.8 + few * 0.2))


def test_signed_ranks_by_hand():
    """Three ranks: sums 0 to 6 in 1, 1, 1, 2, 1, 1, 1 of 8 ways. Six values have an interval at 95 %: from the smallest
    mean to the largest, as P[0] = 1/64 and P[at most 1] = 2/64 > 0.025."""
    assert _signed_rank(3).tolist() == [1 / 8, 1 / 8, 1 / 8, 2 / 8, 1 / 8, 1 / 8, 1 / 8]
    found = pseudo_median([1.0, 2.0, 3.0, 4.0, 5.0, 60.0])
    assert (found.low, found.high, found.n) == (1.0, 60.0, 6)
    assert found.value == 3.5
    few = pseudo_median([1.0, 2.0, 9.0])
    assert (few.value, few.low, few.interval) == (3.5, None, "none: 3 values are too few")
    assert pseudo_median([]).value is None


def test_what_a_score_may_be():
    assert [part.tolist() for part in split_classes([3, 1, 2], [1, 0, True])] == [[2.0, 3.0], [1.0]]
    for scores, member, words in (
        ([1.0], [1, 0], "1 scores but 2 member flags"),
        ([1.0, math.inf], [1, 0], "1 of 2 scores are NaN or infinite"),
        (["a", "b"], [1, 0], "give numbers"),
        ([1.0, 2.0], [1, 2], "other values than 0 and 1"),
        ([[1.0]], [1], r"have shape \(1, 1\)"),
    ):
        with pytest.raises(ContractError, match=words):
            checked(scores, member)
    with pytest.raises(ContractError, match="no non-members"):
        split_classes([1.0], [1])
    assert missing_class(1, 1) is None
    assert missing_class(0, 0) == "there are no members and no non-members among the candidates"
    assert missing_class(0, 2) == "there are no members among the candidates"
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(SettingError, match="strictly between"):
            check_confidence(confidence)


def test_scores_above_and_parts():
    assert above(np.array([1.0, 2.0, 2.0, 3.0]), [0.5, 2.0, 3.0]).tolist() == [4, 1, 0]
    for n, share, cut in ((4, 0.5, 2), (5, 0.5, 2), (3, 0.1, 1), (1, 0.5, 1)):
        one, other = parted(np.arange(float(n)), np.random.default_rng(0), share)
        assert (len(one), len(other)) == (cut, n - cut)
        assert sorted([*one, *other]) == list(range(n))
        assert np.all(np.diff(one) > 0)


@pytest.mark.parametrize(("k", "n", "confidence"), [(3, 10, 0.95), (57, 80, 0.9), (1, 4, 0.99)])
def test_wilsons_interval_ends_where_its_equation_holds(k, n, confidence):
    """Each end q solves |k / n - q| = z sqrt(q (1 - q) / n)."""
    z = scipy_stats.norm.ppf(0.5 + confidence / 2)
    low, high = wilson(k, n, confidence)
    assert low < k / n < high
    for end in (low, high):
        assert abs(k / n - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), rel=1e-9)


def test_quantiles_that_stand_in_the_source_are_scipys():
    """To the bit: a figure may not depend on which of the two gave it."""
    assert {level: float(special.ndtri(0.5 + level / 2)) for level in QUANTILES} == QUANTILES
    assert [_quantile(level) for level in (0.9, 0.95)] == [special.ndtri(0.95), special.ndtri(0.975)]
