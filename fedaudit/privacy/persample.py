"""Gradients of single rows, for DP-SGD (Abadi et al. 2016, Algorithm 1), by torch.func.

The loss is run on one row at a time and vectorised, so whatever it does with `f.params`, with more rows or with `given`
is differentiated as written. opacus' hooks see the layers only. They silently miss a proximal term and everything else
that uses the parameters outside of the layers.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedaudit.errors import ContractError, PrivacyError
from fedaudit.extras import install

Loss = Callable[..., Tensor]

_REMEDY = (
    "Replace them by layers that use one record at a time: --norm group puts GroupNorm in their place (by opacus' "
    "ModuleValidator.fix). If you compare with a run without privacy, use --norm group there, too."
)

_RECURRENT = (
    "Use a layer that opacus can look into: its own DPLSTM, DPGRU or DPRNN (opacus.layers) in the place of torch's, or "
    "a transformer."
)


class _Caller(nn.Module):
    """Lets `functional_call`, which only calls `forward`, call every method of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, method)(*args, **kwargs)


class Functional:
    """The `f` of a loss: the model with `params` in place of its parameters. It keeps frozen ones and buffers."""

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self._caller = _Caller(model)
        self.params: dict[str, Tensor] = {n: params.get(n, p) for n, p in model.named_parameters()}
        # A shared parameter has one name here and several places in the model. functional_call can tie them itself, but
        # if a layer is used under two names, it leaves the replaced tensor behind in the model.
        name_of = {p: name for name, p in model.named_parameters() if name in params}
        self._replaced = {
            place: params[name_of[p]]
            for prefix, layer in self._caller.named_modules()
            for place, p in layer.named_parameters(prefix, recurse=False, remove_duplicate=False)
            if p in name_of
        }

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._caller, self._replaced, (method, *args), kwargs, tie_weights=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    def encode(self, x: Tensor) -> Tensor:
        return self._call("encode", x)

    def classify(self, e: Tensor) -> Tensor:
        return self._call("classify", e)


def row_gradients(
    model: nn.Module,
    loss: Loss,
    rows: Sequence[Tensor],
    given: Mapping[str, Any] | None = None,
    *,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """Return the gradient of each row's loss in each trainable parameter: name -> (rows, *shape of the parameter).

    `loss(f, *rows, **given)` gives one value per row. Dropout draws anew for each row, from the global generator.
    `chunk_size` rows are computed at a time (all by default). Each takes the memory of one copy of the model.
    """
    _refuse(_keeps_statistics(model))
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    sizes = {len(row) for row in rows}
    if len(sizes) != 1:
        raise ContractError(f"The rows of a loss must be tensors with one common number of rows, not {sorted(sizes)}.")
    if sizes == {0}:  # a Poisson sample can be empty
        return {name: p.new_zeros((0, *p.shape)) for name, p in params.items()}

    def value_of_one(params: dict[str, Tensor], *row: Tensor) -> Tensor:
        value = loss(Functional(model, params), *(r.unsqueeze(0) for r in row), **(given or {}))
        if value.shape != (1,):
            raise ContractError(
                f"The loss {getattr(loss, '__qualname__', loss)} returned the shape {tuple(value.shape)} for 1 row; "
                'under DP-SGD it must give one value per row (reduction="none").'
            )
        return value.squeeze(0)

    in_dims = (None, *(0 for _ in rows))
    return vmap(grad(value_of_one), in_dims=in_dims, randomness="different", chunk_size=chunk_size)(params, *rows)


def clip_and_sum(row_grads: Mapping[str, Tensor], C: float) -> tuple[dict[str, Tensor], Tensor]:
    """Clip each row's gradient, over all parameters together, to L2 norm C; return the sum, and the norms before.

    Abadi et al. 2016, Algorithm 1, with opacus' factor min(1, C / (norm + 1e-6)), which never exceeds the norm C.
    """
    if isinstance(C, bool) or not isinstance(C, numbers.Real) or not 0 < C < math.inf:
        raise PrivacyError(f"The clipping norm C = {C!r} bounds nothing: give a finite number above 0.")
    if not row_grads:
        raise PrivacyError(
            "There are no gradients to clip: the model has no trainable parameter. Set requires_grad on one."
        )
    flat = [g.reshape(len(g), math.prod(g.shape[1:])) for g in row_grads.values()]
    norms = torch.stack([g.norm(2, dim=1) for g in flat], dim=1).norm(2, dim=1)
    if not bool(torch.isfinite(norms).all()):
        bad = [name for name, g in row_grads.items() if not bool(torch.isfinite(g).all())]
        raise PrivacyError(
            f"{int((~torch.isfinite(norms)).sum())} of {len(norms)} row gradients are not finite"
            + (f" (in {', '.join(bad)})" if bad else "")
            + ", so clipping cannot bound them: lower the learning rate, or look for NaN in the records."
        )
    factor = (C / (norms + 1e-6)).clamp(max=1.0)
    return {name: torch.einsum("i,i...->...", factor.to(g.dtype), g) for name, g in row_grads.items()}, norms


# -- which models have gradients of single rows ---------------------------------------------------------------------


def _keeps_statistics(model: nn.Module) -> dict[str, str]:
    """Return the layers that mix the rows of a batch or keep statistics of them: name -> why.

    opacus skips those without trainable parameters (affine=False, or frozen), although they mix the rows, too.
    """
    return {
        name: f"{type(layer).__name__} makes a row's output depend on the other rows, now or by its running statistics"
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        or (isinstance(layer, _InstanceNorm) and (layer.track_running_stats or layer.running_mean is not None))
    }


def _refuse(layers: Mapping[str, str]) -> None:
    if layers:
        named = "; ".join(f"{name or 'the model itself'}: {why}" for name, why in layers.items())
        remedy = _REMEDY if any("Norm" in why for why in layers.values()) else _RECURRENT
        raise PrivacyError(
            f"DP-SGD needs gradients of single records, which these layers do not have. {named}. {remedy}"
        )


# opacus' hooks cannot see into this layer; torch.func differentiates it as it is written.
_DIFFERENTIABLE = (nn.MultiheadAttention,)


def validate(model: nn.Module) -> None:
    """Raise, naming all of them, if a model has layers that DP-SGD cannot train. Ask opacus, too, if installed."""
    layers = _keeps_statistics(model)
    try:
        validator = _validator()
    except PrivacyError:
        _refuse(layers)
        return
    for name, layer in model.named_modules():
        check = validator.VALIDATORS.get(type(layer))
        if (
            check is not None
            and name not in layers
            and not isinstance(layer, _DIFFERENTIABLE)
            and (errors := check(layer))
        ):
            layers[name] = f"{type(layer).__name__}: {' '.join(str(e) for e in errors)}"
    _refuse(layers)


def repair(model: nn.Module) -> nn.Module:
    """Return a copy that DP-SGD can train, made by opacus: batch norm becomes GroupNorm of gcd(32, channels) groups."""
    fixed: nn.Module = _validator().fix(model)
    for name, layer in list(fixed.named_modules()):
        if isinstance(layer, _BatchNorm):  # opacus skips those without trainable parameters
            group = nn.GroupNorm(math.gcd(32, layer.num_features), layer.num_features, affine=layer.affine)
            device = layer.weight.device if layer.affine else None
            fixed.set_submodule(name, group.to(device).requires_grad_(False))
        elif isinstance(layer, _InstanceNorm):  # opacus only clears the flag; torch goes on updating the buffers
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    validate(fixed)
    return fixed


def _validator() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from opacus.validators import ModuleValidator
    except ImportError as e:
        raise PrivacyError(
            "opacus' validator finds and replaces layers that DP-SGD cannot train, but opacus is not installed: "
            f"{install('opacus')}."
        ) from e
    return ModuleValidator
