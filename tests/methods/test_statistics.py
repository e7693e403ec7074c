"""Statistics of batch norm that clients send: how the server averages them."""

from __future__ import annotations

import pytest
import torch

from fedaudit.aggregation.mean import mean_of
from fedaudit.methods.shared._statistics import Statistics, settled
from fedaudit.wire.message import State


def test_statistics_weigh_by_records_and_variances_stay_above_zero():
    """One record at 0 and three at 4: the mean is 3. A noised variance below 0 becomes 0; weights stay."""
    w = State({"w": torch.ones(1), "b.running_mean": torch.zeros(1), "b.running_var": torch.ones(1)})
    sent = {
        k: Statistics(s=State({"b.running_mean": torch.tensor([mean]), "b.running_var": torch.tensor([var])}), n=n)
        for k, (mean, var, n) in enumerate([(0.0, 1.0, 1), (4.0, -3.0, 3)])
    }
    found = settled(w, mean_of(sent, "n").value.s)
    assert found["b.running_mean"].item() == pytest.approx(3.0)
    assert found["b.running_var"].item() == 0.0
    assert found["w"].item() == 1.0
