"""Statistics of pixels by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedaudit.attacks.baselines.blind_pixels import looks


def test_statistics_by_hand():
    """4, 1, 1, 2: three values, the commonest in half of the places, from 1 to 4, mean 2, variance (4 + 1 + 1) / 3;
    steps 3, 0, 1 with mean 4/3 and variance (25 + 16 + 1) / 9 / 2. All equal: one value, everywhere."""
    x = torch.tensor([[4.0, 1.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]]).reshape(2, 1, 2, 2)
    found = looks(x)
    assert found[:, :4].tolist() == x.flatten(1).tolist()
    assert found[0, 4:].tolist() == pytest.approx([3, 0.5, 1, 4, 2, math.sqrt(2), 4 / 3, math.sqrt(42 / 18)])
    assert found[1, 4:].tolist() == pytest.approx([1, 1, 5, 5, 5, 0, 0, 0])


def test_token_ids_are_told_apart():
    assert looks(torch.tensor([[3, 3, 7]]))[0, 3:5].tolist() == pytest.approx([2, 2 / 3])
