"""Ratios of two things timed in turns: their interval, the verdict on a limit, and how many rounds would tell."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest

from fedaudit.gates import in_turns
from fedaudit.gates.finding import enough, told
from fedaudit.gates.in_turns import FEWEST, LOOKS, Compared, Pairs, Turns, compared
from fedaudit.stats import Estimate, pseudo_median


def test_the_interval_of_a_pseudo_median_by_hand():
    """Three values 1, 2, 6 have the means of two 1, 1.5, 2, 3.5, 4, 6: their median is 2.75. The sum of signed ranks of
    six values is 0 with probability 1 / 64, so that the extremes leave out 2 / 64 = 3.1 %; up to 1 with 2 / 64, and
    4 / 64 would be above 5 %. Of seven it is up to 2 with 3 / 128 (0, 1, 2), which leaves 4.7 %: the third from each
    end. Of five already the extremes leave 2 / 32 = 6.3 %."""
    assert pseudo_median([6.0, 1.0, 2.0]).value == 2.75
    six = pseudo_median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (six.value, six.low, six.high, six.n) == (3.5, 1.0, 6.0, 6)
    seven = pseudo_median([float(i) for i in range(1, 8)])
    assert (seven.value, seven.low, seven.high) == (4.0, 2.0, 6.0)  # 1, 1.5, 2: three smallest means
    assert pseudo_median([1.0, 2.0, 3.0, 4.0, 5.0]).low is None
    assert pseudo_median([]).value is None


def test_the_interval_is_that_of_scipys_test():
    """A centre is inside exactly where Wilcoxon's exact test does not reject it."""
    from scipy.stats import wilcoxon

    values = np.random.default_rng(2).normal(0.3, 1.0, 15)
    found = pseudo_median(values.tolist(), 0.9)
    for centre, inside in ((found.low + 1e-6, True), (found.low - 1e-6, False), (found.high - 1e-6, True)):
        assert (wilcoxon(values - centre, method="exact").pvalue > 0.1) == inside


def test_the_fewest_pairs_that_have_an_interval_at_one_of_five_looks():
    """Each look has 5 % / 5 = 1 %: 2 / 2^8 = 0.8 % is within that, 2 / 2^7 is not."""
    assert LOOKS == 5
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


@pytest.mark.parametrize(
    ("facts", "limit", "number"),
    [
        ({"value": 2.0, "low": 1.25, "high": 9.0, "n": 10}, 1.5, 23),  # (0.75 / 0.5)^2 times 10 is 22.5
        ({"value": 1.0, "low": -3.0, "high": 1.75, "n": 10}, 1.5, 23),
        ({"value": 2.0, "low": 2.0, "high": 9.0, "n": 10}, 1.5, None),  # no spread to that side
        ({"value": 1.5, "low": 1.0, "high": 9.0, "n": 10}, 1.5, None),  # at the limit
        ({"value": 2.0, "low": None, "high": None, "n": 10}, 1.5, None),
        ({"value": 2.0, "low": 1.25, "high": 9.0, "n": 0}, 1.5, None),
        ({"value": 2.0, "low": 1.25, "high": 9.0, "n": None}, 1.5, None),
        ({"value": None, "n": 10}, 1.5, None),
    ],
)
def test_how_many_would_tell_is_rounded_up_and_not_always_known(facts, limit, number):
    assert enough(Estimate(**facts), limit) == number


def test_every_pair_has_two_sides_and_turns_alternate(monkeypatch):
    """Ours take 3 seconds and theirs 2, a rest takes 100, which nobody pays for."""
    now, order = [0.0], []

    def work(name, seconds):
        def done():
            order.append(name)
            now[0] += seconds

        return done

    monkeypatch.setattr(in_turns, "clock", lambda: now[0])
    monkeypatch.setattr(in_turns.gc, "collect", lambda: order.append("collected"))
    turns = Turns(work("ours", 3.0), work("theirs", 2.0), work("rest", 100.0))
    turns.more(3)
    ready, both = ["rest", "collected"], {"ours": ["ours"], "theirs": ["rest", "collected", "theirs"]}
    pair, other = [*both["theirs"], *ready, *both["ours"]], [*ready, *both["ours"], *both["theirs"]]
    assert order == pair + other + pair
    assert (turns.pairs.ours, turns.pairs.theirs) == ([3.0] * 3, [2.0] * 3)
    turns.after()
    assert len(turns.pairs.theirs) == 3, "they had their turn"
    assert Pairs([3.0, 5.0, 8.0], [2.0, 4.0, 1.0]).ratios == [1.5, 1.25, 8.0]
    assert Pairs([3.0, 5.0, 8.0], [2.0, 4.0, 1.0]).ratio == 1.5
    with pytest.raises(ValueError, match="zip"):
        Pairs([3.0, 5.0], [2.0]).ratios  # noqa: B018


def test_a_ratio_is_shown_with_the_interval_that_it_has():
    assert Compared(Estimate(value=1.23456), 1.2, "cannot be told", None).shown() == "1.23"
    assert Compared(Estimate(value=1.23456, low=1.0, high=2.345), 1.2, "kept", None).shown() == "1.23 [1, 2.35]"


def test_so_many_rounds_do_tell():
    """Ratios spread as on a busy machine (0.13 in logarithms) about 1.29, ten at first: of many machines on which it
    cannot be told at first, most can tell with as many rounds as are said to be enough."""
    rng = np.random.default_rng(0)
    asked = right = 0
    for _ in range(120):
        first = compared(np.exp(rng.normal(math.log(1.29), 0.13, 10)).tolist(), 1.2)
        if first.told == "cannot be told" and first.rounds_to_tell and first.rounds_to_tell < 2000:
            asked += 1
            then = compared(np.exp(rng.normal(math.log(1.29), 0.13, min(2 * first.rounds_to_tell, 600))).tolist(), 1.2)
            right += then.told == "broken"
    assert asked > 40
    assert right / asked > 0.6


def test_wrong_verdicts_over_all_looks_are_rarer_than_5_percent():
    """At the limit itself, where every verdict is wrong, with all five looks; one standard error of 200 is 1.5 %."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        ratios = np.exp(rng.normal(math.log(1.2), 0.13, 160))
        wrong += any(compared(ratios[:n].tolist(), 1.2).told != "cannot be told" for n in (10, 20, 40, 80, 160))
    assert wrong / 200 <= 0.05 + 2 * 0.015


@pytest.mark.slow
def test_every_other_pair_begins_with_theirs_and_every_turn_with_rest():
    order = []
    turns = Turns(lambda: order.append("ours"), lambda: order.append("theirs"), lambda: order.append("rest"))
    turns.more(4)
    assert [word for word in order if word != "rest"] == ["theirs", "ours", "ours", "theirs"] * 2
    assert all(before == "rest" for before, turn in itertools.pairwise(order) if turn != "rest")
    assert len(turns.pairs.ratios) == 4


def test_the_clock_leaves_out_the_time_in_which_others_ran(monkeypatch):
    """Ten seconds on the wall. In two and a half of them the system ran somebody else; where it does not tell: ten."""
    monkeypatch.setattr(in_turns.time, "perf_counter", lambda: 10.0)
    monkeypatch.setattr(in_turns, "open", lambda path: io.StringIO("7000000000 2500000000 12"), raising=False)
    assert in_turns.clock() == 7.5

    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(in_turns, "open", missing, raising=False)
    assert in_turns.clock() == 10.0
