"""The exact test of two counts: it keeps its level where a claim is just true, and finds more than two limits do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import beta, binom

from fedaudit.epsilon.exact_counts import _least_counts, _score, claim_p, excess_p
from fedaudit.epsilon.lower_bounds import box_epsilon, from_scores, from_scores_exactly


@pytest.mark.parametrize("share", [0.05, 0.4, 0.7])
def test_a_claim_that_is_just_true_is_refuted_no_more_often_than_it_may_be(share):
    """All pairs of counts of 20 and 25, weighted by their exact probability at the edge of the claim. The largest share
    is next to the corner where the demand on TNR and FNR is just met, too."""
    n1, n0, epsilon, delta = 20, 25, 1.0, 0.01
    fpr = share * (1 - delta) / math.e
    tpr = math.e * fpr + delta
    wrong = sum(
        binom.pmf(x, n1, tpr) * binom.pmf(y, n0, fpr)
        for x, y in itertools.product(range(n1 + 1), range(n0 + 1))
        if binom.pmf(x, n1, tpr) * binom.pmf(y, n0, fpr) > 1e-9 and claim_p(x, y, n1, n0, epsilon, delta) < 0.05
    )
    assert wrong <= 0.05
    assert share < 0.1 or wrong > 0.005, "not so careful that it says nothing"


def test_the_p_value_is_the_sum_over_all_pairs_with_such_a_score():
    """By hand for 5 of 6 against 0 of 6: the pairs are listed, and the worst rate is searched on a fine grid."""
    from fedaudit.epsilon import exact_counts

    n, ratio, delta = 6, math.e, 0.01
    score = lambda x, y: exact_counts._score(np.array([float(x)]), np.array([float(y)]), n, n, ratio, delta)[0]  # noqa: E731
    pairs = [(x, y) for x in range(n + 1) for y in range(n + 1) if score(x, y) >= score(5, 0) - 1e-12]
    rates = np.linspace(0, (1 - delta) / ratio, 4001)
    total = sum(binom.pmf(x, n, ratio * rates + delta) * binom.pmf(y, n, rates) for x, y in pairs)
    assert excess_p(5, 0, n, n, 1.0, delta) == pytest.approx(float(total.max()), rel=2e-3)


def test_both_demands_count():
    """Members and non-members change places: TNR and FNR decide, and the p-value is the same."""
    assert claim_p(80, 5, 100, 200, 1.0, 1e-5) == pytest.approx(claim_p(195, 20, 200, 100, 1.0, 1e-5), rel=1e-9)
    assert claim_p(50, 50, 100, 100, 0.0, 0.0) == 1
    assert claim_p(0, 9, 10, 10, 1.0, 1e-5) == 1


def test_more_is_found_than_by_two_limits():
    for n, tp, fp in ((50, 25, 9), (200, 44, 9), (1000, 264, 184)):
        box = max(0.0, float(box_epsilon(tp, fp, n, n, 1e-5, 0.05)))
        assert claim_p(tp, fp, n, n, box + 0.03, 1e-5) < 0.05


def test_over_thresholds_it_is_at_most_as_sure_as_it_says():
    rng = np.random.default_rng(0)
    member = np.arange(400) < 200
    null = [from_scores_exactly(rng.normal(size=400), member, 1e-5).epsilon for _ in range(20)]
    assert sum(found > 0 for found in null) <= 4
    scores = rng.normal(size=400) + 2 * member
    exact, limits = from_scores_exactly(scores, member, 1e-5), from_scores(scores, member, 1e-5)
    assert exact.epsilon > limits.epsilon > 0
    assert exact.p_value(exact.epsilon * 0.99) < 0.05 < exact.p_value(exact.epsilon * 1.01)


@pytest.mark.filterwarnings("error")
def test_counts_of_all_records_on_both_sides_say_nothing_against_any_claim():
    """All of 5 and all of 7: both rates are 1, nothing deviates, and the excess is none, without a division by 0."""
    assert excess_p(5, 7, 5, 7, 0.0, 0.0) == 1
    assert excess_p(50, 25, 100, 50, 0.0, 0.0) == 1, "exactly what the claim allows is no excess"
    assert claim_p(5, 7, 5, 7, 0.0, 0.0) == 1


def test_the_score_by_hand():
    """9 of 10 against 4 of 20 under a ratio of 2 and delta = 0.1: the rate at the edge is (13 - 1) / (20 + 20) = 0.3,
    the larger one 0.7. The excess 0.9 - 0.4 - 0.1 is held against sqrt(0.7 0.3 / 10 + 4 0.3 0.7 / 20)."""
    from fedaudit.epsilon.exact_counts import _score

    found = _score(np.array([9.0]), np.array([4.0]), 10, 20, 2.0, 0.1)[0]
    assert found == pytest.approx(0.4 / math.sqrt(0.021 + 0.042))
    # Nothing was seen: half a count, 0.5 / 40, and 0.125 for the larger rate.
    found = _score(np.array([0.0]), np.array([0.0]), 10, 20, 2.0, 0.1)[0]
    assert found == pytest.approx(-0.1 / math.sqrt(0.125 * 0.875 / 10 + 4 * 0.0125 * 0.9875 / 20))
    # All were: the rate ends at (1 - 0.1) / 2, where the larger one is 1.
    found = _score(np.array([10.0]), np.array([20.0]), 10, 20, 2.0, 0.1)[0]
    assert found == pytest.approx(-1.1 / math.sqrt(4 * 0.45 * 0.55 / 20))


@pytest.mark.parametrize(
    ("x", "y", "n1", "n0", "epsilon", "delta"),
    [(14, 2, 17, 23, 0.7, 0.02), (9, 0, 11, 30, 1.5, 0.1), (17, 5, 17, 23, 0.3, 0.0), (6, 1, 19, 13, 0.1, 0.01)],
)
def test_an_excess_of_unequal_classes_is_the_sum_over_all_pairs(x, y, n1, n0, epsilon, delta):
    """All pairs with at least that score, at the worst rate that lies where y of n0 allows it."""
    ratio = math.exp(epsilon)

    def score(a: int, b: int) -> float:
        rate = min(max(a + b - n1 * delta, 0.5) / (n1 * ratio + n0), (1 - delta) / ratio)
        larger = min(ratio * rate + delta, 1.0)
        deviation = math.sqrt(larger * (1 - larger) / n1 + ratio**2 * rate * (1 - rate) / n0)
        return (a / n1 - ratio * b / n0 - delta) / deviation

    pairs = [(a, b) for a in range(n1 + 1) for b in range(n0 + 1) if score(a, b) >= score(x, y) - 1e-11]
    low, high = beta.ppf(5e-10, y, n0 - y + 1) if y else 0.0, beta.ppf(1 - 5e-10, y + 1, n0 - y)
    rates = (
        np.sin(np.linspace(math.asin(math.sqrt(low)), math.asin(math.sqrt(min(high, (1 - delta) / ratio))), 96)) ** 2
    )
    total = sum(binom.pmf(a, n1, np.minimum(ratio * rates + delta, 1)) * binom.pmf(b, n0, rates) for a, b in pairs)
    wanted = float(total.max()) + 1e-9
    assert excess_p(x, y, n1, n0, epsilon, delta) == pytest.approx(wanted, rel=1e-6)
    assert excess_p(0, y, n1, n0, epsilon, delta) == 1.0
    both = excess_p(x, y, n1, n0, epsilon, delta), excess_p(n0 - y, n1 - x, n0, n1, epsilon, delta)
    assert claim_p(x, y, n1, n0, epsilon, delta) == pytest.approx(min(1.0, 2 * min(both)))


@pytest.mark.parametrize(
    ("x", "y", "n1", "n0", "epsilon", "delta"),
    [
        (80, 200, 200, 1200, 0.5, 1e-3),
        (17, 217, 20, 300, 0.1, 0.0),
        (49, 1915, 50, 2000, 0.01, 0.0),
        (498, 1925, 500, 2000, 0.0, 1e-3),
    ],
)
def test_many_records_are_summed_up_only_where_they_lie(x, y, n1, n0, epsilon, delta):
    """Of 1,200 and 300 non-members those counts are looked at that lie within nine deviations: nothing is lost. The
    worst rate of the first is the lowest one, of the second the highest."""
    ratio = math.exp(epsilon)
    edge = _score(np.array([float(x)]), np.array([float(y)]), n1, n0, ratio, delta)[0]
    least = []
    for b in range(n0 + 1):
        scores = _score(np.arange(n1 + 1.0), np.full(n1 + 1, float(b)), n1, n0, ratio, delta)
        least.append(int(np.argmax(scores >= edge - 1e-11)) if (scores >= edge - 1e-11).any() else n1 + 1)
    low, high = beta.ppf(5e-10, y, n0 - y + 1), beta.ppf(1 - 5e-10, y + 1, n0 - y)
    rates = np.sin(np.linspace(math.asin(math.sqrt(low)), math.asin(math.sqrt(high)), 96)) ** 2
    found = _least_counts(np.arange(n0 + 1.0), edge, n1, n0, ratio, delta)
    assert found.tolist() == least
    b = np.arange(n0 + 1)
    total = [(binom.pmf(b, n0, r) * binom.sf(np.array(least) - 1, n1, ratio * r + delta)).sum() for r in rates]
    assert excess_p(x, y, n1, n0, epsilon, delta) == pytest.approx(max(total) + 1e-9, rel=1e-6)


def test_a_claim_that_allows_every_count_is_not_refuted():
    """e^epsilon FPR + delta reaches 1 below every rate that 20 of 25 allows."""
    assert excess_p(20, 20, 20, 25, 3.0, 0.01) == 1.0
    assert claim_p(20, 1, 20, 25, 400.0, 0.01) == 1.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.01), (2.0, 0.2)])
def test_a_score_is_the_excess_over_its_deviation_by_hand(epsilon, delta):
    """Rates that fit both counts lie at the edge of the claim: the mean of the two, cut off where the claim ends."""
    n1, n0, ratio = 40, 25, math.exp(epsilon)
    for x, y in ((30, 4), (12, 3), (0, 0), (40, 25)):
        rate = min(max(x + y - n1 * delta, 0.5) / (n1 * ratio + n0), (1 - delta) / ratio)
        larger = min(ratio * rate + delta, 1.0)
        variance = larger * (1 - larger) / n1 + ratio * ratio * rate * (1 - rate) / n0
        by_hand = (x / n1 - ratio * y / n0 - delta) / math.sqrt(variance + 1e-300)
        found = _score(np.array([float(x)]), np.array([float(y)]), n1, n0, ratio, delta)
        assert found[0] == pytest.approx(by_hand, rel=1e-9)


def test_scores_that_are_equal_but_for_rounding_count_alike():
    """3 of 3 against 1 of 3 and 2 of 3 against none both have a score of sqrt(3), whose last digits differ."""
    seen = _score(np.array([3.0]), np.array([1.0]), 3, 3, 1.0, 0.0)[0]
    assert seen == pytest.approx(math.sqrt(3))
    assert _least_counts(np.arange(4.0), seen, 3, 3, 1.0, 0.0).tolist() == [2, 3, 4, 4]
