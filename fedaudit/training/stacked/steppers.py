"""Optimisers for a stack of models: M on dimension 0 of every tensor, and a count of steps for each model.

torch's own optimisers keep one count of steps for a whole tensor, so models that have taken different numbers of steps
cannot share one. SGD and Adam are therefore written here once more, by torch's formulas. Any other optimiser that
treats every number alone serves a stack whose models all step together. Where each part of a model has an optimiser of
its own (`optimiser_parts`), so it has here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedaudit.training.fit import Opt
from fedaudit.training.optimiser_parts import ByParts, split
from fedaudit.training.plain_optimisers import Optimiser

Tensors = dict[str, Tensor]

# These treat each number without regard to the others, so a step on a stack is a step on each of its models.
_ELEMENTWISE = (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


class Stepper:
    """An optimiser for M models. Its state is tensors with M on dimension 0, which can be sliced as the models are."""

    together = False  # whether all models must take every step

    def __init__(self, options: Mapping[str, Any], scheduled: bool = False):
        self.options, self.scheduled = dict(options), scheduled

    def state(self, params: Tensors) -> Tensors:
        """Return what the optimiser remembers of each model. Under a schedule it holds each model's present share of
        the learning rate, `rate`, which whoever steps the stack writes before a step.
        """
        first = next(iter(params.values()))
        return {"rate": torch.ones(len(first), dtype=torch.float64, device=first.device)} if self.scheduled else {}

    def step(self, params: Tensors, grads: Mapping[str, Tensor | None], state: Tensors) -> None:
        """Take one step, in place, on the parameters that have a gradient."""
        raise NotImplementedError


def stepper(opt: Opt) -> Stepper | str:
    """Return the optimiser that steps each model of a stack as `opt` would, or the reason why there is none."""
    known = {"lr", "momentum", "weight_decay", "nesterov"}
    if opt.make is torch.optim.SGD and opt.options.keys() <= known and _plain(opt.options):
        return _SGD(opt.options, opt.schedule != "constant")
    if opt.make is torch.optim.Adam and opt.options.keys() <= {"lr", "betas", "eps", "weight_decay"}:
        return _Adam(opt.options, opt.schedule != "constant")
    if opt.schedule != "constant":
        return f"the learning rate of {opt.make.__name__} changes, and it counts one rate for all of a stack"
    if opt.make is ByParts:
        return _by_parts(opt)
    if opt.make in (*_ELEMENTWISE, torch.optim.SGD, torch.optim.Adam) or getattr(opt.make, "elementwise", False):
        return _Torch(opt)
    return f"{opt.make.__name__} is not known to treat every number alone"


def _by_parts(opt: Opt) -> Stepper | str:
    """Return an optimiser for each part of each model, or the reason why there is none."""
    found = [(size, stepper(Opt(make, options))) for size, make, options in opt.options["parts"]]
    for _, how in found:
        if isinstance(how, str) or how.together:
            return how if isinstance(how, str) else "the optimiser of a part counts steps for all of a stack"
    return _Parts([(size, how) for size, how in found if isinstance(how, Stepper)], opt.options.get("clip"))


def _plain(options: Mapping[str, Any]) -> bool:
    return all(isinstance(value, bool | int | float) for value in options.values())


def _chosen(params: Tensors, grads: Mapping[str, Tensor | None]) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Return the names, parameters and gradients of what has a gradient. Each gradient lies as its parameter does."""
    found = [(name, params[name], _laid_out(g, params[name])) for name, g in grads.items() if g is not None]
    return [name for name, _, _ in found], [p for _, p, _ in found], [g for _, _, g in found]


class _SGD(Stepper):
    def state(self, params: Tensors) -> Tensors:
        kept = params.items() if self.options.get("momentum") else ()
        return {**super().state(params), **{f"b.{name}": torch.zeros_like(p) for name, p in kept}}

    @torch.no_grad()
    def step(self, params: Tensors, grads: Mapping[str, Tensor | None], state: Tensors) -> None:
        names, p, g = _chosen(params, grads)
        if not p:
            return
        lr, momentum = self.options["lr"], self.options.get("momentum", 0.0)
        if decay := self.options.get("weight_decay", 0.0):
            g = _foreach("add", g, p, alpha=decay)
        if momentum:
            buffers = [state[f"b.{name}"] for name in names]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, g)
            g = _foreach("add", g, buffers, alpha=momentum) if self.options.get("nesterov") else buffers
        if not self.scheduled:
            torch._foreach_add_(p, g, alpha=-lr)
            return
        for p_, g_ in zip(p, g, strict=True):
            p_.sub_(g_ * _along(lr * state["rate"], p_))


class _Adam(Stepper):
    def state(self, params: Tensors) -> Tensors:
        first = next(iter(params.values()))
        moments = {f"{m}.{name}": torch.zeros_like(p) for m in "mv" for name, p in params.items()}
        return {
            **super().state(params),
            **moments,
            "t": torch.zeros(len(first), dtype=torch.float64, device=first.device),
        }

    @torch.no_grad()
    def step(self, params: Tensors, grads: Mapping[str, Tensor | None], state: Tensors) -> None:
        names, p, g = _chosen(params, grads)
        if not p:
            return
        lr, (b1, b2) = self.options.get("lr", 1e-3), self.options.get("betas", (0.9, 0.999))
        eps = self.options.get("eps", 1e-8)
        t = state["t"].add_(1)
        if _fuses(p) and not self.scheduled:
            self._fused(names, p, g, state, t)
            return
        if decay := self.options.get("weight_decay", 0.0):
            g = _foreach("add", g, p, alpha=decay)
        m, v = ([state[f"{which}.{name}"] for name in names] for which in "mv")
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, value=1 - b2)
        size = lr / (1 - b1**t) * (state["rate"] if self.scheduled else 1.0)  # the step size of each model
        root = (1 - b2**t).sqrt()
        for p_, m_, v_ in zip(p, m, v, strict=True):
            shape = (-1, *[1] * (p_.dim() - 1))
            below = v_.sqrt().div_(root.to(p_.dtype).view(shape)).add_(eps)
            p_.sub_(m_.div(below).mul_(size.to(p_.dtype).view(shape)))

    def _fused(self, names: list[str], p: list[Tensor], g: list[Tensor], state: Tensors, t: Tensor) -> None:
        """Take the step with torch's own kernel for all numbers of all models: one pass over them, where the formulas
        take nine.
        """
        lr, (b1, b2) = self.options.get("lr", 1e-3), self.options.get("betas", (0.9, 0.999))
        decay, eps = self.options.get("weight_decay", 0.0), self.options.get("eps", 1e-8)
        m, v = ([state[f"{which}.{name}"] for name in names] for which in "mv")
        P, G, M, V = ([part for whole in of for part in whole.unbind(0)] for of in (p, g, m, v))
        counts = list(t.float().unbind(0)) * len(names)
        torch._fused_adam_(
            P, G, M, V, [], counts, lr=float(lr), beta1=b1, beta2=b2, weight_decay=decay, eps=eps, amsgrad=False,
            maximize=False,
        )  # fmt: skip


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    """Return a tensor whose numbers lie in memory in the order of another's: one kernel then goes over all of both."""
    return t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """Return a number for each model in the shape that multiplies the models' tensors."""
    return values.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def _fuses(p: Sequence[Tensor]) -> bool:
    return _has_fused(p[0].device) and all(map(_dense, p))


def _dense(p: Tensor) -> bool:
    """Return whether each model's numbers lie without gaps, with the channels of filters first or last."""
    last = p.dim() == 5 and p[0].is_contiguous(memory_format=torch.channels_last)
    return p.is_contiguous() or last


def _has_fused(device: torch.device) -> bool:
    return device.type == "cuda"


class _Parts(Stepper):
    """Steps each part of each model by its own optimiser, after each part's gradient was clipped."""

    def __init__(self, parts: Sequence[tuple[int, Stepper]], clip: float | None):
        super().__init__({})
        self._sizes, self._steppers, self._clip = [size for size, _ in parts], [how for _, how in parts], clip

    def state(self, params: Tensors) -> Tensors:
        kept = zip(self._steppers, split(list(params), self._sizes), strict=True)
        found = [how.state({name: params[name] for name in names}) if names else {} for how, names in kept]
        return {f"{at}:{name}": t for at, of_part in enumerate(found) for name, t in of_part.items()}

    @torch.no_grad()
    def step(self, params: Tensors, grads: Mapping[str, Tensor | None], state: Tensors) -> None:
        for at, (how, names) in enumerate(zip(self._steppers, split(list(params), self._sizes), strict=True)):
            mine = {name: grads[name] for name in names}
            if self._clip is not None:
                mine = clipped(mine, self._clip)
            begin = f"{at}:"
            kept = {name.removeprefix(begin): t for name, t in state.items() if name.startswith(begin)}
            how.step({name: params[name] for name in names}, mine, kept)


def clipped(grads: Mapping[str, Tensor | None], clip: float) -> dict[str, Tensor | None]:
    """Return gradients of M models, each model's scaled down to the norm `clip` if it is longer, as torch does it."""
    there = [g for g in grads.values() if g is not None]
    if not there:
        return dict(grads)
    models = [list(g.unbind(0)) for g in there]  # tensor, model
    norms = torch.stack(torch._foreach_norm([g for of_tensor in models for g in of_tensor])).view(len(there), -1)
    scale = (clip / (norms.norm(dim=0) + 1e-6)).clamp(max=1.0)
    return {name: None if g is None else g * _along(scale, g) for name, g in grads.items()}


class _Torch(Stepper):
    """Runs torch's own optimiser on the stacked tensors. This is right as long as all models take every step."""

    together = True

    def __init__(self, opt: Opt):
        super().__init__(opt.options)
        self._opt = opt
        self._made: Optimiser | None = None

    def step(self, params: Tensors, grads: Mapping[str, Tensor | None], state: Tensors) -> None:
        if self._made is None:
            self._made = self._opt.build(list(params.values()))
        for name, p in params.items():
            p.grad = grads[name]
        self._made.step()


def _foreach(name: str, a: Sequence[Tensor], b: Sequence[Tensor], **more: Any) -> list[Tensor]:
    return list(getattr(torch, f"_foreach_{name}")(list(a), list(b), **more))
