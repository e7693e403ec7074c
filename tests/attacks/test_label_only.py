"""Distances to a decision boundary from labels alone, where the boundary is known: the first number is above 0."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit.attacks.membership.label_only import LabelOnly, reach
from fedaudit.shape import Shape

OTHERS = torch.tensor([[0.5, 0.6], [-0.9, 0.0], [0.9, -0.9]])


def first_above_zero(asked):
    """A model that gives the label 1 where the first number is above 0; it counts what it is asked."""

    def predict(x):
        asked.append(len(x))
        return (x[:, 0] > 0).long()

    return predict


def rng():
    return torch.Generator().manual_seed(0)


def test_the_way_to_the_nearest_record_of_another_label_is_halved():
    """(-0.5, 0) is nearest to (0.5, 0.6) of the others with label 1, half of 1.166 away; (0.2, 0) has 0.2 of the 1.1
    to (-0.9, 0). Sixteen labels are enough for twelve bisections and nothing more."""
    asked = []
    attack = LabelOnly(queries=16, bisections=12, probes=2, steps=2)
    x, y = torch.tensor([[-0.5, 0.0], [0.2, 0.0]]), torch.tensor([0, 1])
    found = attack.distances(first_above_zero(asked), x, y, OTHERS, rng())
    assert found.tolist() == pytest.approx([math.sqrt(1.36) / 2, 0.2], abs=1e-3)
    assert (found >= torch.tensor([math.sqrt(1.36) / 2, 0.2]) - 1e-6).all(), "from the far side"
    assert asked == [3, *[2] * 12]


def test_where_there_is_no_other_label_the_distance_is_the_diameter():
    """Of two records one has another label to go to, the other none. The space is 2 numbers from -3 to 1."""
    attack = LabelOnly(queries=16, bisections=12)
    x, y = torch.tensor([[-0.5, 0.0], [0.2, 0.0]]), torch.tensor([0, 1])
    found = attack.distances(first_above_zero([]), x, y, OTHERS[[0, 2]], rng(), (-3.0, 1.0))
    assert found.tolist() == pytest.approx([math.sqrt(1.36) / 2, 4 * math.sqrt(2)], abs=1e-3)
    nobody = attack.distances(first_above_zero([]), x, y, OTHERS[:0], rng())
    assert nobody.tolist() == pytest.approx([2 * math.sqrt(2)] * 2)
    assert len(attack.distances(first_above_zero([]), x[:0], y[:0], OTHERS, rng())) == 0


def test_the_search_comes_near_to_the_boundary_within_its_queries():
    """500 labels: one for the candidate, 8 for the first way, then 11 rounds of 30 + 4 + 8."""
    asked = []
    x, y = torch.tensor([[-0.5, 0.0]]), torch.tensor([0])
    found = LabelOnly().distances(first_above_zero(asked), x, y, OTHERS, rng())
    assert 0.5 <= found.item() < 0.51
    assert sum(asked) - len(OTHERS) == 8 + 11 * 42
    asked.clear()
    LabelOnly(queries=1 + 8 + 42).distances(first_above_zero(asked), x, y, OTHERS, rng())
    assert sum(asked) - len(OTHERS) == 8 + 42, "the last round fits exactly"
    asked.clear()
    LabelOnly(queries=8 + 42).distances(first_above_zero(asked), x, y, OTHERS, rng())
    assert sum(asked) - len(OTHERS) == 8


class Sign(nn.Module):
    def forward(self, x):
        first = x.flatten(1)[:, :1]
        return torch.cat([-first, first], 1)


@pytest.mark.parametrize("shape", [Shape((1, 1, 2)), Shape((2,))])
def test_a_record_that_the_model_gets_wrong_has_no_distance(shape, monkeypatch):
    """Images lie in [-1, 1], rows between the least and the greatest number that is known."""
    seen = {}

    def distances(self, predict, x, y, others, rng, bounds):
        seen.update(x=x, y=y, others=others, rng=rng, bounds=bounds, labels=predict(others))
        return torch.tensor([7.0, 8.0], dtype=torch.float64)

    monkeypatch.setattr(LabelOnly, "distances", distances)
    x = torch.tensor([[-0.5, 0.0], [0.2, 3.0], [0.4, 0.0]]).view(3, *shape)
    others = OTHERS.view(3, *shape)
    scene = SimpleNamespace(
        x=x, y=torch.tensor([0, 0, 1]), device=x.device, auxiliary=(others, None), shape=shape, rng=lambda name: name
    )
    found = LabelOnly()._of_model(scene, Sign())
    assert (found.tolist(), found.dtype) == ([7.0, 0.0, 8.0], torch.float64)
    assert torch.equal(seen["x"], x[[0, 2]])
    assert (seen["y"].tolist(), seen["labels"].tolist(), seen["rng"]) == ([0, 1], [1, 0, 1], "probes")
    assert torch.equal(seen["others"], others)
    assert seen["bounds"] == ((-1.0, 1.0) if len(shape) == 3 else pytest.approx((-0.9, 3.0)))
    assert reach(torch.tensor([[3.0, -2.0], [1.0, 0.0]])) == (-2.0, 3.0)


def test_a_round_of_the_search_takes_nobody_farther_away():
    """Here all labels are the candidate's own: no step finds another one, and the point stays."""
    attack = LabelOnly()
    x, point = torch.tensor([[-0.5, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 0.4]], dtype=torch.float64)
    inside = attack._closer(lambda p: torch.zeros(p.shape[:-1], dtype=torch.bool), x, point, 1, rng(), (-1.0, 1.0))
    assert torch.equal(inside, point)
    seen = []

    def outside(points):
        seen.append(points)
        return points[..., 0] >= 0

    new = attack._closer(outside, x, point, 1, rng(), (-1.0, 1.0))
    assert (new - x).norm() < (point - x).norm()
    probes, tried = seen[0], seen[1]
    width = (point - x).norm() * max(1 / 2, 2.0**-8)
    assert probes.shape == (1, 30, 2)
    assert torch.allclose((probes - point).norm(dim=2), width.expand(1, 30), atol=1e-9)
    assert float((tried - point).norm()) == pytest.approx(float((point - x).norm()), abs=1e-9), "a step of its length"
    later = []
    attack._closer(lambda p: later.append(p) or p[..., 0] >= 0, x, point, 4, rng(), (-1.0, 1.0))
    assert float((later[1] - point).norm()) == pytest.approx(float((point - x).norm()) / 2, abs=1e-9)
    assert float((later[2] - point).norm()) == pytest.approx(float((point - x).norm()) / 4, abs=1e-9)


@pytest.mark.parametrize(("edge", "mixed"), [(0.25, True), (-9.0, False)])
def test_the_direction_is_the_mean_of_probes_less_their_common_part(edge, mixed):
    """Each probe's direction counts by its label, +1 or -1, less the mean label. Where all labels are equal nothing is
    taken off, as nothing would be left."""
    attack, seen = LabelOnly(), []
    x, point = torch.tensor([[-0.5, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 0.4]], dtype=torch.float64)

    def outside(points):
        seen.append(points)
        return points[..., 0] >= edge

    attack._closer(outside, x, point, 1, rng(), (-5.0, 5.0))
    u = seen[0][0] - point
    u = u / u.norm(dim=1, keepdim=True)
    labels = [1.0 if probe[0] >= edge else -1.0 for probe in seen[0][0].tolist()]
    assert (len(set(labels)) == 2) is mixed
    common = sum(labels) / len(labels) if mixed else 0.0
    direction = sum((label - common) * way for label, way in zip(labels, u, strict=True))
    step = (seen[1] - point)[0]
    assert torch.allclose(step / step.norm(), direction / direction.norm(), atol=1e-9)
