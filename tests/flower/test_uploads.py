"""Uploads that left an app's run hold the noise that its mod claims, or are refuted."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, message_size_mod
from scipy.stats import chi2, ncx2

from fedaudit.flower import audit_mods, run_app, uploads
from fedaudit.flower.claims import local_claims
from fedaudit.flower.uploads import Left, _would_find, audit_uploads, uploads_of
from fedaudit.runtime.folder import RunFolder

CLIP, EPSILON, DELTA = 0.5, 4.0, 1e-5


class Weak(LocalDpMod):
    """A run's mod that adds half of the noise; it goes by the name of the honest one."""

    def __call__(self, msg, ctxt, call_next):
        half = LocalDpMod(self.clipping_norm, self.sensitivity, 2 * self.epsilon, self.delta)
        return half(msg, ctxt, call_next)


def app_of(*mods):
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        arrays = [array + 0.1 for array in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    return app


def ran(sk_app, client, out):
    """Two nodes, two rounds, a model of 1,230 numbers."""
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    server = ServerApp()

    @server.main()
    def main(grid, context):
        start = ArrayRecord([np.full((40, 30), 3, dtype=np.float32), np.zeros(30, dtype=np.float32)])
        FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=2)

    run_app(dataclasses.replace(sk_app, client=client, server=server, adapter=None), out=out, nodes=2)
    return out


HONEST = LocalDpMod(CLIP, 2 * CLIP, EPSILON, DELTA)


@pytest.fixture(scope="module")
def honest(sk_app, tmp_path_factory):
    return ran(sk_app, app_of(message_size_mod, HONEST), tmp_path_factory.mktemp("flower") / "honest")


def test_a_mod_that_was_weak_in_the_run_alone_is_found(sk_app, honest, tmp_path):
    """The mods that are tried afterwards are honest: only what left the run shows what was missing in it."""
    weak = ran(sk_app, app_of(Weak(CLIP, 2 * CLIP, EPSILON, DELTA)), tmp_path / "weak")
    found = audit_mods(weak, app_of(HONEST), trials=20)
    assert [(a.test, a.verdict) for a in found if a.verdict == "refuted"] == [("uploads of the run", "refuted")]
    assert found[0].p_value < 1e-20
    assert found[0].lower_bound > EPSILON
    (first, *_) = audit_mods(honest, app_of(message_size_mod, HONEST), trials=20)
    assert (first.test, first.verdict, first.trials) == ("uploads of the run", "not refuted", 4 * 1230)
    assert first.finds > 0.9
    assert "no record holds Flower's generator" in first.how


def test_sums_of_squares_by_hand(honest):
    """Every upload less the model of its own round, in double precision."""
    run = RunFolder(honest)
    sent, squares = {}, 0.0
    for entry in run.transcript.entries():
        values = torch.cat([t.double().reshape(-1) for t in entry["arrays"].values()])
        if entry.direction == "down":
            sent[entry.client, entry.round] = values
        else:
            squares += float((values - sent[entry.client, entry.round]).square().sum())
    assert uploads_of(run) == Left(pytest.approx(squares), 4 * 1230, 4)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "not refuted"), (0.95, "refuted"), (1.5, "not refuted")])
def test_the_sum_of_squares_is_held_against_chi_square(monkeypatch, scale, verdict):
    """4,000 numbers at their expectation. p is P[chi-square with 4,000 degrees <= 4,000 scale^2]."""
    (claim,) = local_claims(app_of(HONEST))
    monkeypatch.setattr(uploads, "uploads_of", lambda run: Left(4000 * (scale * claim.sigma) ** 2, 4000, 2))
    run = SimpleNamespace(record=SimpleNamespace(ledger=[]))
    found = audit_uploads(run, app_of(HONEST), claim, "weights", 0.95)
    assert found.verdict == verdict
    assert found.p_value == pytest.approx(chi2.cdf(4000 * scale**2, 4000), rel=1e-6)


def test_what_would_be_found():
    """Of 1,000 numbers and updates that add 100 variances at most, by SciPy's own distributions."""
    finds, tells_at = _would_find(1000, 100.0, 0.001)
    most = chi2.ppf(0.001, 1000)
    assert ncx2.cdf(most / finds**2, 1000, 100 / finds**2) >= 0.99
    assert ncx2.cdf(most / (finds + 0.01) ** 2, 1000, 100 / (finds + 0.01) ** 2) < 0.99
    unlucky = 0.81 * ncx2.ppf(0.99, 1000, 100 / 0.81)
    assert tells_at == pytest.approx(chi2.cdf(unlucky, 1000), rel=1e-3)


def test_honest_uploads_are_rarely_refuted():
    """Noise without updates, the hardest case: 5 % of 2,000 draws have p < 0.05, within four deviations."""
    rng = np.random.default_rng(3)
    p = chi2.cdf((rng.standard_normal((2000, 50)) ** 2).sum(1), 50)
    assert abs((p < 0.05).mean() - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 2000)


def changes(message, context, call_next):
    return call_next(message, context)


@pytest.mark.parametrize(
    ("mods", "words"),
    [
        ([arrays_size_mod, HONEST], None),
        ([changes, HONEST], "the mod changes may change an upload after the noise of LocalDpMod"),
        ([Weak(CLIP, 1.0, 1.0, DELTA), HONEST], "Weak adds noise of its own after LocalDpMod"),
        ([HONEST, changes], None),
    ],
)
def test_what_comes_after_the_noise_is_named(honest, mods, words):
    claim = next(c for c in local_claims(app_of(*mods)) if c.mod == "LocalDpMod")
    found = audit_uploads(RunFolder(honest), app_of(*mods), claim, "weights", 0.95)
    assert (words is None) == (found.verdict == "not refuted")
    assert words is None or (found.verdict == "cannot tell" and words in found.how)
