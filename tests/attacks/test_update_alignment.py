"""Updates against other clients': the null distribution by other code, and who has none."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedaudit.attacks.membership import update_alignment
from fedaudit.attacks.membership.update_alignment import UpdateAlignment, above_null, one_tailed


def by_numpy(measured: np.ndarray) -> np.ndarray:
    """Empirical Bayes, written anew: the prior variance of a candidate's mean is what exceeds the noise of a mean."""
    target, null = measured[0], measured[1:]
    K = null.shape[0]
    noise = np.mean([np.var(column, ddof=1) for column in null.T])
    prior = max(0.0, np.var(null.mean(0), ddof=1) - noise / K)
    share = prior / (prior + noise / K)
    centre = (1 - share) * null.mean() + share * null.mean(0)
    return (target - centre) / np.sqrt(noise + share * noise / K)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_the_shrunken_null_by_other_code(spread):
    """Candidates whose means differ not at all, by less than 1, and by more."""
    rng = np.random.default_rng(1)
    measured = 0.4 * rng.normal(size=(5, 12)) + spread * rng.normal(size=12)
    assert above_null(torch.from_numpy(measured)).numpy() == pytest.approx(by_numpy(measured), rel=1e-6)


def test_one_candidate_has_no_spread_between_candidates():
    """Others at 0 and 2: mean 1, variance 2; nothing is shrunken."""
    assert above_null(torch.tensor([[4.0], [0.0], [2.0]])).tolist() == pytest.approx([3 / math.sqrt(2)], rel=1e-6)
    assert one_tailed(torch.tensor([[1.0], [0.0], [2.0]])).tolist() == pytest.approx([0.5])


def shown(weights, starts, monkeypatch):
    """Models of one parameter, by client, and the models that they started from; None: the view shows none."""
    models = {}
    for k, w in weights.items():
        models[k] = SimpleNamespace(client=k), nn.Linear(1, 1, bias=False)
        nn.init.constant_(models[k][1].weight, w)

    def received(scene, entry):
        if starts[entry.client] is None:
            return None
        start = nn.Linear(1, 1, bias=False)
        nn.init.constant_(start.weight, starts[entry.client])
        return start

    monkeypatch.setattr(update_alignment, "received", received)
    monkeypatch.setattr(update_alignment, "cosines", lambda start, x, y, updates: updates.clone())
    return models


SCENE = SimpleNamespace(target=0, x=None, y=None)


@pytest.mark.parametrize("starts", [{0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 2.0, 2: 1.0}])
def test_updates_are_what_training_took_away(starts, monkeypatch):
    """Of one broadcast, and of clients that got unequal models. The target's row comes first."""
    models = shown({0: 0.5, 1: 0.25, 2: 3.0}, starts, monkeypatch)
    found = UpdateAlignment()._cosines(SCENE, models)
    assert found[:, 0].tolist() == [starts[k] - w for k, w in ((0, 0.5), (1, 0.25), (2, 3.0))]


@pytest.mark.parametrize("starts", [{0: 1.0, 1: 1.0, 2: None}, {0: None, 1: 1.0, 2: 1.0}])
def test_two_updates_have_no_null_distribution(starts, monkeypatch):
    models = shown({0: 0.5, 1: 0.25, 2: 3.0}, starts, monkeypatch)
    assert UpdateAlignment()._cosines(SCENE, models) is None


@pytest.mark.parametrize(
    ("measure", "start", "words"),
    [
        ("cosine", None, "does not see the model that client 0 started from, which the cosine needs"),
        ("cosine", 1.0, None),
        ("loss", None, None),
        ("both", None, None),  # the loss needs no start
    ],
)
def test_only_the_cosine_needs_the_model_that_a_client_started_from(measure, start, words, monkeypatch):
    models = shown({0: 0.5, 1: 0.25, 2: 3.0}, {0: start, 1: 1.0, 2: 1.0}, monkeypatch)
    monkeypatch.setattr(UpdateAlignment, "_rounds", lambda self, scene: [1])
    monkeypatch.setattr(UpdateAlignment, "_shown", lambda self, scene, t: models)
    found = UpdateAlignment(measure=measure).cannot(SimpleNamespace(target=0, view=SimpleNamespace(threat="server")))
    assert found == (None if words is None else f"the server {words}")
