"""Values that losses are given, as one tree for a stack of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedaudit.training.stacked.given import copy_given, form_of_given, map_given, stacked_given


def tree(n: float, **change: Any) -> dict[str, Any]:
    """One model's values: tensors in containers, and plain ones beside them."""
    base = {"w": torch.full((2,), n), "rest": [torch.tensor(n), ("a", None, 3)], "pair": (True, torch.full((1, 2), -n))}
    return base | change


def test_trees_of_one_form_are_one_tree_of_stacked_tensors() -> None:
    found, dims = stacked_given([tree(1.0), tree(2.0), tree(5.0)])
    assert found["w"].tolist() == [[1, 1], [2, 2], [5, 5]]
    assert found["rest"][0].tolist() == [1, 2, 5]
    assert found["rest"][1] == ("a", None, 3)
    assert found["pair"][0] is True
    assert found["pair"][1].tolist() == [[[-1, -1]], [[-2, -2]], [[-5, -5]]]
    assert dims == {"w": 0, "rest": [0, (None, None, None)], "pair": (None, 0)}
    first = tree(1.0)
    tried, same = stacked_given([first, tree(2.0)], dry=True)
    assert tried["w"] is first["w"], "only tried: nothing is copied"
    assert same == dims
    grown = torch.ones(2, requires_grad=True)
    assert not stacked_given([grown, grown])[0].requires_grad


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": torch.zeros(3)}, "in shape"),
        ({"w": torch.zeros(2).double()}, "in shape"),
        ({"w": [1]}, "in form"),
        ({"more": 1}, "in form"),
        ({"rest": [torch.tensor(1.0)]}, "in form"),
        ({"rest": [torch.tensor(1.0), ("a", None, 4)]}, "in its numbers"),
        ({"rest": [torch.tensor(1.0), ("b", None, 3)]}, "in its numbers"),
        ({"pair": (False, torch.ones(1, 2))}, "in its numbers"),
        ({"pair": [True, torch.ones(1, 2)]}, "in form"),
    ],
)
def test_what_differs_is_not_stacked(other: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"differs {words}"):
        stacked_given([tree(1.0), tree(2.0), tree(3.0, **other)])
    with pytest.raises(ValueError, match="given a set"):
        stacked_given([{1}, {1}])
    assert form_of_given(tree(1.0)) != form_of_given(tree(1.0, **other))


def test_a_form_has_shapes_and_plain_values_and_no_numbers_of_tensors() -> None:
    assert form_of_given(tree(1.0)) == form_of_given(tree(7.0))
    assert form_of_given(1) != form_of_given(1.0)
    assert form_of_given((1,)) != form_of_given([1])


def test_tensors_of_a_tree_are_mapped_and_the_rest_stays() -> None:
    found, dims = stacked_given([tree(1.0), tree(2.0)])
    found["shared"], dims["shared"] = torch.ones(1), None
    second = map_given(found, dims, lambda t: t[1])
    assert second["w"].tolist() == [2, 2]
    assert second["rest"][0].item() == 2
    assert second["rest"][1] == ("a", None, 3)
    assert (type(second["rest"]), type(second["pair"]), second["pair"][0]) == (list, tuple, True)
    assert second["pair"][1].tolist() == [[-2, -2]]
    assert second["shared"].tolist() == [1], "one for all"


def test_a_tree_is_copied_into_the_memory_of_another() -> None:
    into, source = tree(1.0), tree(4.0)
    places = into["w"], into["rest"][0], into["pair"][1]
    copy_given(into, source)
    assert [t.flatten().tolist() for t in places] == [[4, 4], [4], [-4, -4]]
    assert into["w"] is places[0]
    with pytest.raises(ValueError, match="zip"):
        copy_given([torch.ones(1)], [])
