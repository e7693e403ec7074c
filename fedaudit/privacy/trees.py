"""Trees of tensors: the values of a field as a flat list, and a field of the same form with other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedaudit.errors import NotApplicable
from fedaudit.wire.message import State


def leaves_of(value: Any, where: str) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, State):  # one vector: a record's effect on a state has no smaller unit
        return [torch.cat([t.reshape(-1) for t in value.values()])] if value else []
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in leaves_of(value[key], f"{where}[{key!r}]")]
    if isinstance(value, list | tuple):
        return [leaf for i, item in enumerate(value) for leaf in leaves_of(item, f"{where}[{i}]")]
    raise NotApplicable(
        f"{where} is a {type(value).__name__}: Gaussian noise needs a floating-point tensor. Send one, or remove the "
        "policy."
    )


def rebuilt(value: Any, leaves: Iterator[Tensor]) -> Any:
    """Return the same tree with other tensors, taken from `leaves` in order."""
    if isinstance(value, Tensor):
        return next(leaves)
    if isinstance(value, State):
        parts = next(leaves).split([t.numel() for t in value.values()]) if value else ()
        both = zip(value.items(), parts, strict=True)
        return value.like({name: part.reshape(t.shape) for (name, t), part in both})
    if isinstance(value, Mapping):
        return {key: rebuilt(item, leaves) for key, item in value.items()}
    return type(value)(rebuilt(item, leaves) for item in value)
