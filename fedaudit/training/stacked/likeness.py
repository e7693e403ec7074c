"""Says which networks and which functions do the same, so that one can stand for all of them in a stack.

A stack runs the layers of its first network with each network's own parameters. So networks are alike only if nothing
else tells them apart: their layers' classes, what hangs on a layer beside parameters (a slope, a function, a number of
heads), and their hooks. How a network prints itself does not tell: own layers print their class and no more.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import types
import weakref
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)  # kinds that a layer may have
MOST = 64  # functions of one text that are known at a time: what they refer to lives as long
_EVERY = frozenset(vars(nn.Module()))  # what torch hangs on each layer: tensors, layers, hooks, the mode
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_numbers = itertools.count()
_classes: dict[type, int] = {}
_functions: dict[types.CodeType, list[tuple[types.FunctionType, int]]] = {}


def structure(model: nn.Module) -> Any:
    """Return a description that is equal for networks of one stack, and for no others in this process."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    own = {id(part): f"the model's {name}" for name, part in [*tensors, *model.named_modules()]}
    layers = [
        (name, _class(type(m)), [(key, _told(value, own)) for key, value in vars(m).items() if key not in _EVERY])
        for name, m in model.named_modules()
    ]
    return str(model), layers, [(name, t.shape, t.dtype, t.device) for name, t in tensors]


def _told(value: Any, own: Mapping[int, str]) -> Any:
    """Return a description of what hangs on a layer: equal for values that do the same. `own` names the model's parts.

    What is neither a plain value nor a function is described by what it holds. If that cannot be told, it is like
    nothing, not even itself when it is asked again.
    """
    try:
        return _described(value, own)
    except Exception:  # noqa: BLE001 (whatever cannot be told, such as a list that holds itself)
        return "like nothing", next(_numbers)


def _described(value: Any, own: Mapping[int, str]) -> Any:
    if id(value) in own:
        return own[id(value)]
    if isinstance(value, Enum):
        return _class(type(value)), value.name
    if type(value) in _PLAIN:
        return type(value).__name__, repr(value)
    if isinstance(value, type):
        return "class", _class(value)
    if isinstance(value, types.FunctionType):
        return "function", _function(value)
    if isinstance(value, types.MethodType):
        return "method", _described(value.__func__, own), _described(value.__self__, own)
    if isinstance(value, functools.partial):
        return "partial", _described(value.func, own), _described(value.args, own), _described(value.keywords, own)
    if isinstance(value, weakref.ref):
        return "reference", _described(value(), own)
    if type(value) in (list, tuple, torch.Size):
        return type(value).__name__, [_described(part, own) for part in value]
    if isinstance(value, Mapping):
        return _class(type(value)), [(_described(key, own), _described(part, own)) for key, part in value.items()]
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None):
        return "built in", value.__module__, value.__qualname__
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), value.requires_grad, _content(value.detach().cpu().numpy())
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), _content(value)
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(_described(part, own)) for part in value)
    made = value.__reduce_ex__(2)  # as copies of it are made: by what, from which values, and with what in it
    if isinstance(made, str):
        return "named", getattr(value, "__module__", None), made
    by, values, state, *more = [*made, None, None, None][:5]
    return _described([by, values, state, *[None if parts is None else list(parts) for parts in more]], own)


def _content(array: np.ndarray) -> tuple[tuple[int, ...], str]:
    if array.dtype.hasobject:
        raise TypeError("An array of objects says nothing of what they hold.")
    return array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def _class(kind: type) -> int:
    """Return a class's number. Two files may have classes of one name."""
    return _classes.setdefault(kind, next(_numbers))


def _function(fn: types.FunctionType) -> int:
    """Return the number of all functions that do the same as this one."""
    known = _functions.setdefault(fn.__code__, [])
    for other, number in known:
        if same_function(fn, other):
            return number
    number = next(_numbers)
    known[:] = [*known[1 - MOST :], (fn, number)]
    return number


def same_hooks(a: nn.Module, b: nn.Module) -> bool:
    def hooks(model: nn.Module) -> list[tuple[str, int, Any]]:
        found = []
        for name, m in model.named_modules():
            found += [(name, i, hook) for i, kind in enumerate(HOOKS) for hook in getattr(m, kind).values()]
        return found

    these, those = hooks(a), hooks(b)
    return len(these) == len(those) and all(
        x[:2] == y[:2] and same_function(x[2], y[2]) for x, y in zip(these, those, strict=True)
    )


def same_function(a: Any, b: Any) -> bool:
    """Return whether two functions do the same: one function, or one text with equal plain values around it."""
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return same_function(a.func, b.func) and (a.args, a.keywords) == (b.args, b.keywords)
    if a is b or not isinstance(a, types.FunctionType) or not isinstance(b, types.FunctionType):
        return a is b or (isinstance(a, types.MethodType) and bool(a == b))
    if a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__ or a.__defaults__ != b.__defaults__:
        return False
    cells = zip(a.__closure__ or (), b.__closure__ or (), strict=True)
    return a.__kwdefaults__ == b.__kwdefaults__ and all(_same_value(x, y) for x, y in cells)


def _same_value(x: Any, y: Any) -> bool:
    a, b = x.cell_contents, y.cell_contents
    plain = (bool, int, float, str, type(None))
    return a is b or (type(a) is type(b) and isinstance(a, plain) and a == b) or _both_same_function(a, b)


def _both_same_function(a: Any, b: Any) -> bool:
    return isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType) and same_function(a, b)
