"""An app whose DP noise is half of what it claims is refuted; the honest one is not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, message_size_mod

from fedaudit.errors import SettingError
from fedaudit.flower import audit_mods, run_app
from fedaudit.runtime.run_record import read_record

CLIP, EPSILON, DELTA = 0.5, 4.0, 1e-5
TRIALS = 150


class Careless(LocalDpMod):
    """Claims epsilon, and adds the noise of twice that."""

    def __call__(self, msg, ctxt, call_next):
        half = LocalDpMod(self.clipping_norm, self.sensitivity, 2 * self.epsilon, self.delta)
        return half(msg, ctxt, call_next)


class Unclipped(LocalDpMod):
    """The noise is right, the clipping is forgotten."""

    def __call__(self, msg, ctxt, call_next):
        loose = LocalDpMod(1e6, self.sensitivity, self.epsilon, self.delta)
        return loose(msg, ctxt, call_next)


def app_with(mod, at="app"):
    app = ClientApp(mods=[message_size_mod, mod]) if at == "app" else ClientApp(mods=[message_size_mod])

    @app.train(mods=None if at == "app" else [mod])
    def train(message, context):
        arrays = [array + 0.1 for array in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    return app


@pytest.fixture(scope="module")
def private_run(sk_app, tmp_path_factory):
    """A tiny model: two nodes, one round, with the honest mod."""
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    server = ServerApp()

    @server.main()
    def main(grid, context):
        start = ArrayRecord([np.zeros((3, 4), dtype=np.float32), np.zeros(3, dtype=np.float32)])
        FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=1)

    honest = app_with(LocalDpMod(CLIP, 2 * CLIP, EPSILON, DELTA))
    app = dataclasses.replace(sk_app, client=honest, server=server, adapter=None)
    out = tmp_path_factory.mktemp("flower") / "dp"
    run_app(app, out=out, nodes=2)
    return out


def test_the_claim_stands_in_the_record(private_run):
    record = read_record(private_run)
    said = "(4, 1e-05)-DP of one upload, clipping norm 0.5, sensitivity 1; such noise gives epsilon 3.51"
    assert f"claim of LocalDpMod: {said}" in record.notes
    assert record.ledger[0].by_kind["weights"] == float("inf")  # a claim is no measure of ours


@pytest.mark.parametrize("at", ["app", pytest.param("function", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mod", "verdict"), [(LocalDpMod, "not refuted"), (Careless, "refuted"), (Unclipped, "refuted")]
)
def test_half_the_noise_is_refuted_and_the_whole_is_not(mod, verdict, at, private_run):
    audits = audit_mods(private_run, app_with(mod(CLIP, 2 * CLIP, EPSILON, DELTA), at), trials=TRIALS)
    gaussian = next(audit for audit in audits if audit.test.endswith("Gaussian"))
    assert gaussian.verdict == verdict
    assert gaussian.claim_epsilon == EPSILON
    assert gaussian.finds >= 0.5
    mine = [audit for audit in read_record(private_run).audits if audit.claim == f"{mod.__name__}, one upload"]
    assert [(audit.test, audit.verdict) for audit in mine] == sorted((audit.test, audit.verdict) for audit in audits)


def test_the_honest_one_is_rarely_refuted(private_run):
    """Its noise is worth 3.51 and its claim 4: one in seventy is expected (2 of 150 were), in three at most one."""
    app = app_with(LocalDpMod(CLIP, 2 * CLIP, EPSILON, DELTA))
    verdicts = [a.verdict for seed in range(3) for a in audit_mods(private_run, app, trials=60, seed=seed)]
    assert verdicts.count("refuted") <= 1


def test_the_classical_formula_does_not_hold_far_above_one():
    """At epsilon 10 it gives noise worth 10.4: said beside the claim."""
    from fedaudit.flower.claims import local_claims

    assert "such noise gives epsilon 10.4" in local_claims(app_with(LocalDpMod(CLIP, 2 * CLIP, 10.0, DELTA)))[0].text


def test_a_sensitivity_below_two_clips_is_told_and_tried_as_claimed(private_run):
    """The noise is scaled for updates C apart: at that distance the claim holds, at 2 C it would not."""
    from fedaudit.flower.claims import local_claims

    app = app_with(LocalDpMod(CLIP, CLIP, EPSILON, DELTA))
    assert "may lie 1 apart, more than this sensitivity" in local_claims(app)[0].text
    audits = audit_mods(private_run, app, trials=TRIALS)
    assert audits[-1].verdict == "not refuted"
    assert audits[-1].how.startswith("two updates 0.5 apart")


def test_few_trials_cannot_tell(private_run):
    audits = audit_mods(private_run, app_with(LocalDpMod(CLIP, 2 * CLIP, EPSILON, DELTA)), trials=4)
    assert {audit.verdict for audit in audits} == {"cannot tell"}


def test_an_app_without_a_claim(private_run, sk_app):
    with pytest.raises(SettingError, match="claims local DP"):
        audit_mods(private_run, sk_app.client)
