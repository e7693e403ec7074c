"""FedFree's layers: what counts as one, which layers of two architectures correspond, and their bytes on the wire."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedaudit import State
from fedaudit.shape import Shape
from fedaudit.training import models

TYPES: dict[type[nn.Module], str] = {nn.Conv2d: "conv", nn.Linear: "linear"}


class Weights(NamedTuple):
    """A layer's numbers: its weight and, if it has one, its bias."""

    w: Tensor
    b: Tensor | None


@dataclass(frozen=True)
class Layer:
    """The public facts about a layer."""

    type: str
    depth: float  # relative: 0 the first, 1 the last
    groups: int
    bytes: int


# --- in a model ----------------------------------------------------------------------------------------------------


def types_in(model: nn.Module) -> dict[str, str]:
    """Return the model's layers from first to last, and the type of each."""
    return {name: kind for name, m in model.named_modules() for of, kind in TYPES.items() if isinstance(m, of)}


def of_layer(state: Mapping[str, Tensor], name: str) -> State:
    """Return the tensors of one layer, under their full names."""
    return State({full: state[full] for full in (f"{name}.weight", f"{name}.bias") if full in state})


def weights_of(state: Mapping[str, Tensor], name: str) -> Weights:
    return Weights(state[f"{name}.weight"], state.get(f"{name}.bias"))


def named(name: str, layer: Weights) -> State:
    """Return a layer's weights as a state: the inverse of `weights_of`."""
    return State({f"{name}.weight": layer.w} | ({} if layer.b is None else {f"{name}.bias": layer.b}))


# --- over architectures ----------------------------------------------------------------------------------------------


def layers_of(arch: str, shape: Shape, classes: int) -> dict[str, Layer]:
    """Return the layers of an architecture. They are public knowledge, found without allocating the model."""
    return _layers_of(arch, shape, classes, torch.get_default_dtype())


@functools.cache
def _layers_of(arch: str, shape: Shape, classes: int, numbers: torch.dtype) -> dict[str, Layer]:
    net = models.structure(arch, shape=shape, classes=classes)
    types, found = types_in(net), {}
    for position, (name, kind) in enumerate(types.items()):
        module = net.get_submodule(name)
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        found[name] = Layer(kind, position / max(len(types) - 1, 1), getattr(module, "groups", 1), size)
    return found


def corresponding(layer: Layer, among: Mapping[str, Layer]) -> str | None:
    """Return the global layer of the same type at the nearest relative depth; None if no layer is of that type."""
    same = [name for name, g in among.items() if g.type == layer.type]
    return min(same, key=lambda name: abs(among[name].depth - layer.depth), default=None)


def kernel(weight: Tensor, groups: int = 1, outputs: int | None = None) -> Tensor:
    """Return a layer's weight as outputs x inputs x height x width. Linear layers are 1 x 1; grouped ones are made
    dense.

    The first `outputs` of a dense one are enough, because all of them can be many.
    """
    if weight.dim() == 2:
        return weight[:, :, None, None]
    if groups == 1:
        return weight
    in_a_group = len(weight) // groups
    weight = weight[:outputs]
    rows = torch.arange(len(weight), device=weight.device)
    dense = weight.new_zeros(len(weight), groups, *weight.shape[1:])
    dense[rows, rows // in_a_group] = weight
    return dense.flatten(1, 2)


def centred(weight: Tensor, h: int, w: int) -> Tensor:
    """Return the kernel in the middle of h x w: with zeros around it, or with its rim cut off."""
    dh, dw = h - weight.shape[2], w - weight.shape[3]
    return pad(weight, (dw // 2, dw - dw // 2, dh // 2, dh - dh // 2))


# --- on the wire -----------------------------------------------------------------------------------------------------


def chosen(choice: Any) -> list[str] | None:
    """Return the layers that a message named, as one string or as the tensors of a state; None when planning."""
    if isinstance(choice, str):
        return [choice]
    return None if choice is None else list(dict.fromkeys(full.rpartition(".")[0] for full in choice))


def billed(
    size: Callable[[str, Layer], int], layers: Mapping[str, Layer], names: Sequence[str] | None, count: int
) -> int:
    """Return `size` summed over the named layers; when planning, over `count` layers of the mean size."""
    if names is not None:
        return sum(size(name, layers[name]) for name in names)
    return round(min(count, len(layers)) * sum(size(name, layer) for name, layer in layers.items()) / len(layers))
