"""What a repeated client is compared by."""

from __future__ import annotations

import math

import pytest
import torch

from fedaudit.epsilon.client_replay import apart


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
