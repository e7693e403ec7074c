"""Answers of a client on images that the attacker knows: which are read, and by which images."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scenes import Entry, scene
from torch import nn

from fedaudit.attacks.shared import _surrogate
from fedaudit.attacks.shared._surrogate import _trained, shared

SENT = torch.rand(2, 1, 2, 2)


def sent(t, ask=0, images=SENT):
    return Entry("down", 0, t, ask, role="public", x=(None, images))


def test_answers_are_read_with_the_images_of_their_ask():
    """Round 1 has logits on two images that were sent, round 2 soft labels on as many, round 3 answers on others."""
    z, q = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    entries = [
        sent(1), Entry("up", 0, 1, z=("logits", z)), sent(2), Entry("up", 0, 2, q=("soft_labels", q)),
        sent(3), Entry("up", 0, 3, z=("logits", torch.zeros(5, 3))), Entry("up", 1, 1, z=("logits", z + 9)),
        sent(4, ask=1), Entry("up", 0, 4, z=("logits", z)),
    ]  # fmt: skip
    found = shared(scene(*entries), 0, 5)
    assert sorted(found) == [1, 2]
    assert torch.equal(found[1][0], SENT)
    assert torch.equal(found[1][1], z)
    assert torch.allclose(found[2][1], q.clamp(min=1e-7).log())
    assert sorted(shared(scene(*entries), 0, 1)) == [2], "the last round alone"


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(2, 4), {0: torch.zeros(2, 3)}])
def test_what_is_no_table_of_answers_is_left_out(value):
    assert shared(scene(sent(1), Entry("up", 0, 1, z=("logits", value))), 0, 5) == {}


def test_a_peer_reads_what_was_passed_on_for_the_public_set():
    public, z = torch.rand(4, 1, 2, 2), torch.rand(4, 3)
    passed = [
        SimpleNamespace(round=1, value=z),
        SimpleNamespace(round=2, value=z[:3]),
        SimpleNamespace(round=3, value={}),
    ]
    of = {"logits": passed, "soft_labels": []}
    found = shared(scene(public=public, relayed=lambda kind, k: of[kind]), 0, 5)
    assert sorted(found) == [1]
    assert torch.equal(found[1][0], public)
    assert torch.equal(found[1][1], z)
    assert shared(scene(relayed=lambda kind, k: of[kind]), 0, 5) == {}, "it holds no public set"
    soft = {"logits": [], "soft_labels": passed}
    found = shared(scene(public=public, relayed=lambda kind, k: soft[kind]), 0, 5)
    assert torch.allclose(found[1][1], z.clamp(min=1e-7).log())


def test_a_surrogate_is_made_once_for_the_same_answers(monkeypatch):
    monkeypatch.setattr(_surrogate, "_made", type(_surrogate._made)())
    monkeypatch.setattr(_surrogate, "KEPT", 2)
    built = []

    def fresh(arch):
        built.append(arch)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    here = scene(fresh=fresh)
    x, y, z = torch.rand(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]), torch.rand(6, 3)
    first = _trained(here, "net", x, y, 3)
    assert _trained(here, "net", x, y, 3) is first
    assert not first.training
    assert not any(p.requires_grad for p in first.parameters())
    for other in (("other", x, y, 3), ("net", x, z, 3), ("net", x, y, 4)):
        _trained(here, *other)
    assert len(built) == 4
    assert len(_surrogate._made) == 2, "the last ones are kept"
    assert _trained(here, "net", x, y, 3) is not first


def blank(arch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def test_a_surrogate_learns_labels_and_outputs():
    """White images of class 0, black ones of class 1: each of 40 steps of Adam moves all weights by 0.001."""
    x, y = torch.cat([torch.ones(20, 1, 2, 2), -torch.ones(20, 1, 2, 2)]), torch.arange(40) // 20
    for target in (y, 8.0 * nn.functional.one_hot(y, 2)):
        gap = _trained(scene(fresh=blank), "net", x, target, 40)(x) @ torch.tensor([1.0, -1.0])
        assert gap[:20].tolist() == pytest.approx([2 * 4 * 0.04] * 20, rel=0.25)
        assert gap[20:].tolist() == pytest.approx([-2 * 4 * 0.04] * 20, rel=0.25)
