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
    ReconstructionResult,
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


@pytest.mark.parametrize(
    ("off", "verdict"), [(0.5, "recomputed"), (2.0, "contradicted"), (-0.5, "recomputed"), (-2.0, "contradicted")]
)
def test_the_presence_of_classes_may_be_off_by_rounding(off, verdict):
    """One class that is held at 0.7, two that are not at 0.2 and 0.8: one pair of two, so 0.5 in either limit."""
    said = SimpleNamespace(pooled=SimpleNamespace(presence=SimpleNamespace(value=0.5 + off * attacks.CLOSE)))
    case = SimpleNamespace(found=Findings())
    claimed, held = np.array([0.7, 0.2, 0.8]), np.array([True, False, False])
    attacks._check_presence(case, "presence", "results.0", said, claimed, held)
    assert [(one.figure, one.verdict) for one in case.found.list] == [("presence", verdict)]


def test_each_result_is_checked_as_what_it_is(monkeypatch):
    """Five results of five kinds. Of two membership attacks one was scored again; one by another party was not."""
    looked = []
    for name in ("membership", "histogram", "participation", "reconstruction"):
        monkeypatch.setattr(
            attacks, f"_check_{name}", lambda case, figure, at, *of, name=name: looked.append((name, figure, at, *of))
        )
    monkeypatch.setattr(attacks, "_check_truth", lambda case: looked.append("truth"))
    monkeypatch.setattr(attacks, "_same_clients", lambda case: "alike")
    mine, peers = membership("loss", "server", [0]), membership("loss", "peer:1", [0])
    empty = membership("rmia", "server", [0])
    again, nothing = membership("loss", "server", [0, 1]), membership("rmia", "server", [])
    shares = histogram()
    part = ParticipationResult.model_construct(attack="participation", threat="server")
    rebuilt = ReconstructionResult.model_construct(attack="invert", threat="server")
    left_out = NotRun(attack="d", threat="server", reason="no public set")
    monkeypatch.setattr(attacks, "rescored", lambda run: [(again, ["a part"]), (nothing, [])])
    record = SimpleNamespace(attacks=[left_out, mine, peers, empty, shares, part, rebuilt])
    case = SimpleNamespace(found=Findings(), record=record, run="run")
    attacks.check_attacks(case)
    assert looked == [
        "truth",
        ("membership", "attack loss by the server", "attacks.1", mine, again, True, "alike"),
        ("membership", "attack loss by the peer:1", "attacks.2", peers, peers, False, "alike"),
        ("membership", "attack rmia by the server", "attacks.3", empty, nothing, False, "alike"),
        ("histogram", "attack label_histogram by the server", "attacks.4", shares),
        ("participation", "attack participation by the server", "attacks.5", part),
        ("reconstruction", "attack invert by the server", "attacks.6", rebuilt),
    ]
    assert [(one.verdict, one.figure, one.reason) for one in case.found.list] == [
        ("the author's word", "attack d by the server", "it did not run: no public set")
    ]
    looked.clear()
    record.attacks = []
    attacks.check_attacks(case)
    assert looked == []


def test_scores_that_cannot_be_scored_again_are_a_contradiction(monkeypatch):
    def rescored(run):
        raise ValueError("x" * 400)
        yield

    looked = []
    monkeypatch.setattr(attacks, "rescored", rescored)
    monkeypatch.setattr(attacks, "_check_truth", lambda case: None)
    monkeypatch.setattr(attacks, "_check_membership", lambda *of: looked.append(of[5]))
    case = SimpleNamespace(
        found=Findings(), record=SimpleNamespace(attacks=[membership("loss", "server", [0])]), run="run"
    )
    attacks.check_attacks(case)
    assert [(one.verdict, one.figure, one.file) for one in case.found.list] == [
        ("contradicted", "kept scores", "scores")
    ]
    assert looked == [False], "its figures are without scores"


def test_a_client_that_is_not_there_contradicts_its_scores(monkeypatch):
    def truth(world, k):
        raise IndexError("no client 9")

    part = SimpleNamespace(client=9, threat="peer:2", attack="loss")
    monkeypatch.setattr(attacks, "_truth", truth)
    monkeypatch.setattr(attacks, "kept", lambda folder, record: [part])
    case = SimpleNamespace(found=Findings(), folder="f", record=None, world="world")
    attacks._check_truth(case)
    assert [(one.verdict, one.file, one.field, one.recomputed) for one in case.found.list] == [
        ("contradicted", "scores/peer-2/loss.safetensors", "client 9", "no client 9")
    ]


def test_the_truth_is_of_the_candidates(monkeypatch):
    candidates = "x", torch.tensor([2, 0]), torch.tensor([True, False])
    monkeypatch.setattr(attacks, "candidates_of", lambda world, k: candidates if (world, k) == ("w", 3) else None)
    assert attacks._truth("w", 3) == ([2, 0], [True, False])


def test_a_client_without_records_has_shares_of_nothing():
    """Both errors are halves of what was guessed: nobody has anything. No class is held, so presence is left out."""
    world = SimpleNamespace(classes=4, members=lambda k: (None, torch.zeros(0).long()))
    each = {str(k): ClientHistogram(error=0.5, uniform=0.5, claimed=[0.25, 0.75, 0.0, 0.0]) for k in (0, 1)}
    half = student_t([0.5, 0.5])
    pooled = HistogramScores(error=half, uniform=half, gain=student_t([0.0, 0.0]))
    result = HistogramResult(
        attack="a", threat="server", pooled=pooled, client=each, measure="m", leak=False, verdict=""
    )
    case = SimpleNamespace(found=Findings(), world=world)
    attacks._check_histogram(case, "f", "attacks.0", result)
    assert [(one.verdict, one.figure) for one in case.found.list] == [
        ("recomputed", f"f, {name}") for name in ("error", "uniform", "gain", "verdict")
    ]


@pytest.mark.parametrize(
    ("held", "others", "value", "verdict"),
    [
        (attacks.DIGITS, 0.0, 0.0, "recomputed"),
        (attacks.DIGITS, 0.0, 1.0, "recomputed"),
        (1.5 * attacks.DIGITS, 0.0, 0.0, "contradicted"),
        (0.0, 0.5 * attacks.DIGITS, 1.0, "recomputed"),
        (0.0, attacks.DIGITS, 1.0, "contradicted"),
    ],
)
def test_two_shares_may_be_apart_by_their_digits(held, others, value, verdict):
    said = SimpleNamespace(pooled=SimpleNamespace(presence=SimpleNamespace(value=value)))
    case = SimpleNamespace(found=Findings())
    attacks._check_presence(case, "f", "attacks.0", said, np.array([held, others]), np.array([True, False]))
    assert [one.verdict for one in case.found.list] == [verdict]


def test_a_verdict_on_participation_asks_for_more_than_chance():
    """An interval that begins at one half is no leak; one that begins above it is."""
    transcript = SimpleNamespace(entries=lambda: [SimpleNamespace(direction="up", client=0)])
    for low, leak in ((0.5, False), (0.51, True), (0.49, False)):
        pooled = SimpleNamespace(auc=Estimate(value=1.0, low=low, high=1.0, n=2))
        rows = {"0": SimpleNamespace(score=0.9, took_part=True), "1": SimpleNamespace(score=0.1, took_part=False)}
        for said in (True, False):
            case = SimpleNamespace(found=Findings(), whole=True, transcript=transcript)
            attacks._check_participation(case, "f", "attacks.0", SimpleNamespace(pooled=pooled, client=rows, leak=said))
            last = case.found.list[-1]
            assert (last.figure, last.verdict) == ("f, verdict", "recomputed" if said is leak else "contradicted")
            assert (case.found.list[0].figure, case.found.list[0].verdict) == ("f, truth", "recomputed")


def test_a_hit_more_or_less_is_seen_in_any_bound():
    """The share is kept to many digits: a millionth is rounding, and more is not."""
    low, high = clopper_pearson(3, 8)
    for change, wrong in (
        ({}, []), ({"low": low + 5e-7}, []), ({"low": low + 5e-6}, ["low"]), ({"high": high - 5e-6}, ["high"]),
        ({"value": 0.375 + 5e-6, "high": high + 1e-3}, ["value", "high"]),
    ):  # fmt: skip
        rate = Rate(**({"value": 0.375, "low": low, "high": high, "n": 8, "hits": 3} | change))
        result = SimpleNamespace(pooled=SimpleNamespace(identification=rate), baselines={}, client={})
        case = SimpleNamespace(found=Findings())
        attacks._check_reconstruction(case, "f", "attacks.0", result)
        fields = [one.field for one in case.found.list if one.verdict == "contradicted"]
        assert fields == [f"attacks.0.pooled.identification.{name}" for name in wrong]
        assert [one.verdict for one in case.found.list if one.field == ""] == ["the author's word"] * (not wrong)
