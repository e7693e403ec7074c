"""Means of clients' replies, as the harness computes them for `cohort.mean`.

In plain mode the server sees each reply, and the mean is what the method's author would have written: the sum runs by
ascending client, so that the bits do not depend on who answered first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedaudit.errors import ContractError
from fedaudit.wire.message import Record, State, Up

U = TypeVar("U", bound=Up)


@dataclass(frozen=True)
class Mean(Generic[U]):
    """The mean of a cohort's replies: all that a method sees of them.

    `value` is a record of the replies' type with each field averaged; the field that the weights come from holds their
    sum. `count` is the number of clients in the sum, or the public number that a noised sum is divided by.
    """

    value: U
    count: int


def weighted_mean(states: Mapping[int, State], weights: Mapping[int, float]) -> State:
    """Return sum_k (n_k / n) w_k, by ascending client so that the bits do not depend on who answered first."""
    if not states:
        raise ContractError("weighted_mean was given no states: no client answered.")
    ids, n = sorted(states), _total(weights, states)
    first = states[ids[0]]
    if other := [k for k in ids if states[k].keys() != first.keys()]:
        raise ContractError(
            f"weighted_mean: clients {ids[0]} and {other[0]} sent states with other tensors. Average states of one "
            "architecture."
        )
    shares = {k: weights[k] / n for k in ids}
    return State({name: _mean({k: states[k][name] for k in ids}, shares) for name in first}, buffers=first.buffers)


def _total(weights: Mapping[int, float], of: Mapping[int, Any]) -> float:
    n = sum(weights[k] for k in sorted(of))
    if n <= 0:
        raise ContractError(f"weighted_mean: the weights sum to {n}. Give weights with a positive sum.")
    return n


def _mean(tensors: Mapping[int, Tensor], shares: Mapping[int, float]) -> Tensor:
    like = next(iter(tensors.values()))
    exact = like.dtype if like.is_floating_point() else torch.float64  # counters are averaged, then rounded
    total = torch.zeros_like(like, dtype=exact)
    for k, t in tensors.items():
        total.add_(t.to(exact), alpha=shares[k])
    return total if like.is_floating_point() else total.round().to(like.dtype)


def mean_of(replies: Mapping[int, U], by: str | None) -> Mean[U]:
    """Return the mean of replies, weighted by their field `by`; None: all weigh the same."""
    if not replies:
        raise ContractError("cohort.mean: no client answered.")
    ids = sorted(replies)
    first = replies[ids[0]]
    weights = {k: weight_of(replies[k], by) for k in ids}
    n = _total(weights, replies)
    shares = {k: weights[k] / n for k in ids}
    values: dict[str, Any] = {}
    for name in first.declared():
        sent = {k: getattr(replies[k], name) for k in ids}
        where = f"{type(first).__name__}.{name}"
        values[name] = sum(sent.values()) if name == by else _averaged(sent, weights, shares, where)
    return Mean(dataclasses.replace(first, **values), len(ids))


def weight_of(reply: Record, by: str | None) -> float:
    """Return what a reply weighs: the number in its field `by`, or 1."""
    if by is None:
        return 1.0
    weight = getattr(reply, by, None)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        raise ContractError(
            f"cohort.mean(by={by!r}): {type(reply).__name__}.{by} is {weight!r}. Name a field that holds a number from "
            "0 up."
        )
    return weight


def _averaged(sent: Mapping[int, Any], weights: Mapping[int, float], shares: Mapping[int, float], where: str) -> Any:
    first = next(iter(sent.values()))
    if any(type(value) is not type(first) for value in sent.values()):
        raise ContractError(f"cohort.mean: {where} has several types. All clients send the same.")
    if first is None:
        return None
    if isinstance(first, State):
        return weighted_mean(sent, weights)
    if isinstance(first, Tensor):
        if any(value.shape != first.shape for value in sent.values()):
            raise ContractError(f"cohort.mean: {where} has several shapes. All clients send the same.")
        return _mean(sent, shares)
    if isinstance(first, int | float) and not isinstance(first, bool):
        mean = sum(shares[k] * value for k, value in sent.items())
        return round(mean) if isinstance(first, int) else mean  # as counters in a state are
    raise ContractError(
        f"cohort.mean: {where} is a {type(first).__name__}, which has no mean. Average states, tensors and numbers, or "
        "use cohort.ask and say in `single_replies` why."
    )
