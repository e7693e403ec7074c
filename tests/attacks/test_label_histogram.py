"""Label shares from what training changed in the last layer, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit.attacks.property import label_histogram
from fedaudit.attacks.property.label_histogram import from_update, rows


class Classified(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.classifier = nn.Linear(2, len(weight))
        with torch.no_grad():
            self.classifier.weight.copy_(torch.tensor(weight))
            self.classifier.bias.copy_(torch.tensor(bias))


START = Classified([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [0.0, 0.0, 0.0])
AFTER = Classified([[2.0, 1.0], [1.5, 1.0], [0.0, 1.0]], [1.0, 0.5, -2.0])


def test_without_an_auxiliary_record_of_each_class_rows_that_grew_are_the_labels():
    """Training raises the row of a label that is there: class 0 by 1 + 1, class 1 by 1/2 + 1/2, class 2 falls."""
    scene = SimpleNamespace(classes=3, auxiliary=(None, torch.tensor([0, 2])))
    shares, size = from_update(scene, START, AFTER)
    assert shares.tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert size == pytest.approx((1 + 0.25 + 1 + 1 + 0.25 + 4) ** 0.5)
    assert from_update(scene, START, START) is None, "nothing was learned"


def test_with_all_classes_shares_explain_the_update(monkeypatch):
    """The update is 3 g_0 + 1 g_1, where g_c is the mean gradient of class c, the mean of before and after."""
    g = torch.zeros(3, 3, 3, dtype=torch.float64)
    g[0, 0, 0], g[1, 1, 1], g[2, 2, 2] = 2.0, 2.0, 2.0
    monkeypatch.setattr(label_histogram, "class_gradients", lambda scene, model: g if model is START else 0 * g)
    scene = SimpleNamespace(classes=3, auxiliary=(None, torch.arange(3)))
    end = Classified([[-2.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [0.0, 0.0, 0.0])
    shares, _ = from_update(scene, START, end)
    assert shares.tolist() == pytest.approx([3 / 4, 1 / 4, 0])


def test_layers_of_other_shapes_tell_nothing():
    other = Classified([[1.0, 1.0], [1.0, 1.0]], [0.0, 0.0])
    assert from_update(SimpleNamespace(), START, other) is None
    assert from_update(SimpleNamespace(), SimpleNamespace(classifier=nn.ReLU()), START) is None
    assert [tuple(t.shape) for t in rows(nn.Linear(2, 3))] == [(3, 2), (3, 1)]
    assert len(rows(nn.Linear(2, 3, bias=False))) == 1


def test_one_row_of_known_noise_is_drawn_towards_equal_shares():
    """Five classes, p = 4. The row (3, 1, 1, 1, -1) lies 8 from equal shares: 1 - (4 - 2) 1 / 8 = 3/4."""
    row = torch.tensor([[3.0, 1, 1, 1, -1]]).double()
    assert label_histogram.shrinkage(row, 1.0) == pytest.approx(3 / 4)
    assert label_histogram.shrinkage(row) == 1, "nothing tells its noise"
