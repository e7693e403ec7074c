"""SGD and Adam on a CPU, by the functions in which torch does their arithmetic, without torch's optimiser class.

The numbers are those of `torch.optim.SGD` and `torch.optim.Adam`, to the bit: it is the same function on the same
tensors. The class around it imports torch's compiler when the first one is made, which takes longer than a small run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd


class Optimiser(Protocol):
    """An optimiser as a training uses it: torch's own, or one of this file."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...


class _Plain:
    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, Any]):
        self.param_groups: list[dict[str, Any]] = [{**options, "params": list(parameters)}]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)

    @property
    def _params(self) -> list[Tensor]:
        """Return the parameters that have a gradient."""
        return [p for p in self.param_groups[0]["params"] if p.grad is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self._params:
            if set_to_none:
                p.grad = None
            else:
                _gradient(p).zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered, by the place of each parameter, as torch's own optimisers say it."""
        params = self.param_groups[0]["params"]
        return {"state": {at: dict(self.state[p]) for at, p in enumerate(params) if p in self.state}}


class PlainSgd(_Plain):
    """`torch.optim.SGD`."""

    @torch.no_grad()
    def step(self) -> None:
        group, params = self.param_groups[0], self._params
        moves = group["momentum"] != 0
        buffers: list[Tensor | None] = [self.state[p].get("momentum_buffer") for p in params] if moves else []
        sgd(
            params, [_gradient(p) for p in params], buffers, foreach=False, fused=False,
            weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"], dampening=0.0,
            nesterov=group["nesterov"], maximize=False,
        )  # fmt: skip
        for p, buffer in zip(params, buffers, strict=False):
            self.state[p]["momentum_buffer"] = buffer


class PlainAdam(_Plain):
    """`torch.optim.Adam`."""

    @torch.no_grad()
    def step(self) -> None:
        group, params = self.param_groups[0], self._params
        for p in params:
            if not self.state[p]:
                exact = torch.get_default_dtype() == torch.float64
                self.state[p] = {
                    "step": torch.tensor(0.0, dtype=torch.float64 if exact else torch.float32),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        means, squares, steps = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        adam(
            params, [_gradient(p) for p in params], means, squares, [], steps, foreach=False, fused=False,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=1e-8,
            maximize=False,
        )  # fmt: skip


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


# By torch's class: the one of this file, and the options that it knows, with torch's defaults.
_PLAIN: dict[type, tuple[type[PlainSgd | PlainAdam], dict[str, Any]]] = {
    torch.optim.SGD: (PlainSgd, {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
    torch.optim.Adam: (PlainAdam, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
}


def plain_optimiser(
    make: type[torch.optim.Optimizer], parameters: Sequence[Tensor], options: Mapping[str, Any]
) -> PlainSgd | PlainAdam | None:
    """Return the same optimiser without torch's class; None where only that class will do.

    That is so on other devices, for subclasses, for options that this file does not know, and for whatever torch's
    class refuses: it says why.
    """
    plain, defaults = _PLAIN.get(make, (None, {}))
    if plain is None or not options.keys() <= defaults.keys() or not 0 < len(parameters) == len(set(parameters)):
        return None
    told = {**defaults, **options}
    if any(p.device.type != "cpu" or not p.is_leaf or not p.is_floating_point() for p in parameters):
        return None
    rates = (told["lr"], told["weight_decay"], told.get("momentum", 0.0))
    if any(type(rate) not in (int, float) or not rate >= 0 for rate in rates):
        return None
    if (told.get("nesterov") and not told["momentum"]) or not all(0 <= beta < 1 for beta in told.get("betas", ())):
        return None
    return plain(parameters, told)
