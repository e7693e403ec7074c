"""Evidence over seeds: pooled with the candidates' own uncertainty, and corrected for how many attacks were tried."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import reported
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedaudit.attack.membership import auc
from fedaudit.reports import attack_rows, leak_tests, sentences
from fedaudit.reports.attack_rows import Found
from fedaudit.runtime.attack_result import MembershipResult
from fedaudit.stats import Estimate
from fedaudit.stored_model import plain


class Tried(Found):
    """An attack whose AUCs are given."""

    def estimates(self, measure):
        return self.results if measure == "auc" else {}


def tried(aucs, name="loss"):
    return Tried(name, "server", "membership", False, dict(enumerate(aucs)))


def about(value, half=0.08):
    return Estimate(value=value, low=value - half, high=value + half, interval="DeLong")


def test_seeds_that_show_nothing_each_show_something_together():
    """Five seeds at 0.55 +- 0.08: none is above chance by itself; of the mean, the half width is 0.08 / sqrt(5)."""
    found = leak_tests.pooled(tried([about(0.55)] * 5))
    assert found is not None
    assert (found.value, found.low) == (pytest.approx(0.55), pytest.approx(0.55 - 0.08 / 5**0.5))
    assert found.low > 0.5
    assert leak_tests.pooled(tried([about(0.55)])).low < 0.5


def test_the_best_of_many_attacks_is_corrected(monkeypatch):
    """One attack at p = 0.017 is a leak alone, and none among ten that show nothing."""
    one, nothing = tried([about(0.586)]), [tried([about(0.5)], f"other {i}") for i in range(9)]
    for attacks, beyond in (([one], True), ([one, *nothing], False)):
        monkeypatch.setattr(leak_tests, "attacks_of", lambda _, attacks=attacks: attacks)
        first = leak_tests.pooled_attacks(None)[0]
        assert first.found is one
        assert first.beyond is beyond
        assert first.low > 0.5
    assert first.adjusted == pytest.approx(10 * first.p)


def test_pooled_intervals_cover():
    """Three seeds of 60 + 60 candidates, true AUC 0.6092 (means 0.3916 apart): 95 %, over 400 repetitions."""
    rng = np.random.default_rng(0)
    member = np.arange(120) < 60
    held = 0
    for scores in rng.normal(size=(400, 3, 120)) + 0.3916 * member:
        found = leak_tests.pooled(tried([auc(row, member) for row in scores]))
        held += found.low <= 0.6092 <= found.high
    assert 0.92 <= held / 400 <= 0.98


@pytest.mark.long
def test_a_null_is_seldom_a_leak(monkeypatch):
    """Eight attacks on three seeds, all guessing: at most 2.5 % of reports call it a leak (300: at most 15)."""
    rng = np.random.default_rng(1)
    member = np.arange(100) < 50
    alarms = 0
    for block in rng.normal(size=(300, 8, 3, 100)):
        attacks = [tried([auc(row, member) for row in seeds], str(i)) for i, seeds in enumerate(block)]
        monkeypatch.setattr(leak_tests, "attacks_of", lambda _, attacks=attacks: attacks)
        alarms += leak_tests.pooled_attacks(None)[0].beyond
    assert alarms <= 15


@pytest.mark.parametrize(
    ("attacks", "word"),
    [
        ([tried([about(0.62)] * 3)], "Members can be told"),
        ([tried([about(0.55)] * 5)], "Members can be told"),  # in no single seed
        ([tried([about(0.586)]), *(tried([about(0.5)], str(i)) for i in range(9))], "Undecided"),
        ([tried([about(0.51)] * 3)], "shows no leak"),
    ],
)
def test_no_row_says_no_leak_whose_pooled_interval_lies_above_chance(attacks, word, monkeypatch):
    monkeypatch.setattr(leak_tests, "attacks_of", lambda _: attacks)
    monkeypatch.setattr(sentences, "best_attack", lambda *_: None)
    row = SimpleNamespace(group=None, cells={"auc": SimpleNamespace(value=0.5, detail="loss, server")})
    told = sentences._membership(row)
    assert word in told
    assert ("no leak" in told) is not any(leak_tests.pooled(one).low > 0.5 for one in attacks)


AUCS = st.tuples(st.floats(0.3, 0.9), st.floats(0.005, 0.3)).map(lambda pair: about(*pair))
ROWS = st.lists(st.lists(AUCS, min_size=1, max_size=5), min_size=1, max_size=8)


@given(ROWS)
@example([[about(0.55)] * 3, *([[about(0.5)]] * 9)])  # pooled above chance, in no seed, and not beyond ten tries
@settings(max_examples=100, deadline=None)
def test_in_no_report_is_an_attack_above_chance_called_no_leak(rows):
    """Any attacks over any seeds: the sentence, the column and the pooled intervals never contradict each other."""
    attacks = [tried(aucs, f"attack {i}") for i, aucs in enumerate(rows)]
    with ExitStack() as patched:
        for module in (leak_tests, attack_rows):
            patched.enter_context(mock.patch.object(module, "attacks_of", return_value=attacks))
        patched.enter_context(
            mock.patch.object(leak_tests, "leak_of", return_value=None)
        )  # seeds are judged by their interval
        row = SimpleNamespace(group=None, cells={"auc": SimpleNamespace(value=0.5, detail="loss, server")})
        told, shown = sentences._membership(row), leak_tests.leak(row)
    above = [by_hand(aucs)[0] - 1.96 * by_hand(aucs)[1] > 0.5 + 1e-6 for aucs in rows]
    if any(above):
        assert shown is not False
        assert "no leak" not in told
    if shown is True:
        assert any(by_hand(aucs)[0] - 1.959 * by_hand(aucs)[1] > 0.5 for aucs in rows)
        assert "Members can be told" in told
    if shown is False:
        assert "no leak" in told
        best = max(rows, key=lambda aucs: by_hand(aucs)[0])
        assert not any(estimate.low > 0.5 for estimate in best)


def by_hand(aucs):
    """The mean AUC of the seeds and its deviation: (sum of half widths / 1.96, squared) ^ 1/2 / n."""
    variance = sum(((e.high - e.low) / 2 / 1.959964) ** 2 for e in aucs)
    return sum(e.value for e in aucs) / len(aucs), variance**0.5 / len(aucs)


def on_a_broken_split(aucs, blind):
    """Results of an attack whose AUC is so far above that of a blind baseline, which tells the split by itself."""
    results = {}
    for seed, value in enumerate(aucs):
        result = reported._membership("loss", "server", value, leak=value - blind > 0.06)
        gap = {"blind_pixels": {"value": value - blind, "low": value - blind - 0.06, "high": value - blind + 0.06}}
        results[seed] = MembershipResult(**{**plain(result), "split_broken": True, "against_blind": gap})
    return Found("loss", "server", "membership", False, results)


def test_on_a_broken_split_every_seed_counts_by_what_the_baseline_leaves(monkeypatch):
    """0.90 beside a blind 0.88 tells nothing, though one seed of three beat it by itself; nor does 0.88. 0.99 is a
    leak."""
    for aucs, leak in (((0.87, 0.88, 0.95), False), ((0.88, 0.88, 0.88), False), ((0.99, 0.99, 0.99), True)):
        found = on_a_broken_split(aucs, 0.88)
        monkeypatch.setattr(leak_tests, "attacks_of", lambda _, found=found: [found])
        monkeypatch.setattr(leak_tests, "best_attack", lambda *_, found=found: found)
        monkeypatch.setattr(sentences, "best_attack", lambda *_, found=found: found)
        (one,) = leak_tests.pooled_attacks(None)
        assert one.value == pytest.approx(0.5 + sum(aucs) / 3 - 0.88)
        assert one.beyond is leak
        row = SimpleNamespace(group=None, cells={"auc": SimpleNamespace(value=0.9, detail="loss, server")})
        assert leak_tests.leak(row) is (True if leak else None)
        told = sentences._membership(row)
        assert told.startswith(
            "Members can be told from others better than from the records alone" if leak else "Member"
        )
        assert ("say nothing" in told) is not leak
        assert "broken" in told
