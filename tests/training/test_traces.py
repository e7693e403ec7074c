"""What a loss could write into: each kind of place is described, and a change of it shows."""

from __future__ import annotations

import functools
import sys
import types
from array import array
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from fedaudit.training.fit import _is_own, _is_own_module, carried, model_traces, traces


class Kept:
    """Somebody's own object, with a place of its own and one of its class."""

    of_class: list = []  # noqa: RUF012 (it is shared on purpose)

    def __init__(self):
        self.own = []


PLACE: list = []  # a global that a loss names


def names_a_global(x):
    return len(PLACE) + x


def changes():
    """Yield what a loss is given, and what writes into it; both anew for each."""
    tensor = torch.zeros(2)
    yield "tensor", tensor, lambda: tensor.add_(1)
    numbers = np.zeros(3)
    yield "numpy", numbers, lambda: numbers.__setitem__(1, 5.0)
    raw = array("d", [1.0, 2.0])
    yield "array", raw, lambda: raw.__setitem__(0, 7.0)
    many = bytearray(b"abc")
    yield "bytes", many, lambda: many.__setitem__(0, 7)
    queue = deque([1])
    yield "deque", queue, lambda: queue.append([])
    inner = []
    yield "list in a table", {"a": ([inner],)}, lambda: inner.append([])
    key = Kept()
    yield "key of a table", {key: 1}, lambda: key.own.append([])
    frozen = Kept()
    yield "set", frozenset([frozen]), lambda: frozen.own.append([])
    partial = functools.partial(max, inner)
    yield "partial", partial, lambda: inner.append([])
    kept = Kept()
    yield "object", kept, lambda: kept.own.append([])
    classed = Kept()
    yield "class of an object", classed, lambda: Kept.of_class.append([])
    yield "class", Kept, lambda: Kept.of_class.append([])
    yield "method", kept.__init__, lambda: kept.own.append([])
    yield "global", names_a_global, lambda: PLACE.append([])
    module = types.ModuleType("somebodys_own")
    module.place = []
    yield "module", module, lambda: module.place.append([])


@pytest.mark.parametrize("number", range(len(list(changes()))))
def test_a_place_that_was_written_into_shows(number):
    name, value, write = list(changes())[number]
    before = traces(max, {"given": value})
    assert traces(max, {"given": value}) == before, f"{name}: nothing was written"
    write()
    assert traces(max, {"given": value}) != before, name


def test_a_loss_shows_what_its_inner_functions_name():
    def loss(x):
        return [names_a_global(y) for y in (lambda: [len(PLACE)])()]

    before = traces(loss, {})
    PLACE.append([])
    assert traces(loss, {}) != before


def test_libraries_are_left_out():
    before = traces(max, {"torch": torch, "function": torch.relu, "class": torch.nn.Linear, "sys": sys})
    torch._a_mark = []
    try:
        assert traces(max, {"torch": torch, "function": torch.relu, "class": torch.nn.Linear, "sys": sys}) == before
    finally:
        del torch._a_mark


@pytest.mark.parametrize(
    ("name", "file", "own"),
    [
        ("fedaudit.methods.fedavg", "/x/fedaudit/methods/fedavg.py", True),
        ("fedaudit.training", "/x/fedaudit/training/__init__.py", False),
        ("torch.nn", "/x/torch/nn.py", False),
        ("collections.abc", "/x/collections/abc.py", False),
        ("mine", "/home/mine.py", True),
        ("mine.torch", "/home/mine/torch.py", True),
        ("other", "/x/site-packages/other.py", False),
        ("bare", None, True),
    ],
)
def test_whose_a_module_is(name, file, own):
    module = types.ModuleType(name)
    module.__file__ = file
    assert _is_own_module(module) is own


def test_whose_a_function_or_an_object_is():
    for value, own in ((Kept, True), (Kept(), True), (names_a_global, True), (torch.nn.Linear, False),
                       (torch.nn.Linear(1, 1), False), (deque(), False), (3, False), (np.zeros(1), False)):  # fmt: skip
        assert _is_own(value) is own
    of_method = type("M", (), {"__module__": "fedaudit.methods.fedavg"})
    of_frame = type("F", (), {"__module__": "fedaudit.training.fit"})
    assert (_is_own(of_method()), _is_own(of_frame())) == (True, False)


def test_all_that_a_loss_brings_with_it():
    """Closures, defaults, attributes, containers, methods, partial functions, slots; each piece once."""

    class Slotted:
        __slots__ = ("a", "b")

        def __init__(self):
            self.a = "slot"

    class Bare:
        __slots__ = ()

    closed, bare, tensor, layer = ["closed"], Bare(), torch.zeros(1), torch.nn.Linear(1, 1)
    later: object
    kept = Kept()
    kept.own = ("of an object",)

    def inner(x, y="of an inner function"):
        return y

    def loss(x, default=1.5, *, named=b"raw"):
        return closed, inner, later

    loss.mark = {"key": {"in a set"}, tensor: frozenset([layer])}
    loss.more = [kept, Slotted(), bare, torch, Kept, max, None, kept]
    wanted = {"closed", "of an inner function", 1.5, b"raw", "key", "in a set", "of an object", "slot"}
    found = carried(loss)
    assert {piece for piece in found if isinstance(piece, str | float | bytes)} == wanted
    others = [piece for piece in found if not isinstance(piece, str | float | bytes)]
    assert {id(piece) for piece in others} == {id(tensor), id(layer), id(bare)}
    assert len(found) == len(wanted) + 3
    assert carried(loss, but=(Kept, torch.Tensor, str)).count("of an object") == 0
    bound = functools.partial(kept.__init__, "given", word="named")
    assert {"given", "named", "of an object"} <= set(carried(bound))
    later = "filled"
    assert "filled" in carried(loss)


class Keeps(nn.Module):
    """Somebody's own layer, within a layer of torch's."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), []
        self.register_buffer("count", torch.zeros(1))


@pytest.mark.parametrize("how", ["list", "attribute", "buffer", "another buffer", "class"])
def test_a_model_that_keeps_something_shows(how, monkeypatch):
    model = nn.Sequential(nn.ReLU(), Keeps())
    before = model_traces(model)
    assert model_traces(model) == before
    if how == "list":
        model[1].seen.append(torch.ones(1))
    elif how == "attribute":
        model[1].last = 3.5
    elif how == "buffer":
        model[1].count.add_(1)
    elif how == "another buffer":
        model[1].count = torch.zeros(1)
    else:
        monkeypatch.setattr(Keeps, "kept", [1], raising=False)
    assert model_traces(model) != before


def test_training_a_model_is_no_trace():
    """Parameters change and get gradients; what a layer of torch's keeps is its own."""
    model = nn.Sequential(nn.ReLU(), Keeps())
    before = model_traces(model)
    model[1].layer(torch.ones(1, 1)).sum().backward()
    with torch.no_grad():
        model[1].layer.weight.add_(1)
    model[0].note = "of no interest"
    assert model_traces(model) == before
    assert len(before) == 3, "one buffer, and two rows of the own layer"
