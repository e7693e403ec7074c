"""Which releases of embeddings are joined over rounds, and how their rows are matched."""

from __future__ import annotations

import math

import pytest
import torch
from scenes import Entry, scene

from fedaudit.attacks.membership import embedding_match
from fedaudit.attacks.membership.embedding_match import EmbeddingMatch, Uploaded, log_density, log_ratio, squared
from fedaudit.wire.release import Protection

ROWS = torch.tensor([[1.0, 0.0], [0.0, 2.0]])


def release(t, rows=ROWS, labels=(0, 1), sigma=None):
    fields = {"e": ("embeddings", rows)}
    if labels is not None:
        fields["y"] = ("labels", torch.tensor(labels))
    protection = None if sigma is None else Protection(mechanism="gaussian", sigma=sigma)
    return Entry("up", 0, t, protection=protection, **fields)


def joined(*entries, **settings):
    here = scene(*entries)
    return [e.round for e, _, _ in EmbeddingMatch(**settings)._joinable(here, [(e, "e", "model") for e in entries])]


def test_rounds_with_the_same_labels_are_joined():
    assert joined(release(1), release(2), release(3)) == [1, 2, 3]
    assert joined(release(1, labels=(1, 0)), release(2), release(3)) == [2, 3], "in another order"
    assert joined(release(1, labels=None), release(2)) == [2]
    assert joined(release(1), release(2, labels=None)) == [2], "the last one says none"
    assert joined(release(1, labels=None), release(2, labels=None)) == [1, 2]
    assert joined(release(1, rows=ROWS[:1], labels=None), release(2, labels=None)) == [2], "of other numbers of rows"
    assert joined(release(1, sigma=1.0), release(2), release(3, sigma=2.0)) == [1, 3], "noise, as the last one has"
    assert joined(release(1, sigma=1.0), release(2), release(3)) == [2, 3]
    assert joined() == []


def test_labels_beside_rows_of_another_length_are_none_of_theirs():
    attack = EmbeddingMatch()
    assert attack._labels(scene(), release(1), "e").tolist() == [0, 1]
    assert attack._labels(scene(), release(1, labels=(0, 1, 2)), "e") is None
    assert attack._labels(scene(), release(1, labels=None), "e") is None


@pytest.mark.parametrize(("join", "rounds"), [(True, [1, 2]), (False, [2])])
def test_the_encoder_is_the_clients_own_or_the_one_it_got(join, rounds, monkeypatch):
    """Round 1 has the client's own model, round 2 one that it got, round 3 none."""
    monkeypatch.setattr(embedding_match, "uploaded", lambda scene, k: {1: ("entry", "own")})
    monkeypatch.setattr(embedding_match, "received", lambda scene, e: "got" if e.round == 2 else None)
    table = Entry("up", 0, 2, e=("embeddings", {0: ROWS}))
    found = EmbeddingMatch(join=join)._encoders(scene(release(1), table, release(2), release(3)))
    assert [entry.round for entry, _, _ in found] == rounds
    assert [model for _, _, model in found] == ["own", "got"][-len(rounds) :]


@pytest.mark.parametrize("labels", [True, False])
def test_auxiliary_rows_are_of_the_same_class_where_that_is_known(labels, monkeypatch):
    """Rows of classes 0 and 1; the auxiliary records are of classes 0, 2 and 0: for class 1 any of them counts."""
    monkeypatch.setattr(embedding_match, "encoder_of", lambda model: lambda x: 10 * x.flatten(1)[:, :2])
    aux = torch.tensor([[0.3, 0.4], [0.0, 0.1], [0.6, 0.8]]).repeat(1, 2).view(3, 1, 2, 2)
    here = scene(auxiliary=(aux, torch.tensor([0, 2, 0])))
    entry = release(1, sigma=0.5)
    entry.fields["e"] = entry.fields["e"].model_copy(
        update={"protection": Protection(mechanism="gaussian", sigma=0.5, clip=2.0)}
    )
    found = EmbeddingMatch(labels=labels)._release(here, entry, "e", "model")
    assert found.auxiliary.tolist() == [pytest.approx(row) for row in ([1.2, 1.6], [0.0, 1.0], [1.2, 1.6])]
    assert found.sigma == 0.5
    assert found.alike.tolist() == ([[True, False, True], [True] * 3] if labels else [[True] * 3] * 2)
    match = EmbeddingMatch()._matching(torch.tensor([0, 1, 2]), found)
    assert match.tolist() == ([[True, False], [False, True], [False, False]] if labels else [[True, True]] * 3)
    bare = EmbeddingMatch(labels=labels)._release(here, release(1), "e", "model")
    assert bare.auxiliary.tolist() == [pytest.approx(row) for row in ([3.0, 4.0], [0.0, 1.0], [6.0, 8.0])], "no clip"
    assert bare.sigma == 0.0


def test_distances_are_summed_over_rounds_before_the_nearest_is_taken():
    """A candidate at (0, 0) is 1 and 4 from the rows of round 1, 9 and 0 from those of round 2: 10 and 4."""

    def of(rows):
        return Uploaded(torch.tensor(rows), None, torch.zeros(1, 2), torch.zeros(0, 2), torch.ones(2, 0).bool(), 0.0)

    releases = [of([[1.0, 0.0], [0.0, 2.0]]), of([[3.0, 0.0], [0.0, 0.0]])]
    both = torch.tensor([[True, True]])
    assert EmbeddingMatch._distance(releases, both).tolist() == [4.0]
    assert EmbeddingMatch._distance(releases, torch.tensor([[True, False]])).tolist() == [10.0]
    assert EmbeddingMatch._distance(releases, ~both).tolist() == [11.0], "no row can be this candidate"


def test_the_density_and_the_ratio_by_hand():
    """-d^2 / 2 sigma^2. One row, one round: N(r; e) / q(r), where q is the mean over auxiliary records of its class."""
    assert log_density(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), 2.0).item() == pytest.approx(-25 / 8)
    assert squared(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0], [4.0, 6.0]])).tolist() == [[0.0, 25.0]]
    rows, candidates = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 0.0], [5.0, 0.0]])
    aux = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    alike = torch.tensor([[True, False], [True, True]])
    one = Uploaded(rows, None, candidates, aux, alike, 1.0)
    match = torch.tensor([[True, True], [False, False]])
    q = [math.exp(-0.5), (math.exp(-0.5) + math.exp(-0.5)) / 2]
    expected = math.log((1 / q[0] + math.exp(-2.0) / q[1]) / 2)
    found = log_ratio([one], match)
    assert found.tolist() == pytest.approx([expected, expected - 1])
    twice = log_ratio([one, one], match)
    assert twice[0].item() == pytest.approx(math.log((1 / q[0] ** 2 + math.exp(-4.0) / q[1] ** 2) / 2))
    assert log_ratio([one], ~torch.ones(2, 2).bool()).tolist() == [-1.0, -1.0]
