"""Parts of a model that travel: what is taken, put in, billed, and refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fedaudit import Down, LowRank, Record, State, Up, load, private, public, relay, state_of
from fedaudit.errors import ContractError, WireError
from fedaudit.wire.codec import decode, encode
from fedaudit.wire.message import (
    Declared,
    Size,
    class_ids,
    class_named,
    fixed,
    fresh,
    live_state,
    masked,
    message_classes,
    model_size,
    size_of,
    trained,
)


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


class Tied(nn.Module):
    """Two names for one weight, and a layer that is not trained."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.still = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.b.weight = self.a.weight
        for p in self.still.parameters():
            p.requires_grad = False


def test_parameters_that_are_not_trained_are_told_apart():
    model = Tied()
    assert fixed(model) == {"still.weight", "still.bias"}
    assert trained(model) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    model.a.weight.requires_grad = False
    assert fixed(model) == {"a.weight", "b.weight", "still.weight", "still.bias"}, "under both names"


def test_weights_under_two_names_count_once():
    """6 + 2 + 2 + 6 + 3 numbers would be counted twice for the tied weight of 4."""
    model = Tied()
    state = live_state(model)
    assert state.buffers == {"b.weight"}
    assert list(state.parameters) == ["a.weight", "a.bias", "b.bias", "still.weight", "still.bias"]
    assert state["a.weight"].data_ptr() == model.a.weight.data_ptr()
    assert not state["a.weight"].requires_grad
    size = model_size(model)
    assert (size.payload, size.buffers, size.numbers) == (4 * (4 + 2 + 2 + 6 + 3), 16, 21)
    assert size.header == sum(70 + len(name) + 5 for name in model.state_dict())
    assert size.tensors == {(2, 2): 1, (2,): 2, (3, 2): 1, (3,): 1}
    half = nn.Linear(3, 2).double()
    assert (model_size(half).payload, model_size(half).tensors) == (64, {})


def test_a_state_without_what_is_not_trained_fits_and_one_without_more_does_not():
    """It may lack all of these parameters, or some of them, and no other."""
    source, target = Tied(), Tied()
    kept = state_of(target)
    state = state_of(source, trained)
    assert load(target, state) is target
    assert torch.equal(target.a.weight, source.a.weight)
    assert torch.equal(target.still.weight, kept["still.weight"])
    load(target, {**state, "still.bias": torch.full((3,), 5.0)})
    assert target.still.bias.tolist() == [5.0] * 3
    for wrong in ("a.bias", "b.bias"):
        with pytest.raises(ContractError, match=wrong.replace(".", r"\.")):
            load(target, {name: t for name, t in state.items() if name != wrong})
    with pytest.raises(ContractError, match="other"):
        load(target, {**state, "other": torch.ones(1)})
    with pytest.raises(ContractError, match=r"still\.bias: in the state or in the part, but not in both"):
        load(target, {**state, "still.bias": torch.ones(3)}, trained)


def test_parts_of_a_state_keep_their_buffers():
    state = State({"a": torch.ones(1), "b": torch.zeros(2)}, buffers=["b", "gone"])
    assert state.buffers == {"b"}
    assert list(state.parameters) == ["a"]
    other = state.like({"a": torch.zeros(1), "b": torch.ones(2)})
    assert (type(other), other.buffers, other["b"].tolist()) == (State, {"b"}, [1.0, 1.0])
    low = LowRank(state, 0.5).like(other)
    assert (type(low), low.energy, low.buffers) == (LowRank, 0.5, {"b"})
    assert LowRank(state, 1).energy == 1


def test_declarations_say_what_they_were_given():
    full = private("logits", via="data", unit="record", depends="class", dtype="uint8", finite=False)
    assert full.metadata["declared"] == Declared("private", "logits", "data", "record", "class", "uint8", False)
    plain = private("logits", via="model", unit="client").metadata["declared"]
    assert plain == Declared("private", "logits", "model", "client", None, None, True, None)
    assert public().metadata["declared"] == Declared("public", finite=True)
    passed = relay("logits").metadata["declared"]
    assert passed == Declared("relay", "logits", finite=True)
    shown = relay("logits", dtype="float16", finite=False, by="client").metadata["declared"]
    assert shown == Declared("relay", "logits", dtype="float16", finite=False, by="client")
    assert masked().metadata["declared"] == Declared("masked")
    assert Declared("public").finite


def test_a_record_that_is_no_message_declares_nothing():
    class Kept(Record):
        a: int
        b: int | None
        c: "Optional[int]"  # noqa: F821, UP037

    assert Kept.declared() == {"a": None, "b": None, "c": None}
    assert Kept.optional() == {"b", "c"}
    one, same = Kept(1, None, None), Kept(1, None, None)
    assert one != same, "a record is itself, whatever another one holds"
    assert len({one, same}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.a = 2
    with pytest.raises(ContractError, match=r"Told\.a: only fields of Up and Down messages are declared"):

        class Told(Record):
            a: int = public()

    with pytest.raises(ContractError, match=r"Sly\.__getattr__: a record must return its fields unchanged"):

        class Sly(Record):
            a: int

            def __getattr__(self, name):
                return 1

    class Allowed(Down):
        a: int = public()
        b: int

    assert Allowed.declared() == {"a": Declared("public"), "b": None}


def test_classes_are_found_by_their_id_and_those_of_a_module_first():
    assert class_named(Open.class_id()) is Open
    assert class_named("no.such.Class") is None
    assert Open.class_id() in class_ids()
    own = [cls for cls in message_classes(Open.__module__) if cls.__module__ == Open.__module__]
    assert Open in own
    assert Passed in own
    every = message_classes(Open.__module__)
    assert every[: len(own)] == own
    assert len(every) == len(set(every)) == len(class_ids()) > len(own)


def test_a_copy_shares_no_memory():
    state = State({"w": torch.ones(2), "n": torch.zeros(1)}, buffers=["n"])
    value = {"a": [torch.ones(2), (state, 3)], 1: Open(torch.ones(1)), "none": None}
    copied = fresh(value)
    copied["a"][0].fill_(7)
    copied["a"][1][0]["w"].fill_(7)
    copied[1].x.fill_(7)
    assert value["a"][0].tolist() == [1.0, 1.0]
    assert state["w"].tolist() == [1.0, 1.0]
    assert value[1].x.tolist() == [1.0]
    assert (type(copied["a"]), type(copied["a"][1]), copied["a"][1][0].buffers) == (list, tuple, {"n"})
    assert (copied["a"][1][1], copied["none"], type(copied[1])) == (3, None, Open)


def test_sizes_of_states_and_records():
    """4 bytes a number; buffers apart. Factors of rank 1 of 6 x 8 have 15 numbers."""
    state = State({"w": torch.outer(torch.ones(6), torch.arange(8.0)), "n": torch.zeros(3)}, buffers=["n"])
    assert size_of(state) == Size(4 * 48, 12)
    assert size_of(LowRank(state, 0.9)) == Size(4 * 15, 12)
    assert size_of(Open(torch.zeros(5))) == Size(20)
    assert size_of({2: state, "ab": [True, None]}) == Size(8 + 192 + 2 + 1, 12)
    with pytest.raises(WireError, match="A object has no size on the wire"):
        size_of(object())


def test_a_size_of_nothing_is_nothing():
    size = Size()
    assert (size.payload, size.buffers, size.header, size.numbers, size.tensors) == (0, 0, 0, 0, {})
    assert sum([Size(3, 2, 7, {(2,): 1}, 4)]) == Size(3, 2)
    both = Size(3, 2, 7, {(2,): 1}, 4) + Size(1, 1, 1, {(2,): 2, (3,): 1}, 5)
    assert (both.payload, both.buffers, both.header, both.numbers) == (4, 3, 8, 9)
    assert both.tensors == {(2,): 3, (3,): 1}
