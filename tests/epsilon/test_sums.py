"""Audits of guarantees for clients: an honest run holds, every sabotage is found, and bounds cover."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from gaussian_by_hand import epsilon_of, multiplier_for
from scipy import stats

pytest.importorskip("cryptography")

from fedaudit import Setting, read_record, run
from fedaudit.aggregation import terms as terms_module
from fedaudit.aggregation.secure import graph
from fedaudit.epsilon import sums as audits
from fedaudit.epsilon.lower_bounds import gdp_mean_shift
from fedaudit.epsilon.sums import CANARIES, MASKS, NOISE, _ledger, audit_sums, canary_audit, deviation, projection
from fedaudit.errors import RunError
from fedaudit.privacy.update_policy import UpdatePolicy
from fedaudit.privacy.updates import Guarantee
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
