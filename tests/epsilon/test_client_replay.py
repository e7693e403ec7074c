"""What a repeated client is compared by, and in which precision it is repeated."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fedaudit.epsilon.client_replay import _double, apart


def test_the_largest_difference_counts_relative_to_the_largest_number_sent():
    """Differences 1 and 3 in two tensors; the largest number of the other is 12."""
    mine = {"a": torch.tensor([2.0, 4.0]), "b": torch.tensor([[9.0]])}
    other = {"a": torch.tensor([2.0, 5.0]), "b": torch.tensor([[-12.0]])}
    assert apart(mine, other) == pytest.approx(21 / 12)
    other["b"] = torch.tensor([[12.0]])
    assert apart(mine, other) == pytest.approx(3 / 12)
    assert apart(other, mine) == pytest.approx(3 / 9)
    assert apart(mine, mine) == 0.0


def test_differences_from_zeros_are_taken_as_they_are():
    assert apart(torch.tensor([0.5, -2.0]), torch.zeros(2)) == 2.0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2), torch.zeros(3)),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
        ("text", torch.zeros(1)),
        ({"a": torch.zeros(0)}, {"b": torch.zeros(0)}),
    ],
)
def test_what_differs_in_anything_else_is_infinitely_far(a, b):
    assert apart(a, b) == math.inf


def test_everything_that_trains_is_in_double_precision():
    layer = nn.Linear(2, 1)
    found = _double({"m": layer, "t": (torch.zeros(1), [torch.ones(1, dtype=torch.long)]), "n": 3})
    assert found["m"].weight.dtype == torch.float64
    assert layer.weight.dtype == torch.float32, "the method's own model stays"
    assert type(found["t"]) is tuple
    assert found["t"][0].dtype == torch.float64
    assert found["t"][1][0].dtype == torch.long
    assert found["n"] == 3
    assert type(_double(OrderedDict(a=torch.zeros(1)))) is OrderedDict
