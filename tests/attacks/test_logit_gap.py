"""Gaps of shared outputs: what the attack needs, and the ratio of a noised mean by other code."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedaudit.attacks.membership import logit_gap, relayed_means
from fedaudit.attacks.membership.logit_gap import LogitGap, log_ratio
from fedaudit.attacks.membership.relayed_means import RelayedMeans, others
from fedaudit.wire.release import Protection


@pytest.mark.parametrize("sigma", [0.0, 0.5, 3.0])
def test_the_ratio_of_a_noised_mean_by_other_code(sigma):
    """Two dimensions, every size 2^(i/2) tried by numpy."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(2, 2))
    Sigma, a, d = root @ root.T + np.eye(2), np.array([0.6, -0.3]), rng.normal(size=(3, 2))
    extra = 0.05
    best, N, S = -math.inf, 0.0, None
    for i in range(30):
        size = math.sqrt(2) ** i
        cov = Sigma * (1 / size + extra) + sigma * sigma * np.eye(2)
        value = -np.linalg.slogdet(cov)[1] - a @ np.linalg.inv(cov) @ a
        if value > best:
            best, N, S = value, size, cov
    wanted = [row @ np.linalg.inv(S) @ a / N - row @ np.linalg.inv(S) @ row / (2 * N * N) for row in d]
    made = log_ratio(torch.from_numpy(d), torch.from_numpy(a), torch.from_numpy(Sigma), extra, sigma)
    assert made.tolist() == pytest.approx(wanted, rel=1e-9)


def scene(auxiliary=0):
    return SimpleNamespace(view=SimpleNamespace(threat="server"), target=0, auxiliary=(torch.zeros(auxiliary, 1),))


@pytest.mark.parametrize(
    ("means", "shares", "consensus", "auxiliary", "words"),
    [
        (True, False, False, 1, None),
        (True, False, False, 0, "no auxiliary set to hold means against"),
        (False, False, True, 1, "sees no outputs of client 0"),
        (False, True, True, 0, None),  # another client answered on the same images
        (False, True, False, 1, None),  # or there are auxiliary records
        (False, True, False, 0, "sees no other answers on these images"),
    ],
)
def test_what_the_gap_needs(means, shares, consensus, auxiliary, words, monkeypatch):
    monkeypatch.setattr(logit_gap, "class_means", lambda scene: ["one"] if means else [])
    monkeypatch.setattr(logit_gap, "shared", lambda scene, k, rounds: {1: "answers"} if shares else {})
    monkeypatch.setattr(LogitGap, "_consensus", lambda self, scene, of: ["one"] if consensus else [])
    found = LogitGap().cannot(scene(auxiliary))
    assert found is None if words is None else words in found


def test_the_consensus_is_of_those_who_answered_on_the_same_images(monkeypatch):
    """Round 1: clients 1 and 2 on the same images, mean (3 + 5) / 2. Round 2: nobody. `auxiliary`: nobody is asked."""
    same, foreign = torch.ones(1, 2), torch.zeros(1, 2)
    answers = {
        1: {1: (same, torch.tensor([[3.0]])), 2: (foreign, torch.tensor([[9.0]]))},
        2: {1: (same, torch.tensor([[5.0]]))},
    }
    monkeypatch.setattr(logit_gap, "others", lambda scene: [1, 2])
    monkeypatch.setattr(logit_gap, "shared", lambda scene, k, rounds: answers[k])
    mine = {1: (same, torch.tensor([[7.0]])), 2: (same, torch.tensor([[7.0]]))}
    ((images, mean),) = LogitGap()._consensus(scene(), mine)
    assert (images is same, mean.tolist()) == (True, [[4.0]])
    assert LogitGap(pair="auxiliary")._consensus(scene(), mine) == []


def peer(number=1, mixed=(), auxiliary=1):
    threat = SimpleNamespace(peer=number)
    made = scene(auxiliary)
    made.view.threat, made.mixed = threat, lambda kind: [1] if kind in mixed else []
    return made


@pytest.mark.parametrize(
    ("given", "means", "words"),
    [
        ({"number": None}, True, "has the uploads themselves"),
        ({"mixed": ()}, True, "passed on no means by class"),
        ({"mixed": ("logits",)}, False, "was sent no model that the means by class were taken at"),
        ({"mixed": ("prototypes",), "auxiliary": 0}, True, "no auxiliary set"),
        ({"mixed": ("prototypes",)}, True, None),
        ({"mixed": ("logits",), "number": 0}, True, None),
    ],
)
def test_what_relayed_means_need(given, means, words, monkeypatch):
    monkeypatch.setattr(relayed_means, "means_of_others", lambda scene: ["one"] if means else [])
    found = RelayedMeans().cannot(peer(**given))
    assert found is None if words is None else words in found


def test_the_others_mean_of_three_clients():
    """(3 * 5 - 3) / 2 = 6; a class that the peer does not hold is the others' own."""
    found = others({0: torch.tensor([5.0]), 1: torch.tensor([7.0])}, {0: torch.tensor([3.0])}, 3)
    assert {c: mean.item() for c, mean in found.items()} == {0: 6.0, 1: 7.0}


def test_a_mean_is_held_against_as_many_records_as_its_class_has(monkeypatch):
    """Four auxiliary records of class 0, two of class 1 and one of class 2: their own means have 1/4 and 1/2 of the
    variance, and one record gives none. Class 0's centre is 2.5, so that its mean of 3 lies 0.5 above it."""
    calls = []

    def told(d, a, Sigma, extra, sigma):
        calls.append((d.flatten().tolist(), a.tolist(), extra, sigma))
        return torch.full((len(d),), float(len(calls)), dtype=torch.float64)

    monkeypatch.setattr(logit_gap, "log_ratio", told)
    known, y = torch.tensor([[1.0], [2.0], [3.0], [4.0], [6.0], [8.0], [9.0]]), torch.tensor([0, 0, 0, 0, 1, 1, 2])
    scene = SimpleNamespace(
        auxiliary=(known, y), x=torch.tensor([[2.0], [7.5], [9.0], [3.5]]), y=torch.tensor([0, 1, 2, 0]), classes=3
    )
    means = {c: torch.tensor([3.0 + c]) for c in range(3)}
    ratio = logit_gap.tracing(scene, lambda x: x, means, "logits", Protection(mechanism="gaussian", sigma=0.25))
    assert calls == [([-0.5, 1.0], [0.5], 1 / 4, 0.25), ([0.5], [-3.0], 1 / 2, 0.25)]
    assert ratio.tolist() == [1.0, 2.0, 0.0, 1.0]
