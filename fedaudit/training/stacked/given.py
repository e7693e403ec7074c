"""Stacks the values that losses are given besides rows, and maps over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def stacked_given(values: Sequence[Any], dry: bool = False) -> tuple[Any, Any]:
    """Return trees of one form as one tree of stacked tensors, and the dimension that each leaf is mapped over."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ValueError("what their losses are given differs in form")
    if isinstance(first, Tensor):
        if any(value.shape != first.shape or value.dtype != first.dtype for value in values):
            raise ValueError("what their losses are given differs in shape")
        return (first if dry else torch.stack(list(values)).detach()), 0
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError("what their losses are given differs in form")
        parts = {key: stacked_given([value[key] for value in values], dry) for key in first}
        return {key: part[0] for key, part in parts.items()}, {key: part[1] for key, part in parts.items()}
    if isinstance(first, list | tuple):
        if any(len(value) != len(first) for value in values):
            raise ValueError("what their losses are given differs in form")
        items = [stacked_given(list(value), dry) for value in zip(*values, strict=True)]
        return type(first)(item[0] for item in items), type(first)(item[1] for item in items)
    if first is None or isinstance(first, bool | int | float | str):
        if any(value != first for value in values):
            raise ValueError("what their losses are given differs in its numbers")
        return first, None
    raise ValueError(f"their losses are given a {type(first).__name__}")


def map_given(given: Any, dims: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(given, dict):
        return {key: map_given(value, dims[key], fn) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(map_given(value, dim, fn) for value, dim in zip(given, dims, strict=True))
    return given if dims is None else fn(given)


def form_of_given(given: Any) -> Any:
    """Return a description that is equal for values of one form: shapes of tensors, and all other values themselves."""
    if isinstance(given, Tensor):
        return "tensor", tuple(given.shape), given.dtype
    if isinstance(given, dict):
        return {key: form_of_given(value) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return type(given), [form_of_given(value) for value in given]
    return type(given), given


def copy_given(into: Any, source: Any) -> None:
    """Copy the tensors of one tree into those of another one of the same form."""
    if isinstance(into, Tensor):
        into.copy_(source)
    elif isinstance(into, dict):
        for key, value in into.items():
            copy_given(value, source[key])
    elif isinstance(into, list | tuple):
        for mine, theirs in zip(into, source, strict=True):
            copy_given(mine, theirs)
