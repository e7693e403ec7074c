"""Verdicts on attacks: against chance, and against blind baselines where the split is broken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit.attack import verdict
from fedaudit.attack.claims import Attacked, Claims, Groups
from fedaudit.attack.membership import auc
from fedaudit.attack.verdict import BROKEN, judge, judge_blind
from fedaudit.stats import Measured

# --- ties, and unequal clients


def part(k, claims, member=None, n=0):
    member = torch.ones(n, dtype=torch.bool) if member is None else member
    return Attacked(k, claims, torch.zeros(len(member), 1, 2, 2), torch.zeros(len(member), dtype=torch.long), member)


def scored(scores, member):
    return [part(0, Claims(torch.as_tensor(np.asarray(scores, dtype=np.float64))), torch.as_tensor(member))]


@pytest.fixture(scope="module")
def candidates():
    rng = np.random.default_rng(3)
    member = np.arange(200) % 2 == 0
    return rng.normal(size=200), rng.normal(size=200), member


def test_an_auc_within_its_interval_is_no_leak(candidates):
    noise, _, member = candidates
    parts = scored(noise + 0.1 * member, member)
    value = auc(noise + 0.1 * member, member)
    assert value.low < 0.5 < value.value
    assert judge("mine", parts, {}, False).leak is False


def test_who_beats_chance_and_not_the_blind_baseline_shows_no_leak(candidates):
    """On a broken split: of two baselines one is at chance and beaten; the other finds as much as the attack."""
    noise, other, member = candidates
    strong = scored(noise + 2.0 * member, member)
    blind = {"weak": scored(other, member), "as_good": scored(noise + 2.0 * member + 0.2 * other, member)}
    found = judge("mine", strong, blind, True)
    assert found.against_blind["weak"].low > 0 >= found.against_blind["as_good"].low
    assert found.leak is False
    assert "not above the blind baseline as_good" in found.verdict
    assert judge("mine", strong, {"weak": blind["weak"]}, True).leak is True


def test_on_an_honest_split_an_attack_is_held_against_chance_alone(candidates):
    """A baseline at chance that happened to find nearly as much in its noise takes nothing from a leak."""
    noise, other, member = candidates
    mine, lucky = scored(noise + 0.5 * member, member), scored(0.5 * noise + other + 0.4 * member, member)
    found = judge("mine", mine, {"lucky": lucky}, False)
    assert found.against_blind["lucky"].low <= 0
    assert found.leak is True
    assert judge("mine", mine, {"lucky": lucky}, True).leak is False


def test_blind_baselines_are_corrected_for_their_number(candidates):
    """An AUC that is above chance at 99 %, and not at 99.8 %: broken when alone, not as one of five."""
    noise, other, member = candidates
    shift = next(
        s for s in np.linspace(0.2, 1, 401)
        if auc(noise + s * member, member, 0.99).low > 0.5 >= auc(noise + s * member, member, 0.998).low
    )  # fmt: skip
    told = scored(noise + shift * member, member)
    assert judge_blind({"a": told})["a"].split_broken is True
    five = {"a": told, **{name: scored(other, member) for name in "bcde"}}
    assert judge_blind(five)["a"].split_broken is False


def test_a_split_told_the_wrong_way_round_is_broken_too(candidates):
    noise, _, member = candidates
    assert judge_blind({"a": scored(noise - 2.0 * member, member)})["a"].split_broken is True
    groups = Groups(torch.as_tensor(member).long())
    learned_parts = [part(0, groups, torch.as_tensor(member))]
    assert judge_blind({"a": learned_parts})["a"].split_broken is True


def test_a_baseline_that_learned_from_one_client_has_its_direction(candidates):
    """Two clients, of which one was claimed in groups: a ranking below chance is no sign of a broken split."""
    _, _, member = candidates
    half = torch.as_tensor(member)
    wrong = part(0, Claims(-half.double()), half)
    grouped = part(1, Groups(torch.zeros(len(half), dtype=torch.long)), half)
    assert judge_blind({"a": [wrong]})["a"].split_broken is True
    assert judge_blind({"a": [wrong, grouped]})["a"].split_broken is False


def test_a_baselines_sentence_is_whole(candidates):
    """It begins with a capital letter and has all its words, whether the split is broken or not."""
    noise, _, member = candidates
    for far, words in ((0.0, "No sign that the audit split is broken"), (3.0, BROKEN[0].upper() + BROKEN[1:])):
        found = judge_blind({"a": scored(noise + far * member, member)})["a"]
        assert found.split_broken is (far > 0)
        assert found.verdict.startswith(f"{words} (AUC ")
        assert found.verdict.endswith("confidence, corrected for 1 blind baselines).")


def between(low, high):
    return Measured(value=(low + high) / 2, low=low, high=high, interval="by hand")


@pytest.mark.parametrize(("low", "leak"), [(0.4, False), (0.5, False), (0.51, True)])
def test_an_interval_that_reaches_chance_shows_no_leak(low, leak, monkeypatch):
    """One half itself is chance."""
    monkeypatch.setattr(verdict, "auc", lambda *_: between(low, 0.9))
    found = judge("mine", scored([1, 2], [True, False]), {}, False)
    assert found.leak is leak
    assert found.verdict.startswith("A leak: AUC" if leak else "No leak shown: AUC")
    assert ("is not above chance beyond its interval" in found.verdict) is not leak


@pytest.mark.parametrize(
    ("low", "high", "broken"), [(0.5, 0.9, False), (0.51, 0.9, True), (0.1, 0.5, False), (0.1, 0.49, True)]
)
def test_a_split_is_broken_beyond_chance_to_either_side(low, high, broken, monkeypatch):
    monkeypatch.setattr(verdict, "auc", lambda *_: between(low, high))
    found = judge_blind({"blind": scored([1, 2], [True, False])})["blind"]
    assert (found.split_broken, found.leak, found.against_blind) == (broken, None, {})
    member = torch.tensor([True, False])
    grouped = judge_blind({"blind": [part(0, Groups(member.long()), member)]})["blind"]
    assert grouped.split_broken is (low > 0.5), "what was learned has its direction already"


@pytest.mark.parametrize(("low", "beaten"), [(-0.1, False), (0.0, False), (0.01, True)])
def test_a_blind_baseline_is_beaten_beyond_the_interval_of_the_difference(low, beaten, monkeypatch):
    monkeypatch.setattr(verdict, "auc", lambda *_: between(0.6, 0.9))
    monkeypatch.setattr(verdict, "auc_difference", lambda *_: between(low, 0.3))
    parts = scored([1, 2], [True, False])
    found = judge("mine", parts, {"blind": parts}, True)
    assert found.leak is beaten
    assert set(found.against_blind) == {"blind"}
    assert found.split_broken
    assert found.verdict.endswith(f"; but {BROKEN}.")
    assert ("above the blind baseline blind" in found.verdict) is not beaten
    assert judge("mine", parts, {"blind": parts}, False).leak, "on a split that is whole, chance alone counts"
    assert judge("mine", parts, {"blind": [part(7, Claims(torch.ones(1)), n=1)]}, True).against_blind == {}
