"""Parts of a model that travel: what is taken, put in, billed, and refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedaudit import load, state_of
from fedaudit.errors import ContractError
from fedaudit.wire.message import model_size


def net():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def first(model):
    return {name for name in model.state_dict() if name.startswith("0.")}


def norm(model):
    return set(model.state_dict()) - first(model)


def test_a_part_is_taken_and_put_in_and_the_rest_stays():
    a, b = net(), net()
    kept = state_of(b, norm)
    part = state_of(a, first)
    assert set(part) == {"0.weight", "0.bias"}
    load(b, part, first)
    assert torch.equal(b[0].weight, a[0].weight)
    assert all(torch.equal(t, kept[name]) for name, t in state_of(b, norm).items())
    assert state_of(a, norm).buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_a_parts_bytes_are_what_it_holds():
    """Linear: 6 + 2 floats. Batch norm: 2 + 2 floats of parameters, 2 + 2 floats and a 64-bit counter of buffers."""
    size = model_size(net(), first)
    assert (size.payload, size.buffers) == (32, 0)
    size = model_size(net(), norm)
    assert (size.payload, size.buffers) == (16, 24)


@pytest.mark.parametrize("change", ["less", "more"])
def test_what_is_not_the_part_is_refused(change):
    part = state_of(net(), first)
    if change == "less":
        del part["0.bias"]
    else:
        part["1.weight"] = torch.ones(2)
    with pytest.raises(ContractError, match=r"0\.bias|1\.weight"):
        load(net(), part, first)
