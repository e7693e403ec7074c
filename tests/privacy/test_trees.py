"""Trees of tensors: their leaves in order, and the same tree with others."""

from __future__ import annotations

import pytest
import torch

from fedaudit import State
from fedaudit.errors import NotApplicable
from fedaudit.privacy.trees import leaves_of, rebuilt


def whole():
    state = State({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0])}, frozenset({"b"}))
    return {"x": torch.tensor([6.0]), "s": state, "l": [torch.tensor([7.0]), (torch.tensor([8.0, 9.0]),)]}


def test_leaves_are_in_order_and_a_state_is_one_vector():
    found = [leaf.tolist() for leaf in leaves_of(whole(), "M.f")]
    assert found == [[6.0], [1.0, 2.0, 3.0, 4.0, 5.0], [7.0], [8.0, 9.0]]
    assert leaves_of(State({}), "M.f") == []
    assert leaves_of([], "M.f") == []


def test_a_tree_is_rebuilt_of_other_leaves():
    made = rebuilt(whole(), iter([10 * leaf for leaf in leaves_of(whole(), "M.f")]))
    assert list(made) == ["x", "s", "l"]
    assert made["x"].tolist() == [60.0]
    assert isinstance(made["s"], State)
    assert (made["s"]["a"].tolist(), made["s"]["b"].tolist()) == ([[10.0, 20.0], [30.0, 40.0]], [50.0])
    assert made["s"].buffers == frozenset({"b"})
    assert (type(made["l"]), type(made["l"][1])) == (list, tuple)
    assert [made["l"][0].tolist(), made["l"][1][0].tolist()] == [[70.0], [80.0, 90.0]]
    empty = rebuilt(State({}), iter([]))
    assert (type(empty), dict(empty)) == (State, {})


def test_what_is_no_tensor_is_told_by_its_place():
    with pytest.raises(NotApplicable, match=r"^M\.f\['l'\]\[1\] is a int: Gaussian noise needs"):
        leaves_of({"l": [torch.zeros(1), 3]}, "M.f")
