"""Parts of a model that travel: what is taken, put in, billed, and refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedaudit import Down, Up, load, private, public, relay, state_of
from fedaudit.errors import ContractError, WireError
from fedaudit.wire.codec import decode, encode
from fedaudit.wire.message import Size, model_size, size_of


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


def test_sizes_add_up_and_multiply_in_every_part():
    """Payload, buffers, header, tensors by shape and elements, all unequal."""
    a = Size(100, 20, 3, {(5, 5): 1, (4,): 2}, 33)
    b = Size(7, 1, 10, {(4,): 1, (2,): 4}, 6)
    both = a + b
    assert (both.payload, both.buffers, both.header, both.numbers) == (107, 21, 13, 39)
    assert both.tensors == {(5, 5): 1, (4,): 3, (2,): 4}
    assert (b + a).tensors == both.tensors
    assert (a + 8).payload == (8 + a).payload == 108
    assert ((a + 8).numbers, (a + 8).tensors) == (33, a.tensors)
    three = 3 * b
    assert (three.payload, three.buffers, three.header, three.numbers) == (21, 3, 30, 18)
    assert three.tensors == {(4,): 3, (2,): 12}
    assert a.without_buffers() == Size(100, 0)
    assert sum([b, b], Size()) == 2 * b


def test_a_models_numbers_are_counted_buffers_too():
    """Linear 6 + 2; batch norm 2 + 2 and, as buffers, 2 + 2 + 1."""
    size = model_size(net())
    assert size.numbers == 17
    assert size.tensors == {(2, 3): 1, (2,): 3}
    assert model_size(net(), first).numbers == 8


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (None, 0), (True, 1), (7, 8), (0.5, 8), ("über", 5), (torch.zeros(3, dtype=torch.int16), 6),
        ({"ab": torch.zeros(2)}, 10), ([1, True], 9), ((1.0, "a"), 9),
    ],
)  # fmt: skip
def test_sizes_of_values(value, payload):
    assert size_of(value) == Size(payload)


def test_only_types_that_can_travel_are_declared():
    assert private("logits", via="model", unit="client", dtype="uint8").metadata["declared"].dtype == "uint8"
    with pytest.raises(ContractError, match="dtype of private"):
        private("logits", via="model", unit="client", dtype="int9")
    with pytest.raises(ContractError, match="depends of private"):
        private("logits", via="model", unit="client", depends="nobody")
    for options in ({"via": "nothing", "unit": "client"}, {"via": "model", "unit": "nobody"}):
        with pytest.raises(ContractError, match="via is one of"):
            private("logits", **options)
    with pytest.raises(ContractError, match="by of relay"):
        relay("logits", by="nobody")


class Open(Up):
    x: torch.Tensor = public()


class Loose(Up):
    x: torch.Tensor = public(finite=False)


class Passed(Down):
    x: torch.Tensor = relay("logits")


class Released(Up):
    x: torch.Tensor = private("logits", via="model", unit="client")


@pytest.mark.parametrize("cls", [Open, Passed, Released])
def test_numbers_are_finite_unless_a_field_says_else(cls):
    with pytest.raises(WireError, match="holds NaN or infinity"):
        encode(cls(torch.tensor([torch.inf])))
    assert decode(encode(Loose(torch.tensor([torch.inf]))), Loose).x.item() == torch.inf
