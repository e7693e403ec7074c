"""Means of replies: by hand, by ascending client, and for every method a word on why it sees single replies."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch

from fedaudit import State, Up, private, registry
from fedaudit.aggregation.mean import mean_of, weighted_mean
from fedaudit.errors import ContractError


class Reply(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")
    f: torch.Tensor | None = private("logits", via="model", unit="client")
    loss: float = private("statistics", via="data", unit="client")


def reply(w, n, f=None, loss=0.0):
    return Reply(State({"w": torch.tensor([float(w)]), "c": torch.tensor(int(w))}, ["c"]), n, f, loss)


def test_a_mean_by_hand():
    """(1 * 1 + 3 * 5) / 4 = 4; the loss (1 * 2 + 3 * 6) / 4 = 5; the weights' own field holds their sum, 1 + 3."""
    mean = mean_of({7: reply(5, 3, torch.tensor([4.0, 0.0]), 6.0), 2: reply(1, 1, torch.tensor([0.0, 4.0]), 2.0)}, "n")
    assert mean.value.w["w"].tolist() == [4.0]
    assert mean.value.w["c"].item() == 4
    assert mean.value.w.buffers == {"c"}
    assert mean.value.f.tolist() == [3.0, 1.0]
    assert (mean.value.n, mean.value.loss, mean.count) == (4, 5.0, 2)
    equal = mean_of({7: reply(5, 3), 2: reply(1, 1)}, None)
    assert equal.value.w["w"].tolist() == [3.0]
    assert equal.value.n == 2.0
    assert equal.value.f is None
    opposed = mean_of({7: reply(5, 3), 2: reply(-1, 1)}, None)
    assert opposed.value.w["w"].tolist() == [2.0], "all weigh the same, whatever they hold"


def test_the_bits_are_those_of_the_method_s_own_sum():
    """In plain mode nothing but the place of the sum changed."""
    torch.manual_seed(0)
    states = {k: State({"w": torch.randn(1000)}) for k in (9, 4, 6)}
    replies = {k: Reply(w, k, None, 0.0) for k, w in states.items()}
    assert torch.equal(mean_of(replies, "n").value.w["w"], weighted_mean(states, {k: k for k in states})["w"])


@pytest.mark.parametrize(
    ("replies", "by", "words"),
    [
        ({}, None, "no client answered"),
        ({0: reply(1, 1)}, "w", "Name a field that holds a number"),
        ({0: reply(1, 1)}, "m", "Name a field that holds a number"),
        ({0: reply(1, -1)}, "n", "Name a field that holds a number"),
        ({0: reply(1, 0)}, "n", "positive sum"),
        ({0: reply(1, 1), 1: reply(1, 1, torch.ones(2))}, "n", "several types"),
        ({0: reply(1, 1, torch.ones(3)), 1: reply(1, 1, torch.ones(2))}, "n", "several shapes"),
    ],
)
def test_what_has_no_mean_is_refused(replies, by, words):
    with pytest.raises(ContractError, match=words):
        mean_of(replies, by)


def test_a_method_takes_means_or_says_why_not():
    """Whoever asks for single replies that hold something private says so, and nobody else does."""
    for name in registry.names("methods"):
        cls = registry.find(name)
        modules = {inspect.getmodule(base) for base in cls.__mro__ if base.__module__.startswith("fedaudit.methods")}
        calls = {
            node.func.attr
            for module in modules
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            and getattr(node.func.value, "id", "") == "cohort"
        }  # fmt: skip
        assert "mean" in calls or cls.single_replies or name in {"local", "constant"}, f"{name} says nothing"
        assert len(cls.single_replies) < 100, f"{name}: one line"


# --- unequal clients, deltas and rounds


def test_a_weighted_mean_of_unequal_clients_by_hand():
    """Weights 1 and 3: 0.25 a + 0.75 b; counters 5 and 10: 8.75, rounded to 9."""
    a = State({"w": torch.tensor([0.0, 4.0]), "n": torch.tensor(5)}, buffers=["n"])
    b = State({"w": torch.tensor([8.0, 0.0]), "n": torch.tensor(10)}, buffers=["n"])
    mean = weighted_mean({7: b, 2: a}, {2: 1, 7: 3})
    assert mean["w"].tolist() == [6.0, 1.0]
    assert mean["n"].item() == 9
    assert mean["n"].dtype == torch.int64
    assert set(mean.buffers) == {"n"}


def test_who_did_not_answer_is_no_part_of_the_mean():
    a = State({"w": torch.tensor([1.0])})
    assert weighted_mean({2: a}, {2: 1, 7: 3})["w"].tolist() == [1.0]
