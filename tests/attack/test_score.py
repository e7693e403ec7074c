"""Scores of claims: groups, label shares and their gains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedaudit.attack.claims import Attacked, Claims, Groups, Histogram
from fedaudit.attack.score import histogram, learned, score
from fedaudit.errors import ContractError

# --- ties, and unequal clients


def test_groups_are_learned_on_the_other_half():
    """Five members and nine others, told perfectly by their group: three and five are judged, by two and four."""
    member = torch.arange(14) < 5
    share = learned(member.long(), member)
    judged = share != 0.5
    assert (int(judged[member].sum()), int(judged[~member].sum())) == (3, 5)
    assert share[member & judged].unique().tolist() == [pytest.approx(3 / 4)]  # (2 + 1) / (2 + 2)
    assert share[~member & judged].unique().tolist() == [pytest.approx(1 / 6)]  # (0 + 1) / (4 + 2)


def labelled(*labels):
    """A world of three classes, of which nobody holds the last."""
    rows = [torch.tensor(y) for y in labels]
    return SimpleNamespace(classes=3, members=lambda k: (torch.zeros(len(rows[k]), 1, 2, 2), rows[k]))


def part(k, claims, member=None, n=0):
    member = torch.ones(n, dtype=torch.bool) if member is None else member
    return Attacked(k, claims, torch.zeros(len(member), 1, 2, 2), torch.zeros(len(member), dtype=torch.long), member)


def test_label_shares_are_held_against_each_clients_own():
    """Client 0 has (3/4, 1/4, 0), client 1 (0, 1, 0). Claims (1/2, 1/2, 0) and (0, 1/2, 1/2): errors 1/4 and 1/2."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.5, 0.5, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert [found.client[k].error for k in "01"] == [pytest.approx(0.25), pytest.approx(0.5)]
    assert [found.client[k].uniform for k in "01"] == [pytest.approx(5 / 12), pytest.approx(2 / 3)]


def test_a_gain_within_its_interval_is_no_leak():
    """Gains of 0.42 and 0.17 over the uniform guess: above 0 in the mean, and their interval holds 0."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.75, 0.25, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert found.pooled.gain.value > 0 > found.pooled.gain.low
    assert found.leak is False
    assert found.verdict.startswith("No leak shown")


def test_clients_with_scores_and_clients_with_groups_are_one_attack():
    """A baseline may have scores for one client, and groups for another."""
    member = torch.arange(8) < 4
    parts = [part(0, Claims(member.double()), member), part(3, Groups(member.long()), member)]
    found = score(parts, labelled([0]), Path("nowhere"), "mine", 0)
    assert (found.pooled.members, found.pooled.nonmembers) == (8, 8)
    assert sorted(found.client) == ["0", "3"]
    assert found.client["0"].auc.value == 1.0


def test_claims_of_two_sorts_are_refused():
    member = torch.arange(8) < 4
    parts = [part(0, Claims(member.double()), member), part(1, Histogram(torch.ones(3) / 3), member)]
    with pytest.raises(ContractError, match="mine returned Claims, Histogram"):
        score(parts, labelled([0], [1]), Path("nowhere"), "mine", 0)
