"""Scores of claims: groups, label shares and their gains."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedaudit.attack import score as scorer
from fedaudit.attack import shared_results
from fedaudit.attack.claims import Attacked, Claims, Features, Groups, Histogram, Reconstructions, TookPart
from fedaudit.attack.membership import auc
from fedaudit.attack.score import (
    classified,
    halves,
    histogram,
    last_round,
    learned,
    membership,
    participation,
    pooled,
    presence,
    score,
    settled,
)
from fedaudit.errors import ContractError

# --- ties, and unequal clients


def test_groups_are_learned_on_the_other_half():
    """Five members and nine others, told perfectly by their group: three and five are judged, by two and four."""
    member = torch.arange(14) < 5
    share = learned(member.long(), member)
    judged = share != 0.5
    assert (int(judged[member].sum()), int(judged[~member].sum())) == (3, 5)
    assert share[member & judged].unique().tolist() == [pytest.approx(3 / 4)]  # (2 + 1) / (2 + 2)
    assert share[~member & judged].unique().tolist() == [pytest.approx(1 / 6)]  # (0 + 1) / (4 + 2)


@pytest.fixture
def grown(monkeypatch, tmp_path):
    """How often a forest was grown, in a folder that processes share. Call it to be another process."""
    count, grow = [], scorer._grown
    monkeypatch.setattr(scorer, "_grown", lambda *what: count.append(1) or grow(*what))
    monkeypatch.setattr(shared_results, "_folder", tmp_path)
    monkeypatch.setattr(scorer, "_known", {})

    def so_often():
        scorer._known.clear()
        return len(count)

    return so_often


def looks(seed=0, n=24):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=rng), torch.arange(n) % 2 == 0


def test_a_forest_is_grown_once_for_all_processes_of_an_audit(grown, tmp_path):
    first = scorer.classified(*looks())
    assert grown() == 1
    assert torch.equal(scorer.classified(*looks()), first)
    assert grown() == 1
    scorer.classified(*looks(seed=1))
    assert grown() == 2  # other candidates
    shared_results.share(None)
    assert torch.equal(scorer.classified(*looks()), first)
    assert grown() == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_forest_is_grown_again(grown, tmp_path):
    first = scorer.classified(*looks())
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-9], b"", whole.replace(b"<f8", b"<f4")):
        kept.write_bytes(damaged)
        before = grown()
        assert torch.equal(scorer.classified(*looks()), first)
        assert grown() == before + 1
    assert kept.read_bytes() == whole


def test_without_the_folder_each_process_grows_its_own(grown, tmp_path):
    shared_results.share(tmp_path / "gone")
    assert torch.equal(scorer.classified(*looks()), scorer._grown(*looks()))
    assert not (tmp_path / "gone").exists()


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """How often scores were measured, in a folder that processes share."""
    count, measure = [], scorer.membership_scores
    monkeypatch.setattr(scorer, "membership_scores", lambda *what, **how: count.append(1) or measure(*what, **how))
    monkeypatch.setattr(shared_results, "_folder", tmp_path)
    return count


def claimed(seed=0, n=24, classes=2, client=1, **how):
    values, member = looks(seed, n)
    part = Attacked(client, Claims(values[:, 0], **how), values, torch.arange(n) % classes, member)
    return [part, replace(part, client=0, claims=Claims(values[:, 1]))]


def test_scores_are_measured_once_for_all_processes_of_an_audit(measured, tmp_path):
    first = scorer.membership(claimed(), "a", 5)
    assert len(measured) == 1
    again = scorer.membership(claimed(), "b", 5)
    assert len(measured) == 1
    assert again == first
    assert again.model_dump_json() == first.model_dump_json()
    assert again.model_fields_set == first.model_fields_set
    assert "roc" not in again.client["0"].model_fields_set
    shared_results.share(None)
    assert scorer.membership(claimed(), "a", 5) == first
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        (claimed(seed=1), 5), (claimed(classes=3), 5), (claimed(client=2), 5), (claimed(), 6),
        ([replace(part, member=~part.member) for part in claimed()], 5), (claimed()[::-1], 5),
    ],
    ids=["scores", "classes", "clients", "seed", "truth", "order"],
)  # fmt: skip
def test_other_scores_classes_clients_truths_and_seeds_are_measured_anew(parts, seed, measured):
    scorer.membership(claimed(), "a", 5)
    found = scorer.membership(parts, "a", seed)
    assert len(measured) == 2
    shared_results.share(None)
    assert found == scorer.membership(parts, "a", seed)


def test_rounds_and_notes_are_each_attacks_own(measured):
    """They are no part of what was left, and do not get into it."""
    scorer.membership(claimed(last=looks()[0][:, 2], notes=["mine"]), "a", 5)
    other = scorer.membership(claimed(), "a", 5)
    assert (len(measured), other.last_round, other.notes) == (1, None, [])


def test_damaged_figures_are_measured_again(measured, tmp_path):
    first = scorer.membership(claimed(), "a", 5)
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], b"{}"):
        kept.write_bytes(damaged)
        assert scorer.membership(claimed(), "a", 5) == first
        assert kept.read_bytes() == whole
    assert len(measured) == 4


def labelled(*labels):
    """A world of three classes, of which nobody holds the last."""
    rows = [torch.tensor(y) for y in labels]
    return SimpleNamespace(classes=3, members=lambda k: (torch.zeros(len(rows[k]), 1, 2, 2), rows[k]))


def part(k, claims, member=None, n=0):
    member = torch.ones(n, dtype=torch.bool) if member is None else member
    return Attacked(k, claims, torch.zeros(len(member), 1, 2, 2), torch.zeros(len(member), dtype=torch.long), member)


def test_label_shares_are_held_against_each_clients_own():
    """Client 0 has (3/4, 1/4, 0), client 1 (0, 1, 0). Claims (1/2, 1/2, 0) and (0, 1/2, 1/2): errors 1/4 and 1/2."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.5, 0.5, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert [found.client[k].error for k in "01"] == [pytest.approx(0.25), pytest.approx(0.5)]
    assert [found.client[k].uniform for k in "01"] == [pytest.approx(5 / 12), pytest.approx(2 / 3)]


def test_a_gain_within_its_interval_is_no_leak():
    """Gains of 0.42 and 0.17 over the uniform guess: above 0 in the mean, and their interval holds 0."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.75, 0.25, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert found.pooled.gain.value > 0 > found.pooled.gain.low
    assert found.leak is False
    assert found.verdict.startswith("No leak shown")


def test_clients_with_scores_and_clients_with_groups_are_one_attack():
    """A baseline may have scores for one client, and groups for another."""
    member = torch.arange(8) < 4
    parts = [part(0, Claims(member.double()), member), part(3, Groups(member.long()), member)]
    found = score(parts, labelled([0]), Path("nowhere"), "mine", 0)
    assert (found.pooled.members, found.pooled.nonmembers) == (8, 8)
    assert sorted(found.client) == ["0", "3"]
    assert found.client["0"].auc.value == 1.0


def test_claims_of_two_sorts_are_refused():
    member = torch.arange(8) < 4
    parts = [part(0, Claims(member.double()), member), part(1, Histogram(torch.ones(3) / 3), member)]
    with pytest.raises(ContractError, match="mine returned Claims, Histogram"):
        score(parts, labelled([0], [1]), Path("nowhere"), "mine", 0)


def scored(k, scores, member, labels, last=None, notes=()):
    claims = Claims(torch.tensor(scores), notes, None if last is None else torch.tensor(last))
    member = torch.tensor(member, dtype=torch.bool)
    return Attacked(k, claims, torch.zeros(len(member), 1, 2, 2), torch.tensor(labels), member)


PARTS = [
    scored(4, [0.9, 0.1, 0.8, 0.3], [1, 0, 1, 0], [7, 7, 2, 2], last=[0.1, 0.9, 0.2, 0.3], notes=("b", "a")),
    scored(1, [0.2, 0.7], [1, 0], [7, 2], notes=("a",)),
]


def test_candidates_are_scored_by_client_and_by_class():
    """Client 4 is told perfectly, client 1 the wrong way round. Class 7: members 0.9 and 0.2 against 0.1; class 2:
    0.8 against 0.3 and 0.7."""
    found = membership(PARTS, "mine", 3)
    assert {k: of.auc.value for k, of in found.client.items()} == {"1": 0.0, "4": 1.0}
    assert {c: of.auc.value for c, of in found.class_.items()} == {"2": 1.0, "7": 1.0}
    assert found.pooled.auc.value == pytest.approx(7 / 9)  # of 9 pairs 0.2 loses to 0.3 and 0.7
    assert found.notes == ["a", "b"]
    # The last round alone: client 1 has one round, and its scores stay.
    assert found.last_round == auc([0.1, 0.9, 0.2, 0.3, 0.2, 0.7], [1, 0, 1, 0, 1, 0])
    assert membership(PARTS[1:], "mine", 3).last_round is None
    assert last_round(PARTS[1]) is PARTS[1]
    assert last_round(PARTS[0]).claims.scores.tolist() == pytest.approx([0.1, 0.9, 0.2, 0.3])
    silent = membership([scored(0, [0.1, 0.2], [1, 0], [0, 0])], "mine", 3)
    assert silent.notes == []


def test_one_score_for_each_candidate():
    scores, member = pooled(PARTS, "mine")
    assert scores.tolist() == pytest.approx([0.9, 0.1, 0.8, 0.3, 0.2, 0.7])
    assert member.tolist() == [True, False, True, False, True, False]
    assert scores.dtype == np.float64
    short = scored(0, [0.1], [1, 0], [0, 0])
    with pytest.raises(ContractError, match=r"mine gave scores of shape \(1,\) for 2 candidates"):
        pooled([short], "mine")


def test_features_become_scores_and_claims_stay():
    member = torch.arange(40) < 20
    told = Features(member.double()[:, None] + torch.linspace(0, 0.1, 40)[:, None])
    found = settled(told, member)
    judged = halves(member)
    assert isinstance(found, Claims)
    assert (found.scores[~judged] == 0.5).all()
    assert (found.scores[judged & member] > 0.9).all()
    assert (found.scores[judged & ~member] < 0.1).all()
    assert settled(PARTS[0].claims, member) is PARTS[0].claims
    with pytest.raises(ContractError, match="features of 40 candidates; give those of all 30"):
        settled(told, member[:30])


def test_half_of_each_class_is_judged():
    for n, m in ((7, 12), (1, 2)):
        member = torch.arange(n + m) < n
        judged = halves(member)
        assert int(judged[member].sum()) == (n + 1) // 2
        assert int(judged[~member].sum()) == (m + 1) // 2


def test_a_forest_that_sees_one_class_alone_knows_nothing(monkeypatch):
    """Ten members and twelve others, of whom one alone is taken to learn from."""
    monkeypatch.setattr(scorer, "_known", {})
    monkeypatch.setattr(scorer, "LEARNED_ON", 1)
    member = torch.arange(22) < 10
    values = torch.arange(22.0)[:, None]
    assert classified(values, member).tolist() == [0.5] * 22
    assert len(scorer._known) == 1
    monkeypatch.setattr(scorer, "LEARNED_ON", 2000)
    assert classified(values, member).tolist() == [0.5] * 22, "found again by its candidates"
    assert len(set(classified(values + 1, member).tolist())) > 1
    assert len(scorer._known) == 2


def test_forests_that_were_grown_do_not_fill_the_memory(monkeypatch):
    member = torch.tensor([True, True, False, False, False])
    for many, left in ((1000, 1001), (1001, 1)):
        monkeypatch.setattr(scorer, "_known", {str(i): None for i in range(many)})
        classified(torch.arange(5.0)[:, None], member)
        assert len(scorer._known) == left


def test_the_presence_of_classes():
    claimed = np.array([0.6, 0.4, 0.0, 0.1])
    assert presence(claimed, np.array([True, True, False, False])).value == 1.0
    assert presence(claimed, np.array([True, False, True, False])).value == pytest.approx(0.5)
    for held, reason in ((np.ones(4, bool), "all clients hold all classes"), (np.zeros(4, bool), "no client holds")):
        found = presence(claimed, held)
        assert found.value is None
        assert found.reason.startswith(reason)


@pytest.mark.parametrize("turned", [False, True])
def test_who_took_part_is_ranked_over_clients(turned):
    """Thirty clients, of whom the first ten took part and have the highest scores, or the lowest."""
    parts = [
        Attacked(k, TookPart(float(k if turned else -k)), torch.zeros(0), torch.zeros(0), torch.tensor(k < 10))
        for k in range(30)
    ]  # fmt: skip
    found = participation(parts)
    assert found.pooled.auc.value == (0.0 if turned else 1.0)
    assert (found.pooled.took_part, found.pooled.others) == (10, 20)
    assert found.leak is not turned
    assert found.verdict.startswith("No leak shown" if turned else "A leak")
    assert [(k, one.took_part) for k, one in found.client.items()] == [(str(k), k < 10) for k in range(30)]
    assert found.client["3"].score == (3.0 if turned else -3.0)


def test_claims_of_one_sort_go_to_their_scorer(monkeypatch, tmp_path):
    for name in ("membership", "histogram", "participation"):
        monkeypatch.setattr(scorer, name, lambda *of, name=name: name)

    def of(*claims):
        return score([SimpleNamespace(claims=one) for one in claims], None, tmp_path, "mine", 1)

    one, groups = Claims(torch.zeros(1)), Groups(torch.zeros(1).long())
    shares, part_of = Histogram(torch.ones(1)), TookPart(0.0)
    assert of(one, one) == of(one, groups) == of(groups) == "membership"
    assert of(shares) == "histogram"
    assert of(part_of) == "participation"
    for mixed in ((one, shares), (shares, part_of), ("something else",), (Reconstructions(torch.zeros(1)), shares)):
        with pytest.raises(ContractError, match="Return Claims, Reconstructions, Histogram or TookPart"):
            of(*mixed)


def test_shares_are_one_per_class_and_sum_to_one():
    world = labelled([0, 0, 0, 1], [1, 1])
    for shares in ([0.5, 0.5], [0.7, 0.6, -0.3], [0.5, 0.5, 0.1], [0.5, 0.4, 0.0]):
        with pytest.raises(ContractError, match="mine did not give 3 shares"):
            histogram([part(0, Histogram(torch.tensor(shares)))], world, "mine")
    assert histogram([part(0, Histogram(torch.tensor([0.5, 0.5, 1e-6])))], world, "mine").client["0"].error > 0


def test_a_gain_beyond_its_interval_is_a_leak():
    """Four clients whose shares are told exactly: the gain is the distance of the uniform guess, each time."""
    world = labelled([0, 0, 0, 1], [1, 1], [0, 1], [0, 0])
    truth = ([0.75, 0.25, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0])
    claims = [Histogram(torch.tensor(shares), source="logits" if k else "") for k, shares in enumerate(truth)]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert found.leak is True
    assert found.verdict.startswith("A leak")
    assert found.pooled.gain.value == pytest.approx((5 / 12 + 2 / 3 + 1 / 3 + 2 / 3) / 4)
    assert found.pooled.presence.value == 1.0
    assert [found.client[k].source for k in "0123"] == ["", "logits", "logits", "logits"]
    assert found.client["0"].claimed == [0.75, 0.25, 0.0]


def test_what_was_learned_of_each_group_by_hand():
    """Groups of unequal sizes: (members + 1) / (all + 2) of those that are not judged; 1/2 for these themselves."""
    groups = torch.tensor([4, 4, 9, 9, 9, 4, 7, 9, 4, 9, 4, 7, 9])
    member = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0], dtype=torch.bool)
    judged = halves(member).tolist()
    found = learned(groups, member).tolist()
    for i in range(13):
        others = [bool(member[j]) for j in range(13) if not judged[j] and groups[j] == groups[i]]
        wanted = (sum(others) + 1) / (len(others) + 2) if judged[i] else 0.5
        assert found[i] == pytest.approx(wanted), i
    assert len(set(found)) > 2


def test_a_forest_learns_from_those_that_are_not_judged(monkeypatch):
    import sklearn.ensemble

    asked = {}

    class Forest:
        def __init__(self, trees, **how):
            asked.update(trees=trees, **how)

        def fit(self, x, y):
            asked.update(x=sorted(x[:, 0].tolist()), y=int(y.sum()), columns=x.shape[1])

        def predict_proba(self, x):
            return np.stack([1 - x[:, 0] / 100, x[:, 0] / 100], axis=1)

    monkeypatch.setattr(sklearn.ensemble, "ExtraTreesClassifier", Forest)
    member = torch.arange(11) < 5
    values = torch.arange(22.0).view(11, 2, 1)
    found = scorer._grown(values, member)
    judged = halves(member)
    assert asked["x"] == values[~judged][:, 0, 0].tolist()
    assert (asked["trees"], asked["min_samples_leaf"], asked["random_state"], asked["n_jobs"]) == (
        scorer.TREES,
        2,
        0,
        1,
    )
    assert (asked["y"], asked["columns"]) == (2, 2)
    for i in range(11):
        assert found[i] == pytest.approx(2 * i / 100 if judged[i] else 0.5)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_forests_of_others_are_read_as_numbers_alone(tmp_path, monkeypatch):
    """Of the right length, and never unpickled."""
    monkeypatch.setattr(shared_results, "_folder", tmp_path)
    np.save(tmp_path / "a.npy", np.arange(3.0))
    (tmp_path / "a.npy").rename(tmp_path / "forest a")
    assert scorer._grown_elsewhere("a", 3).tolist() == [0.0, 1.0, 2.0]
    assert scorer._grown_elsewhere("a", 2) is None
    assert scorer._grown_elsewhere("b", 3) is None
    np.save(tmp_path / "c.npy", np.array([Trap(tmp_path / "sprung"), 1, 2], dtype=object), allow_pickle=True)
    (tmp_path / "c.npy").rename(tmp_path / "forest c")
    assert scorer._grown_elsewhere("c", 3) is None
    assert not (tmp_path / "sprung").exists()


def test_a_gain_is_the_uniform_guess_less_the_error():
    """Errors 1/4 and 1/2, uniform guesses 5/12 and 2/3: gains of 1/6 each, with no spread."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.5, 0.5, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    pooled_found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine").pooled
    assert pooled_found.gain.value == pytest.approx(1 / 6)
    assert pooled_found.error.value == pytest.approx(3 / 8)
    assert pooled_found.uniform.value == pytest.approx((5 / 12 + 2 / 3) / 2)
    held = [(0.5, 1), (0.5, 1), (0.0, 0), (0.0, 0), (0.5, 1), (0.5, 0)]
    pairs = [(a > b) + 0.5 * (a == b) for a, x in held if x for b, y in held if not y]
    assert pooled_found.presence.value == pytest.approx(sum(pairs) / len(pairs))


def test_the_uniform_guess_itself_gains_nothing():
    world = labelled([0, 0, 0, 1], [1, 1], [0, 1])
    world.classes = 2
    parts = [part(k, Histogram(torch.tensor([0.5, 0.5], dtype=torch.float64))) for k in range(3)]
    found = histogram(parts, world, "mine")
    assert (found.pooled.gain.value, found.pooled.gain.low) == (0.0, 0.0)
    assert found.leak is False


def test_the_same_score_for_all_tells_nobody():
    parts = [Attacked(k, TookPart(1.0), torch.zeros(0), torch.zeros(0), torch.tensor(k < 4)) for k in range(9)]
    found = participation(parts)
    assert found.pooled.auc.value == 0.5
    assert found.leak is False
