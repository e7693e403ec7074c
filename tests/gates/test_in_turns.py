"""Ratios of two things timed in turns: their interval, the verdict on a limit, and how many rounds would tell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedaudit.gates.finding import enough, told
from fedaudit.gates.in_turns import FEWEST, LOOKS, Pairs, compared
from fedaudit.stats import Estimate, median


def test_the_interval_of_a_median_by_hand():
    """Of 6 values the least and the largest have the median between them unless all lie on one side of it: 2 / 2^6 =
    3.1 %, which is within 5 %. Of 5 values it would be 2 / 2^5 = 6.3 %. Of 9 values the second from each end leaves
    2 (1 + 9) / 2^9 = 3.9 %, the third 2 (1 + 9 + 36) / 2^9 = 18 %."""
    six = median([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    assert (six.value, six.low, six.high, six.n) == (3.5, 1.0, 6.0, 6)
    assert median([1.0, 2.0, 3.0, 4.0, 5.0]).low is None
    nine = median([float(i) for i in range(1, 10)])
    assert (nine.value, nine.low, nine.high) == (5.0, 2.0, 8.0)
    assert median([]).value is None


def test_the_fewest_pairs_that_have_an_interval_at_one_of_three_looks():
    """Each look has 5 % / 3 = 1.67 %: 2 / 2^7 = 1.56 % is within that, 2 / 2^6 is not."""
    assert LOOKS == 3
    assert compared([1.0] * FEWEST, 1.2).told == "kept"
    assert compared([1.0] * (FEWEST - 1), 1.2).told == "cannot be told"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.3, 1.5, "broken"), (1.0, 1.2, "kept"), (1.1, 1.3, "cannot be told"), (1.2, 1.3, "cannot be told")],
)
def test_the_interval_decides(low, high, verdict):
    assert told(Estimate(value=(low + high) / 2, low=low, high=high), 1.2) == verdict


def test_how_many_would_tell_by_hand():
    """1.3 with [1.1, 1.5] of 10 against 1.2: the lower half is 0.2, the distance 0.1; half of it takes four times as
    many. 1.15 with [1.0, 1.25]: the upper half is 0.1, the distance 0.05."""
    assert enough(Estimate(value=1.3, low=1.1, high=1.5, n=10), 1.2) == pytest.approx(40, abs=1)
    assert enough(Estimate(value=1.15, low=1.0, high=1.25, n=10), 1.2) == pytest.approx(40, abs=1)
    assert enough(Estimate(value=1.2, low=1.1, high=1.3, n=10), 1.2) is None
    assert enough(Estimate(value=1.2), 1.0) is None


def test_so_many_rounds_do_tell():
    """Ratios spread as on a busy machine (0.13 in logarithms) about 1.29, ten at first: of many machines on which it
    cannot be told at first, most can tell with as many rounds as are said to be enough."""
    rng = np.random.default_rng(0)
    asked = right = 0
    for _ in range(400):
        first = compared(np.exp(rng.normal(math.log(1.29), 0.13, 10)).tolist(), 1.2)
        if first.told == "cannot be told" and first.rounds_to_tell and first.rounds_to_tell < 2000:
            asked += 1
            then = compared(np.exp(rng.normal(math.log(1.29), 0.13, 2 * first.rounds_to_tell)).tolist(), 1.2)
            right += then.told == "broken"
    assert asked > 100
    assert right / asked > 0.6


def test_wrong_verdicts_over_all_looks_are_rarer_than_5_percent():
    """At the limit itself, where every verdict is wrong, with all three looks; one standard error of 2,000 is 0.5 %."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(2000):
        ratios = np.exp(rng.normal(math.log(1.2), 0.13, 40))
        wrong += any(compared(ratios[:n].tolist(), 1.2).told != "cannot be told" for n in (10, 20, 40))
    assert wrong / 2000 <= 0.05 + 2 * 0.005


def test_every_other_pair_begins_with_theirs():
    order = []
    pairs = Pairs()
    pairs.more(lambda: order.append("ours"), lambda: order.append("theirs"), 4)
    assert order == ["theirs", "ours", "ours", "theirs"] * 2
    assert len(pairs.ratios) == 4
