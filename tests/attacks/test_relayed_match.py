"""Rows that are passed on to a peer: which of them count, and how far candidates are from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scenes import scene

from fedaudit.attacks.membership import relayed_match
from fedaudit.attacks.membership.relayed_match import RelayedMatch, _comparable, _own, _relative, _rows


def passing(**by_client):
    """A scene in which a peer was passed on these values, by kind and client: `embeddings_0=[...]`."""

    def relayed(kind, k=0):
        values = by_client.get(f"{kind}_{k}", [])
        return [SimpleNamespace(round=t, value=value) for t, value in enumerate(values, 1)]

    return relayed


def test_tables_by_round_give_the_rows_of_their_round():
    first, second = torch.ones(2, 3), 2 * torch.ones(2, 3)
    here = scene(peer=1, relayed=passing(embeddings_0=[{1: first, 2: second}, {1: first, 2: second}, torch.ones(3)]))
    assert [rows[0, 0].item() for rows in _rows(here, 0, "embeddings")] == [1.0, 2.0]
    assert _rows(here, 2, "embeddings") == []
    images = scene(peer=1, relayed=passing(embeddings_0=[torch.ones(2, 3, 4)]))
    assert [tuple(rows.shape) for rows in _rows(images, 0, "embeddings")] == [(2, 12)]


def test_outputs_on_the_public_set_are_no_rows_of_records():
    z = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for public, found in ((None, 1), (torch.zeros(2, 1, 2, 2), 0), (torch.zeros(3, 1, 2, 2), 1)):
        here = scene(peer=1, public=public, relayed=passing(logits_0=[z], embeddings_0=[z]))
        rows = _rows(here, 0, "logits")
        assert len(rows) == found
        assert all(torch.allclose(of, z.log_softmax(1)) for of in rows)
        assert torch.equal(_rows(here, 0, "embeddings")[0], z), "as they are"


def test_distances_are_relative_to_those_of_auxiliary_records():
    e, known, rows = torch.tensor([[3.0], [0.0]]), torch.tensor([[2.0], [6.0]]), torch.tensor([[0.0], [5.0]])
    assert _relative(e, known, rows).tolist() == pytest.approx([2 / 1.5, 0.0])
    assert _relative(e, rows, rows).isfinite().all(), "auxiliary records that are the rows themselves"


@pytest.fixture
def own(monkeypatch):
    """The peer's own encoder takes the first two pixels."""
    monkeypatch.setattr(relayed_match, "_function", lambda model, kind: lambda x: x.flatten(1)[:, :2])
    monkeypatch.setattr(relayed_match, "_own", lambda scene: "model")


def test_the_targets_rows_are_nearer_than_the_others(own):
    """Candidates at (0, 0) and (4, 0). Round 1: the target's row is (1, 0), the others' (4, 3) and, too wide, none;
    auxiliary records lie at (0, 0): units 1 and 5. Round 2: only the target has a row, (0, 0), of unit 2 by (2, 0)."""
    x = torch.zeros(2, 1, 2, 2)
    x[1, 0, 0, 0] = 4.0
    aux = torch.zeros(1, 1, 2, 2)
    others = {"embeddings_1": [torch.tensor([[4.0, 3.0]])], "embeddings_2": [torch.zeros(1, 3)]}
    here = scene(peer=1, x=x, y=torch.tensor([0, 1]), auxiliary=(aux, torch.zeros(1).long()),
                 relayed=passing(embeddings_0=[torch.tensor([[1.0, 0.0]])], **others))  # fmt: skip
    assert RelayedMatch._score(here, "model", "embeddings").tolist() == pytest.approx([-1 + 1, -3 + 3 / 5])
    alone = scene(peer=1, x=x, y=torch.tensor([0, 1]), auxiliary=(aux + 2.0, torch.zeros(1).long()),
                  relayed=passing(embeddings_0=[torch.zeros(1, 2)]))  # fmt: skip
    assert RelayedMatch._score(alone, "model", "embeddings").tolist() == pytest.approx([0.0, -4 / 8**0.5])
    assert RelayedMatch().run(alone).scores.tolist() == pytest.approx([0.0, -4 / 8**0.5])
    both = scene(peer=1, x=x, y=torch.tensor([0, 1]), auxiliary=(aux + 2.0, torch.zeros(1).long()),
                 relayed=passing(embeddings_0=[torch.zeros(1, 2)], logits_0=[torch.zeros(1, 3)]))  # fmt: skip
    assert RelayedMatch().run(both).scores.tolist() == pytest.approx([0.0, -4 / 8**0.5]), "outputs are too wide"


@pytest.mark.parametrize(
    ("peer", "rows", "model", "words"),
    [
        (1, torch.zeros(1, 2), "model", None),
        (None, torch.zeros(1, 2), "model", "has the uploads themselves"),
        (1, None, "model", "is passed on no embeddings or outputs"),
        (1, torch.zeros(1, 2), None, "was never asked, and has no encoder"),
        (1, torch.zeros(1, 5), "model", "an encoder of another width"),
    ],
)
def test_what_a_peer_needs(peer, rows, model, words, own, monkeypatch):
    monkeypatch.setattr(relayed_match, "_own", lambda scene: model)
    here = scene(peer=peer, relayed=passing(embeddings_0=[] if rows is None else [rows]))
    found = RelayedMatch().cannot(here)
    assert found is None if words is None else words in found


def test_rows_of_the_last_message_decide_whether_they_compare(own):
    here = scene(peer=1, relayed=passing(embeddings_0=[torch.zeros(1, 5), torch.zeros(1, 2)]))
    assert _comparable(here, "model", "embeddings")
    assert not _comparable(here, "model", "logits")


def test_a_peers_own_model_is_of_its_own_architecture():
    made = []
    state = SimpleNamespace(model={"w": 1})
    here = scene(peer=2, own=("x", "y", state), model=lambda arch, of: made.append((arch, of)))
    assert _own(here) is None, "no network"
    assert made == [("net 2", {"w": 1})]
    assert _own(scene(peer=2, own=("x", "y", None))) is None
