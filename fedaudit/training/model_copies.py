"""Copies of models in memory of their own.

A client's task begins with a copy, so it has to be quick. `copy.deepcopy` looks at every attribute of every layer, and
takes longer than a step of a small network.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
_PLAIN = (bool, int, float, str, bytes, type(None), type)
_AS_IT_IS = frozenset(_PLAIN)
_OFTEN_EMPTY = frozenset((dict, OrderedDict, set, list))  # a layer has a dozen of them, for hooks that it has not


def copied(model: M) -> M:
    """Return a copy as `copy.deepcopy` makes it: layers that stand in two places and shared tensors stay shared."""
    return cast(M, _layer(model, {}))


def copied_with(model: M, state: Mapping[str, Tensor]) -> M | None:
    """Return a copy of the model that uses the tensors of `state` as its own, without copying the model's tensors.

    Returns None if the state does not fit, or if the model is not plain enough to know that the state is all it needs.
    """
    known: dict[int, Any] = {}
    mine = model.state_dict(keep_vars=True)
    if mine.keys() != state.keys():
        return None
    for name, t in mine.items():
        given = state[name]
        alike = (t.shape, t.dtype, t.device, t.stride()) == (given.shape, given.dtype, given.device, given.stride())
        if id(t) in known or not alike or type(t) not in (Tensor, nn.Parameter) or not t.is_leaf or vars(t):
            return None
        own = given.detach()
        known[id(t)] = nn.Parameter(own, t.requires_grad) if isinstance(t, nn.Parameter) else own
    return cast(M, _layer(model, known))


def _layer(layer: nn.Module, known: dict[int, Any]) -> nn.Module:
    if id(layer) in known:
        return cast(nn.Module, known[id(layer)])
    if hasattr(type(layer), "__deepcopy__") or "__deepcopy__" in layer.__dict__:
        return copy.deepcopy(layer, known)
    mine: nn.Module = type(layer).__new__(type(layer))
    known[id(layer)] = mine
    own = mine.__dict__
    for name, value in layer.__dict__.items():
        kind = type(value)
        if kind in _AS_IT_IS:  # most are
            own[name] = value
        elif kind in _OFTEN_EMPTY and not value:
            own[name] = known.setdefault(id(value), kind())
        else:
            own[name] = _attribute(name, value, known)
    return mine


def _attribute(name: str, value: Any, known: dict[int, Any]) -> Any:
    if name == "_modules":
        return type(value)((key, None if m is None else _layer(m, known)) for key, m in value.items())
    if name in ("_parameters", "_buffers"):
        return type(value)((key, _tensor(t, known)) for key, t in value.items())
    if isinstance(value, _PLAIN):
        return value
    if type(value) is tuple and all(isinstance(item, _PLAIN) for item in value):
        return value
    return copy.deepcopy(value, known)


def _tensor(t: Tensor | None, known: dict[int, Any]) -> Tensor | None:
    if t is None or id(t) in known:
        return known[id(t)] if t is not None else None
    if type(t) not in (Tensor, nn.Parameter) or not t.is_leaf or vars(t):
        return copy.deepcopy(t, known)
    mine = t.detach().clone()
    mine = nn.Parameter(mine, t.requires_grad) if isinstance(t, nn.Parameter) else mine.requires_grad_(t.requires_grad)
    known[id(t)] = mine
    return mine
