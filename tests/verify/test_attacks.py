"""Results of attacks, held against data and claims by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedaudit.attack.membership import auc
from fedaudit.errors import RunError
from fedaudit.runtime.attack_result import (
    ClientHistogram,
    ClientScore,
    HistogramResult,
    HistogramScores,
    MembershipResult,
    NotRun,
    ParticipationResult,
    ParticipationScores,
    Rate,
)
from fedaudit.stats import Estimate, clopper_pearson, student_t
from fedaudit.verify import attacks
from fedaudit.verify.finding import Findings

# Client 0 holds 3, 1 and 0 records of three classes, client 4 holds 0, 2 and 2.
LABELS = {0: [0, 0, 0, 1], 4: [1, 1, 2, 2]}
CLAIMED = {"0": [0.5, 0.5, 0.0], "4": [0.25, 0.25, 0.5]}
ERRORS, UNIFORM = [0.25, 0.25], [5 / 12, 1 / 3]


def histogram(client=None, pooled=None, leak=None):
    gain = student_t([u - e for u, e in zip(UNIFORM, ERRORS, strict=True)])
    # Of the 4 classes that are held and the 2 that are not, 7 of 8 pairs are ranked rightly, one is even.
    scores = {"error": student_t(ERRORS), "uniform": student_t(UNIFORM), "gain": gain,
              "presence": Estimate(value=7.5 / 8, low=0.1, high=0.99, n=6)}  # fmt: skip
    each = {
        k: ClientHistogram(**({"error": e, "uniform": u, "claimed": CLAIMED[k]} | (client or {}).get(k, {})))
        for k, e, u in zip(("0", "4"), ERRORS, UNIFORM, strict=True)
    }
    found = HistogramScores(**(scores | (pooled or {})))
    leaks = gain.low is not None and gain.low > 0
    return HistogramResult(
        attack="label_histogram", threat="server", pooled=found, client=each, measure="m",
        leak=leaks if leak is None else leak, verdict="",
    )  # fmt: skip


def checked(result):
    world = SimpleNamespace(classes=3, members=lambda k: (None, torch.tensor(LABELS[k])))
    case = SimpleNamespace(found=Findings(), world=world)
    attacks._check_histogram(case, "f", "attacks.2", result)
    return [one.field for one in case.found.list if one.verdict == "contradicted"], case


def test_a_histogram_follows_from_the_data():
    wrong, case = checked(histogram())
    assert wrong == []
    assert [one.figure for one in case.found.list] == ["f, error", "f, uniform", "f, gain", "f, presence", "f, verdict"]
    assert checked(histogram({"4": {"error": 0.5}}))[0] == ["attacks.2.client.4.error"]
    assert checked(histogram({"0": {"uniform": 0.25}}))[0] == ["attacks.2.client.0.uniform"]
    assert checked(histogram({"0": {"error": 0.2504}}))[0] == [], "claimed shares are kept to four digits"
    assert checked(histogram({"4": {"claimed": [0.5, 0.5]}}))[0] == ["attacks.2.client.4.claimed"]
    assert checked(histogram(leak=True))[0] == ["attacks.2.leak"]
    moved = student_t([0.25, 0.5])
    assert checked(histogram(pooled={"error": moved}))[0][0].startswith("attacks.2.pooled.error")
    assert checked(histogram(pooled={"uniform": moved}))[0][0].startswith("attacks.2.pooled.uniform")
    assert checked(histogram(pooled={"gain": moved}))[0][0].startswith("attacks.2.pooled.gain")
    case = SimpleNamespace(found=Findings(), world=None, why_no_world="no data")
    attacks._check_histogram(case, "f", "attacks.2", histogram())
    assert [one.reason for one in case.found.list] == ["no data"]


def test_a_gain_that_is_surely_above_zero_is_a_leak():
    """Three clients, all of whose shares are guessed to the digit: the gain is that of the uniform guess."""
    world = SimpleNamespace(classes=3, members=lambda k: (None, torch.tensor(LABELS[0])))
    each = {str(k): ClientHistogram(error=0.0, uniform=5 / 12, claimed=[0.75, 0.25, 0.0]) for k in range(3)}
    errors, uniform = student_t([0.0] * 3), student_t([5 / 12] * 3)
    pooled = HistogramScores(error=errors, uniform=uniform, gain=uniform)
    for leak, verdict in ((True, "recomputed"), (False, "contradicted")):
        result = HistogramResult(
            attack="a", threat="server", pooled=pooled, client=each, measure="m", leak=leak, verdict=""
        )
        case = SimpleNamespace(found=Findings(), world=world)
        attacks._check_histogram(case, "f", "attacks.0", result)
        assert case.found.list[-1].verdict == verdict


def test_the_presence_of_classes_is_open_where_shares_are_nearly_equal():
    claimed = np.array([0.4, 0.2, 0.2, 0.00005, 0.0])
    held = np.array([True, True, False, True, False])
    # Pairs: 0.4 beats both; 0.2 is even with 0.2 and beats 0; 0.00005 loses to 0.2 and is nearly even with 0.
    for value, verdict in (
        (3 / 6, "recomputed"),
        (5 / 6, "recomputed"),
        (0.49, "contradicted"),
        (0.84, "contradicted"),
    ):
        result = SimpleNamespace(pooled=SimpleNamespace(presence=Estimate(value=value, low=0.0, high=1.0, n=5)))
        case = SimpleNamespace(found=Findings())
        attacks._check_presence(case, "f", "attacks.0", result, claimed, held)
        assert [one.verdict for one in case.found.list] == [verdict]
    for nobody in (np.ones(5, bool), np.zeros(5, bool)):
        case = SimpleNamespace(found=Findings())
        attacks._check_presence(case, "f", "attacks.0", result, claimed, nobody)
        assert case.found.list == []


@pytest.mark.parametrize(
    ("took_part", "score", "leak", "named"),
    [
        (True, 0.9, None, []),
        (False, 0.9, None, ["attacks.1.client.5", "attacks.1.pooled.auc"]),
        (True, 0.9, "turned", ["attacks.1.leak"]),
    ],
)
def test_participation_is_who_was_heard(took_part, score, leak, named):
    """Clients 0 and 5 answered, client 3 was asked and did not; client 7 was not asked."""
    entries = [("down", 0), ("up", 0), ("down", 3), ("down", 5), ("up", 5)]
    transcript = SimpleNamespace(entries=lambda: [SimpleNamespace(direction=way, client=k) for way, k in entries])
    scores = {"0": 0.7, "3": 0.75, "5": score, "7": 0.1}
    truth = {"0": True, "3": False, "5": True, "7": False}
    value = auc(np.array(list(scores.values())), np.array(list(truth.values())))
    leaks = value.low > 0.5
    result = ParticipationResult(
        attack="participation", threat="server", verdict="", leak=leaks if leak is None else not leaks,
        pooled=ParticipationScores(auc=value, took_part=2, others=2),
        client={k: ClientScore(score=s, took_part=took_part if k == "5" else truth[k]) for k, s in scores.items()},
    )  # fmt: skip
    case = SimpleNamespace(found=Findings(), whole=True, transcript=transcript)
    attacks._check_participation(case, "f", "attacks.1", result)
    found = [one.field for one in case.found.list if one.verdict == "contradicted"]
    assert [any(field.startswith(place) for field in found) for place in named] == [True] * len(named)
    assert bool(found) is bool(named)
    case = SimpleNamespace(found=Findings(), whole=False)
    attacks._check_participation(case, "f", "attacks.1", result)
    assert [one.verdict for one in case.found.list] == ["the author's word"]


def test_shares_of_identified_records_follow_from_the_hits():
    low, high = clopper_pearson(3, 8)
    told = Rate(value=0.5, low=0.1, high=0.6, n=8, hits=3)
    assert attacks._rate(told) == [("value", 0.5, 0.375), ("low", 0.1, low), ("high", 0.6, high)]
    assert attacks._rate(Rate(value=0.5, low=None, high=None, n=8, hits=3)) == [("value", 0.5, 0.375)]
    assert attacks._rate(Rate(value=None, low=None, high=None, n=8, hits=3)) == []
    assert attacks._rate(Rate(value=0.5, low=None, high=None, n=8)) == []
    assert attacks._rate(Rate(value=0.5, low=None, high=None, n=0, hits=0)) == []


@pytest.mark.parametrize("place", [None, "pooled", "baselines.b", "client.7"])
def test_each_table_of_a_reconstruction_is_looked_at(place):
    low, high = clopper_pearson(3, 8)

    def scores(name):
        value = 0.5 if name == place else 0.375
        return SimpleNamespace(identification=Rate(value=value, low=low, high=high, n=8, hits=3))

    result = SimpleNamespace(
        pooled=scores("pooled"), baselines={"a": scores("baselines.a"), "b": scores("baselines.b")},
        client={"7": scores("client.7")},
    )  # fmt: skip
    case = SimpleNamespace(found=Findings())
    attacks._check_reconstruction(case, "f", "attacks.0", result)
    fields = [one.field for one in case.found.list if one.verdict == "contradicted"]
    assert fields == ([] if place is None else [f"attacks.0.{place}.identification.value"])
    assert len(case.found.list) == 1


def membership(attack, threat, clients):
    return MembershipResult.model_construct(attack=attack, threat=threat, clients=clients, ran=True)


def test_verdicts_are_compared_where_all_attacks_were_on_the_same_clients():
    def alike(*results):
        return attacks._same_clients(SimpleNamespace(record=SimpleNamespace(attacks=list(results))))

    server, others = membership("a", "server", [0, 1]), membership("b", "server", [0, 2])
    peer, none = membership("c", "peer:1", [0, 2]), NotRun(attack="d", threat="server", reason="r")
    assert alike()
    assert alike(server, membership("b", "server", [0, 1]), peer, none)
    assert not alike(server, peer, others)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("change", [{}, {"leak": True}, {"last_round": 2}, {"wall_s": 9.0}])
def test_what_is_compared_of_a_membership_attack(alike, change, monkeypatch):
    """How long it took never is; the verdict is not where baselines differ."""
    monkeypatch.setattr(attacks, "_other_code", lambda result, case: "")
    facts = {"leak": False, "last_round": 1, "wall_s": 1.0, "verdict": "v", "against_blind": {}, "split_broken": False}

    def one(given):
        return SimpleNamespace(
            threat="peer:3", attack="loss", clients=[1, 2],
            model_dump=lambda exclude: {name: value for name, value in given.items() if name not in exclude},
        )  # fmt: skip

    case = SimpleNamespace(found=Findings())
    attacks._check_membership(case, "f", "attacks.0", one(facts), one(facts | change), True, alike)
    wrong = [one.field for one in case.found.list if one.verdict == "contradicted"]
    seen = {name for name in change if name == "last_round" or (alike and name == "leak")}
    assert wrong == [f"attacks.0.{name}" for name in seen]
    assert ("f, verdict" in [one.figure for one in case.found.list]) is not alike
    case = SimpleNamespace(found=Findings())
    attacks._check_membership(case, "f", "attacks.0", one(facts), one(facts), False, alike)
    assert [(one.verdict, one.file) for one in case.found.list] == [
        ("contradicted", "scores/peer-3/loss.safetensors")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"member": [True, True, True]}, "client 4: member"),
        ({"labels": [1, 0, 1]}, "client 4: labels"),
        ({"labels": [1]}, "client 4: labels"),
    ],
)
def test_the_truth_beside_the_scores_is_that_of_the_data(change, named, monkeypatch):
    looked = []

    def truth(world, k):
        looked.append(k)
        return ([1, 0, 2], [True, False, True]) if k == 4 else ([0], [True])

    def part(client, member, labels, attack="loss"):
        return SimpleNamespace(
            client=client, member=torch.tensor(member), labels=torch.tensor(labels), threat="server", attack=attack
        )

    right = {"member": [True, False, True], "labels": [1, 0, 2]}
    parts = [part(1, [True], [0]), part(4, **right), part(1, [True], [0], "rmia"), part(4, **(right | change))]
    monkeypatch.setattr(attacks, "_truth", truth)
    monkeypatch.setattr(attacks, "kept", lambda folder, record: parts)
    case = SimpleNamespace(found=Findings(), folder="f", record=None, world="world", why_no_world="no data")
    attacks._check_truth(case)
    assert looked == [1, 4], "each client once"
    wrong = [(one.field, one.recomputed) for one in case.found.list if one.verdict == "contradicted"]
    assert wrong == ([] if named is None else [(named, "3 values, 1 of them others" if len(
        next(iter(change.values()))) == 3 else "3 values, 0 of them others")])  # fmt: skip
    assert len(case.found.list) == 1
    case.world, case.found = None, Findings()
    attacks._check_truth(case)
    assert [one.reason for one in case.found.list] == ["no data"]
    parts.clear()
    case.found = Findings()
    attacks._check_truth(case)
    assert case.found.list == []


def test_scores_that_cannot_be_read_are_a_contradiction(monkeypatch):
    def kept(folder, record):
        raise RunError("they are cut off")

    monkeypatch.setattr(attacks, "kept", kept)
    case = SimpleNamespace(found=Findings(), folder="f", record=None)
    attacks._check_truth(case)
    assert [(one.verdict, one.recomputed) for one in case.found.list] == [("contradicted", "they are cut off")]


@pytest.mark.parametrize(("there", "now", "words"), [("a", "a", ""), ("a", "b", "other code attacked")])
def test_other_code_is_an_excuse(there, now, words, monkeypatch, tmp_path):
    monkeypatch.setattr(attacks, "find", lambda name, kind: name)
    monkeypatch.setattr(attacks, "source_of", lambda cls: now)
    monkeypatch.setattr(attacks, "is_same", lambda a, b: a == b)
    found = attacks._other_code(SimpleNamespace(attack="loss", source=there), SimpleNamespace(folder=tmp_path))
    assert found.startswith(words)
    assert bool(found) is bool(words)
