"""Sums in a run: secure ones equal plain ones, every phase is billed and planned, and the server sees nothing else."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("cryptography")

from fedaudit import Setting, Up, private, read_record, registry, run
from fedaudit.aggregation.secure.messages import words_of
from fedaudit.epsilon.sums import NOISE, audit_sums
from fedaudit.errors import NotApplicable, PrivacyError, RunError, SettingError
from fedaudit.privacy.noise_key import SIZE, write_secret
from fedaudit.privacy.update_policy import UpdatePolicy
from fedaudit.privacy.updates import Guarantee
from fedaudit.runtime import runner
from fedaudit.runtime import sums as run_sums
from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.runtime.sums import Summing
from fedaudit.verify.check import verify
from fedaudit.wire.transcript import Transcript

BASE = {
    "method": "fedavg", "model": "mlp", "rounds": 2, "clients": 5, "set": {"B": 32, "eta": 0.1},
    "eval_clients": False, "eval_every": 2, "keep_weights": 3,
}  # fmt: skip


def ran(out, **more):
    return run(Setting.make(**{**BASE, **more}), out=out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run for each way, made when it is first asked for."""
    made = {}
    ways = {
        "plain": {},
        "secure": {"aggregate": "secure"},
        "dropping": {"aggregate": "secure", "clients": 12, "dropout": 0.05, "threshold": 0.5, "seed": 1},
        "by_server": {"privacy": {"updates": {"epsilon": 8, "clip": 1.0, "delta": 1e-3}}},
        "in_shares": {
            "aggregate": "secure",
            "privacy": {"updates": {"epsilon": 8, "clip": 1.0, "delta": 1e-3, "where": "shares"}},
        },
    }

    def get(name):
        if name not in made:
            out = tmp_path_factory.mktemp(name) / "run"
            ran(out, **ways[name])
            made[name] = out
        return made[name]

    return get


def sent_in(out, t):
    """The global model that went down in round t."""
    return next(e for e in Transcript(out / "transcript").entries() if e.round == t and e.message == "Global")


def models(out):
    return load_file(out / "models" / "global.safetensors")


def test_a_secure_run_is_the_plain_one_within_the_stated_error(runs):
    """Two rounds; the second trains on from a model that differs by rounding, hence the factor."""
    plain, secure = models(runs("plain")), models(runs("secure"))
    sums = [one for row in read_record(runs("secure")).rounds for one in row.sums]
    assert [one.stayed for one in sums] == [5, 5]
    assert all(one.cut_off == 0 and one.error < 1e-6 for one in sums)
    apart = max(float((plain[name] - secure[name]).abs().max()) for name in plain)
    assert 0 < apart < 1e-5
    first = [sent_in(runs(name), 2) for name in ("plain", "secure")]
    off = max(
        float((a.double() - b.double()).abs().max()) for a, b in zip(*(e["w"].values() for e in first), strict=True)
    )
    assert off <= sums[0].error + 6e-8  # and float32's own rounding of numbers up to 1


def test_the_server_s_transcript_holds_masked_vectors_and_sums(runs):
    transcript = Transcript(runs("secure") / "transcript")
    up = [e for e in transcript.entries() if e.direction == "up"]
    assert {e.message for e in up} == {"Advertised", "Shared", "Masked", "Helped"}
    assert not any(e.kinds() for e in up)
    masked = [e for e in up if e.message == "Masked"]
    assert len(masked) == 10
    assert all(e.fields["y"].role == "masked" for e in masked)
    sums = list(transcript.sums())
    assert [e.row["clients"] for e in sums] == [[0, 1, 2, 3, 4]] * 2
    w = next(e for e in transcript.entries() if e.round == 2 and e.message == "Global")["w"]
    assert all(torch.equal(t, w[name]) for name, t in sums[0]["w"].items())


def test_attacks_by_the_server_get_the_sum_and_peers_do_not(runs):
    transcript = Transcript(runs("secure") / "transcript")
    of_server = list(transcript.view("server").entries(direction="up", kind="weights", client=2))
    assert [(e.client, e.round, e.row["type"]) for e in of_server] == [(2, 1, "sum"), (2, 2, "sum")]
    assert not list(transcript.view("peer:2").entries(direction="up", kind="weights"))
    assert all(e.row["type"] == "message" for e in transcript.view("server").entries())


def test_no_mask_is_used_twice_in_a_run(runs):
    words = [words_of(e["y"]) for e in Transcript(runs("secure") / "transcript").entries() if e.message == "Masked"]
    for i, one in enumerate(words):
        for other in words[:i]:
            assert (one == other).mean() < 0.01
            assert (
                np.abs(np.bincount((one - other).view(np.uint8), minlength=256) / (4 * len(one)) * 256 - 1).max() < 0.5
            )


def test_every_phase_is_billed_and_planned(runs):
    """What `comm` plans for a round is what a run without drop-outs measures, field by field."""
    record = read_record(runs("secure"))
    setting = Setting.make(**{**BASE, "aggregate": "secure"})
    planned = {(row["direction"], row["field"]): row["bytes"] for row in plan_traffic(setting)["fields"]}
    measured = {(row.direction, row.field): row.payload // 2 for row in record.traffic if row.payload}
    assert {key: size for key, size in planned.items() if size} == measured
    assert measured["up", "Masked.y"] == 5 * 4 * (sum(t.numel() for t in models(runs("secure")).values()) + 1)
    assert measured["up", "Shared.sealed"] == 5 * 4 * 82
    assert measured["up", "Helped.own"] == 5 * 5 * 33


def test_drop_outs_are_recovered_and_billed(runs):
    """Clients leave in every phase of some round; declared and measured bytes agree, or the run would have ended."""
    record = read_record(runs("dropping"))
    phases = {a.reason for row in record.rounds for a in row.absent}
    assert phases == {"dropped out", *(f"dropped out ({phase})" for phase in ("advertise", "share", "unmask"))}
    for row in record.rounds:
        (one,) = row.sums
        assert one.invited == 12 >= one.advertised >= one.shared >= one.stayed >= one.helped >= 6
    assert any(one.shared > one.stayed for row in record.rounds for one in row.sums)
    assert any(one.stayed > one.helped for row in record.rounds for one in row.sums)


def test_below_the_threshold_the_run_ends(tmp_path):
    with pytest.raises(RunError, match=r"the threshold is 5. The server learns nothing"):
        ran(tmp_path / "run", aggregate="secure", dropout=0.4, threshold=0.9, quorum=0.1)


def test_a_cut_off_is_counted(tmp_path):
    record = ran(tmp_path / "run", aggregate="secure", update_bound=1e-3, rounds=1)
    (one,) = record.rounds[0].sums
    assert one.cut_off > 100
    assert one.bound == 1e-3


@pytest.mark.slow
def test_a_secure_run_is_the_same_in_processes_of_its_own(runs, tmp_path):
    record = ran(tmp_path / "run", aggregate="secure", isolate=True)
    assert record.transcript_digest == read_record(runs("secure")).transcript_digest


@pytest.mark.parametrize("name", ["feddropout", "pfedla", "dense"])
def test_a_method_that_needs_single_replies_is_refused_with_its_reason(name, tmp_path):
    with pytest.raises(NotApplicable, match=registry.find(name).single_replies):
        ran(tmp_path / "run", method=name, set={}, aggregate="secure")


def test_who_asks_all_the_same_is_refused(tmp_path):
    """A method that says nothing, and asks: refused at the ask, before any client computes."""
    with pytest.raises(NotApplicable, match=r"uses cohort\.ask for replies that hold something private"):
        ran(tmp_path / "run", method="outside:Exchange", set={}, aggregate="secure", rounds=1)


def test_a_method_without_private_replies_may_ask(tmp_path):
    record = ran(tmp_path / "run", method="local", aggregate="secure", rounds=1)
    assert record.status == "done"


def test_masked_vectors_are_not_compressed(tmp_path):
    with pytest.raises(SettingError, match="masked vectors of secure aggregation"):
        ran(tmp_path / "run", aggregate="secure", compress="int8")


def test_the_record_says_who_sees_what(runs):
    assert any("the server sees only sums of at least 5 clients" in note for note in read_record(runs("secure")).notes)
    entries = [e for client in read_record(runs("secure")).ledger for e in client.entries]
    assert {e.condition for e in entries if e.field == "Local.w"} == {"in sums of clients, without noise"}


# --- guarantees for clients -----------------------------------------------------------------------------------------


def test_the_noise_on_the_sum_is_the_promised_one(runs):
    """The next model, less the clipped mean of the replies (by hand from the transcript), is N(0, sigma^2 / 25)."""
    out = runs("by_server")
    record = read_record(out)
    (one,) = record.rounds[0].sums
    entries = [e for e in Transcript(out / "transcript").entries() if e.round == 1]
    w0 = next(e for e in entries if e.direction == "down")["w"]
    w1 = next(e for e in Transcript(out / "transcript").entries() if e.round == 2 and e.direction == "down")["w"]
    flat = lambda w: torch.cat([t.double().flatten() for t in w.values()])  # noqa: E731
    steps = [flat(e["w"]) - flat(w0) for e in entries if e.direction == "up"]
    assert len(steps) == 5
    assert min(float(s.norm()) for s in steps) > 0.5
    mean = sum(s * min(1.0, 1.0 / float(s.norm())) for s in steps) / 5
    noise = (flat(w1) - flat(w0) - mean) * 5 / one.sigma
    n = noise.numel()
    assert abs(float(noise.mean())) < 4 / n**0.5
    assert abs(float(noise.square().mean()) - 1) < 4 * (2 / n) ** 0.5
    (entry,) = [e for e in record.ledger[0].entries if e.unit == "client"]
    assert one.sigma == pytest.approx(entry.noise_multiplier)


def test_a_client_s_ledger_names_unit_relation_and_to_whom(runs):
    for name, to in (("by_server", "peers, outsiders"), ("in_shares", "server, peers, outsiders")):
        for client in read_record(runs(name)).ledger:
            (entry,) = [e for e in client.entries if e.noise_multiplier < float("inf")]
            assert (entry.unit, entry.relation, entry.to) == ("client", "zero-out", to)
            assert entry.rounds == [1, 2]
            assert client.epsilon <= 8.0001
            assert client.delta == 1e-3


def test_shares_of_noise_add_up(runs):
    """Noise of 3 of 5 is promised, all 5 stay: the sum's noise has variance 5 / 3 sigma^2, on the ring's grid."""
    out = runs("in_shares")
    record = read_record(out)
    (one,) = record.rounds[0].sums
    again = ran(
        out.parent / "without", aggregate="secure", privacy={"updates": {"noise_multiplier": 1e-3, "clip": 1.0}}
    )
    noisy, clean = (
        torch.cat([t.double().flatten() for t in next(Transcript(folder / "transcript").sums())["w"].values()])
        for folder in (out, out.parent / "without")
    )
    assert again.rounds[0].sums[0].sigma == 1e-3
    z = (noisy - clean) * 5 / one.sigma
    n = z.numel()
    assert abs(float(z.square().mean()) - 5 / 3) < 5 * 5 / 3 * (2 / n) ** 0.5 + 1e-3


def test_by_poisson_every_client_pays_in_every_round(tmp_path):
    record = ran(
        tmp_path / "run", clients=60, minimum=5, participation=0.3, sampling="poisson", rounds=2,
        privacy={"updates": {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-3}},
    )  # fmt: skip
    asked = [row.participants for row in record.rounds]
    assert all(5 < len(ids) < 35 for ids in asked)
    assert asked[0] != asked[1]
    assert all(row.sums[0].divisor == pytest.approx(18) for row in record.rounds)
    assert len(record.ledger) == 60
    paid = [e for c in record.ledger for e in c.entries if e.unit == "client"]
    assert len(paid) == 60
    assert all((e.sample_rate, e.rounds) == (0.3, [1, 2]) for e in paid)
    fixed = [e.sample_rate for e in ran(
        tmp_path / "fixed", clients=10, participation=0.3,
        privacy={"updates": {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-3}},
    ).ledger[0].entries if e.unit == "client"]  # fmt: skip
    assert set(fixed) <= {1.0}


@pytest.mark.parametrize(
    ("privacy", "more", "words"),
    [
        ({"where": "shares"}, {}, "Use --aggregate secure"),
        ({"where": "server"}, {"method": "fedgh", "set": {}}, "needs single replies"),
        ({}, {"sampling": "poisson", "participation": 0.1}, "without any client"),
        ({"clip": 0}, {}, "above 0"),
        ({"epsilon": None}, {}, "either epsilon or noise_multiplier"),
        ({"unit": "record"}, {}, "client"),
        ({"delta": "x"}, {}, "'1/K'"),
        ({"whree": "server"}, {}, "whree"),
    ],
)
def test_what_guarantees_nothing_is_refused(privacy, more, words, tmp_path):
    with pytest.raises((PrivacyError, NotApplicable), match=words):
        ran(tmp_path / "run", **{"privacy": {"updates": {"epsilon": 8, "clip": 1.0, **privacy}}, **more})


def test_rounds_that_share_an_epsilon_get_no_more(runs, tmp_path):
    """The noise was calibrated so that two rounds meet epsilon = 8 together; a third would cost more than promised."""
    out = shutil.copytree(runs("by_server"), tmp_path / "run")
    with pytest.raises(SettingError, match="rounds = 2, now 3"):
        run(read_record(out).setting, rounds=3, out=out, resume=True)


def test_an_old_setting_keeps_its_key():
    from fedaudit.runtime.folder import setting_key

    one = Setting.make(**BASE)
    assert setting_key(one) == setting_key(one.model_copy(update={"threshold": 0.9}))
    assert setting_key(one) != setting_key(one.model_copy(update={"aggregate": "secure"}))
    before = json.loads(one.model_dump_json())
    for name in ("sampling", "aggregate", "threshold", "update_bound"):
        del before[name]
    assert setting_key(Setting.make(**before)) == setting_key(one)


@pytest.mark.parametrize("where", ["server", "client", "shares"])
def test_the_noise_on_sums_follows_from_the_runs_key_and_not_from_its_seed(where, tmp_path):
    """Whoever knows the setting can draw the seed's numbers again. The same key gives the same run, another another."""
    way = {"updates": {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-3, "where": where}}
    secure = {"aggregate": "secure"} if where == "shares" else {}
    setting = Setting.make(**{**BASE, "clients": 3, "rounds": 1, "eval_every": 1, "privacy": way, **secure})
    for name, byte in (("one", 1), ("same", 1), ("other", 2)):
        write_secret(tmp_path / f"{name}.key", bytes([byte]) * SIZE)
        run(setting, out=tmp_path / name, noise_key=tmp_path / f"{name}.key")
    models = {name: load_file(tmp_path / name / "models" / "global.safetensors") for name in ("one", "same", "other")}
    assert all(torch.equal(models["one"][layer], models["same"][layer]) for layer in models["one"])
    assert not any(torch.equal(models["one"][layer], models["other"][layer]) for layer in models["one"])


def test_masks_follow_from_the_runs_key_and_not_from_its_seed(tmp_path):
    """Two secure runs of one setting have the same models and other masks. A client's task has a key of its own."""
    setting = Setting.make(**{**BASE, "clients": 3, "rounds": 1, "eval_every": 1, "aggregate": "secure"})
    masked = []
    for byte in (1, 2):
        write_secret(tmp_path / f"{byte}.key", bytes([byte]) * SIZE)
        run(setting, out=tmp_path / str(byte), noise_key=tmp_path / f"{byte}.key")
        entries = Transcript(tmp_path / str(byte) / "transcript").entries()
        masked.append([e["y"] for e in entries if e.message == "Masked" and e.direction == "up"])
    assert len(masked[0]) == len(masked[1]) == 3
    assert not any(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*masked, strict=True))
    one, two = (load_file(tmp_path / byte / "models" / "global.safetensors") for byte in ("1", "2"))
    assert all(torch.equal(one[layer], two[layer]) for layer in one)


FOLLOWS = {"epsilon": 8, "clip": 0.05, "delta": 1e-3, "quantile": 0.5, "clip_rate": 1.0}


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """Four rounds whose clip begins far below the clients' norms, so that it has to grow."""
    out = tmp_path_factory.mktemp("followed") / "run"
    ran(out, rounds=4, eval_every=4, keep_weights=5, privacy={"updates": FOLLOWS})
    return out


def test_the_clip_of_a_run_follows_its_votes(followed):
    """Every sum's clip is that of the sum before, moved by its noised share; the bill does not change with it."""
    record = read_record(followed)
    sums = [one for row in record.rounds for one in row.sums]
    assert sums[0].clip == 0.05
    for one, after in pairwise(sums):
        assert after.clip == pytest.approx(one.clip * math.exp(-1.0 * (one.within - 0.5)))
        assert after.sigma / after.clip == pytest.approx(one.sigma / one.clip)
    assert len({one.within for one in sums}) == 4
    for ledger in record.ledger:
        entries = [entry for entry in ledger.entries if entry.field.endswith("(update)")]
        assert [entry.rounds for entry in entries] == [[1], [2], [3], [4]]
        assert [entry.clip for entry in entries] == pytest.approx([one.clip for one in sums])
        assert len({entry.noise_multiplier for entry in entries}) == 1
        assert ledger.epsilon == pytest.approx(8.0, rel=1e-3)


def test_votes_are_those_of_norms_before_clipping(tmp_path, monkeypatch):
    """Without noise: all five clients are beyond a tiny clip, and within a huge one."""
    monkeypatch.setattr(run_sums, "gaussian", lambda key, purpose, sigma, length, *, secure: np.zeros(length))
    for clip, share in ((1e-6, 0.0), (1e6, 1.0)):
        ran(tmp_path / str(clip), rounds=1, eval_every=1, privacy={"updates": {**FOLLOWS, "clip": clip}})
        (one,) = read_record(tmp_path / str(clip)).rounds[0].sums
        assert one.within == share


def test_a_resumed_run_goes_on_with_the_clip_that_it_had(tmp_path, monkeypatch):
    """It dies in its third round, and goes on in another process's place."""
    out, whole = tmp_path / "run", runner._one_round

    def dies(state, t):
        if t == 3:
            raise KeyboardInterrupt
        whole(state, t)

    monkeypatch.setattr(runner, "_one_round", dies)
    with pytest.raises(KeyboardInterrupt):
        ran(out, rounds=3, eval_every=3, privacy={"updates": FOLLOWS})
    monkeypatch.undo()
    run(read_record(out).setting, out=out, resume=True)
    sums = [one for row in read_record(out).rounds for one in row.sums]
    assert sums[2].clip == pytest.approx(sums[1].clip * math.exp(-(sums[1].within - 0.5)))
    assert sums[2].clip != sums[0].clip


def test_a_followed_clip_is_verified_and_audited(followed, tmp_path):
    """Honest: not accused, its noise not refuted. A clip that does not follow from the votes is named."""
    checked = verify(followed, rerun=0.5, seed=1)
    assert not checked.contradictions, checked.contradictions
    assert any("4 rounds: every message" in f.reason and "4 sums" in f.reason for f in checked.findings)
    noise = next(audit for audit in audit_sums(followed, trials=50) if audit.test == NOISE)
    assert noise.verdict == "not refuted"
    forged = shutil.copytree(followed, tmp_path / "forged")
    record = json.loads((forged / "record.json").read_text())
    record["rounds"][2]["sums"][0]["clip"] *= 2
    record["rounds"][2]["sums"][0]["sigma"] *= 2  # as that clip would have it
    (forged / "record.json").write_text(json.dumps(record))
    (forged / "seal.json").unlink()
    named = [f for f in verify(forged).contradictions if f.figure == "sums of clients"]
    assert any("rounds.2.sums" in f.field for f in named)


def test_secure_sums_have_no_norms_to_follow(tmp_path):
    with pytest.raises(PrivacyError, match="the masked vectors of secure aggregation carry none"):
        ran(tmp_path / "run", aggregate="secure", privacy={"updates": FOLLOWS})


class Summed(Up):
    v: Tensor = private("weights", via="data", unit="client")


def test_replies_of_several_shapes_have_no_sum():
    """The last of three differs."""
    replies = {k: Summed(torch.ones(3 if k == 2 else 2)) for k in range(3)}
    guarantee = SimpleNamespace(policy=SimpleNamespace(where="server", clip=1.0, quantile=None), vote_sigma=None)
    so_far = SimpleNamespace(t=4, entries=[], wire=SimpleNamespace(traffic=SimpleNamespace(asks=[])))
    hub = SimpleNamespace(archs=("mlp",) * 3, shape=None, classes=2)
    world = SimpleNamespace(hub=hub, method=registry.find("fedavg")())
    summing = Summing(SimpleNamespace(world=world), so_far, lambda *words: replies, b"", guarantee, 10)
    with pytest.raises(RunError, match="Round 4, update: clients sent replies of several shapes"):
        summing._noised(SimpleNamespace(ids=[0, 1, 2]), None, "update", dict.fromkeys(range(3)), None)


@pytest.mark.parametrize(("threshold", "invited", "least"), [(0.5, 12, 6), (0.6, 5, 3), (1.0, 4, 4)])
def test_as_many_as_the_threshold_are_enough(threshold, invited, least):
    """Not one fewer."""
    of = SimpleNamespace(run=SimpleNamespace(setting=Setting.make(threshold=threshold)), so_far=SimpleNamespace(t=2))
    Summing._enough(of, least, invited, "update", "stayed")
    with pytest.raises(RunError, match=f"{least - 1} of {invited} clients stayed, the threshold is {least}"):
        Summing._enough(of, least - 1, invited, "update", "stayed")


def test_the_bound_of_a_number_with_a_share_of_the_noise_by_hand():
    """sigma = 0.0002, six of twelve must stay: each adds a sixth of its square. The sum of all twelve has a deviation
    of sqrt(12 / 6) sigma, and a twelfth of twelve such deviations lies above the clip. The ring's step follows."""
    policy = UpdatePolicy(clip=1.0, noise_multiplier=2e-4, delta=1e-3, where="shares")
    setting = Setting.make(clients=12, threshold=0.5)
    _, noise, bound = run_sums.own_noise(Guarantee(policy, 12, 1, 1.0, False), 12, setting)
    assert bound == pytest.approx(1.0 + 12 * math.sqrt(12 / 6) * 2e-4 / 12, rel=1e-9)
    step = bound / (run_sums.HALF // 12)
    assert noise.variance * step**2 == pytest.approx(2e-4**2 / 6)


# --- one sum by hand -------------------------------------------------------------------------------------------------


def by_hand(replies, *, where="server", poisson=False, rate=0.5, quantile=None, before=None, clip=2.0, entries=()):
    """A round's sums over 8 clients, a half of whom take part, without any noise: its deviation is 1e-9 of the clip."""
    policy = UpdatePolicy(clip=clip, noise_multiplier=1e-9, delta=1e-3, where=where, quantile=quantile)
    guarantee = Guarantee(policy, 8, 3, rate, poisson)
    told = []
    wire = SimpleNamespace(traffic=SimpleNamespace(asks=["one", "two"]), summed=lambda *of: told.append(of))
    so_far = SimpleNamespace(t=4, entries=list(entries), wire=wire)
    hub = SimpleNamespace(archs=("mlp",) * 8, shape=None, classes=2)
    world = SimpleNamespace(hub=hub, method=registry.find("fedavg")(), device=torch.device("cpu"))
    setting = SimpleNamespace(participation=rate, clients=8, aggregate="plain", method="fedavg", update_bound=9.0)
    asked = []

    def ask(cohort, fn, message, terms=None):
        asked.append((message, terms))
        return replies

    made = Summing(SimpleNamespace(world=world, setting=setting), so_far, ask, b"secret", guarantee, 10, before)
    return made, told, asked


def test_a_noised_sum_by_hand():
    """Updates of length 5 and 1 under a clip of 2: (1.2, 1.6) + (0, 1) = (1.2, 2.6), over 3 who were invited."""
    replies = {5: Summed(torch.tensor([3.0, 4.0])), 1: Summed(torch.tensor([0.0, 1.0]))}
    summing, told, asked = by_hand(replies)
    cohort = SimpleNamespace(ids=[1, 5, 6])
    mean = summing._noised(cohort, update, "update", dict.fromkeys((1, 5, 6)), None)
    assert mean.value.v.tolist() == pytest.approx([0.4, 2.6 / 3], abs=1e-6)
    assert mean.count == 3
    (record,) = summing.records
    assert (record.ask, record.fn, record.invited, record.stayed, record.divisor) == (2, "update", 3, 2, 3.0)
    assert (record.clip, record.where, record.within) == (2.0, "server", None)
    assert record.sigma == pytest.approx(2e-9)
    assert told == [(mean.value, "update", 2, [])]
    assert [terms for _, terms in asked] == [None]
    assert [k for k, _ in summing.entries] == [1, 5, 6]
    with pytest.raises(RunError, match="Round 4, update: no client answered"):
        by_hand({})[0]._noised(cohort, update, "update", dict.fromkeys((1, 5, 6)), None)


def update(client, message) -> Summed: ...


@pytest.mark.parametrize(("rate", "divisor", "amplified"), [(0.5, 4.0, True), (0.05, 1.0, True), (1.0, 8.0, False)])
def test_by_poisson_the_divisor_is_how_many_are_expected(rate, divisor, amplified):
    """Who came must not show: a half of 8 clients, or one at least. Amplified, all 8 pay."""
    replies = {5: Summed(torch.tensor([0.0, 1.0]))}
    summing, _, _ = by_hand(replies, poisson=True, rate=rate)
    mean = summing._noised(SimpleNamespace(ids=[1, 5, 6]), update, "update", dict.fromkeys((1, 5, 6)), None)
    assert mean.value.v.tolist() == pytest.approx([0.0, 1 / divisor], abs=1e-6)
    assert (mean.count, summing.records[0].divisor) == (round(divisor), divisor)
    assert [k for k, _ in summing.entries] == (list(range(8)) if amplified else [1, 5, 6])


def test_clients_that_add_their_own_noise_are_told_the_terms():
    replies = {5: Summed(torch.tensor([3.0, 4.0])), 1: Summed(torch.tensor([0.0, 1.0]))}
    summing, _, asked = by_hand(replies, where="client")
    mean = summing._noised(SimpleNamespace(ids=[1, 5]), update, "update", dict.fromkeys((1, 5)), None)
    assert mean.value.v.tolist() == pytest.approx([1.5, 2.5]), "they clip themselves"
    ((_, terms),) = asked
    assert sorted(terms) == [1, 5]
    assert terms[1].key != terms[5].key
    assert (terms[1].by, terms[1].clients, terms[1].bound, terms[1].based) == (None, 1, 2.0, False)
    assert (terms[1].noise.clip, terms[1].noise.sigma) == (2.0, pytest.approx(2e-9))
    assert summing.records[0].within is None


def test_a_clip_that_follows_a_quantile_is_voted_on(monkeypatch):
    """Of 4 who were invited 3 came, 1 of them within the clip: votes of -1/2, -1/2 and 1/2, with a noise of 0.1, which
    is half of its deviation of 4 / 20. The share is 1/2 + (-1/2 + 0.1) / 4."""
    drawn = []

    def half(key, name, sigma, length, secure):
        drawn.append((key, name, length))
        return np.full(length, sigma / 2)

    monkeypatch.setattr(run_sums, "gaussian", half)
    replies = {k: Summed(torch.tensor([3.0, 4.0 * k])) for k in (1, 5)} | {6: Summed(torch.tensor([0.5, 0.0]))}
    summing, _, _ = by_hand(replies, quantile=0.9)
    summing._noised(SimpleNamespace(ids=[1, 5, 6, 7]), update, "update", dict.fromkeys((1, 5, 6, 7)), None)
    (record,) = summing.records
    assert record.within == pytest.approx(0.4)
    assert [(name, length) for _, name, length in drawn] == [("vote noise", 1), ("sum noise", 2)]
    assert drawn[0][0] != drawn[1][0], "each has a key of its own"
    assert summing._guaranteed().policy.clip == pytest.approx(2.0 * math.exp(0.2 * 0.5)), "the next sum's"
    last = record.model_copy(update={"within": 0.25, "clip": 3.0})
    again, _, _ = by_hand(replies, quantile=0.9, before=last)
    assert again._guaranteed().policy.clip == pytest.approx(3.0 * math.exp(-0.2 * (0.25 - 0.9)))
    unmoved, _, _ = by_hand(replies, before=last)
    assert unmoved._guaranteed().policy.clip == 2.0


def entry(field, noise=0.0):
    return run_sums.LedgerEntry(
        field=field, kind="weights", mechanism="gaussian", noise_multiplier=noise, relation="zero-out"
    )


def test_a_reply_in_a_noised_sum_is_billed_with_the_sum_alone():
    """Entries before the mark are of other asks; other fields and those with noise of their own stay."""
    entries = [
        (1, [entry("Summed.v")]), (5, [entry("Summed.v"), entry("Other.v")]), (6, [entry("Summed.v", 2.0)]),
    ]  # fmt: skip
    summing, _, _ = by_hand({}, entries=entries)
    summing._bill(Summed, (), [5, 6], 1, grid=0.25)
    left = [(k, [(e.field, e.noise_multiplier) for e in of]) for k, of in summing.so_far.entries]
    assert left == [(1, [("Summed.v", 0.0)]), (5, [("Other.v", 0.0)]), (6, [("Summed.v", 2.0)])]
    assert [(k, one.field, one.kind, one.grid) for k, (one,) in summing.entries] == [
        (5, "Summed (update)", "weights", 0.25), (6, "Summed (update)", "weights", 0.25),
    ]  # fmt: skip


def test_a_reply_in_a_secure_sum_is_said_to_be_there_alone():
    entries = [
        (1, [entry("Summed.v")]), (5, [entry("Summed.v"), entry("Other.v")]), (6, [entry("Summed.v", 2.0)]),
    ]  # fmt: skip
    summing, _, _ = by_hand({}, entries=entries)
    summing._hide((Summed,), 1)
    told = [[e.condition == run_sums.IN_SUMS for e in of] for _, of in summing.so_far.entries]
    assert told == [[False], [True, False], [False]]


@pytest.mark.parametrize(("where", "bound"), [("server", 1.5), ("client", 1.5 + 12 * 3.0)])
def test_the_bound_of_a_number_by_who_adds_the_noise(where, bound):
    policy = UpdatePolicy(clip=1.5, noise_multiplier=2.0, delta=1e-3, where=where)
    multiplier, noise, found = run_sums.own_noise(Guarantee(policy, 12, 1, 1.0, False), 12, Setting.make(clients=12))
    assert (multiplier, noise.clip, found) == (2.0, 1.5, pytest.approx(bound))
    assert run_sums.TAIL == 12
    assert run_sums.own_noise(None, 12, Setting.make(update_bound=7.0)) == (None, None, 7.0)


def test_a_second_sum_under_a_guarantee_is_refused():
    summing, _, _ = by_hand({5: Summed(torch.ones(2))})
    cohort = SimpleNamespace(ids=[5])
    summing.run.method = registry.find("fedavg")()
    message = {5: None}
    summing.mean(cohort, summing.run.method.client_update, message, None)
    with pytest.raises(NotApplicable, match="accounts for one sum in a round, and fedavg takes another one"):
        summing.mean(cohort, summing.run.method.client_update, message, None)
    free, _, _ = by_hand({5: Summed(torch.ones(2))})
    free.guarantee, free.run.method = None, summing.run.method
    for _ in range(2):
        assert free.mean(cohort, free.run.method.client_update, message, None).value.v.tolist() == [1.0, 1.0]
    assert free.records == [], "the harness only averages"


class Counted(Up):
    v: Tensor = private("weights", via="data", unit="client")
    seen: Tensor = private("statistics", via="data", unit="client")


def test_whole_numbers_do_not_move_under_a_guarantee():
    """Buffers of 8 and 4 batches say how many records a client has: nothing of them is in the sum."""
    replies = {k: Counted(torch.ones(2), torch.tensor([n])) for k, n in ((1, 8), (5, 4))}
    summing, _, _ = by_hand(replies)
    mean = summing._noised(SimpleNamespace(ids=[1, 5]), update, "update", dict.fromkeys((1, 5)), None)
    assert mean.value.seen.tolist() == [0]
    assert mean.value.v.tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


def test_neighbours_are_as_many_as_drop_outs_in_four_phases_ask_for(tmp_path, monkeypatch):
    asked = []
    real = run_sums.graph.degree

    def degree(clients, threshold, dropping):
        asked.append((clients, threshold, dropping))
        return real(clients, threshold, dropping)

    monkeypatch.setattr(run_sums.graph, "degree", degree)
    ran(tmp_path / "a", aggregate="secure", rounds=1, clients=3, dropout=0.01, threshold=0.5, method="fedavg")
    assert asked == [(3, 0.5, pytest.approx(1 - 0.99**4))]


def test_the_clip_is_that_after_the_last_sum(monkeypatch):
    """Of this round, else of the rounds before."""
    monkeypatch.setattr(run_sums, "at_the_clip", lambda guarantee, last: (guarantee, last))
    one = Summing(None, None, None, b"", "guarantee", 9, before="before")
    assert one._guaranteed() == ("guarantee", "before")
    one.records = ["first", "second"]
    assert one._guaranteed() == ("guarantee", "second")
    assert Summing(None, None, None, b"", "guarantee", 9)._guaranteed() == ("guarantee", None)


@pytest.mark.parametrize(("multiplier", "sigma"), [(None, 7.0), (0.5, 1.5), (0.0, 0.0)])
def test_the_noise_that_is_told_of_a_sum(multiplier, sigma):
    """The clip is 3. A multiplier counts in clips; without one it is the guarantee's own sigma."""
    policy = SimpleNamespace(clip=3.0, where="server")
    summing = SimpleNamespace(guarantee="any", _guaranteed=lambda: SimpleNamespace(sigma=7.0, policy=policy))
    assert Summing._noise_facts(summing, multiplier) == {"clip": 3.0, "sigma": sigma, "where": "server"}
    assert Summing._noise_facts(SimpleNamespace(guarantee=None), multiplier) == {}
