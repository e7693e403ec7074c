"""Canaries along single parameters: without noise the claim falls in one run, with honest noise it stands."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedaudit import run
from fedaudit.epsilon import gradient_canaries
from fedaudit.epsilon.client_replay import repeat
from fedaudit.epsilon.gradient_canaries import (
    REAL,
    Canaries,
    Scores,
    _probe,
    _with_canaries,
    _without_canaries,
    audit_canaries,
    keep_canaries,
)
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.errors import DataError, PrivacyError, SettingError
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.task import compute

SMALL = {"dataset": "digits", "model": "mlp", "partition": "iid", "holdout": 0.5, "aux": 0.4, "eval_clients": False}
PRIVATE = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:0.5", "delta": 1e-2}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "trained"
    run(method="fedavg", rounds=2, clients=2, set={"E": 1, "B": 64}, privacy=PRIVATE, out=folder, **SMALL)
    return folder


def less_noise(monkeypatch, factor):
    from opacus.optimizers import DPOptimizer

    real = DPOptimizer.add_noise

    def less(self):
        real(self)
        for p in self.params:
            p.grad = p.summed_grad.view_as(p) + factor * (p.grad - p.summed_grad.view_as(p))

    monkeypatch.setattr(DPOptimizer, "add_noise", less)


def test_honest_noise_is_not_refuted(trained):
    audits = audit_canaries(trained, canaries=200)
    assert [a.test for a in audits] == ["gradient canaries, Gaussian", "gradient canaries, f-DP"]
    assert all(a.verdict != "refuted" and a.lower_bound <= a.claim_epsilon for a in audits)
    assert all(a.trials == 400 and a.ceiling is not None for a in audits)
    assert {a.test for a in read_record(trained).audits} == {a.test for a in audits}


def test_without_noise_the_claim_is_refuted_in_one_run(trained, monkeypatch):
    less_noise(monkeypatch, 0.0)
    assert "refuted" in {a.verdict for a in audit_canaries(trained, canaries=200)}


@pytest.mark.long
def test_less_noise_is_never_silent(trained, monkeypatch):
    less_noise(monkeypatch, 0.5)
    shift = audit_canaries(trained, canaries=200)[0]
    assert shift.verdict in ("refuted", "suspicious", "cannot tell")


def scores_of(folder, canaries=300):
    found = RunFolder(folder)
    coins = torch.rand(canaries, generator=torch.Generator().manual_seed(1)) < 0.5
    scores = Scores(coins, torch.zeros(canaries, dtype=torch.float64))
    with compute(found.world):
        repeat(found, 0, lambda *_: None, lambda fit: _probe(fit, scores))
    return scores


def test_scores_are_as_far_apart_as_the_theory_says(trained):
    """Out: N(0, 1). In: q sqrt(T) / m above, q the sample rate and m = 1 the noise multiplier; the sample adds
    q (1 - q) / m^2 to the variance. 300 canaries: standard errors of a mean 0.08, of a deviation 0.06."""
    scores = scores_of(trained)
    values, inside = scores.scaled, scores.inside.numpy()
    assert abs(values[~inside].mean()) < 0.3
    assert values[~inside].std() == pytest.approx(1, abs=0.2)
    shift = scores.rate * math.sqrt(scores.steps)
    assert values[inside].mean() - values[~inside].mean() == pytest.approx(shift, abs=0.4)


def test_without_noise_scores_count_how_often_a_canary_was_drawn(trained, monkeypatch):
    """sigma sqrt(T) times a score is C times a count: multiples of 1 / sqrt(T), and 0 for canaries that are out."""
    less_noise(monkeypatch, 0.0)
    scores = scores_of(trained)
    counts = scores.scaled * math.sqrt(scores.steps)
    assert np.abs(counts[~scores.inside.numpy()]).max() < 1e-3
    assert np.abs(counts - counts.round()).max() < 1e-3
    assert counts[scores.inside.numpy()].mean() == pytest.approx(scores.steps * scores.rate, rel=0.15)


def test_the_loss_of_a_canary():
    class F:
        params = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}  # noqa: RUF012

    mark = torch.tensor([REAL, 1, 2])
    found = _with_canaries(F(), mark, torch.ones(3), loss=lambda f, x: 7 * x, name="w", steep=10.0)
    assert found.tolist() == [7.0, 20.0, 30.0]
    left = _without_canaries(F(), mark == REAL, torch.ones(3), loss=lambda f, x: 7 * x)
    assert left.tolist() == [7.0, 0.0, 0.0]


@pytest.mark.long
def test_beside_the_residuals_they_show_what_they_show_alone(trained):
    """One repetition for both, as the audits of a suite make it."""
    alone = [*audit_residuals(trained), *audit_canaries(trained, canaries=20)]
    canaries = Canaries(20)
    together = [*audit_residuals(trained, beside=canaries.of), *keep_canaries(trained, canaries)]
    assert together == alone


@pytest.mark.long
def test_a_training_that_bears_no_canary_does_not_stop_the_residuals(trained, monkeypatch):
    def refuse(fit, scores):
        raise PrivacyError("no")

    monkeypatch.setattr("fedaudit.epsilon.gradient_canaries._probe", refuse)
    canaries = Canaries(100)
    (found,) = audit_residuals(trained, beside=canaries.of)
    assert found.verdict == "not refuted"
    with pytest.raises(DataError, match="could be repeated: no"):
        keep_canaries(trained, canaries)


def test_training_without_privacy_has_no_claim(tmp_path):
    run(method="fedavg", rounds=1, clients=2, out=tmp_path / "a", **SMALL)
    with pytest.raises(SettingError, match="not private"):
        audit_canaries(tmp_path / "a")


def test_the_loss_of_a_canary_is_its_parameter():
    """Two records of the client, and canaries at parameters 0 and 3, which count nothing in the training without."""
    f = SimpleNamespace(params={"w": torch.tensor([[5.0, 6.0], [7.0, 8.0]])})
    mark = torch.tensor([gradient_canaries.REAL, 0, 3, gradient_canaries.REAL])

    def loss(f, x, times):
        return times * x

    found = gradient_canaries._with_canaries(
        f, mark, torch.tensor([1.0, 2.0, 3.0, 5.0]), loss=loss, name="w", steep=10.0, times=2.0
    )
    assert found.tolist() == [2.0, 50.0, 80.0, 10.0]
    real = torch.tensor([True, False, False, True])
    found = gradient_canaries._without_canaries(f, real, torch.tensor([1.0, 2.0, 3.0, 5.0]), loss=loss, times=2.0)
    assert found.tolist() == [2.0, 0.0, 0.0, 10.0]


def test_scores_of_a_client_that_has_not_trained_are_of_no_step():
    scores = Scores(torch.zeros(3), torch.zeros(3))
    assert (scores.steps, scores.rate) == (0, 0.0)
