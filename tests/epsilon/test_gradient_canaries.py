"""Canaries along single parameters: without noise the claim falls in one run, with honest noise it stands."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedaudit import run
from fedaudit.epsilon import gradient_canaries
from fedaudit.epsilon.audit_result import AuditedClaim
from fedaudit.epsilon.client_replay import QUIET, STEP, repeat
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
from fedaudit.errors import DataError, PrivacyError, RunError, SettingError
from fedaudit.progress import unwatched
from fedaudit.rng import generator
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


@pytest.mark.long
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


# --- each function alone ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A training that is not made: `after` notes how it was asked. Without canaries a parameter ends at its place."""

    asked: list
    start: dict
    rows: tuple = (torch.tensor([[1.0], [2.0], [3.0], [4.0]]),)
    loss: object = "the method's loss"
    batch: int = 2
    epochs: int | None = 3
    steps: int | None = None
    people: object = "of some people"
    C: float = 0.5
    sigma: float = 4.0
    count: int = 6
    device: str = "cpu"

    @property
    def expected(self):
        self.asked.append(("expected", self.batch, [row.tolist() for row in self.rows]))
        return 8.0

    def after(self, multiplier):
        self.asked.append((self, multiplier))
        size = self.start["large"].numel()
        places = torch.arange(size, dtype=torch.float64) * STEP
        return {"large": (places if multiplier == QUIET else places / 4).reshape(2, -1), "small": None}


@pytest.mark.parametrize(("canaries", "left"), [(4, 4), (9, 6)])
def test_one_training_with_canaries_and_one_without(canaries, left):
    """Each canary has a parameter of the largest tensor. What the first training has beyond the second is its score."""
    asked = []
    fit = Fit(asked, {"small": torch.zeros(1, 2), "large": torch.zeros(2, 3)})
    inside = torch.tensor([True, False, True, True, False, False, True, True, True])[:canaries]
    scores = Scores(inside, torch.full((canaries,), 0.25, dtype=torch.float64))
    _probe(fit, scores)
    at = torch.randperm(6, generator=generator("gradient canaries", "at"))[:left]
    there = at[inside[:left]].tolist()
    more = len(there)
    assert scores.total.tolist() == pytest.approx((0.25 + at.double() * 0.75 * 8.0 / 4.0).tolist())
    assert scores.inside.tolist() == inside[:left].tolist()
    batch = round(2 * (4 + more) / 4)
    assert (scores.steps, scores.rate) == (6, pytest.approx(batch / (4 + more)))
    (noisy, much), (clean, little), expected = asked
    assert (much, little) == (8.0, QUIET)
    mark, x = noisy.rows
    assert mark.tolist() == [REAL] * 4 + there
    assert x.flatten().tolist() == [1.0, 2.0, 3.0, 4.0] + [1.0] * more
    assert clean.rows[0].tolist() == [True] * 4 + [False] * more
    for made in (noisy, clean):
        assert (made.batch, made.epochs, made.steps, made.people) == (batch, None, 6, None)
    assert noisy.loss.keywords == {"loss": "the method's loss", "name": "large", "steep": 500.0}
    assert clean.loss.keywords == {"loss": "the method's loss"}
    assert expected == ("expected", batch, [mark.tolist()])
    _probe(fit, scores)
    assert scores.steps == 12


def test_coins_are_of_the_runs_seed_and_the_client():
    def coins(seed, k, n=400):
        return gradient_canaries._coins(
            SimpleNamespace(world=SimpleNamespace(setting=SimpleNamespace(seed=seed))), k, n
        )

    inside, total = coins(3, 1)
    wanted = torch.rand(400, generator=generator(3, "gradient canaries", 1)) < 0.5
    assert inside.tolist() == wanted.tolist()
    assert (total.tolist(), total.dtype) == ([0.0] * 400, torch.float64)
    assert inside.tolist() != coins(4, 1)[0].tolist()
    assert inside.tolist() != coins(3, 2)[0].tolist()


def test_scores_are_in_deviations_of_all_steps():
    scores = Scores(torch.tensor([True, False]), torch.tensor([6.0, -3.0], dtype=torch.float64), steps=9)
    assert scores.scaled.tolist() == pytest.approx([2.0, -1.0])
    assert Scores(scores.inside, scores.total).scaled.tolist() == [6.0, -3.0]


def test_canaries_of_clients_that_bear_none_are_left_out(monkeypatch):
    tried = []

    def probe(fit, scores):
        tried.append((fit, scores))
        if fit == "bad":
            raise PrivacyError("it bears none")
        scores.steps += 2

    monkeypatch.setattr(gradient_canaries, "_probe", probe)
    monkeypatch.setattr(gradient_canaries, "_coins", lambda run, k, n: (f"coins {run} {k} {n}", None))
    monkeypatch.setattr(gradient_canaries, "_audit", lambda run, found, confidence: (run, sorted(found), confidence))
    found = Canaries()
    assert (found.each, found.scores, found.reason) == (400, {}, "no client took part")
    with pytest.raises(DataError, match=r"could be repeated: no client took part\."):
        found.audit("run")
    first, second, third = (found.of("run", k) for k in (0, 1, 2))
    assert found.scores[1].inside == "coins run 1 400"
    first("good")
    second("bad")
    second("good")
    assert [fit for fit, _ in tried] == ["good", "bad"], "a client that bears none is not asked again"
    assert (sorted(found.scores), found.reason) == ([0, 2], "it bears none")
    assert found.audit("run") == ("run", [0], 0.95), "the third has not trained"
    third("good")
    assert found.audit("run", 0.9) == ("run", [0, 2], 0.9)
    assert Canaries(7).each == 7


@pytest.fixture
def of_run(monkeypatch):
    """A run of three clients of which two are in the ledger, with nothing repeated and nothing judged."""
    noted = SimpleNamespace(repeated=[], saved=[], status="done", policies={"training": 1})

    def folder(path):
        ledger = [SimpleNamespace(client=k) for k in (0, 2)]
        world = SimpleNamespace(policies=noted.policies, setting=SimpleNamespace(clients=3, seed=1))
        record = SimpleNamespace(status=noted.status, ledger=ledger, transcript_digest="digest")
        return SimpleNamespace(world=world, record=record, folder=path)

    def repeated(run, k, watch, probe):
        noted.repeated.append((k, watch, probe.args[0], len(probe.args[1].inside)))
        if k == 2:
            raise PrivacyError("client 2 is gone")

    def audit(self, run, confidence=0.95):
        noted.reason = self.reason
        return [f"audits {confidence}"]

    monkeypatch.setattr(gradient_canaries, "RunFolder", folder)
    monkeypatch.setattr(gradient_canaries, "compute", lambda world: nullcontext())
    monkeypatch.setattr(gradient_canaries, "repeat", repeated)
    monkeypatch.setattr(Canaries, "audit", audit)
    monkeypatch.setattr(gradient_canaries, "save_audits", lambda *given: noted.saved.append(given))
    return noted


def test_the_trainings_of_the_clients_that_are_asked_for_are_repeated(of_run):
    assert audit_canaries("here", canaries=5, confidence=0.9, watch="watch") == ["audits 0.9"]
    assert of_run.repeated == [(0, "watch", 0, 5), (2, "watch", 2, 5)]
    assert of_run.reason == "client 2 is gone"
    (saved,) = of_run.saved
    assert saved[:3] == ("here", "digest", ["audits 0.9"])
    assert 0 <= saved[3] < 60
    of_run.repeated.clear()
    audit_canaries("here", clients=[0])
    assert of_run.repeated == [(0, unwatched, 0, 400)]
    assert of_run.reason == "no client took part"
    of_run.saved.clear()
    assert keep_canaries("here", Canaries()) == ["audits 0.95"]
    assert of_run.saved == [("here", "digest", ["audits 0.95"], 0.0)]


def test_what_cannot_be_tried_with_canaries_is_said(of_run):
    for k in (-1, 3):
        with pytest.raises(SettingError, match=f"There is no client {k}; the run has 3"):
            audit_canaries("here", clients=[0, k])
    audit_canaries("here", clients=[2])
    with pytest.raises(SettingError, match="confidence = 1"):
        audit_canaries("here", confidence=1.0)
    of_run.status = "running"
    with pytest.raises(RunError, match="is not finished"):
        audit_canaries("here")
    of_run.status, of_run.policies = "done", {"logits": 1}
    with pytest.raises(SettingError, match="was not private"):
        audit_canaries("here")


def test_scores_are_held_against_the_largest_claim_of_their_clients(monkeypatch):
    """Client 2 claims 3, client 0 claims 2, and client 1, who has no scores, 9. 6 canaries of which 4 are guessed on:
    with 0.1 sqrt(25) / 2 deviations between in and out, those farthest from 0.125 are guessed."""
    noted = {}

    def entry(kind, multiplier):
        return SimpleNamespace(kind=kind, noise_multiplier=multiplier)

    def row(k, claim, multiplier):
        kinds = {} if claim is None else {"training": claim, "logits": 50.0}
        return SimpleNamespace(
            client=k, by_kind=kinds, delta=k / 100, entries=[entry("logits", 7.0), entry("training", multiplier)]
        )

    ledger = [row(0, 2.0, 4.0), row(1, 9.0, 9.0), row(2, 3.0, 2.0), row(3, None, 1.0)]
    run = SimpleNamespace(record=SimpleNamespace(ledger=ledger))
    first = Scores(torch.tensor([True, False, True]), torch.tensor([1.0, 0.125, 3.0]) * 5, steps=25, rate=0.1)
    other = Scores(torch.tensor([False, True, False]), torch.tensor([0.5, -2.0, 0.1]) * 2, steps=4, rate=0.9)

    def path(place, test, bound, scores, member, shift, delta, confidence, how):
        noted.update(scores=scores.tolist(), member=member.tolist(), shift=shift)
        return (place, test, bound, delta, confidence, how)

    def fdp(m, made, right, delta, confidence):
        return SimpleNamespace(
            epsilon=100.0 * right + made, of=(m, delta, confidence), p_value=lambda claim: claim / 64
        )

    def judged(place, test, bound, top, how, *, tells_at):
        return (place, test, bound.epsilon, bound.of, top, how, tells_at)

    monkeypatch.setattr(gradient_canaries, "held_path", path)
    monkeypatch.setattr(gradient_canaries, "one_run_fdp", fdp)
    monkeypatch.setattr(gradient_canaries, "held", judged)
    monkeypatch.setattr(gradient_canaries, "best_guesses", lambda *terms: noted.update(terms=terms) or 4)
    gaussian, guessed = gradient_canaries._audit(
        run, {2: first, 0: other, 3: Scores(torch.ones(0), torch.ones(0))}, 0.9
    )
    assert noted["scores"] == pytest.approx([1.0, 0.125, 3.0, 0.5, -2.0, 0.1])
    assert [bool(of) for of in noted["member"]] == [True, False, True, False, True, False]
    assert noted["shift"] == pytest.approx(0.1 * 5 / 2)
    assert noted["terms"] == (6, 3.0, 0.02, 0.9)
    place = AuditedClaim("training", "whoever sees every step of training", "training, all rounds", 3.0, 3.0)
    how = "6 canaries of 3 clients, 25 steps at sample rate 0.1; with the promised noise 0.25 deviations apart"
    assert gaussian == (place, "gradient canaries, Gaussian", gradient_canaries.gdp_mean_shift, 0.02, 0.9, how)
    # Farthest from 0.125: 3 (in, right), -2 (in, wrong), 1 (in, right), 0.5 (out, wrong).
    told = f"{how}; 2 of 4 guesses right; so many canaries can show 404"
    assert guessed == (place, "gradient canaries, f-DP", 204.0, (6, 0.02, 0.9), 404.0, told, 3.0 / 64)
    monkeypatch.setattr(gradient_canaries, "best_guesses", lambda *terms: 6)
    _, guessed = gradient_canaries._audit(run, {2: first, 0: other}, 0.9)
    assert guessed[2] == 406.0, "0.125 and 0.1 are guessed to be out, and are"
