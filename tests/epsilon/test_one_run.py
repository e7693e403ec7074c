"""Canaries in one run: how they are dealt, that a coin is a coin, and what guesses about them say of a claim."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from fedaudit import run
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.claims import Claims
from fedaudit.data import Dataset, federate, load
from fedaudit.epsilon import one_run
from fedaudit.epsilon.one_run import _claims, _terms, audit_run, pairs
from fedaudit.errors import DataError, RunError, SettingError, ThreatError
from fedaudit.privacy.ledger import ClientLedger, LedgerEntry, Total
from fedaudit.progress import unwatched
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import Guesses, read_record
from fedaudit.runtime.world import World, world_of
from fedaudit.setting import Setting

SMALL = {
    "dataset": "digits", "model": "mlp", "partition": "iid", "clients": 2, "holdout": 0.4, "eval_clients": False,
    "aux": 0.6,
}  # fmt: skip
OVERTRAINED = {"E": 25, "B": 16, "eta": 0.2}


def dealt(canaries, seed=0, **options):
    return federate(load("digits"), clients=3, partition="iid", seed=seed, aux=0.2, canaries=canaries, **options)


# -- the canaries -------------------------------------------------------------------------------------------------


def test_canaries_come_out_of_the_auxiliary_set_and_change_nothing_else():
    without, with_ = dealt(0), dealt(50)
    pairs_of = [shard.canaries for shard in with_.shards]
    assert [len(p) for p in pairs_of] == [17, 17, 16]
    taken = np.concatenate(pairs_of).ravel()
    assert len(set(taken)) == 100
    assert set(taken) | set(with_.aux) == set(without.aux)
    assert not set(taken) & set(with_.aux)
    for a, b in zip(without.shards, with_.shards, strict=True):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("members", "nonmembers"))
    rest = np.setdiff1d(np.arange(len(without.dataset.y)), taken)
    assert torch.equal(with_.dataset.y[rest], without.dataset.y[rest])


def test_a_canary_has_a_wrong_label_and_one_of_each_pair_is_trained_on():
    truth = load("digits").y
    fed = dealt(60)
    at = np.concatenate([shard.canaries for shard in fed.shards]).ravel()
    assert (fed.dataset.y[at] != truth[at]).all()
    assert torch.equal(load("digits").y, truth), "the shared data set keeps its labels"
    for k, shard in enumerate(fed.shards):
        _, y = fed.members(k)
        assert len(y) == len(shard.members) + len(shard.canaries)
        assert torch.equal(y[len(shard.members) :], fed.dataset.y[shard.canaries[:, 0]])
        assert len(fed.candidates(k)[1]) == len(shard.members)
    assert fed.counts().sum() == sum(len(fed.members(k)[1]) for k in range(3))


def test_coins_are_fair_and_independent():
    """Over 200 seeds, 20 pairs: heads within 4 standard errors of a half, each coin by itself (4000 in all, and the
    worst of 20), and any two agree as often as not (the worst of 190 within 4.5)."""
    heads = []
    for seed in range(200):
        fed = dealt(20, seed)
        # The permutation of the auxiliary set is the same with and without canaries, and its order gives the pairs.
        drawn = np.random.default_rng(_data_seed(seed)).permutation(len(fed.dataset.y))[:40].reshape(20, 2)
        inside = np.concatenate([shard.canaries[:, 0] for shard in fed.shards])
        heads.append(np.isin(drawn[:, 0], inside))
    heads = np.array(heads)
    assert abs(heads.mean() - 0.5) < 4 * 0.5 / math.sqrt(heads.size)
    assert np.abs(heads.mean(0) - 0.5).max() < 4 * 0.5 / math.sqrt(200)
    agree = np.array([(heads[:, i] == heads[:, j]).mean() for i in range(20) for j in range(i)])
    assert np.abs(agree - 0.5).max() < 4.5 * 0.5 / math.sqrt(200)


def _data_seed(seed):
    from fedaudit.rng import seed_of

    return seed_of(seed, "data", "aux")


def test_pairs_of_the_audit_split_are_fair_coins_too():
    """A client with 8 records, 4 of them held out: over 800 seeds, given that two records form a pair, each is the
    member as often as the other, and which one it is says nothing about another pair. (About 800 / 7 pairs of records
    0 and 1, 3 others beside each.)"""
    x = torch.arange(8, dtype=torch.uint8).reshape(8, 1, 1, 1)
    toy = Dataset("toy", x, torch.zeros(8, dtype=torch.int64), x, torch.zeros(8, dtype=torch.int64), ("one",))
    first: list[bool] = []
    agree: list[bool] = []
    for seed in range(800):
        fed = federate(toy, clients=1, partition="iid", seed=seed, minimum=8, holdout=0.5, validation=0.0, aux=0.0)
        setting = SimpleNamespace(seed=seed, canaries=0)
        (xm, _), (xo, _) = pairs(SimpleNamespace(setting=setting, federation=fed, candidates=fed.candidates,
                                                 nonmembers=fed.nonmembers), 0)  # fmt: skip
        both = zip(*(((t.flatten() + 1) * 127.5).round().int().tolist() for t in (xm, xo)), strict=True)
        matched = {frozenset(pair): pair[0] for pair in both}
        if frozenset((0, 1)) in matched:
            coin = matched.pop(frozenset((0, 1))) == 0
            first.append(coin)
            agree += [(member == min(pair)) == coin for pair, member in matched.items()]
    assert 80 < len(first) == len(agree) / 3
    assert abs(np.mean(first) - 0.5) < 4 * 0.5 / math.sqrt(len(first))
    assert abs(np.mean(agree) - 0.5) < 4 * 0.5 / math.sqrt(len(agree))


def test_too_many_canaries():
    with pytest.raises(SettingError, match="raise aux"):
        dealt(1000)


def test_ordinary_candidates_hold_no_canary():
    """A membership attack on a run with canaries would know them by their labels."""
    world = World(Setting.make(**SMALL, canaries=40))
    for k in range(2):
        (xm, _), (xo, _) = pairs(world, k)
        assert len(xm) == len(xo) == 20
        assert len(world.candidates(k)[0]) == len(world.members(k)[0]) - 20 == world.count(k) - 20
        assert not (world.candidates(k)[0].flatten(1)[:, None] == xm.flatten(1)[None]).all(2).any(), (
            "digits repeat none"
        )


# -- the audit ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    """An over-trained FedAvg: its canaries are learnt by heart."""
    folder = tmp_path_factory.mktemp("runs") / "leaky"
    run(method="fedavg", rounds=2, canaries=120, set=OVERTRAINED, out=folder, **SMALL)
    return folder


def test_an_overtrained_run_is_found_out_and_a_claim_for_it_refuted(tmp_path):
    """Embeddings are noised at epsilon 0.1, the weights beside them are not: read as the run's, 0.1 is refuted."""
    privacy = {"embeddings": {"epsilon": 0.1, "delta": 1e-5}}
    quick = {"tau": "off", "E_local": 30, "B": 16, "h": 4, "T_Tran": 0, "T_Dec": 0, "T_FKE": 0, "w_Dec": 1, "R": 1}
    run(method="dffke", rounds=1, canaries=120, set=quick, privacy=privacy, out=tmp_path / "a", **SMALL)
    audits = audit_run(tmp_path / "a")
    assert {(a.claim_epsilon, a.verdict) for a in audits} == {(0.1, "refuted")}
    assert all(a.p_value < 0.001 and a.ledger_epsilon == math.inf for a in audits)
    assert read_record(tmp_path / "a").audits == sorted(audits, key=lambda a: a.test)


@pytest.mark.long
def test_no_claim_is_no_refutation_but_the_bound_stands(leaky):
    steinke, fdp = audit_run(leaky)
    for found in (steinke, fdp):
        assert found.claim_epsilon == found.ledger_epsilon == math.inf
        assert (found.verdict, found.p_value, found.trials) == ("not refuted", 1.0, 120)
        assert found.guesses.right == found.guesses.made
    assert fdp.lower_bound > 0.8
    assert 0 < steinke.lower_bound < fdp.lower_bound, "its bound adds 2 m delta, and delta is large here"
    assert "mislabelled canaries" in steinke.how
    (one,) = {a.trials for a in audit_run(leaky, clients=[0])}
    assert one == 60


@pytest.mark.long
def test_a_blind_attacker_shows_nothing(tmp_path):
    """The same canaries, guessed from a model that was never trained on them."""
    run(method="fedavg", rounds=1, canaries=120, set={"eta": 1e-9}, out=tmp_path / "a", **SMALL)
    assert [a.lower_bound for a in audit_run(tmp_path / "a")] == [0, 0]


def test_dp_sgd_is_not_refuted(tmp_path):
    privacy = {"training": {"noise_multiplier": 2.0, "delta": 1e-3}}
    setting = {"rounds": 1, "canaries": 120, "set": {"E": 1, "B": 64, "eta": 0.1}, "privacy": privacy}
    run(method="fedavg", out=tmp_path / "a", **setting, **SMALL)
    audits = audit_run(tmp_path / "a")
    assert len(audits) == 2, "no epsilon was asked for: the ledger's is the one claim"
    for found in audits:
        assert found.lower_bound <= found.ledger_epsilon == found.claim_epsilon < 3
        assert "add-or-remove" in found.how
    steinke, fdp = audits  # had every guess been right, that would not have refuted it by the one, but by the other
    assert steinke.ceiling < steinke.claim_epsilon < fdp.ceiling
    assert (steinke.verdict, fdp.verdict) == ("cannot tell", "not refuted")


def test_without_canaries_the_audit_split_serves(tmp_path):
    run(method="fedavg", rounds=1, set={"E": 1}, out=tmp_path / "a", **SMALL)
    found = audit_run(tmp_path / "a", guesses=10)
    world = world_of(read_record(tmp_path / "a").setting.model_dump_json())
    assert found[0].trials == sum(min(len(s.members), len(s.nonmembers)) for s in world.federation.shards)
    assert "of 10 guesses" in found[0].how
    assert "members and non-members" in found[0].how


def test_canaries_leave_the_ordinary_attacks_sound(leaky):
    (loss,) = (r for r in attack_run(leaky, attacks=["loss"]) if r.attack == "loss")
    assert loss.pooled.members == loss.pooled.nonmembers


def test_claims_and_their_relations():
    def row(relation, claim=1.0, multiplier=2.0):
        entry = LedgerEntry(
            field="f", kind="embeddings", mechanism="gaussian", noise_multiplier=multiplier, relation=relation
        )
        ledger = ClientLedger(client=0, n=10, delta=1e-2)
        ledger.add(entry.model_copy(update={"claim": claim}), 1)
        ledger.close()
        return ledger

    (_, asked, _), (words, ledger, relation) = _claims([row("replace-one")], True)
    assert (asked, relation, "ledger" in words) == (1.0, "replace-one", True)
    assert ledger == row("replace-one").epsilon
    assert {c[2] for c in _claims([row("replace-one"), row("zero-out")], True)} == {"zero-out"}
    assert _claims([row("replace-one", None, 0.0)], True)[0][1] == math.inf


def test_what_the_ledger_does_not_count_is_not_held_against_it(tmp_path):
    """Local training releases nothing, so its ledger says 0. The models that clients deploy are known all the same, and
    give their canaries away: that is no error of the ledger."""
    run(method="local", rounds=1, canaries=120, set=OVERTRAINED, out=tmp_path / "a", **SMALL)
    for found in audit_run(tmp_path / "a"):
        assert found.ledger_epsilon == 0 < found.lower_bound
        assert (found.claim_epsilon, found.verdict) == (math.inf, "not refuted")


def test_clients_that_were_never_asked_are_left_out(tmp_path):
    run(method="fedavg", rounds=1, participation=0.5, canaries=20, out=tmp_path / "a", **SMALL)
    assert {found.trials for found in audit_run(tmp_path / "a")} == {10}


def test_user_errors(leaky, tmp_path):
    with pytest.raises(SettingError, match="from 1 to 120"):
        audit_run(leaky, guesses=121)
    with pytest.raises(ThreatError, match="no client 9"):
        audit_run(leaky, clients=[9])
    with pytest.raises(SettingError, match="Unknown attack"):
        audit_run(leaky, attack="lose")
    with pytest.raises(DataError, match="nobody to attack"):
        audit_run(leaky, threat="peer:0", clients=[0])


# --- ties, and unequal clients


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two clients whose class means and embeddings are protected; one round."""
    out = tmp_path_factory.mktemp("unequal") / "run"
    policy = {"epsilon": 1.0, "delta": 1e-2}
    run(
        method="outside:Releases", rounds=1, clients=2, partition="dirichlet:0.5", model="mlp", holdout=0.5, aux=0.4,
        eval_clients=False, privacy={"embeddings": policy, "logits": policy}, out=out,
    )  # fmt: skip
    return out


def guessed(folder, gaps, guesses):
    with mock.patch.object(one_run, "_gaps", return_value=(torch.tensor(gaps, dtype=torch.float64), [0, 1])):
        return audit_run(folder, guesses=guesses)[0].how.partition(" guesses right")[0]


def test_tied_pairs_are_no_right_guesses(folder):
    assert guessed(folder, [0.0] * 8, 8) == "0 of 8"
    assert guessed(folder, [3.0, -2.0, 0.0, 0.0, 1.0, 0.0], 6) == "2 of 6"


def test_the_surest_pairs_are_guessed(folder):
    assert guessed(folder, [0.5, 5.0, -4.0, 1.0], 2) == "1 of 2"
    assert guessed(folder, [0.5, 5.0, -4.0, -1.0], 3) == "1 of 3"


def client_row(k, delta, claim, epsilon, relation):
    entry = LedgerEntry(field="M.e", kind="e", mechanism="gaussian", noise_multiplier=1, relation=relation, claim=claim)
    total = {relation: Total(epsilon=epsilon, accountant="prv")}
    return ClientLedger(
        client=k, n=round(1 / delta), delta=delta, entries=[entry], by_relation=total, epsilon=epsilon, claim=claim
    )


def test_terms_and_claims_of_unequal_clients():
    """The largest claim, the worst client's total, and the largest delta, with which least is refuted."""
    rows = [client_row(0, 0.1, 1.0, 2.0, "replace-one"), client_row(1, 0.001, 3.0, 5.0, "add-or-remove")]
    claims = _claims(rows, covered=True)
    assert claims == [("the run, as asked for", 3.0, "add-or-remove"), ("the run, by the ledger", 5.0, "add-or-remove")]
    assert _terms(claims[0], rows, 0.95) == (0.1, 0.95, 2)
    assert _terms(("", 1.0, "replace-one"), rows, 0.95) == (0.1, 0.95, 1)


def test_the_order_of_candidates_tells_nothing(folder):
    seen = []

    class Watches:
        blind = False

        def cannot(self, scene):
            return None

        def run(self, scene):
            seen.append((scene.target, scene.x))
            return Claims(torch.zeros(len(scene.x)))

    found = RunFolder(folder)
    one_run._gaps(found, "watches", Watches(), one_run.Threat.parse("server"), None, lambda *_: None)
    for k, x in seen:
        (inside, _), _ = pairs(found.world, k)
        first = sum(any(torch.equal(a, b) for b in inside) for a in x[: len(inside)])
        assert 0.1 * len(inside) < first < 0.9 * len(inside), "members and others are mixed"


# --- each function alone, without a run ------------------------------------------------------------------------------


class Knows:
    """Scores a record by its own number, so that each gap is that of its pair."""

    blind = False

    def cannot(self, scene):
        return "it sees nothing of client 4" if scene.target == 4 else None

    def run(self, scene):
        assert sorted(scene.x.flatten().tolist()) == sorted(10.0 * label for label in scene.y.tolist())
        return Claims(scene.x.flatten().float())


@pytest.fixture
def scenes(monkeypatch):
    """Six clients: 1 was never asked, 2 has no pair, 4 cannot be attacked; 0, 3 and 5 have 2, 1 and 1 pairs."""
    made = {0: ([30, 10], [20, 40]), 2: ([], []), 3: ([70], [60]), 4: ([1], [2]), 5: ([5], [80])}

    def rows(numbers):
        x = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 1)
        return x, (x.flatten() / 10).clone()

    world = SimpleNamespace(setting=SimpleNamespace(clients=6, seed=3, canaries=0), device=torch.device("cpu"))
    ledger = [SimpleNamespace(client=k) for k in made]
    found = SimpleNamespace(world=world, transcript="transcript", record=SimpleNamespace(ledger=ledger))
    monkeypatch.setattr(one_run, "pairs", lambda world, k: tuple(map(rows, made[k])))
    monkeypatch.setattr(one_run, "compute", lambda world: nullcontext())
    monkeypatch.setattr(one_run, "TranscriptView", lambda transcript, threat: (transcript, str(threat)))
    monkeypatch.setattr(one_run, "Scene", lambda run, view, k, x, y: SimpleNamespace(target=k, x=x, y=y, view=view))
    return found


def test_gaps_are_those_of_the_pairs_of_all_who_can_be_attacked(scenes):
    told = []

    def gaps(threat="server", clients=None):
        told.clear()
        found, who = one_run._gaps(
            scenes, "knows", Knows(), one_run.Threat.parse(threat), clients, lambda *of: told.append(of)
        )
        return found.tolist(), who

    assert gaps() == ([10.0, -30.0, 10.0, -75.0], [0, 3, 5])
    assert told == [(k, 6, f"knows on client {k}") for k in range(6)]
    assert gaps("peer:3") == ([10.0, -30.0, -75.0], [0, 5])
    assert told[3] == (3, 5, "knows on client 4")
    assert gaps(clients=[5, 0]) == ([-75.0, 10.0, -30.0], [5, 0])
    for clients, why in (([1], "client 1 was never asked"), ([2], "client 2 has no pair"), ([4], "it sees nothing")):
        with pytest.raises(DataError, match=f"^No client can be audited: {why}"):
            gaps(clients=clients)
    with pytest.raises(DataError, match="the peer:3 has nobody to attack but itself"):
        gaps("peer:3", [3])


def test_an_attack_that_tells_no_members_is_refused(scenes):
    class Other(Knows):
        def run(self, scene):
            return "pictures"

    with pytest.raises(SettingError, match="--attack other: it tells no members"):
        one_run._gaps(scenes, "other", Other(), one_run.Threat.parse("server"), None, lambda *of: None)


def test_pairs_are_canaries_or_as_many_of_both_sides():
    """Of 5 members and 3 non-members, three pairs; a record and its label stay together."""
    x = torch.arange(5.0)
    inside, outside = (x, 10 * x), (20 + x[:3], 10 * (20 + x[:3]))
    world = SimpleNamespace(
        setting=SimpleNamespace(canaries=0, seed=1),
        federation=SimpleNamespace(
            shards=[None, SimpleNamespace(canaries=torch.tensor([[1, 2], [3, 4]]))],
            rows=lambda index: (index, 10 * index),
        ),
        candidates=lambda k: inside,
        nonmembers=lambda k: outside,
        _to_device=lambda rows: rows,
    )
    (xm, ym), (xn, yn) = pairs(world, 1)
    assert (len(set(xm.tolist())), sorted(xn.tolist())) == (3, [20.0, 21.0, 22.0])
    assert ym.tolist() == (10 * xm).tolist()
    assert yn.tolist() == (10 * xn).tolist()
    assert one_run.pairs_are(world) == "members and non-members"
    outside = (x[:0], x[:0])
    assert [len(part) for side in pairs(world, 1) for part in side] == [0] * 4
    world.setting.canaries = 2
    (xi, yi), (xo, yo) = pairs(world, 1)
    assert (xi.tolist(), yi.tolist(), xo.tolist(), yo.tolist()) == ([1, 3], [10, 30], [2, 4], [20, 40])
    assert one_run.pairs_are(world) == "mislabelled canaries"


def test_claims_are_the_largest_and_only_what_is_covered():
    def words(rows, covered):
        return [claim[:2] for claim in _claims(rows, covered)]

    rows = [client_row(0, 0.1, 1.0, 2.0, "replace-one"), client_row(1, 0.1, None, 5.0, "any")]
    assert words(rows, True) == [("the run, as asked for", 1.0), ("the run, by the ledger", 5.0)]
    assert words(rows, False) == [("the run, as asked for", 1.0)]
    assert words(rows[1:], True) == [("the run, by the ledger", 5.0)]
    for total in (math.inf, None):
        open_row = rows[1].model_copy(update={"epsilon": total})
        assert words([rows[0], open_row], True) == [("the run, as asked for", 1.0)]
        assert _claims([open_row], True) == [("none: something is unprotected", math.inf, "replace-one")]
    idle = {"zero-out": Total(epsilon=0.0, accountant="prv"), "any": Total(epsilon=5.0, accountant="prv")}
    assert _claims([rows[1].model_copy(update={"by_relation": idle})], True)[0][2] == "replace-one"
    assert one_run._weakest({"replace-one", "zero-out", "add-or-remove"}) == "add-or-remove"
    assert one_run._weakest({"any", "replace-one"}) == one_run._weakest(set()) == "replace-one"


def test_an_audit_holds_every_claim_against_both_bounds(monkeypatch):
    """Gaps of five pairs, of clients 0 and 2. The surest three are guessed for the first claim, all for the second."""
    rows = [client_row(k, (k + 1) / 100, float(k), 2.0 + k, "replace-one") for k in range(3)]
    record = SimpleNamespace(status="done", ledger=rows, models_covered=True, transcript_digest="digest")
    setting = SimpleNamespace(clients=3, canaries=4)
    found = SimpleNamespace(record=record, world=SimpleNamespace(setting=setting), folder="folder")
    saved, asked = [], []
    monkeypatch.setattr(one_run, "RunFolder", lambda folder: found)
    monkeypatch.setattr(one_run, "made", lambda attack: (f"named {attack}", "the attack"))

    def gaps(run, name, attack, threat, clients, watch):
        asked.append((name, attack, str(threat), clients, watch))
        return torch.tensor([1.0, -5.0, 0.0, -4.0, 0.5]), [0, 2]

    def guesses(m, claim, delta, confidence, steps):
        asked.append((m, claim, delta, confidence, steps))
        return {2.0: 3, 4.0: 5}[claim]

    def bound(name):
        return lambda m, r, v, delta, confidence, steps: (name, m, r, v, delta, confidence, steps)

    monkeypatch.setattr(one_run, "_gaps", gaps)
    monkeypatch.setattr(one_run, "best_guesses", guesses)
    monkeypatch.setattr(one_run, "BOUNDS", {"A": bound("A"), "B": bound("B")})
    monkeypatch.setattr(one_run, "_verdict", lambda *given: given)
    monkeypatch.setattr(one_run, "save_audits", lambda *given: saved.append(given))
    audits = audit_run("here", attack="gap", threat="peer:1", confidence=0.9, watch="watch")
    assert asked == [
        ("named gap", "the attack", "peer:1", None, "watch"), (5, 2.0, 0.03, 0.9, 1), (5, 4.0, 0.03, 0.9, 1),
    ]  # fmt: skip
    ledger = [rows[0], rows[2]]
    wanted = []
    for claim, r, v in (("the run, as asked for", 3, 1), ("the run, by the ledger", 5, 2)):
        epsilon = {3: 2.0, 5: 4.0}[r]
        how = f"{v} of {r} guesses right on 5 pairs of mislabelled canaries, of 2 clients"
        for name in "AB":
            told = (name, 5, r, v, 0.03, 0.9, 1), (name, 5, r, r, 0.03, 0.9, 1)
            counts = Guesses(bound=name, pairs=5, made=r, right=v, steps=1)
            claimed = (claim, epsilon, "replace-one")
            test = f"one run, named gap by the peer:1, {name}"
            wanted.append((test, one_run.Threat.parse("peer:1"), *told, claimed, ledger, how, counts))
    assert audits == wanted
    assert saved[0][:3] == ("folder", "digest", audits)
    assert 0 <= saved[0][3] < 60
    asked.clear()
    assert {(audit[-1].made, audit[2][5]) for audit in audit_run("here", guesses=1)} == {(1, 0.95)}
    assert asked == [("named loss", "the attack", "server", None, unwatched)]
    assert audit_run("here", guesses=5)[0][-1].made == 5
    for wrong in (0, 6):
        with pytest.raises(SettingError, match=f"--guesses {wrong}: there are 5 pairs"):
            audit_run("here", guesses=wrong)
    for how in ({"clients": [3]}, {"clients": [0, -1]}, {"threat": "peer:3"}):
        with pytest.raises(ThreatError, match=r"There is no client -?\d; the run has 3"):
            audit_run("here", **how)
    audit_run("here", clients=[0, 2])
    record.status = "running"
    with pytest.raises(RunError, match="is not finished"):
        audit_run("here")


def test_the_row_of_a_claim_says_what_perfect_guesses_would_show(monkeypatch):
    monkeypatch.setattr(one_run, "held", lambda *given, **named: (given, named))
    threat = one_run.Threat.parse("server")
    best = SimpleNamespace(epsilon=4.5678, p_value=lambda epsilon: epsilon / 100)
    rows = [client_row(k, 0.1, 1.0, 2.0 + k, "any") for k in (0, 2, 1)]

    def row(epsilon, ledger):
        return one_run._verdict("test", threat, "bound", best, ("words", epsilon, "zero-out"), ledger, "how", "guesses")

    place = one_run.AuditedClaim("run", "server", "words", 3.0, 4.0)
    told = "how; so many guesses can show 4.57; zero-out"
    assert row(3.0, rows) == ((place, "test", "bound", 4.5678, told), {"tells_at": 0.03, "guesses": "guesses"})
    given, named = row(math.inf, [*rows, rows[0].model_copy(update={"epsilon": None})])
    assert (given[0].ledger, named["tells_at"]) == (None, None)
