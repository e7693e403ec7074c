"""Runs under mechanisms other than the Gaussian, audited on the bytes as they were sent."""

from __future__ import annotations

import math

import pytest
from protected import SMALL, AsksOnce
from torch import Tensor

from fedaudit import Up, private, run
from fedaudit.cli.listing import ledger_lines
from fedaudit.epsilon.release_path import audit_releases
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.privacy.mechanisms import randomised_response
from fedaudit.privacy.mechanisms.discrete import WholeNoise
from fedaudit.privacy.mechanisms.laplace import Laplace
from fedaudit.privacy.policy import parse_policy
from fedaudit.reports.vocabulary import protection_text
from fedaudit.runtime.run_record import read_record


class Sent(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    V: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")
    n: Tensor = private("label_counts", via="data", unit="client")
    z: Tensor = private("soft_labels", via="model", unit="client", depends="all")
    Y: Tensor = private("labels", via="data", unit="record")


class Everything(AsksOnce):
    def send(self, client, msg):
        e, counts, z = self.trained(client)
        return Sent(e, client.protect(Sent, "V", client.class_means(e, "logits")), counts, z, client.y)


PRIVACY = dict(
    parse_policy(text)
    for text in (
        "embeddings:eps=1,mechanism=laplace,clip=2",
        "logits:eps=1,skellam,clip=1,delta=1e-2",
        "label_counts:eps=1,discrete-gaussian,delta=1e-2",
        "soft_labels:eps=2,mechanism=laplace",
        "labels:eps=0.3,randomised-response",
    )
)


class Row(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    n: Tensor = private("label_counts", via="data", unit="client")
    Y: Tensor = private("labels", via="data", unit="record")


class Private(AsksOnce):
    def send(self, client, msg):
        e, counts, _ = self.trained(client)
        return Row(e, counts, client.y)


def made(folder, privacy=PRIVACY, method="Everything"):
    run(method=f"{__name__}:{method}", rounds=2, clients=2, privacy=privacy, out=folder, **SMALL)
    return folder


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return made(tmp_path_factory.mktemp("runs") / "honest")


def verdicts(audits):
    return {audit.kind: audit.verdict for audit in audits}


@pytest.mark.long
def test_honest_noise_is_not_refuted(honest):
    said = verdicts(audit_residuals(honest))
    assert said == {
        "embeddings": "not refuted",
        "logits": "not refuted",
        "label_counts": "cannot tell",
        "soft_labels": "cannot tell",
        "labels": "not refuted",
    }


@pytest.mark.long
def test_a_tenth_less_is_found_on_the_bytes(tmp_path, monkeypatch):
    """The run has 0.9 times the noise, and 0.9 times the flips, that its ledger says."""
    draw, drawn, flip = Laplace.draw, WholeNoise._drawn, randomised_response.flip
    with monkeypatch.context() as m:
        m.setattr(Laplace, "draw", lambda self, like, scale, *rest: draw(self, like, 0.9 * scale, *rest))
        m.setattr(WholeNoise, "_drawn", lambda self, like, sigma, *rest: drawn(self, like, 0.9 * sigma, *rest))
        m.setattr(randomised_response, "flip", lambda labels, u, p, k: flip(labels, u, 1 - 0.9 * (1 - p), k))
        made(tmp_path / "a")
    found = {audit.kind: audit for audit in audit_residuals(tmp_path / "a")}
    assert {kind for kind, audit in found.items() if audit.verdict == "refuted"} >= {"embeddings", "logits", "labels"}
    assert found["embeddings"].lower_bound == pytest.approx(1 / 0.9, rel=0.05)
    assert all(audit.verdict != "not refuted" for audit in found.values()), "never silent"


@pytest.mark.long
def test_neighbours_are_tried_and_the_claim_holds(honest):
    audits = audit_releases(honest, kinds=["embeddings", "label_counts", "labels"], clients=[0], trials=60)
    said = verdicts(audits)
    assert said["labels"] == "not tried"
    assert {said[kind] for kind in ("embeddings", "label_counts")} <= {
        "not refuted",
        "cannot tell",
    }
    tests = {audit.kind: [a.test for a in audits if a.kind == audit.kind] for audit in audits}
    assert all(len(names) == 1 for names in tests.values()), "the sharper test is for Gaussian noise alone"
    laplace = next(a for a in audits if a.kind == "embeddings")
    assert laplace.delta == 0.0
    assert laplace.claim_epsilon == 1.0


@pytest.mark.long
def test_a_tenth_of_the_noise_is_found_between_neighbours(honest, monkeypatch):
    draw = Laplace.draw
    monkeypatch.setattr(Laplace, "draw", lambda self, like, scale, *rest: draw(self, like, 0.1 * scale, *rest))
    (audit,) = audit_releases(honest, kinds=["embeddings"], clients=[0], trials=200)
    assert audit.verdict == "refuted"
    assert audit.lower_bound > 1.0


def test_what_show_and_the_report_say(honest):
    record = read_record(honest)
    text = "\n".join(ledger_lines(record))
    assert "Sent.e (embeddings): laplace, sigma 5.657, sensitivity 4, replace-one, scale 4 (L1)" in text
    assert "Sent.n (label_counts): discrete-gaussian" in text
    assert "in steps of 1" in text
    assert "Sent.Y (labels): randomised-response, a label stays with probability 0.1304" in text
    (client, *_) = record.ledger
    said = {e.field: protection_text([e]) for e in client.entries if e.noise_multiplier}
    assert said["Sent.e"][0].startswith("Laplace noise, sigma 5.66, clipped to 2 (given the encoder), 2 releases")
    assert said["Sent.V"][0].startswith("Skellam noise, sigma")
    assert said["Sent.n"][0].startswith("discrete Gaussian noise, sigma")
    assert (
        said["Sent.Y"][0] == "randomised response: a label stays in 13.0%, 2 releases; asked for: ε = 0.3 per release"
    )
    assert {colour for _, colour in said.values()} == {"noise"}
    assert 0.3 < client.by_kind["labels"] <= 0.6
    assert 1.0 < client.by_kind["embeddings"] <= 2.0
    assert client.epsilon == math.inf, "which classes there are is told by the class means"


def test_dp_sgd_and_a_release_have_one_epsilon(tmp_path):
    """Private training and embeddings under zero-out: one number, larger than either."""
    privacy = dict(
        parse_policy(text) for text in ("training:noise=2,clip=1", "embeddings:eps=1,laplace,zero-out",
                                        "labels:eps=1,randomised-response,zero-out",
                                        "label_counts:eps=1,skellam,zero-out")
    )  # fmt: skip
    made(tmp_path / "a", privacy, "Private")
    record = read_record(tmp_path / "a")
    for client in record.ledger:
        assert set(client.by_relation) >= {"zero-out"}
        assert client.epsilon is not None
        assert client.epsilon > max(client.by_kind["training"], client.by_kind["embeddings"])
    assert "(zero-out, for one record)" in ledger_lines(record)[0]
