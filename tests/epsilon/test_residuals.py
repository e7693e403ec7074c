"""The noise of a run on the bytes as sent: honest noise passes, and each way of having less of it is found."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gaussian_by_hand import epsilon_of, multiplier_for
from protected import ALL, ONE, SMALL, Everything, everything, fedavg
from scipy import stats

from fedaudit import ce, run, sgd
from fedaudit.epsilon.client_replay import repeat
from fedaudit.epsilon.noise_tests import numbers_to_tell
from fedaudit.epsilon.residuals import _rounds_to_tell, audit_residuals
from fedaudit.errors import RunError, SettingError
from fedaudit.privacy import sensitivity
from fedaudit.privacy.calibration import analytic, gaussian_epsilon
from fedaudit.privacy.mechanisms import gaussian
from fedaudit.progress import unwatched
from fedaudit.runtime import asking
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.task import compute
from fedaudit.significance import level_of
from fedaudit.wire.transcript import Transcript


def scaled(monkeypatch, factor):
    real = gaussian.normal_noise
    monkeypatch.setattr(gaussian, "normal_noise", lambda like, sigma, *rest: real(like, factor * sigma, *rest))


def by_kind(audits):
    return {audit.kind: audit for audit in audits}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("runs") / "honest")


def test_honest_noise_is_as_large_as_the_ledger_says(honest):
    audits = audit_residuals(honest)
    found = by_kind(audits)
    assert sorted(found) == sorted(ALL)
    assert {kind for kind, a in found.items() if a.verdict == "refuted"} == set()
    # 2 clients, 2 rounds, n records of 64 numbers; 4 times 10 counts cannot tell noise x 0.9.
    assert found["embeddings"].verdict == found["logits"].verdict == "not refuted"
    assert found["label_counts"].verdict == "cannot tell"
    assert found["label_counts"].trials == 40
    assert all(a.finds is not None and a.ceiling == math.inf for a in audits)
    assert read_record(honest).audits == sorted(audits, key=lambda a: (a.test, a.claim))
    opened = RunFolder(honest)
    with compute(opened.world):  # the client goes on with what it sent, noise and all: its memory is the run's
        assert all(repeat(opened, k, unwatched).exact for k in range(2))


def test_few_numbers_say_how_many_rounds_would_tell(honest):
    """Noise x 0.9 leaves 0.81 times a chi-square sum of squares. With n numbers its 99 % point is refuted at 0.001
    (half of that, for two kinds of test) from some n on. 40 counts came from two rounds."""
    enough = next(n for n in range(100, 10_000) if 2 * stats.chi2.cdf(0.81 * stats.chi2.ppf(0.99, n), n) < 1e-3)
    assert not 2 * stats.chi2.cdf(0.81 * stats.chi2.ppf(0.99, enough - 1), enough - 1) < 1e-3
    assert numbers_to_tell(1e-3) == enough
    found = by_kind(audit_residuals(honest))
    assert f"about {math.ceil(enough * 2 / 40)} rounds of this size would tell noise x 0.9" in found["label_counts"].how
    assert "rounds of this size" not in found["embeddings"].how


def test_who_keeps_what_it_released_is_repeated_to_the_bit(honest):
    """V is kept as it was sent, with its noise: a repetition that went on without would leave another state."""
    found = RunFolder(honest)
    with compute(found.world):
        again = repeat(found, 0, unwatched)
    assert again.same_state
    assert again.exact


@pytest.mark.parametrize(
    ("factor", "found_in"),
    [
        (0.9, {"embeddings", "logits"}),
        *(pytest.param(factor, set(ALL), marks=pytest.mark.long) for factor in (0.5, 0.0)),
    ],
)
def test_less_noise_is_found_on_the_bytes_that_were_sent(factor, found_in, tmp_path, monkeypatch):
    """The run was made with less noise than its ledger has; the audit is honest code, and only has the transcript."""
    with monkeypatch.context() as m:
        scaled(m, factor)
        everything(tmp_path / "a")
    found = by_kind(audit_residuals(tmp_path / "a"))
    assert {kind for kind, a in found.items() if a.verdict == "refuted"} >= found_in
    assert {a.verdict for a in found.values()} <= {"refuted", "suspicious", "cannot tell"}, "never silent"
    embeddings = found["embeddings"]
    assert embeddings.p_value < 1e-9
    assert embeddings.lower_bound > 1.0
    if factor == 0.5:
        m = analytic(1.0, 1e-2, 1.0)
        assert embeddings.lower_bound == pytest.approx(gaussian_epsilon(2 / m, 1e-2), rel=0.1)


@pytest.mark.long
def test_noise_of_another_round_is_found(tmp_path, monkeypatch):
    """The same noise in both rounds: each release by itself is as noisy as promised, their difference is not."""
    from fedaudit.privacy.noise_key import task_key

    with monkeypatch.context() as m:
        m.setattr(asking, "task_key", lambda secret, k, t, ask, attempt: task_key(secret, k, 1, ask, attempt))
        everything(tmp_path / "a")
    found = by_kind(audit_residuals(tmp_path / "a"))
    for kind in ("embeddings", "label_counts", "logits", "soft_labels"):
        assert found[kind].verdict == "refuted"
        assert "reused" in found[kind].how or "shared" in found[kind].how


def test_a_release_that_was_not_clipped_is_found(tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(sensitivity, "clip_rows", lambda t, *_: t.clone())
        everything(tmp_path / "a", embeddings={"noise_multiplier": 0.5, "delta": 1e-2, "sensitivity": "clip:0.1"})
    (found,) = audit_residuals(tmp_path / "a")
    assert found.verdict == "refuted"


def test_one_client_with_less_noise_is_named(tmp_path, monkeypatch):
    from fedaudit.privacy.mechanism_outputs import outputs
    from fedaudit.privacy.noise_key import task_key

    real = gaussian.normal_noise
    of_client = {task_key(bytes(range(32)), 1, t, ask, 0) for t in range(9) for ask in range(9)}

    def less(like, sigma, policy, key):
        return real(like, (0.8 if outputs().key._key in of_client else 1) * sigma, policy, key)

    with monkeypatch.context() as m:
        m.setattr(gaussian, "normal_noise", less)
        everything(tmp_path / "a", embeddings=ONE)
    (found,) = audit_residuals(tmp_path / "a")
    assert found.verdict == "refuted"
    (alone,) = audit_residuals(tmp_path / "a", clients=[0])
    assert alone.verdict == "not refuted"


def test_a_repetition_that_goes_astray_accuses_nobody(honest, monkeypatch):
    """More training, and other images: what comes out is not what was sent. However unlikely the difference is as
    noise, no statement about noise is made."""
    real = Everything.send

    def other(self, client, msg):
        client.fit(ce, epochs=1, batch=64, opt=sgd(0.5))
        reply = real(self, client, msg)
        return dataclasses.replace(reply, S=-reply.S)

    monkeypatch.setattr(Everything, "send", other)
    monkeypatch.setattr(Everything, "round", lambda self, s, server, cohort: s)
    found = by_kind(audit_residuals(honest))
    assert found["label_counts"].verdict == "cannot tell"  # these do not depend on the model
    assert found["embeddings"].verdict == "cannot tell"
    assert found["synthetic_images"].verdict == "cannot tell"
    assert found["synthetic_images"].p_value < 1e-6


# -- DP-SGD --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return fedavg(tmp_path_factory.mktemp("runs") / "trained")


def test_the_noise_of_private_training_is_as_large_as_the_ledger_says(trained):
    (found,) = audit_residuals(trained)
    assert (found.kind, found.claim, found.verdict) == ("training", "training, all rounds", "not refuted")
    assert "to the bit" not in found.how, "the weights that were sent came out again"
    assert found.trials > 10_000
    assert found.lower_bound <= found.claim_epsilon == found.ledger_epsilon


@pytest.mark.parametrize("factor", [0.9, *(pytest.param(f, marks=pytest.mark.long) for f in (0.5, 0.0))])
def test_less_noise_in_private_training_is_found(factor, trained, monkeypatch):
    from opacus.optimizers import DPOptimizer

    real = DPOptimizer.add_noise

    def less(self):
        real(self)
        for p in self.params:
            p.grad = p.summed_grad.view_as(p) + factor * (p.grad - p.summed_grad.view_as(p))

    monkeypatch.setattr(DPOptimizer, "add_noise", less)
    (found,) = audit_residuals(trained)
    assert found.verdict == "refuted"
    assert found.lower_bound > found.claim_epsilon
    assert "to the bit" in found.how, "the run was honest: its weights do not come out again"


def test_gradients_that_are_not_clipped_are_found(trained, monkeypatch):
    from fedaudit.privacy import dpsgd

    real = dpsgd.clip_and_sum
    monkeypatch.setattr(dpsgd, "clip_and_sum", lambda gradients, C: real(gradients, 10 * C))
    (found,) = audit_residuals(trained)
    assert found.verdict == "refuted"
    assert "times the clipping norm" in found.how


def test_what_a_user_gets_wrong(honest, tmp_path):
    with pytest.raises(SettingError, match="Did you mean 'embeddings'"):
        audit_residuals(honest, kinds=["embedings"])
    with pytest.raises(SettingError, match="no client 7"):
        audit_residuals(honest, clients=[7])
    run(method="fedavg", rounds=1, clients=2, out=tmp_path / "plain", **SMALL)
    with pytest.raises(SettingError, match="no noise to examine"):
        audit_residuals(tmp_path / "plain")
    path = tmp_path / "plain" / "record.json"
    path.write_text(path.read_text().replace('"status": "done"', '"status": "running"'))
    with pytest.raises(RunError, match="not finished"):
        audit_residuals(tmp_path / "plain")


def test_the_bound_is_that_of_the_most_noise_that_the_residuals_allow(honest, monkeypatch):
    """Not that of the likeliest: a bound on epsilon has to hold for all that cannot be ruled out."""
    from fedaudit.epsilon import residuals

    real = residuals.examine
    monkeypatch.setattr(residuals, "examine", lambda *a, **k: dataclasses.replace(real(*a, **k), scale=1.1, high=1.5))
    found = by_kind(audit_residuals(honest, kinds=["embeddings"]))["embeddings"]
    multiplier = analytic(1.0, 1e-2, 1.0)
    assert found.lower_bound == pytest.approx(gaussian_epsilon(1 / (1.5 * multiplier), 1e-2), rel=1e-6)


# --- by hand, on each engine ----------------------------------------------------------------------------------------


SEEN = ("embeddings", "label_counts", "logits", "soft_labels")
FIELDS = {"embeddings": "e", "label_counts": "n", "logits": "V", "soft_labels": "z"}


@pytest.fixture(scope="module", params=["serial", "stacked"])
def both(request, tmp_path_factory):
    """One round with noise and one with next to none, on one engine: the difference of what was sent is the noise."""
    folder = tmp_path_factory.mktemp(request.param)
    for name, policy in (("noisy", ONE), ("bare", {"noise_multiplier": 1e-9, "delta": 1e-2})):
        run(
            method="protected:Everything", rounds=1, clients=2, out=folder / name, engine=request.param,
            privacy=dict.fromkeys(SEEN, policy), **SMALL,
        )  # fmt: skip
    assert read_record(folder / "noisy").setting.engine == request.param
    return folder


def noise_by_hand(both, kind):
    """The noise of every release of a kind in units of its deviation, from the bytes of both runs. C = 1, replace-one:
    2 C for a row of one record, sqrt(2) for counts, sqrt(3) 2 C for three rows that depend on all records, and
    sqrt(2) 2 C / (N - 1) for the mean of a class of N records."""
    m = multiplier_for(1.0, 1e-2)
    found = []
    sent, bare = (
        {e.client: e for e in Transcript(both / name / "transcript").entries() if e.direction == "up"}
        for name in ("noisy", "bare")
    )
    world = RunFolder(both / "noisy").world
    for k in sent:
        a, b = sent[k][FIELDS[kind]], bare[k][FIELDS[kind]]
        if kind == "logits":
            counts = torch.bincount(world.members(k)[1])
            for c in a:
                sigma = m * math.sqrt(2) * 2 / max(int(counts[c]) - 1, 1)
                found.append((a[c].double() - b[c].double()).numpy().ravel() / sigma)
        else:
            sigma = m * {"embeddings": 2.0, "label_counts": math.sqrt(2), "soft_labels": math.sqrt(3) * 2}[kind]
            found.append((a.double() - b.double()).numpy().ravel() / sigma)
    return found


@pytest.mark.parametrize("kind", SEEN)
def test_noise_bill_and_figures_by_hand_on_every_engine(both, kind):
    """The noise is normal and of the promised size, the ledger's epsilon is the claim's, and what the audit says of the
    noise is what the same numbers say by hand: the scale, its upper limit, and the epsilon of that much noise."""
    parts = noise_by_hand(both, kind)
    z = np.concatenate(parts)
    assert stats.kstest(z, "norm").pvalue > 1e-6
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(z)) / len(z)
    assert low < np.mean(z**2) < high
    for client in read_record(both / "noisy").ledger:
        (entry,) = [e for e in client.entries if e.field == f"Sent.{FIELDS[kind]}"]
        # The noise of class means tells how many records each class has, and no noise hides that.
        assert client.by_kind[kind] == (math.inf if kind == "label_counts" else pytest.approx(1.0, rel=1e-4))
        assert entry.noise_multiplier == pytest.approx(multiplier_for(1.0, 1e-2), rel=1e-4)
        assert (entry.rounds, entry.relation, entry.delta) == ([1], "replace-one", 1e-2)
    (found,) = audit_residuals(both / "noisy", kinds=[kind])
    scale, most = np.sqrt(np.mean(z**2)), np.sqrt((z**2).sum() / stats.chi2.ppf(0.025, len(z)))
    told = re.match(
        r"noise x ([\d.]+) of what is promised, at most x ([\d.]+), over 2 releases of 2 clients", found.how
    )
    assert told, found.how
    assert [float(word) for word in told.groups()] == pytest.approx([scale, most], rel=2e-3)
    assert (found.trials, found.claim_epsilon, found.delta) == (len(z), 1.0, 1e-2)
    bound = epsilon_of(most * multiplier_for(1.0, 1e-2), 1e-2)
    assert found.lower_bound == pytest.approx(min(bound, 1.0), rel=5e-3)
    assert found.p_value <= min(1.0, 2 * stats.chi2.cdf((z**2).sum(), len(z))) * (1 + 1e-2)
    assert found.verdict in ("not refuted", "cannot tell")


def test_noise_of_clients_and_fields_is_not_shared(both):
    """No two releases of one run have the same noise: correlations of 64 numbers stay below 0.65 (1e-7 by chance)."""
    heads = [part[:64] for kind in ("embeddings", "logits") for part in noise_by_hand(both, kind) if len(part) >= 10]
    for i, a in enumerate(heads):
        for b in heads[:i]:
            n = min(len(a), len(b))
            if n == 64:
                assert abs(np.corrcoef(a, b)[0, 1]) < 0.65
            else:
                assert not np.allclose(a[:n], b[:n])


@pytest.mark.parametrize(
    ("tells_at", "more", "words"),
    [
        (0.0, -1, ""),  # it can tell
        (1.0, 0, "so much of it was rounded away"),
        (1.0, 5, "so much of it was rounded away"),
        (1.0, -1, "about 4 rounds of this size would tell noise x 0.9"),
    ],
)
def test_how_many_rounds_would_tell(tells_at, more, words):
    """Three rounds with one number fewer than are needed: a fourth makes it enough. With as many, rounding is to
    blame."""
    needed = numbers_to_tell(level_of(0.95))
    finding = SimpleNamespace(tells_at=tells_at, confidence=0.95, numbers=needed + more)
    assert _rounds_to_tell(finding, 3).startswith(words)
    assert bool(_rounds_to_tell(finding, 3)) is bool(words)
