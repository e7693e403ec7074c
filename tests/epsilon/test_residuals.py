"""The noise of a run on the bytes as sent: honest noise passes, and each way of having less of it is found."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gaussian_by_hand import epsilon_of, multiplier_for
from protected import ALL, ONE, SMALL, Everything, everything, fedavg, few_steps
from scipy import stats

from fedaudit import ce, run, sgd
from fedaudit.epsilon import residuals
from fedaudit.epsilon.client_replay import Repeated, Seen, Stepped, noise_of, repeat
from fedaudit.epsilon.noise_tests import Finding, numbers_to_tell
from fedaudit.epsilon.noise_tests import Test as OneTest
from fedaudit.epsilon.private_steps import MadeStep, MadeTraining, Span
from fedaudit.epsilon.recount import WrongCount
from fedaudit.epsilon.residuals import _levels, _of_field, _rounds_to_tell, audit_residuals
from fedaudit.errors import ContractError, RunError, SettingError
from fedaudit.privacy import sensitivity
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.calibration import analytic, gaussian_epsilon
from fedaudit.privacy.mechanisms import gaussian
from fedaudit.privacy.mechanisms.base import Prepared
from fedaudit.privacy.policy import Policy
from fedaudit.progress import unwatched
from fedaudit.runtime import asking
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit, read_record
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


@pytest.mark.parametrize(
    "promise",
    [{"noise_multiplier": 1.0}, pytest.param({"noise_multiplier": None, "epsilon": 8.0}, marks=pytest.mark.long)],
)
def test_private_training_is_tried_at_the_delta_that_nobody_chose(promise, tmp_path, monkeypatch):
    """Where delta is 1/n, one record alone has none: what is done with a few records has the training's own. The run
    with half of the noise is accused by what it sent. How much noise that has nobody can tell: no figure of the
    repetition, whose noise is as promised, stands beside it."""
    from opacus.optimizers import DPOptimizer

    real = DPOptimizer.add_noise

    def half(self):
        real(self)
        for p in self.params:
            p.grad = (p.summed_grad.view_as(p) + p.grad) / 2

    privacy = {"delta": "1/n", **promise}
    (found,) = audit_residuals(few_steps(tmp_path / "honest", privacy), clients=[0])
    ledger = read_record(tmp_path / "honest").ledger
    assert (found.verdict, found.delta) == ("not refuted", pytest.approx(max(1 / row.n for row in ledger)))
    assert found.trials > 10_000
    assert "noise x " in found.how
    with monkeypatch.context() as m:
        m.setattr(DPOptimizer, "add_noise", half)
        few_steps(tmp_path / "half", privacy)
    (found,) = audit_residuals(tmp_path / "half", clients=[0])
    assert found.verdict == "refuted"
    assert "it does not hold that noise; how much noise it holds cannot be told, and no bound follows" in found.how
    assert (found.lower_bound, found.bound) == (0.0, None)
    assert not re.search(r"noise x [\d.]", found.how)
    assert "as it is now" not in found.how


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


def seen_of(sent, clean, sigma=0.5, **more):
    ready = SimpleNamespace(leaves=[clean], sigmas=[sigma])
    facts = {"client": 1, "round": 3, "where": "Sent.z", "dtype": None, "rounded": False} | more
    return SimpleNamespace(sent=[sent], ready=ready, **facts)


class Plain:
    """Noise of a mechanism whose residual is the number itself."""

    def noise(self, sent, ready, i, seed):
        return SimpleNamespace(z=(sent - ready.leaves[i].double().numpy()) / ready.sigmas[i], sizes=None, free=True)

    def centre(self, free):
        return free


def test_the_grain_of_a_residual_is_in_deviations_of_its_noise():
    """5 and -3 in float32 are 4 x 2^-23 and 2 x 2^-23 from the next number, twice that is told, and sigma is 1/2."""
    sent, clean = torch.tensor([[5.0, -3.0]]), torch.tensor([[4.0, -4.0]])
    (found,) = _of_field(seen_of(sent, clean), Plain())
    assert (found.client, found.round, found.part) == (1, 3, "Sent.z 0")
    assert found.z.tolist() == [[2.0, 2.0]]
    assert found.clean.tolist() == [[4.0, -4.0]]
    assert (found.grain * 2**23).tolist() == [[2 * 4 / 0.5, 2 * 2 / 0.5]]
    (coarse,) = _of_field(seen_of(sent.bfloat16(), clean), Plain())
    assert (coarse.grain * 2**7).tolist() == [[2 * 4 / 0.5, 2 * 2 / 0.5]]


@pytest.mark.parametrize(("number", "largest", "rounded"), [(64, 6.35, True), (63, 6.35, False), (64, 0.0, False)])
def test_a_release_that_travels_in_eight_bits_is_known_to_its_cell(number, largest, rounded):
    """Numbers of up to 6.35 travel as multiples of 6.35 / 127 = 0.05, of 64 numbers or more."""
    sent = torch.zeros(1, number)
    sent[0, 0] = -largest
    found = _levels(seen_of(sent, sent, rounded=True), sent.double().numpy())
    if not rounded:
        assert found is None
        return
    assert found == pytest.approx(0.05 * np.arange(-127, 128), abs=1e-6)
    assert _levels(seen_of(sent, sent), sent.double().numpy()) is None
    (residual,) = _of_field(seen_of(sent, sent, rounded=True), Plain())
    assert not residual.free
    assert residual.sizes.low[0, 1] == pytest.approx(-0.025 / 0.5, abs=1e-6)
    assert residual.sizes.high[0, 1] == pytest.approx(0.025 / 0.5, abs=1e-6)


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


# --- each step by itself, on clients that differ in everything ------------------------------------------------------


def finding_of(**facts):
    """Return what a test of residuals found: half of the failure probability is the scale's."""
    tests = (OneTest("scale", 0.3), OneTest("mean", 0.04), OneTest("part", 0.2, "layer 2"))
    return Finding(
        **{"numbers": 77, "scale": 0.98, "low": 0.9, "high": 1.5, "confidence": 0.95, "p": 0.08, "p_more": 0.7}
        | {"tests": tests, "finds": 0.85, "tells_at": 1e-5}
        | facts
    )


def ledger_of(client, n=50, entries=(), delta=0.01, **by_kind):
    facts = {"client": client, "n": n, "entries": list(entries), "delta": delta, "by_kind": by_kind}
    return SimpleNamespace(**facts, observers={"logits": [f"peer {client}"]})


def entry_of(kind, **facts):
    return SimpleNamespace(
        **{"kind": kind, "noise_multiplier": 2.0, "sample_rate": 0.25, "steps": 3, "rounds": [1], "sigma": 1.0} | facts
    )


def run_of(*ledger, policies=None, compress=None):
    setting = SimpleNamespace(method="mine", compress=compress)
    record = SimpleNamespace(ledger=list(ledger), setting=setting, transcript_digest="d1")
    return SimpleNamespace(record=record, world=SimpleNamespace(policies=policies or {}), folder="there")


def step_of(number, value, names=("w", "b")):
    parts = [{name: np.full((1, 2), value + i + j) for j, name in enumerate(names)} for i in (0, 10, 20)]
    return MadeStep(number, *parts, 4)


def test_the_noise_of_fields_and_of_trainings_is_put_together_by_field(monkeypatch):
    """Client 3 has two trainings with steps, so that its sums are not looked at. Client 5 has sums alone."""
    monkeypatch.setattr(residuals, "_of_field", lambda seen, how: [(seen.kind, seen.client, how.name)] * seen.times)
    sums = [
        Stepped(k, 2, 1.0, 4, {"w": torch.full((2, 3), 1.0 * k)}, {"w": torch.full((2, 3), 2.0 * k)}, 0.5)
        for k in (3, 5)
    ]
    one = Repeated(
        3, made=[MadeTraining(3, 1, 9, 0.5, 2, 1.0, 1.0, (step_of(0, 1.0), step_of(4, 2.0))),
                 MadeTraining(3, 2, 9, 0.5, 2, 1.0, 1.0)], trained=sums[:1],
    )  # fmt: skip
    other = Repeated(5, trained=sums[1:], made=[MadeTraining(5, 2, 9, 0.5, 2, 1.0, 1.0)])
    for found in (one, other):
        k = found.client
        found.seen += [
            SimpleNamespace(where="A.e", kind="embeddings", client=k, times=1),
            SimpleNamespace(where="A.s", kind="logits", client=k, times=0),
        ]
    policies = {"embeddings": Policy(epsilon=1.0), "logits": Policy(epsilon=1.0, mechanism="laplace")}
    found = residuals._noise_by_field(run_of(policies=policies), [one, other])
    assert sorted(found) == ["A.e", "training"], "a field of which nothing is left is not there"
    assert found["A.e"] == [("embeddings", 3, "gaussian"), ("embeddings", 5, "gaussian")]
    told = [(r.client, r.round, r.part, r.step, float(r.z[0, 0]), float(r.clean[0, 0])) for r in found["training"]]
    assert told == [
        (3, 1, "w", 0, 1.0, 11.0), (3, 1, "b", 0, 2.0, 12.0), (3, 1, "w", 4, 2.0, 12.0), (3, 1, "b", 4, 3.0, 13.0),
        (5, 2, "w", None, 5.0, 10.0),
    ]  # fmt: skip
    assert [float(np.max(r.grain)) for r in found["training"]] == [21.0, 22.0, 22.0, 23.0, 0.0]
    assert found["training"][-1].z.shape == found["training"][-1].clean.shape == (2, 3)


def audit_of(**facts):
    values = {"test": "residuals", "kind": "logits", "threat": "t", "claim": "c", "claim_epsilon": 1.0}
    values |= {"ledger_epsilon": 1.0, "lower_bound": 0.5, "p_value": 0.5, "trials": 9, "confidence": 0.95}
    values |= {"delta": 0.1, "verdict": "not refuted", "method": "m", "how": "so", "tells_at": 1e-9}
    return EpsilonAudit(**{**values, **facts})


def test_an_audit_of_some_clients_says_nothing_of_all():
    """Clients 0 to 3 paid for logits or something else. 0 and 2 came out again, 1 did not, and 3 was not asked for."""
    both = [entry_of("embeddings"), entry_of("logits")]
    run = run_of(
        ledger_of(0, entries=both),
        ledger_of(1, entries=both),
        ledger_of(2, entries=both[:1]),
        ledger_of(3, entries=both),
    )
    audit, came = audit_of(), [Repeated(0), Repeated(2)]
    found = residuals._counted(audit, run, "logits", [0, 1, 2], came, ["no state", "second"])
    assert found.how == "so; 1 of 2 clients were looked at; client 1 could not be repeated: no state"
    assert (found.verdict, found.tells_at) == ("cannot tell", 1.0)
    assert residuals._counted(audit, run, "logits", [0, 1], came, []).how == "so; 1 of 2 clients were looked at"
    refuted = residuals._counted(audit_of(verdict="refuted"), run, "logits", [0, 1], came, [])
    assert (refuted.verdict, refuted.tells_at) == ("refuted", 1e-9)
    assert residuals._counted(audit, run, "logits", [0, 2], came, ["no state"]) is audit, "no one is missing"
    none = audit_of(trials=0, verdict="not tried")
    assert residuals._counted(none, run, "logits", [0, 1], came, ["no state"]) is none


def test_what_is_audited_of_a_kind(monkeypatch):
    monkeypatch.setattr(residuals, "_not_tried", lambda run, kind, claim, reasons, c: ("not", kind, claim, reasons, c))
    monkeypatch.setattr(residuals, "_audit_training", lambda run, noise, repeated, c: ("training", c))
    monkeypatch.setattr(
        residuals, "_audit_field", lambda run, seen, noise, repeated, c: [(s.where, s.client) for s in seen]
    )
    repeated = [Repeated(k) for k in (0, 1)]
    for found in repeated:
        found.seen += [
            SimpleNamespace(where=where, kind=kind, client=found.client)
            for where, kind in (("A.e", "embeddings"), ("A.f", "embeddings"), ("A.v", "logits"))
        ]

    def of(kind, noise):
        return residuals._audit_kind(None, kind, repeated, noise, ["why"], 0.9)

    assert of("training", {}) == [("not", "training", "training, all rounds", ["why"], 0.9)]
    assert of("training", {"training": [1]}) == [("training", 0.9)]
    assert of("embeddings", {"training": [1]}) == [[("A.e", 0), ("A.e", 1)], [("A.f", 0), ("A.f", 1)]]
    assert of("logits", {}) == [[("A.v", 0), ("A.v", 1)]]
    assert of("prototypes", {}) == [("not", "prototypes", "prototypes, one release", ["why"], 0.9)]


@pytest.mark.parametrize(("off", "wrong"), [(0.5e-4, False), (1.5e-4, True)])
def test_the_audit_of_a_field_takes_the_largest_delta_and_the_largest_sigma(monkeypatch, off, wrong):
    """Noise multiplier 2, sensitivities 1 and 3: sigma is 6. At delta = 0.03, the larger of two."""
    asked = {}

    def examined(noise, confidence, **more):
        asked.update(noise=noise, confidence=confidence, **more)
        return finding_of()

    monkeypatch.setattr(residuals, "examine", examined)
    monkeypatch.setattr(residuals, "_audit", lambda *facts: facts)
    monkeypatch.setattr(residuals, "_rounds_to_tell", lambda finding, rounds: f"{rounds} rounds")
    seen = [
        Seen("A.e", "logits", None, k, t, Prepared([], [1.0, 3.0], 2.0, delta, None), [], sigma)
        for k, t, delta, sigma in ((0, 1, 0.01, None), (1, 1, 0.03, 6 * (1 + off)), (1, 2, 0.02, 6.0))
    ]
    run = run_of(policies={"logits": Policy(noise_multiplier=2.0, delta=0.01), "embeddings": Policy(epsilon=5.0)})
    repeated = [Repeated(0, same_state=True), Repeated(1, same_state=False)]
    noise = {"A.e": [1, 2], "A.f": [3], "training": [4, 5]}
    told = residuals._audit_field(run, seen, noise, repeated, 0.9)
    assert asked == {"noise": [1, 2], "confidence": 0.9, "exact": False, "others": [3, 4, 5]}
    assert told[:3] == (run, "logits", "A.e, one release")
    assert told[3:6] == pytest.approx((epsilon_of(2.0, 0.03), epsilon_of(3.0, 0.03), 0.03))
    assert told[6:9] == (finding_of(), repeated, 3)
    words = "the transcript says sigma = 6.001 of round 1, the policy gives 6" if wrong else ""
    assert told[9:] == (words, "2 rounds")
    repeated[1].same_state = True
    alone = residuals._audit_field(run, seen[:1], noise, repeated, 0.9)
    assert asked["exact"] is True
    assert alone[5:] == (0.01, finding_of(), repeated, 1, "", "1 rounds")


def test_a_level_that_is_just_reached_is_not_told():
    """`tells_at` at the level itself is not below it."""
    finding = SimpleNamespace(tells_at=level_of(0.95), confidence=0.95, numbers=10)
    assert _rounds_to_tell(finding, 1).startswith("about ")


def test_residuals_of_two_tensors_of_which_one_has_fewer_tests_than_numbers():
    """The second tensor's mechanism makes one number of four: its clean values and its grain have no place."""

    class Fewer:
        def __init__(self):
            self.seeds = []

        def noise(self, sent, ready, i, seed):
            self.seeds.append(seed)
            if i == 0:
                return SimpleNamespace(z=sent.reshape(1, -1), sizes="sizes 0", free=False)
            return SimpleNamespace(z=np.array([[7.0]]), sizes="sizes 1", free=True)

    sent = [torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([1.0, 0.0, 1.0, 1.0])]
    ready = SimpleNamespace(leaves=[t + 1 for t in sent], sigmas=[0.5, 0.25])
    seen = SimpleNamespace(client=2, round=5, where="A.x", dtype=None, rounded=False, sent=sent, ready=ready)
    fewer = Fewer()
    one, other = _of_field(seen, fewer)
    assert (one.client, one.round, one.part, one.sizes, one.free) == (2, 5, "A.x 0", "sizes 0", False)
    assert one.clean.tolist() == [[2.0, 3.0, 5.0, 9.0]]
    assert (one.grain * 2**23).tolist() == [[4.0, 8.0, 16.0, 32.0]]
    assert (other.part, other.sizes, other.free, other.grain) == ("A.x 1", "sizes 1", False, 0.0)
    assert other.clean.tolist() == [[0.0]]
    assert len(set(fewer.seeds)) == 2
    assert all(2**10 < seed < 2**32 for seed in fewer.seeds), "seeds are 32 bits"
    seen.sent = [sent[0]]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        _of_field(seen, Fewer())
    seen.sent = [sent[0][:1], sent[1]]
    with pytest.raises(ContractError, match=r"A\.x 0: \(1, 2\) was sent, and \(2, 2\) comes out again"):
        _of_field(seen, Fewer())


def test_images_travel_in_256_levels():
    sent = torch.tensor([[-1.0, 1.0]])
    assert _levels(seen_of(sent, sent, dtype="uint8"), sent.double().numpy()) == pytest.approx(np.linspace(-1, 1, 256))
    (found,) = _of_field(seen_of(sent, sent, dtype="uint8"), Plain())
    assert (found.client, found.round, found.part, found.free) == (1, 3, "Sent.z 0", False)
    assert found.clean.tolist() == [[-1.0, 1.0]]
    half = 1 / 255 / 0.5
    assert found.sizes.low == pytest.approx(np.array([[-math.inf, -half]]))
    assert found.sizes.high == pytest.approx(np.array([[half, math.inf]]))


def test_the_coarsest_format_counts():
    whole, half = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.float16)
    assert residuals._eps(torch.zeros(1), half, whole) == 2**-10
    assert residuals._eps(torch.zeros(1), whole) == 2**-23
    assert residuals._eps(whole) == 0.0


def test_large_parameters_are_looked_at_in_part(monkeypatch):
    monkeypatch.setattr(residuals, "LARGE", 4)
    values = np.arange(10.0).reshape(2, 5)
    assert residuals._some(values[:, :2]).tolist() == [[0.0, 1.0], [5.0, 6.0]], "four are not too many"
    assert residuals._some(values).tolist() == [[0.0, 3.0, 6.0, 9.0]], "every third of ten"
    assert residuals._matrix(torch.from_numpy(values)).tolist() == [[0.0, 3.0, 6.0, 9.0]]
    assert residuals._matrix(torch.arange(4.0)).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert residuals._matrix(torch.arange(4.0).reshape(2, 1, 2)).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert residuals._matrix(torch.tensor(3.0)).tolist() == [[3.0]]


def made_of(client=0, round=1, steps=4, found=(), **facts):
    return MadeTraining(client, round, 20, 0.25, steps, 0.5, facts.pop("sigma", 1.0), found, **facts)


def test_the_longest_gradient_and_then_the_first_wrong_one_is_named():
    def of(trainings, *largest):
        repeated = [SimpleNamespace(trained=[SimpleNamespace(largest=x)]) for x in largest]
        return residuals._clipped_wrongly(trainings, repeated)

    fine, wrong = made_of(longest=0.5), [made_of(wrong="first", longest=1.0), made_of(wrong="second", longest=0.2)]
    assert of([]) == of([fine], 1.0) == ""
    assert of([fine, *wrong], 0.3) == "first"
    assert of([made_of(longest=1.5), fine], 1.25) == "a record's gradient has 1.5 times the clipping norm"
    assert of([fine], 0.1, 2.5) == "a record's gradient has 2.5 times the clipping norm"
    assert of([fine], 1 + 0.5e-6) == "", "rounding is no fault"
    assert of([fine], 1 + 2e-6) == "a record's gradient has 1 times the clipping norm"


def test_why_what_was_sent_is_not_what_the_key_gives(monkeypatch):
    said = {"other": ""}
    monkeypatch.setattr(residuals, "other_conditions", lambda run: said["other"])

    def of(*repeated, trainings=None):
        made = [made_of()] if trainings is None else list(trainings)
        return residuals._sent_otherwise(None, made, [Repeated(0, apart=a, lacking=of) for a, of in repeated])

    strange = "what was sent is not what this code makes of the run's own key (relative difference 0.5)"
    along = "what was sent differs from what the run's key gives along the noise itself (cosine {}): it does not"
    assert of((0.0, []), (0.5, [])) == strange
    assert of((0.0, []), (1e-3, [])) == "", "rounding"
    assert of((1e-3, [(0.9, 1e-9)])) == "", "whatever its direction is"
    assert of((2e-3, [])) == of((1e-2, [])) == of((math.inf, [])) == "", "too little to tell, or no number at all"
    assert of() == ""
    assert of((0.5, []), trainings=()) == ""
    assert of((0.5, []), trainings=(made_of(), made_of(lacks="dropout"))) == ""
    assert of((0.5, [(0.1, 1e-9), (-0.9, 1e-9), (0.99, 1e-5)])).startswith(along.format("-0.9"))
    assert of((2e-3, [(0.3, 1e-9)]), (0.0, [(0.25, 1e-9)])).startswith(along.format("0.3"))
    assert of((0.5, [(0.2, 1e-9), (0.9, 1e-6)])) == strange, "0.2 itself, and 1e-6 itself, are not enough"
    said["other"] = "torch 1.0"
    assert of((0.5, [])) == ""
    assert of((0.5, [(0.5, 1e-9)])).startswith(along.format("0.5"))


class OfTraining:
    """The audit of private training, of two clients: what is asked of others, and what is made of their answers."""

    def __init__(self, monkeypatch):
        self.finding, self.count, self.otherwise, self.asked = finding_of(), None, "", {}

        def examined(noise, confidence, **more):
            self.asked |= {"noise": noise, "confidence": confidence, **more}
            return self.finding

        def composed(events, delta, compare=True):
            self.asked |= {"events": events, "delta": delta, "compare": compare}
            return SimpleNamespace(epsilon_of_record=2.5)

        monkeypatch.setattr(residuals, "examine", examined)
        monkeypatch.setattr(residuals, "compose", composed)
        monkeypatch.setattr(residuals, "counted_again", lambda run, trainings: self.count)
        monkeypatch.setattr(residuals, "_sent_otherwise", lambda run, trainings, repeated: self.otherwise)
        monkeypatch.setattr(residuals, "_audit", lambda *facts: facts)
        training = [
            entry_of("training", rounds=[1, 2], steps=3),
            entry_of("training", rounds=[3], steps=5, noise_multiplier=4.0, sample_rate=0.5, sigma=None),
            entry_of("logits", sigma=7.0),
        ]
        self.run = run_of(
            ledger_of(0, entries=[entry_of("training", sigma=4.0)], training=1.0),
            ledger_of(1, entries=training, delta=0.02, training=3.0),
            ledger_of(2, logits=9.0),
        )
        steps = (step_of(0, 1.0), step_of(3, 1.0))
        self.repeated = [
            Repeated(0, made=[made_of(found=steps, span=Span(5.0, 7, 0.5, 2))], same_state=True),
            Repeated(1, made=[made_of(1, span=Span(6.0, 2, 0.25, 1))], same_state=True),
        ]

    def audit(self):
        noise = {"training": ["a", "b"], "A.e": ["c"]}
        return residuals._audit_training(self.run, noise, self.repeated, 0.9)


@pytest.fixture
def training(monkeypatch):
    return OfTraining(monkeypatch)


def test_what_is_asked_and_told(training):
    told = training.audit()
    assert training.asked["noise"] == ["a", "b"]
    assert (training.asked["confidence"], training.asked["exact"], training.asked["others"]) == (0.9, True, ["c"])
    members, outside = training.asked["more"]
    assert (members.name, members.p) == ("members", pytest.approx(stats.chi2.sf(11.0, 9)))
    assert (outside.name, outside.p) == ("outside", pytest.approx(2 * stats.norm.sf(0.75 / math.sqrt(3))))
    assert training.asked["events"] == [Event(2.0 * 1.5, 0.25, 6), Event(4.0 * 1.5, 0.5, 5)]
    assert (training.asked["delta"], training.asked["compare"]) == (0.02, False)
    assert told[:3] == (training.run, "training", "training, all rounds")
    assert told[3:6] == (3.0, 2.5, 0.02)
    assert told[6:] == (training.finding, training.repeated, 2, "", "2 of 8 steps were made again")


def test_no_noise_at_all_has_no_finite_bound(training):
    training.finding = finding_of(high=0.0)
    assert training.audit()[4] == math.inf
    assert "events" not in training.asked


def test_trainings_without_spans_or_steps(training):
    """Of what only its sums are known, releases are the sums, and the reason is said once."""
    for found in training.repeated:
        found.made = []
        found.trained = [Stepped(found.client, t, 1.0, 4, {}, {}, 0.5) for t in (1, 2)]
    training.repeated[1].same_state = False
    told = training.audit()
    assert training.asked["more"] == []
    assert training.asked["exact"] is True
    again = "what was sent does not come out again to the bit: this is the noise of the code as it is now"
    assert told[8:] == (4, "", again)
    training.repeated[0].made = [made_of(lacks="dropout"), made_of(lacks="persons")]
    assert training.audit()[8:] == (2, "", f"{again}; single steps were not looked at: dropout")


def test_a_wrong_count_gives_a_larger_bound_and_never_a_smaller_one(training):
    training.repeated[0].made[0] = dataclasses.replace(training.repeated[0].made[0], longest=3.0)
    training.otherwise, training.finding = "sent otherwise", finding_of(p=1e-9)
    for epsilon in (1.5, 7.0):
        training.count = WrongCount("the ledger says less", epsilon)
        told = training.audit()
        assert told[4] == max(2.5, epsilon)
        assert told[9] == ("a record's gradient has 3 times the clipping norm; the ledger says less; sent otherwise")


@pytest.mark.parametrize(("p", "told"), [(1e-9, True), (0.099, True), (0.101, False), (0.8, False)])
def test_noise_of_steps_that_were_not_sent_is_told_only_where_it_accuses(training, p, told):
    """At a confidence of 0.9, below 0.1. Else it says nothing of what was sent. A wrong count still stands in words."""
    again = "what was sent does not come out again to the bit: this is the noise of the code as it is now"
    training.repeated[1].same_state = False
    training.finding, training.otherwise = finding_of(p=p), "sent otherwise"
    training.count = WrongCount("the ledger says less", 7.0)
    found = training.audit()
    assert found[4] == (7.0 if told else None)
    assert found[9] == "the ledger says less; sent otherwise"
    assert found[10] == (f"{again}; " if told else "") + "2 of 8 steps were made again"
    training.otherwise = ""
    found = training.audit()
    assert (found[4], found[10]) == (7.0, f"{again}; 2 of 8 steps were made again"), "what was sent may be the same"


@pytest.mark.parametrize(("off", "foreign"), [(0.5e-6, False), (1.5e-6, True)])
def test_a_sigma_that_the_ledger_does_not_have(training, off, foreign):
    training.repeated[1].trained.append(Stepped(1, 1, 1.0, 4, {}, {}, 0.5))
    training.repeated[1].made[0] = dataclasses.replace(training.repeated[1].made[0], sigma=1 + off)
    words = "the ledger has no training with sigma = 1, which comes out" if foreign else ""
    assert training.audit()[9] == words
    training.repeated[1].trained[0] = Stepped(1, 1, 7.0, 4, {}, {}, 0.5)
    assert training.audit()[9] == "the ledger has no training with sigma = 7, which comes out"


class OfAVerdict:
    """One audit: every field of it, for a repetition that is faithful or is not."""

    def __init__(self, monkeypatch):
        self.other = ""
        monkeypatch.setattr(residuals, "other_conditions", lambda run: self.other)

    def of(self, kind="logits", aparts=(0.0, 1e-3), wrong="", note="", bound=2.0, **finding):
        run = run_of(ledger_of(4, logits=0.5, training=3.0), ledger_of(6, logits=1.25), ledger_of(7))
        repeated = [Repeated(k, apart=apart) for k, apart in enumerate(aparts)]
        return residuals._audit(
            run, kind, "A.e, one release", 1.5, bound, 0.02, finding_of(**finding), repeated, 9, wrong, note
        )


@pytest.fixture
def verdicts(monkeypatch):
    return OfAVerdict(monkeypatch)


def test_a_faithful_repetition(verdicts):
    found = verdicts.of()
    how = (
        "noise x 0.98 of what is promised, at most x 1.5, over 9 releases of 2 clients; strongest of 3 tests: "
        "mean, p = 0.04; noise x 0.85 or less would be refuted with a probability of 99 %, at a level of 0.001"
    )
    assert found == EpsilonAudit(
        test="residuals", kind="logits", threat="whoever sees the release: peer 6", claim="A.e, one release",
        claim_epsilon=1.5, ledger_epsilon=1.25, lower_bound=1.5, p_value=0.08, trials=77, confidence=0.95,
        delta=0.02, verdict="not refuted", method="chi-square and F tests of residuals", how=how, ceiling=math.inf,
        finds=0.85, seeks=0.9, tells_at=1e-5,
    )  # fmt: skip
    assert verdicts.of(bound=1.0).lower_bound == 1.0
    assert verdicts.of(tells_at=0.5).verdict == "cannot tell"
    tests = (OneTest("scale", 0.3), OneTest("part", 0.01, "layer 2"))
    assert "strongest of 2 tests: part, p = 0.01 (layer 2); noise" in verdicts.of(tests=tests).how


@pytest.mark.parametrize(("p", "verdict"), [(1e-5, "refuted"), (0.02, "suspicious")])
def test_what_speaks_against_a_claim_gives_its_bound(verdicts, p, verdict):
    found = verdicts.of(p=p)
    assert (found.verdict, found.lower_bound, found.p_value) == (verdict, 2.0, p)


def test_another_computation_says_nothing_of_fields(verdicts):
    verdicts.other = "torch 1.0"
    found = verdicts.of(aparts=(2e-3, 0.0), p=1e-9)
    assert (found.verdict, found.tells_at, found.lower_bound, found.p_value) == ("cannot tell", 1.0, 1.5, 1e-9)
    assert found.how.endswith(
        "; what was sent, or the client's model, does not come out again (relative difference 0.002); the run was "
        "made with torch 1.0: repeat the audit where that is the same"
    )
    verdicts.other = ""
    assert verdicts.of(aparts=(2e-3, 0.0)).how.endswith("(relative difference 0.002)")


def test_of_training_it_says_what_its_steps_say(verdicts):
    found = verdicts.of("training", aparts=(2e-3, 0.0), p=1e-9)
    assert (found.verdict, found.tells_at, found.ledger_epsilon) == ("refuted", 1e-5, 3.0)
    assert found.threat == "whoever sees the release: server"
    quiet = verdicts.of("training", aparts=(2e-3, 0.0))
    assert (quiet.verdict, quiet.tells_at) == ("cannot tell", 1e-5)


def test_what_is_wrong_decides_whatever_the_noise_says(verdicts):
    found = verdicts.of(wrong="too long", note="a note", aparts=(2e-3, 0.0))
    assert (found.verdict, found.p_value, found.lower_bound) == ("refuted", 1e-15, 2.0)
    assert found.how.startswith("too long; noise x 0.98")
    assert found.how.endswith("; a note")
    assert verdicts.of(wrong="too long", p=1e-20).p_value == 1e-20


def test_what_was_found_on_something_else_gives_no_figure(verdicts):
    found = verdicts.of("training", bound=None, wrong="sent otherwise", note="a note", aparts=(0.0, 0.5))
    assert (found.verdict, found.lower_bound, found.bound, found.trials) == ("refuted", 0.0, None, 77)
    assert found.how == (
        "sent otherwise; how much noise it holds cannot be told, and no bound follows, over 9 releases of 2 clients; "
        "what was sent, or the client's model, does not come out again (relative difference 0.5); a note"
    )


def test_a_kind_without_a_ledger_is_infinite(verdicts):
    assert verdicts.of("prototypes").ledger_epsilon == math.inf


@pytest.mark.parametrize(
    ("kind", "reasons", "compress", "verdict", "how", "seeks"),
    [
        ("logits", ["no state", "second"], None, "not tried", "no state", 0.9),
        ("logits", ["no state", "second"], "int8", "cannot tell", "no state", 0.9),
        ("logits", [], "int8", "not tried", "nothing protected came out again", 0.9),
        ("prototypes", ["no state"], "int8", "not tried", "mine released no prototypes", None),
    ],
)
def test_what_was_not_tried_says_why(kind, reasons, compress, verdict, how, seeks):
    """Clients of 50 and 20 records: delta = 1/n is the largest for the smaller one."""
    policies = {"logits": Policy(noise_multiplier=2.0), "prototypes": Policy(epsilon=4.0)}
    both = [entry_of("training"), entry_of("logits")]
    run = run_of(
        ledger_of(0, 50, both, logits=2.5), ledger_of(1, 20, both[:1], logits=1.5), policies=policies, compress=compress
    )
    spent, claimed = (2.5, 2.5) if kind == "logits" else (0.0, 4.0)
    assert residuals._not_tried(run, kind, "a claim", reasons, 0.9) == EpsilonAudit(
        test="residuals", kind=kind, threat="nobody", claim="a claim", claim_epsilon=claimed, ledger_epsilon=spent,
        lower_bound=0.0, p_value=1.0, trials=0, confidence=0.9, delta=1 / 20, verdict=verdict, method="none", how=how,
        seeks=seeks,
    )  # fmt: skip
    run.record.ledger = []
    nobody = residuals._not_tried(run, kind, "a claim", reasons, 0.9)
    assert (nobody.ledger_epsilon, nobody.delta) == (0.0, 0.0)


def test_who_is_repeated_and_what_is_kept_of_it(monkeypatch):
    """Of clients 0 to 4, 3 has no ledger. 1 cannot be repeated, 2 has a method that breaks, 4 has reasons."""
    run = run_of(*(ledger_of(k) for k in (0, 1, 2, 4)), policies={"logits": 1, "embeddings": 2})
    asked, kept = [], {}

    def repeated(opened, k, watch, *probes):
        asked.append((k, watch, probes))
        if k == 1:
            raise ContractError("no state of 1")
        return Repeated(k, reasons=[f"reason of {k}"] * (k // 2)) if k != 2 else 1 / 0

    def counted(audit, run, kind, clients, repeated, reasons):
        return (*audit, kind, clients, [r.client for r in repeated], reasons)

    def saved(folder, digest, audits, seconds):
        kept.update(folder=folder, digest=digest, audits=audits, seconds=seconds)

    monkeypatch.setattr(residuals, "closed_run", lambda *how: asked.append(how) or run)
    monkeypatch.setattr(residuals, "compute", lambda world: contextlib.nullcontext())
    monkeypatch.setattr(residuals, "repeat", repeated)
    monkeypatch.setattr(residuals, "_noise_by_field", lambda run, repeated: "noise")
    monkeypatch.setattr(residuals, "_audit_kind", lambda run, kind, repeated, noise, reasons, c: [(kind, noise, c)] * 2)
    monkeypatch.setattr(residuals, "_counted", counted)
    monkeypatch.setattr(residuals, "save_audits", saved)
    found = audit_residuals("there", beside=lambda run, k: f"beside {k}")
    reasons = [
        "no state of 1", "client 2 could not be repeated: ZeroDivisionError: division by zero",
        *["reason of 4"] * 2,
    ]  # fmt: skip
    of_each = [(kind, "noise", 0.95, kind, [0, 1, 2, 4], [0, 4], reasons) for kind in ("embeddings", "logits")]
    assert found == [of_each[0]] * 2 + [of_each[1]] * 2
    assert asked[0] == ("there", None, None, "there is no noise to examine.")
    assert asked[1:] == [(k, unwatched, (noise_of, f"beside {k}")) for k in (0, 1, 2, 4)]
    assert (kept["folder"], kept["digest"], kept["audits"]) == ("there", "d1", found)
    assert 0 <= kept["seconds"] < 5
    asked.clear()
    (one, *_) = audit_residuals("there", kinds=["logits"], clients=[4, 0, 3], confidence=0.8, watch=print)
    assert one == ("logits", "noise", 0.8, "logits", [0, 4], [0, 4], reasons[2:])
    assert asked[1:] == [(k, print, (noise_of,)) for k in (0, 4)]
