"""An app whose DP noise is half of what it claims is refuted; the honest one is not."""

from __future__ import annotations

import dataclasses
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, message_size_mod
from flwr.common import Code, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import recorddict_to_fitres

from fedaudit.epsilon.audit_result import AuditedClaim
from fedaudit.errors import RunError, SettingError
from fedaudit.flower import audit_mods, epsilon, run_app
from fedaudit.flower.claims import LocalClaim, local_claims
from fedaudit.flower.client import identify
from fedaudit.flower.messages import array_of
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


@pytest.mark.long
def test_the_honest_one_is_rarely_refuted(private_run):
    """Its noise is worth 3.51 and its claim 4: one in seventy is expected (2 of 150 were), in three at most one."""
    app = app_with(LocalDpMod(CLIP, 2 * CLIP, EPSILON, DELTA))
    verdicts = [a.verdict for seed in range(3) for a in audit_mods(private_run, app, trials=60, seed=seed)]
    assert verdicts.count("refuted") <= 1


def test_the_classical_formula_does_not_hold_far_above_one():
    """At epsilon 10 it gives noise worth 10.4: said beside the claim."""
    assert "such noise gives epsilon 10.4" in local_claims(app_with(LocalDpMod(CLIP, 2 * CLIP, 10.0, DELTA)))[0].text


def test_a_sensitivity_below_two_clips_is_told_and_tried_as_claimed(private_run):
    """The noise is scaled for updates C apart: at that distance the claim holds, at 2 C it would not."""
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


# --- the line between two updates ------------------------------------------------------------------------------------

START = {"w": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), "b": torch.tensor([-1.0, 0.5])}


def start_of(tensors=START):
    return ArrayRecord({key: array_of(t) for key, t in tensors.items()})


@pytest.mark.parametrize("name", ["arrays", "fitins.parameters"])
def test_an_answer_moves_the_model_by_the_update(name):
    """In order, each array in its shape and type. The older API's mods read what `fit` returned."""
    identify()
    update = torch.arange(8.0, dtype=torch.float64) / 4
    before = {key: t.double() for key, t in START.items()}
    request = Message(RecordDict({name: start_of()}), dst_node_id=1, message_type="train")
    reply = epsilon._reply_of(name, start_of(), before, update)(request, None)
    wanted = [np.array([[1.0, 2.25, 3.5], [4.75, 6.0, 7.25]], np.float32), np.array([0.5, 2.25], np.float32)]
    if name == "arrays":
        assert list(reply.content) == [name]
        found = reply.content[name].to_numpy_ndarrays()
        assert list(reply.content[name]) == ["w", "b"]
    else:
        result = recorddict_to_fitres(reply.content, keep_input=False)
        assert (result.status.code, result.num_examples, result.metrics) == (Code.OK, 1, {})
        found = parameters_to_ndarrays(result.parameters)
    assert [array.dtype for array in found] == [np.float32, np.float32]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other)


class Scales(LocalDpMod):
    """Sends so many times the update, and counts; a mod without noise has the same score each time."""

    def __init__(self, factor, *claim):
        super().__init__(*claim)
        self.factor, self.calls = factor, 0

    def __call__(self, msg, ctxt, call_next):
        self.calls += 1
        start = msg.content["arrays"].to_numpy_ndarrays()
        reply = call_next(msg, ctxt)
        sent = reply.content["arrays"]
        moved = [a + self.factor * (b - a) for a, b in zip(start, sent.to_numpy_ndarrays(), strict=True)]
        reply.content["arrays"] = ArrayRecord(dict(zip(sent, map(Array, moved), strict=True)))
        return reply


@pytest.mark.parametrize(("sensitivity", "reach"), [(1.0, 50.0), (1.5, 50.0), (0.8, 0.4)])
def test_scores_are_lengths_along_the_line(sensitivity, reach):
    """Updates at both ends: far beyond the clipping norm of 0.5 if it decides, else the sensitivity apart."""
    mod = Scales(3.0, 0.5, sensitivity, 4.0, 1e-5)
    app, told = app_with(mod), []
    content = RecordDict({"config": ConfigRecord({"lr": 0.1}), "arrays": start_of()})
    (claim,) = local_claims(app)
    logger = logging.getLogger("flwr")
    level = logger.level
    found = epsilon._scores(app, claim, content, 2, 0, lambda *of: told.append(of))
    assert found.shape == (2, 2)
    np.testing.assert_allclose(found, [[3 * reach] * 2, [-3 * reach] * 2], rtol=1e-5)
    assert (mod.calls, logger.level) == (4, level)
    assert told == [(0, 2, "uploads through Scales")]


def test_progress_is_told_every_hundred_uploads(monkeypatch):
    app, told = app_with(Scales(1.0, 0.5, 1.0, 4.0, 1e-5)), []
    (claim,) = local_claims(app)
    monkeypatch.setattr(epsilon, "_through", lambda app, content, end: content["arrays"])
    found = epsilon._scores(app, claim, RecordDict({"arrays": start_of()}), 201, 0, lambda *of: told.append(of[:2]))
    assert told == [(0, 201), (100, 201), (200, 201)]
    np.testing.assert_allclose(found, np.zeros((2, 201)), atol=1e-9)


def run_of(entries, fields=None, kinds=("weights",), clients=()):
    shape = {"messages": {"Train": {"fields": fields}}} if fields else {}
    return SimpleNamespace(
        folder="a folder",
        transcript=SimpleNamespace(entries=lambda: list(entries)),
        record=SimpleNamespace(
            setting=SimpleNamespace(set=shape),
            releases=[SimpleNamespace(kind=kind) for kind in kinds],
            ledger=[SimpleNamespace(client=k, by_kind=by_kind) for k, by_kind in clients],
        ),
    )


class Entry(dict):
    def __init__(self, seq, message, lost=(), **fields):
        super().__init__(fields)
        self.seq, self.message, self.lost = seq, message, lost

    def kept(self, name):
        return name not in self.lost


def test_the_last_request_whose_model_was_kept_is_tried(monkeypatch):
    """Not one of another message, nor one with a lost field, nor one with two array records."""
    monkeypatch.setattr(epsilon, "contents_of", lambda values, fields: RecordDict(dict(values)))
    arrays, config = start_of(), ConfigRecord({"lr": 0.1})
    of = {"a": arrays, "b": config}
    entries = [
        Entry(3, "Train", a=arrays, b=config), Entry(7, "Train", a=arrays, b=config),
        Entry(8, "Train", a=arrays, b=arrays), Entry(9, "Evaluate", a=arrays, b=config),
        Entry(10, "Train", lost=("b",), a=arrays, b=config),
    ]  # fmt: skip
    entry, content = epsilon._request(run_of(entries, of))
    assert (entry.seq, list(content)) == (7, ["a", "b"])
    for nothing in (run_of(entries), run_of(entries[2:], of), run_of([], of)):
        with pytest.raises(RunError, match="a folder keeps no request for training"):
            epsilon._request(nothing)


@pytest.mark.parametrize(
    ("client", "kinds", "kind", "ledger"),
    [(1, ("logits", "weights"), "weights", 7.0), (0, ("weights",), "weights", math.inf), (5, (), "unmapped", math.inf)],
)
def test_what_an_audit_says_of_its_claim(client, kinds, kind, ledger, monkeypatch):
    """The ledger of that client and kind; a client without any has no guarantee. Updates lie 2 C apart at most."""
    said = []
    monkeypatch.setattr(epsilon, "held_path", lambda *of: said.append(of))
    run = run_of([], None, kinds, [(0, {"logits": 2.0}), (1, {"weights": 7.0})])
    scores = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    entry = SimpleNamespace(client=client, round=9)
    for sensitivity, apart in ((0.6, 0.6), (5.0, 1.0)):
        claim = LocalClaim("M", 4.0, 1e-5, 0.5, sensitivity)
        epsilon._held(run, entry, claim, "a test", max, scores, 0.9)
        place, test, bound, flat, member, shift, delta, confidence, how = said.pop()
        assert place == AuditedClaim(
            kind=kind, threat="whoever sees the upload: server", claim="M, one upload", epsilon=4.0, ledger=ledger
        )
        assert (test, bound, delta, confidence) == ("a test", max, 1e-5, 0.9)
        assert (flat.tolist(), member.tolist()) == ([1, 2, 3, 4, 5, 6], [True] * 3 + [False] * 3)
        assert shift == pytest.approx(apart / (sensitivity * math.sqrt(2 * math.log(1.25e5)) / 4))
        assert how == f"two updates {apart:g} apart, on the request to client {client} in round 9"


def test_a_bound_needs_two_uploads(private_run):
    with pytest.raises(SettingError, match="--trials 1: a bound needs at least 2"):
        audit_mods(private_run, app_with(LocalDpMod(CLIP, 2 * CLIP, EPSILON, DELTA)), trials=1)
