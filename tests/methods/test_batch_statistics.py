"""Tests and answers by the statistics of their own rows, against batch norm written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedaudit.methods.shared._batch_statistics import OnBatchStatistics, predict_on_batches
from fedaudit.registry import find
from fedaudit.runtime.runner import run


def norm(x):
    """Batch norm of a fresh layer: by the mean and the biased variance of these rows."""
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt()


def test_rows_are_normalised_four_at_a_time_also_in_evaluation_mode():
    """Ten rows of 3 + 3 + 4: the last of one row joins the part before it. Nothing is remembered."""
    torch.manual_seed(0)
    layer, x = nn.BatchNorm2d(2), torch.randn(10, 2, 3, 3) * 2 + 1
    before = {name: t.clone() for name, t in layer.state_dict().items() if "running" in name}
    out = OnBatchStatistics(layer, 3).eval()(x)
    wanted = torch.cat([norm(x[:3]), norm(x[3:6]), norm(x[6:])])
    assert torch.allclose(out, wanted, atol=1e-5)
    assert all(torch.equal(layer.state_dict()[name], t) for name, t in before.items())


def test_each_query_is_normalised_by_itself_and_the_model_stays_as_it_was():
    torch.manual_seed(0)
    layer, a, b = nn.BatchNorm2d(2).eval(), torch.randn(5, 2, 3, 3), torch.randn(4, 2, 3, 3) + 3
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    assert torch.allclose(predict_on_batches(layer, a, b), torch.cat([norm(a), norm(b)]), atol=1e-5)
    assert all(torch.equal(layer.state_dict()[name], t) for name, t in before.items())
    assert (layer.momentum, layer.training) == (0.1, False)


@pytest.mark.parametrize(("tested", "points"), [("batch", 1), ("inner", 3)])
def test_the_second_point_is_named_after_what_it_is(tested, points, tiny, tmp_path):
    """Two inner steps: f at the end, and after each, by the statistics of test batches. The last step is the end."""
    setting = tiny("fedzge", model="cnn_bn", rounds=1, eval_every=1, set={**find("fedzge").quick, "tested": tested})
    utility = run(setting, out=tmp_path / "a").rounds[0].utility
    names = ["test batch statistics", *(f"test batch statistics, inner step {i}" for i in range(1, points))]
    assert list(utility.global_points) == names
    scores = [utility.global_points[name].test.accuracy for name in names]
    if tested == "inner":
        assert scores[0] == scores[2]
