"""Audits of guarantees for clients: an honest run holds, every sabotage is found, and bounds cover."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from gaussian_by_hand import epsilon_of, multiplier_for
from scipy import stats

pytest.importorskip("cryptography")

from fedaudit import Down, Setting, Up, private, public, read_record, run
from fedaudit.aggregation import terms as terms_module
from fedaudit.aggregation.secure import graph
from fedaudit.epsilon import sums as audits
from fedaudit.epsilon.lower_bounds import gdp_mean_shift
from fedaudit.epsilon.noise_tests import Finding
from fedaudit.epsilon.noise_tests import Test as OneTest
from fedaudit.epsilon.sums import CANARIES, MASKS, NOISE, _ledger, audit_sums, canary_audit, deviation, projection
from fedaudit.errors import RunError
from fedaudit.privacy.update_policy import UpdatePolicy
from fedaudit.privacy.updates import Guarantee
from fedaudit.progress import unwatched
from fedaudit.runtime import sums as run_sums
from fedaudit.wire.transcript import Transcript

BASE = {
    "method": "fedavg", "model": "mlp", "rounds": 2, "clients": 5, "set": {"B": 32, "eta": 0.1},
    "eval_clients": False, "eval_every": 2, "keep_weights": 3,
}  # fmt: skip


def ran(out, where, aggregate="plain", **more):
    policy = {"epsilon": 8, "clip": 1.0, "delta": 1e-3, "where": where}
    run(Setting.make(**{**BASE, "aggregate": aggregate, "privacy": {"updates": policy}, **more}), out=out)
    return out


def verdicts(out, trials=300):
    return {audit.test: audit.verdict for audit in audit_sums(out, trials=trials)}


@pytest.mark.parametrize(("where", "aggregate"), [("server", "plain"), ("client", "plain"), ("shares", "secure")])
def test_an_honest_run_holds(where, aggregate, tmp_path):
    found = verdicts(ran(tmp_path / "run", where, aggregate))
    assert found[NOISE] == "not refuted"
    assert found[CANARIES] != "refuted"
    assert found.get(MASKS) == ("not refuted" if aggregate == "secure" else None)
    assert {a.test for a in read_record(tmp_path / "run").audits} == set(found)


def test_whole_steps_of_noise_on_nothing_are_no_repeats(tmp_path):
    """Nobody learns, so a sum in shares is noise of whole steps alone, many of them equal: no fault of the noise."""
    out = tmp_path / "run"
    ran(out, "shares", "secure", set={"B": 64, "eta": 1e-30}, clients=3, rounds=1, eval_every=1)
    assert audit_sums(out, trials=20)[0].verdict == "not refuted"


def test_noise_of_the_server_that_is_a_tenth_too_small_is_found(tmp_path, monkeypatch):
    honest = run_sums.gaussian

    def less(key, purpose, sigma, length, *, secure):
        return 0.9 * honest(key, purpose, sigma, length, secure=secure)

    monkeypatch.setattr(run_sums, "gaussian", less)
    out = ran(tmp_path / "run", "server")
    (audit,) = [a for a in audit_sums(out, trials=50) if a.test == NOISE]
    assert audit.verdict == "refuted"
    assert audit.lower_bound > audit.claim_epsilon
    assert audit.finds > 0.9


def test_shares_that_forget_one_client_are_found(tmp_path, monkeypatch):
    honest = terms_module.skellam

    def forgetful(rng, variance, length, whole):
        return honest(rng, variance, length, whole) * (forgetful.calls.append(1) or len(forgetful.calls) % 5 != 1)

    forgetful.calls = []
    monkeypatch.setattr(terms_module, "skellam", forgetful)
    out = ran(tmp_path / "run", "shares", "secure")
    monkeypatch.undo()
    assert verdicts(out, 50)[NOISE] == "refuted"


def test_clipping_after_the_noise_is_found(tmp_path, monkeypatch):
    honest = terms_module.bounded

    def late(update, terms):
        free = dataclasses.replace(terms, noise=dataclasses.replace(terms.noise, clip=1e9))
        noisy, norm = honest(update, free)
        return terms_module.clipped(noisy, terms.noise.clip)[0], norm

    monkeypatch.setattr(terms_module, "bounded", late)
    out = ran(tmp_path / "run", "client")
    monkeypatch.undo()
    assert verdicts(out, 50)[NOISE] == "refuted"


def test_no_clipping_is_found_by_canaries(monkeypatch):
    guarantee, setting = promised("server")
    monkeypatch.setattr(audits, "clipped", lambda update, C: (update, 1.0))
    assert canary_audit(guarantee, setting, 200, 0.95).verdict == "refuted"


def test_masks_that_are_used_twice_are_found(tmp_path, monkeypatch):
    honest = run_sums.Summing._secret

    def stale(self, k, number):
        first = dataclasses.replace(self.so_far, t=1)
        return honest(dataclasses.replace(self, so_far=first), k, number)

    monkeypatch.setattr(run_sums.Summing, "_secret", stale)
    out = ran(tmp_path / "run", "shares", "secure")
    assert verdicts(out, 50)[MASKS] == "refuted"


def test_a_run_that_promises_nothing_is_refused(tmp_path):
    run(Setting.make(**{**BASE, "rounds": 1}), out=tmp_path / "run")
    with pytest.raises(RunError, match="promises nothing to clients"):
        audit_sums(tmp_path / "run")


# --- canary clients -------------------------------------------------------------------------------------------------


def promised(where, z=1.0, scale=1.0):
    policy = UpdatePolicy(where=where, noise_multiplier=z * scale, delta=1e-3)
    aggregate = "secure" if where == "shares" else "plain"
    return Guarantee(policy, 20, 1, 1.0, False), Setting.make(**{**BASE, "clients": 20, "aggregate": aggregate})


@pytest.mark.parametrize("where", ["server", "client", "shares"])
def test_a_canary_s_projection_by_hand(where):
    """With a canary N(C, sigma^2), without N(0, sigma^2): C = 1 after clipping from 100, sigma = 0.5."""
    guarantee, setting = promised(where, 0.5)
    there, away = (np.array([projection(guarantee, setting, i, on) for i in range(100)]) for on in (True, False))
    assert there.mean() == pytest.approx(1, abs=4 * 0.5 / 10)
    assert away.mean() == pytest.approx(0, abs=4 * 0.5 / 10)
    for scores in (there, away):
        assert scores.std() == pytest.approx(0.5, rel=0.3)


def test_noise_x_0_9_is_refuted_by_canaries():
    """20,000 sums of each: the canaries\' own draws, scaled to what a server with 0.9 of the noise would send."""
    guarantee, _ = promised("server")
    rng = np.random.default_rng(0)
    member = np.repeat([True, False], 20_000)
    scores = member + 0.9 * rng.normal(size=40_000)
    claim = dataclasses.replace(guarantee).epsilon()
    assert gdp_mean_shift(scores, member, 1e-3, 0.95).p_value(claim) < 1e-3
    assert gdp_mean_shift(member + rng.normal(size=40_000), member, 1e-3, 0.95).p_value(claim) > 1e-3


@pytest.mark.parametrize("where", ["server", "client", "shares"])
def test_canaries_have_noise_of_their_own_in_each_run(where):
    """The same in the same run, and others with another seed: a false alarm is one run's, not that of all runs."""
    guarantee, setting = promised(where, 0.5)
    other = setting.model_copy(update={"seed": setting.seed + 1})
    mine, again, others = ([projection(guarantee, s, i, True) for i in range(8)] for s in (setting, setting, other))
    assert mine == again
    assert not set(mine) & set(others)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["server", "client"])
def test_client_level_bounds_cover(where):
    """400 audits of an honest guarantee: at most 5 % give a bound above the truth (and the binomial's own error)."""
    guarantee, setting = promised(where)
    truth, above = guarantee.epsilon(), 0
    for seed in range(400):
        own = setting.model_copy(update={"seed": seed})
        scores = [projection(guarantee, own, j, there) for there in (True, False) for j in range(60)]
        above += gdp_mean_shift(scores, np.repeat([True, False], 60), 1e-3, 0.95).epsilon > truth
    assert above <= 400 * 0.05 + 2 * (400 * 0.05 * 0.95) ** 0.5


@pytest.mark.parametrize(("where", "wanted"), [("server", 0.5), ("client", 0.5 * 3), ("shares", 0.5 * (9 / 6) ** 0.5)])
def test_the_noise_of_a_sum_of_those_who_stayed(where, wanted):
    """sigma = 0.5, 9 of 12 stayed. The server adds it once, each client a whole one, or a share that is enough if only
    half of those who were invited stay."""
    guarantee, setting = promised(where, 0.5)
    setting = setting.model_copy(update={"threshold": 0.5})
    one = SimpleNamespace(stayed=9, invited=12)
    assert graph.needed(0.5, 12) == 6 or where != "shares"
    assert deviation(guarantee, one, setting) == pytest.approx(wanted * guarantee.sigma / 0.5)
    assert guarantee.sigma == 0.5


def test_a_ledger_is_as_good_as_its_worst_client():
    def of(*epsilons):
        return _ledger(SimpleNamespace(record=SimpleNamespace(ledger=[SimpleNamespace(epsilon=e) for e in epsilons])))

    assert of(1.0, 3.0, 2.0) == 3.0
    assert of(1.0, None) is None
    assert of() is None


# --- by hand: units of whole clients, on each engine ----------------------------------------------------------------


def flat(state):
    return np.concatenate([t.double().numpy().ravel() for t in state.values()])


def noise_of(out, where):
    """What was added, by hand: to each upload where clients add it, otherwise to the sum of the clipped uploads, which
    is five times the step of the global model."""
    entries = [e for e in Transcript(out / "transcript").entries() if e.round == 1]
    start = flat(next(e for e in entries if e.direction == "down")["w"])
    steps = [flat(e["w"]) - start for e in entries if e.direction == "up"]
    (made,) = [flat(one["w"]) - start for one in Transcript(out / "transcript").sums() if one.round == 1]
    return steps, 5 * made


@pytest.mark.parametrize("engine", ["serial", "stacked"])
@pytest.mark.parametrize("where", ["server", "client"])
def test_noise_bill_and_figures_by_hand_for_whole_clients(where, engine, tmp_path):
    """One round of five clients, clip 0.5, epsilon 3, delta 1e-3: sigma is 0.5 times the exact multiplier, once on the
    sum or on every upload. Uploads without noise are those of a run with next to none of it, from the same seed."""
    policy = {"clip": 0.5, "delta": 1e-3, "where": where}
    more = {"rounds": 1, "eval_every": 1, "engine": engine}
    for name, noise in (("noisy", {"epsilon": 3}), ("bare", {"noise_multiplier": 1e-9})):
        run(Setting.make(**{**BASE, **more, "privacy": {"updates": {**policy, **noise}}}), out=tmp_path / name)
    m = multiplier_for(3.0, 1e-3)
    (steps, made), (bare, _) = (noise_of(tmp_path / name, where) for name in ("noisy", "bare"))
    cut = [step * min(1.0, 0.5 / np.linalg.norm(step)) for step in bare]
    assert min(np.linalg.norm(step) for step in bare) > 0.49, "clipping matters"
    if where == "client":
        z = np.concatenate([a - b for a, b in zip(steps, cut, strict=True)]) / (0.5 * m)
        assert np.linalg.norm(made - sum(steps)) < 1e-3 * np.linalg.norm(made), "the sum is that of noised uploads"
    else:
        z = (made - sum(cut)) / (0.5 * m)
    assert stats.kstest(z, "norm").pvalue > 1e-6
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(z)) / len(z)
    assert low < np.mean(z**2) < high
    record = read_record(tmp_path / "noisy")
    for client in record.ledger:
        (entry,) = [e for e in client.entries if e.unit == "client"]
        assert entry.noise_multiplier == pytest.approx(m, rel=1e-4)
        assert (entry.sigma, entry.sensitivity, entry.clip) == pytest.approx((0.5 * m, 0.5, 0.5), rel=1e-4)
        assert client.epsilon == pytest.approx(3.0, rel=1e-3)
        assert entry.to == ("peers, outsiders" if where == "server" else "server, peers, outsiders")
    found = next(a for a in audit_sums(tmp_path / "noisy", trials=60) if a.test == NOISE)
    scale, most = np.sqrt(np.mean(z**2)), np.sqrt((z**2).sum() / stats.chi2.ppf(0.025, len(z)))
    told = re.match(r"noise x ([\d.]+) of what is promised, at most x ([\d.]+), over (\d) releases of", found.how)
    releases = 5 if where == "client" else 1
    assert [float(word) for word in told.groups()] == pytest.approx([scale, most, releases], rel=2e-3)
    assert found.trials == len(z)
    bound = epsilon_of(most * m, 1e-3)
    assert found.lower_bound == pytest.approx(min(bound, 3.0), rel=5e-3)
    assert (found.claim_epsilon, found.ledger_epsilon) == pytest.approx((3.0, 3.0), rel=1e-3)
    assert found.verdict == "not refuted"


def test_the_noise_of_the_votes_on_a_clip_by_hand(monkeypatch):
    """Four clients, norms of 0.5, 1, 3 and 0 where C = 2: votes of 1/2, 1/2, -1/2 and 0, in all 1/2. The sum says that
    0.9 of them are within C, so 0.4 x 4 = 1.6 votes: 1.1 of noise, and its deviation is 2."""
    real = [np.array([float(k), 1.0]) for k in range(4)]
    policy = SimpleNamespace(where="server", clip=2.0)
    now = SimpleNamespace(policy=policy, vote_sigma=2.0)
    guarantee = SimpleNamespace(policy=SimpleNamespace(where="server", clip=9.0), vote_sigma=2.0, at=lambda C: now)
    one = SimpleNamespace(ask=0, clip=2.0, secure=False, within=0.9, divisor=4, where="server", bound=None, invited=4)
    norms = dict(enumerate((0.5, 1.0, 3.0, 0.0)))
    made = SimpleNamespace(round=1, ask=0, record=lambda: "mean")
    run_folder = SimpleNamespace(
        record=SimpleNamespace(rounds=[SimpleNamespace(round=1, sums=[one])], setting=None),
        transcript=SimpleNamespace(sums=lambda: [made]),
    )
    mean = np.sum(real, axis=0) / 4 + np.array([0.5, -0.25])  # the noise of the sum, over 4: 2 and -1
    of = {"mean": SimpleNamespace(real=mean)} | {k: SimpleNamespace(real=real[k], k=k) for k in range(4)}
    monkeypatch.setattr(audits, "replies", lambda *_: {(1, 0, k): ("message", k) for k in range(4)})
    monkeypatch.setattr(audits, "one_message", lambda sent: True)
    monkeypatch.setattr(audits, "_update", lambda reply, message: of[reply])
    monkeypatch.setattr(audits, "clipped", lambda update, C: (update, norms[update.k]))
    monkeypatch.setattr(audits, "deviation", lambda *_: 4.0)
    found: list[audits.Residual] = []
    monkeypatch.setattr(audits, "examine", lambda residuals, confidence: found.extend(residuals) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        audits._noise(run_folder, guarantee, 0.95, None)
    sums, votes = found
    assert sums.z == pytest.approx(np.array([[2 / 4, -1 / 4]]))
    assert sums.clean == pytest.approx(np.array([[6 / 4, 4 / 4]]))
    assert (votes.part, votes.z) == ("votes on the clip", pytest.approx(np.array([[1.1 / 2]])))


# --- each step by itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregate", "names"), [("plain", ["noise", "canaries"]), ("secure", ["noise", "canaries", "masks"])]
)
def test_which_tests_a_guarantee_goes_through(monkeypatch, aggregate, names):
    kept, told = [], {}
    world = SimpleNamespace(guarantee="guarantee")
    record = SimpleNamespace(
        status="done", setting=SimpleNamespace(aggregate=aggregate), transcript_digest="d1", rounds=[], ledger=[]
    )
    opened = SimpleNamespace(world=world, record=record, folder="there")

    def test_of(name):
        return lambda *how: told.update({name: how}) or name

    monkeypatch.setattr(audits, "RunFolder", lambda folder: opened)
    monkeypatch.setattr(audits, "_noise", test_of("noise"))
    monkeypatch.setattr(audits, "canary_audit", test_of("canaries"))
    monkeypatch.setattr(audits, "_masks", test_of("masks"))
    monkeypatch.setattr(audits, "save_audits", lambda *how: kept.append(how))
    assert audit_sums("there") == names
    assert [one[:3] for one in kept] == [("there", "d1", [name]) for name in names]
    assert all(0 <= seconds < 5 for *_, seconds in kept)
    assert told["noise"] == (opened, "guarantee", 0.95, unwatched)
    assert told["canaries"] == ("guarantee", record.setting, 1000, 0.95)
    assert told.get("masks") == ((opened, "guarantee", 0.95) if aggregate == "secure" else None)
    audit_sums("there", trials=7, confidence=0.8, watch=print)
    assert told["noise"][2:] == (0.8, print)
    assert told["canaries"][2:] == (7, 0.8)
    record.status = "running"
    with pytest.raises(RunError, match="not finished"):
        audit_sums("there")
    world.guarantee = None
    with pytest.raises(RunError, match="promises nothing"):
        audit_sums("there")


def told_entry(direction, round, ask, client, fn="learn", kept=(True, True)):
    fields = dict(zip(("a", "b"), kept, strict=True))
    return SimpleNamespace(
        direction=direction, round=round, ask=ask, client=client, fn=fn, fields=fields, kept=fields.get,
        record=lambda: f"message {round} {client}",
    )  # fmt: skip


def test_tasks_are_performed_again_in_order(monkeypatch):
    """Client 1 is asked twice and dropped out of round 2; client 0 answers all. Sums are no tasks."""
    entries = [
        told_entry(direction, *at)
        for direction, at in (
            ("down", (1, 0, 0)), ("down", (1, 0, 1)), ("up", (1, 0, 0)), ("up", (1, 0, 1)),
            ("down", (2, 0, 0)), ("down", (2, 0, 1)), ("up", (2, 0, 0)), ("down", (3, 1, 1)), ("up", (3, 1, 1)),
        )
    ]  # fmt: skip
    entries.append(told_entry("down", 3, 2, 0, fn="(sum) share"))
    entries.append(told_entry("up", 3, 2, 0))
    tasks, said = [], []

    def run_task(task):
        tasks.append((task.fn, task.client, task.round, task.ask, task.state, task.message))
        state = f"state {task.client} {task.round}"
        return SimpleNamespace(
            reply=None if task.round == bad[0] else f"reply {task.round} {task.client}", state=state, error="e"
        )

    bad = [0]
    world = SimpleNamespace(
        device="cpu", archs=["mlp"], shape="shape", classes=10,
        method=SimpleNamespace(summand=lambda sender, reply, message: (sender.id, sender.round, reply, message)),
    )  # fmt: skip
    setting = SimpleNamespace(model_dump_json=lambda: "json")
    opened = SimpleNamespace(
        world=world, record=SimpleNamespace(setting=setting), transcript=SimpleNamespace(entries=lambda: iter(entries))
    )
    monkeypatch.setattr(audits, "compute", lambda world: contextlib.nullcontext())
    monkeypatch.setattr(audits, "run_task", run_task)
    monkeypatch.setattr(audits, "encode", lambda value: value)
    monkeypatch.setattr(audits, "decode", lambda blob, cls, device: blob)
    monkeypatch.setattr(audits, "Sender", lambda k, t, *rest: SimpleNamespace(id=k, round=t))
    fields = ("setting", "fn", "client", "round", "ask", "state", "message")
    monkeypatch.setattr(audits, "Task", lambda *facts: SimpleNamespace(**dict(zip(fields, facts, strict=True))))
    found = audits.replies(opened, lambda *how: said.append(how))
    assert found == {
        (t, ask, k): (f"message {t} {k}", (k, t, f"reply {t} {k}", f"message {t} {k}"))
        for t, ask, k in ((1, 0, 0), (1, 0, 1), (2, 0, 0), (3, 1, 1))
    }
    assert tasks == [
        ("learn", 0, 1, 0, None, "message 1 0"), ("learn", 1, 1, 0, None, "message 1 1"),
        ("learn", 0, 2, 0, "state 0 1", "message 2 0"), ("learn", 1, 3, 1, "state 1 1", "message 3 1"),
    ]  # fmt: skip
    assert said == [(i, 5, f"repeating round {t}") for i, t in ((0, 1), (1, 1), (2, 2), (4, 3))]
    bad[0] = 2
    with pytest.raises(RunError, match=r"Round 2, client 0: e\. It cannot be repeated"):
        audits.replies(opened)
    entries[0].fields["b"] = False
    with pytest.raises(RunError, match="Round 1: its models were not kept"):
        audits.replies(opened)


class OfNoise:
    """Two sums of three clients with updates that differ, and what the tests of the noise say."""

    def __init__(self, monkeypatch, where="server", secure=False, clients=3, **finding):
        policy = UpdatePolicy(where=where, noise_multiplier=2.0, delta=1e-3, clip=0.5)
        self.guarantee = Guarantee(policy, 20, 1, 1.0, False)
        tests = (OneTest("scale", 0.3), OneTest("mean", 0.04))
        facts = {"numbers": 1234, "scale": 0.98, "low": 0.9, "high": 1.5, "confidence": 0.9, "p": 0.08, "p_more": 0.7}
        self.finding = Finding(**{**facts, "tests": tests, "finds": 0.85, "tells_at": 1e-5, **finding})
        self.rounds = [
            SimpleNamespace(round=t, sums=[SimpleNamespace(
                ask=t + 1, clip=0.5, secure=secure, within=0.75, divisor=4.0 * t, where=where, bound=None, invited=3,
            )])
            for t in (1, 2)
        ]  # fmt: skip
        self.found, self.messages = [], []
        self.updates = {(t, k): np.array([1.0 * k, 10.0 * t]) for t in (1, 2) for k in range(clients)}
        again = {(t, t + 1, k): (f"message {t}", (t, k)) for t, k in self.updates}
        sums = [SimpleNamespace(round=t, ask=t + 1, record=lambda t=t: ("sum", t)) for t in (1, 2)]
        setting = SimpleNamespace()
        ledger = [SimpleNamespace(epsilon=1.0), SimpleNamespace(epsilon=3.0)]
        record = SimpleNamespace(rounds=self.rounds, setting=setting, ledger=ledger)
        self.sums = sums
        self.run = SimpleNamespace(
            record=record, folder="there", transcript=SimpleNamespace(sums=lambda: self.sums, entries=list)
        )

        def update(reply, message):
            self.messages.append((reply, message))
            real = np.array([7.0, 9.0]) if reply[0] == "sum" else self.updates[reply]
            return SimpleNamespace(real=real)

        monkeypatch.setattr(audits, "replies", lambda run, watch: again)
        monkeypatch.setattr(audits, "one_message", lambda sent: sent[0][0] == "message 1")
        monkeypatch.setattr(audits, "_update", update)
        monkeypatch.setattr(audits, "clipped", lambda of, C: (SimpleNamespace(real=of.real * C), 1.0))
        monkeypatch.setattr(audits, "deviation", lambda guarantee, one, setting: 0.25)
        monkeypatch.setattr(audits, "grid", lambda one: 0.125)
        monkeypatch.setattr(audits, "_of_updates", lambda run, g, t, ask, again: [("updates", t, ask)])
        monkeypatch.setattr(audits, "examine", lambda found, c: self.found.extend([*found, c]) or self.finding)

    def audit(self):
        return audits._noise(self.run, self.guarantee, 0.9, None)


def test_the_noise_of_sums_by_hand(monkeypatch):
    """Three updates (k, 10 t), halved by the clip: in all (1.5, 15 t). The sum times 4 t has (28 t, 36 t). A state is
    counted from the message where all were sent the same, in round 1 alone."""
    of = OfNoise(monkeypatch)
    audit = of.audit()
    *found, confidence = of.found
    assert confidence == 0.9
    for t, one in zip((1, 2), found, strict=True):
        assert (one.client, one.round, one.part, one.grain) == (-1, t, "sum", 0.5)
        assert one.z == pytest.approx(np.array([[(28 * t - 1.5) / 0.25, (36 * t - 15 * t) / 0.25]]))
        assert one.clean == pytest.approx(np.array([[1.5 / 0.25, 15 * t / 0.25]]))
    assert [message for _, message in of.messages] == ["message 1"] * 4 + [None] * 4
    assert audit.how == (
        "noise x 0.98 of what is promised, at most x 1.5, over 2 releases of 1,234 numbers; strongest of 2 tests: "
        "mean, p = 0.04; noise x 0.85 or less would be refuted with a probability of 99 %, at a level of 0.001"
    )
    assert (audit.test, audit.kind, audit.claim) == (NOISE, "updates", "sums of updates, all rounds, for a client")
    assert audit.threat == "whoever sees the sums: peers, outsiders"
    assert (audit.claim_epsilon, audit.ledger_epsilon) == (pytest.approx(epsilon_of(2.0, 1e-3), rel=1e-3), 3.0)
    assert audit.lower_bound == pytest.approx(epsilon_of(3.0, 1e-3), rel=1e-3)
    assert (audit.p_value, audit.trials, audit.confidence, audit.delta) == (0.08, 1234, 0.9, 1e-3)
    assert (audit.verdict, audit.ceiling, audit.finds, audit.seeks) == ("suspicious", math.inf, 0.85, 0.9)
    assert (audit.tells_at, audit.method) == (1e-5, "chi-square and F tests of residuals")


def test_the_noise_of_a_sum_of_one_client(monkeypatch):
    """Its update is (0, 10 t), halved by the clip."""
    of = OfNoise(monkeypatch, clients=1)
    of.audit()
    assert [one.clean.tolist() for one in of.found[:-1]] == [[[0.0, 5 * t / 0.25]] for t in (1, 2)]
    assert [message for _, message in of.messages] == ["message 1"] * 2 + [None] * 2


@pytest.mark.parametrize(("p", "least"), [(0.5, 2.0), (1e-9, 1.0)])
def test_the_bound_of_less_noise_is_above_the_claim_only_if_it_is_refuted(monkeypatch, p, least):
    """Half of the noise: epsilon of multiplier 1, or no more than the claim, which is that of 2."""
    found = OfNoise(monkeypatch, high=0.5, p=p).audit()
    assert found.lower_bound == pytest.approx(epsilon_of(least, 1e-3), rel=1e-3)


def test_no_noise_at_all_has_a_finite_bound(monkeypatch):
    found = OfNoise(monkeypatch, high=0.0, p=1e-9).audit()
    assert found.claim_epsilon < found.lower_bound < math.inf


def test_where_clients_add_their_own_noise_each_update_is_looked_at(monkeypatch):
    of = OfNoise(monkeypatch, "client")
    of.audit()
    assert of.found == [("updates", 1, 2), ("updates", 2, 3), 0.9]
    secure = OfNoise(monkeypatch, "client", secure=True)
    secure.audit()
    assert [one.part for one in secure.found[:-1]] == ["sum", "sum"]


def test_a_run_without_sums_has_no_noise_to_examine(monkeypatch):
    of = OfNoise(monkeypatch)
    of.sums = []
    with pytest.raises(RunError, match="no sums to examine"):
        of.audit()


@pytest.mark.parametrize(
    ("bound", "where", "wanted"),
    [(None, "shares", 0.0), (2.0, "server", 0.0), (2.0, "shares", 2.0 / 715827882), (None, "server", 0.0)],
)
def test_the_step_of_whole_noise(bound, where, wanted):
    """A third of 2^31 - 1, rounded down, is as large as a number of one of three clients may be."""
    assert audits.grid(SimpleNamespace(bound=bound, where=where, invited=3)) == pytest.approx(wanted, rel=1e-12)


class Asked(Down):
    number: int = public()


class Answer(Up):
    w: torch.Tensor = private("weights", via="data", unit="client")
    share: float = private("count", via="data", unit="client")
    n: int = private("count", via="data", unit="client")
    t: int = public()


def test_replies_to_two_messages_have_no_message_in_common():
    assert audits.one_message([(Asked(3), None), (Asked(3), None)])
    assert not audits.one_message([(Asked(3), None), (Asked(4), None)])


def test_an_update_is_weighed_by_its_whole_count(monkeypatch):
    """Not by a share, and not by a number that is no count. Counts themselves are left out."""
    asked = []
    monkeypatch.setattr(audits, "update_of", lambda *how, **more: asked.append((how, more)))
    reply = Answer(torch.zeros(2), 0.5, 7, 3)
    audits._update(reply, "message")
    audits._update(dataclasses.replace(reply, n=7.0), None)
    assert asked[0] == ((reply, "message", "n"), {"counts": False})
    assert asked[1][0][1:] == (None, None)


def test_the_noise_of_each_update_by_hand(monkeypatch):
    """Round 2, ask 1: clients 0 and 4 answered. Their updates are clipped to 0.5, and sigma is 2."""
    again = {(2, 1, 0): ("m 0", "r 0"), (2, 1, 4): ("m 4", "r 4"), (1, 1, 4): ("no", "no")}
    entries = [
        SimpleNamespace(direction=direction, round=t, ask=ask, client=k, record=lambda k=k: f"sent {k}")
        for direction, t, ask, k in (
            ("down", 2, 1, 0), ("up", 2, 1, 0), ("up", 2, 1, 3), ("up", 2, 0, 4), ("up", 1, 1, 4), ("up", 2, 1, 4),
        )
    ]  # fmt: skip
    values = {("r 0", "m 0"): [1.0], ("sent 0", "m 0"): [4.0], ("r 4", "m 4"): [6.0], ("sent 4", "m 4"): [1.0]}
    monkeypatch.setattr(
        audits, "_update", lambda reply, message: SimpleNamespace(real=np.array(values[reply, message]))
    )
    monkeypatch.setattr(audits, "clipped", lambda update, C: (SimpleNamespace(real=update.real * C), "norm"))
    opened = SimpleNamespace(transcript=SimpleNamespace(entries=lambda: iter(entries)))
    guarantee = SimpleNamespace(policy=SimpleNamespace(clip=0.5), sigma=2.0)
    found = audits._of_updates(opened, guarantee, 2, 1, again)
    assert [(r.client, r.round, r.part) for r in found] == [(0, 2, "update"), (4, 2, "update")]
    assert [r.z.tolist() for r in found] == [[[3.5 / 2]], [[-2.0 / 2]]]
    assert [r.clean.tolist() for r in found] == [[[0.5 / 2]], [[3.0 / 2]]]


def test_canaries_are_held_against_one_sum(monkeypatch):
    """Scores of members first. The claim is that of one sum without sampling, of noise 2."""
    guarantee, setting = promised("server", 2.0)
    guarantee = dataclasses.replace(guarantee, rounds=5, poisson=True, rate=0.5)
    monkeypatch.setattr(audits, "projection", lambda g, s, i, there: 10.0 * i + there)
    monkeypatch.setattr(audits, "held_path", lambda *how: how)
    place, test, bound, scores, member, distance, delta, confidence, how = canary_audit(guarantee, setting, 3, 0.9)
    assert (place.kind, place.claim, place.ledger) == ("updates", "one sum of updates, for a client", None)
    assert place.epsilon == pytest.approx(epsilon_of(2.0, 1e-3), rel=1e-3)
    assert place.threat == "whoever sees the sums: peers, outsiders"
    assert (test, bound, distance, delta, confidence) == (CANARIES, gdp_mean_shift, 0.5, 1e-3, 0.9)
    assert scores.tolist() == [1.0, 11.0, 21.0, 0.0, 10.0, 20.0]
    assert member.tolist() == [True, True, True, False, False, False]
    assert how == "canary clients through clipping, scaling and noise, 3 sums with and 3 without"


@pytest.mark.parametrize(
    ("where", "aggregate"),
    [("server", "plain"), ("server", "secure"), ("client", "plain"), ("client", "secure"), ("shares", "secure")],
)
def test_a_canary_next_to_no_noise_is_as_long_as_the_clip(monkeypatch, where, aggregate):
    """A clip of 300: an update of 100 alone would not reach it. Of ten clients half take part, and as many as have to
    stay add their shares."""
    bounds, asked = [], []
    real, noise = audits.bounded, audits.own_noise
    monkeypatch.setattr(audits, "bounded", lambda update, terms: bounds.append(terms) or real(update, terms))
    monkeypatch.setattr(audits, "own_noise", lambda g, invited, s: asked.append(invited) or noise(g, invited, s))
    policy = UpdatePolicy(where=where, noise_multiplier=1e-5, delta=1e-3, clip=300.0)
    guarantee = Guarantee(policy, 10, 1, 1.0, False)
    setting = Setting.make(**{**BASE, "clients": 10, "participation": 0.5, "aggregate": aggregate})
    there, away = (projection(guarantee, setting, 0, on) for on in (True, False))
    assert there == pytest.approx(300.0, rel=1e-3)
    assert away == pytest.approx(0.0, abs=0.3)
    assert asked == [5, 5]
    in_shares = graph.needed(setting.threshold, 5)
    calls = {"shares": in_shares, "client": 1, "server": 1 if aggregate == "secure" else 0}[where]
    assert len(bounds) == 2 * calls
    assert len({terms.key for terms in bounds}) == len(bounds), "each has noise of its own"
    assert {(terms.clients, terms.largest, terms.based) for terms in bounds} <= {(5, 1.0, True)}
    assert {terms.secret is None for terms in bounds} <= {aggregate == "plain"}
    asked.clear()
    few = Setting.make(**{**BASE, "clients": 10, "participation": 0.1, "aggregate": aggregate})
    projection(guarantee, few, 0, True)
    assert asked == [2], "nobody sums alone"


def test_masks_are_compared_by_the_top_bytes_of_their_differences(monkeypatch):
    """Client 0 in rounds 1, 2 and 3, client 5 in round 1. The pairs: 0's in a row, and the first of both."""
    rng = np.random.default_rng(3)
    words = [rng.integers(0, 2**32, 2000, dtype=np.uint32) for _ in range(4)]

    def entry(client, y, message="Masked", kept=True):
        made = mock.MagicMock(client=client, message=message, kept=lambda name: kept)
        made.__getitem__.side_effect = lambda name: torch.from_numpy(y.view(np.int32))
        return made

    rows = [entry(0, words[0]), entry(5, words[3]), entry(0, words[1]), entry(0, words[2])]
    rows += [entry(0, words[0], "Shares"), entry(0, words[0], kept=False)]
    opened = SimpleNamespace(
        transcript=SimpleNamespace(entries=lambda: iter(rows)),
        record=SimpleNamespace(ledger=[SimpleNamespace(epsilon=2.0)]),
    )

    def by_hand(*pairs):
        least = 1.0
        for a, b in pairs:
            top = np.array([((int(x) - int(y)) % 2**32) // 2**24 for x, y in zip(words[a], words[b], strict=True)])
            counts = np.array([(top == byte).sum() for byte in range(256)])
            square = float(((counts - 2000 / 256) ** 2 / (2000 / 256)).sum())
            least = min(least, float(stats.chi2.sf(square, 255)) * len(pairs))
        return least

    guarantee, _ = promised("shares")
    found = audits._masks(opened, guarantee, 0.9)
    assert found.p_value == pytest.approx(min(1.0, by_hand((0, 1), (1, 2), (0, 3))), rel=1e-6)
    assert (found.test, found.kind, found.threat, found.verdict) == (MASKS, "updates", "server", "not refuted")
    assert (found.trials, found.lower_bound, found.ceiling, found.confidence) == (3, 0.0, 0.0, 0.9)
    assert (found.claim_epsilon, found.ledger_epsilon, found.delta) == (guarantee.epsilon(), 2.0, guarantee.delta)
    assert found.how.startswith("3 pairs of masked vectors")
    words[2][:1500] = words[1][:1500] + np.uint32(7)
    bad = audits._masks(opened, guarantee, 0.9)
    assert (bad.verdict, bad.p_value) == ("refuted", pytest.approx(by_hand((0, 1), (1, 2), (0, 3)), abs=1e-300))
    rows[:] = rows[:1]
    alone = audits._masks(opened, guarantee, 0.9)
    assert (alone.verdict, alone.trials, alone.p_value) == ("not tried", 0, 1.0)
