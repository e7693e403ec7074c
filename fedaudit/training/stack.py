"""Training many models of one architecture at once: the loop of `fedaudit.training.fit`, stacked by torch.func.

Parameters and buffers of M models become tensors with M on dimension 0, the loss is mapped over them, and one optimiser
steps them all: the M losses are summed, and a model's parameters reach its own loss only, so each gets the gradient
that it would get alone. Every model has its own rows and its own generator, and draws from it what `fit` would draw.
What comes out is what M calls of `fit` give, to rounding.

Not everything can be stacked: `why_not` says why, and the caller then trains one model after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.training.fit import Fitted, Loss, batches, check_pure, check_rows, check_value, fit, train_mode

# What these do to one number does not depend on the others, so a step on a stack is a step on each of its models.
_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


@dataclass(frozen=True, eq=False)
class Job:
    """One call of `fit`, not yet carried out."""

    model: nn.Module
    loss: Loss
    rows: Sequence[Tensor]
    rng: torch.Generator
    options: Mapping[str, Any]

    def alone(self) -> Fitted:
        return fit(self.model, self.loss, self.rows, rng=self.rng, **self.options)

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)


def why_not(jobs: Sequence[Job]) -> str | None:
    """Why these cannot be trained as one stack; None if they can."""
    first = jobs[0]
    if first.option("until") is not None:
        return "it stops training by looking at its records"
    if first.option("opt").make not in _ELEMENTWISE:
        return f"{first.option('opt').make.__name__} is not known to treat every number alone"
    if any(isinstance(m, _DropoutNd) and m.p > 0 for m in first.model.modules()):
        return "dropout draws for each model in turn"
    shape = _shape(first)
    for job in jobs[1:]:
        if not _same_loss(job.loss, first.loss):
            return "the models are trained on different losses"
        if _shape(job) != shape:
            return "the models or the numbers of their records differ"
    try:
        _stacked([job.option("given") or {} for job in jobs])
    except ValueError as e:
        return str(e)
    return None


def fit_together(jobs: Sequence[Job], *, compile: bool = False) -> list[Fitted]:
    """Carry out all jobs as one stack; the models end as `fit` would leave each of them.

    `compile` counts on a GPU only: there a step is many small kernels, and compiling takes seconds, on a CPU minutes.
    """
    first = jobs[0]
    n, batch = check_rows(first.rows), first.option("batch")
    epochs, steps = first.option("epochs"), first.option("steps")
    check_pure(first.loss)
    trained = [name for name, p in first.model.named_parameters() if p.requires_grad]
    states = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (job.model for job in jobs)]
    params = {name: torch.stack([s[name].detach() for s in states]).requires_grad_() for name in trained}
    rest = {name: torch.stack([s[name].detach() for s in states]) for name in states[0] if name not in params}
    rows = [torch.stack([job.rows[i] for job in jobs]) for i in range(len(first.rows))]
    given, given_dims = _stacked([job.option("given") or {} for job in jobs])
    optimiser = first.option("opt").build(list(params.values()))
    model, of_all = _mapped(first, given_dims, compile and rows[0].is_cuda)
    was_training = model.training
    which = torch.arange(len(jobs), device=rows[0].device)[:, None]
    done_epochs = done_steps = 0
    total, seen = torch.zeros(len(jobs), device=rows[0].device), n
    train_mode(model, first.option("norms", "batch"))
    try:
        while done_epochs < epochs if epochs is not None else done_steps < (steps or 0):
            total.zero_()
            seen = 0
            for drawn in zip(*(batches(n, batch, job.rng, job.option("turns")) for job in jobs), strict=True):
                index = torch.stack(drawn)
                means, sums = of_all(params, rest, [row[which, index] for row in rows], given)
                optimiser.zero_grad(set_to_none=True)
                means.sum().backward()
                optimiser.step()
                total += sums
                seen += index.shape[1]
                done_steps += 1
                if done_steps == steps:
                    break
            done_epochs += 1
    finally:
        model.train(was_training)
    with torch.no_grad():
        for i, state in enumerate(states):
            for name, tensor in state.items():
                tensor.copy_((params[name] if name in params else rest[name])[i])
    return [Fitted(done_epochs, done_steps, float(sum_) / max(seen, 1)) for sum_ in total]


Mapped = Callable[..., tuple[Tensor, Tensor]]  # parameters, other tensors, rows, given -> mean and sum of each model
_compiled: dict[Any, tuple[nn.Module, Mapped]] = {}  # a compiled one is used again for models of the same structure


def _mapped(job: Job, given_dims: Any, compile: bool) -> tuple[nn.Module, Mapped]:
    """The job's loss for a whole stack, and the model whose layers it runs with the stack's tensors in their place."""
    model, loss, separable = job.model, job.loss, job.option("separable", True)
    compile = compile and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())  # they come and go
    key = repr((_structure(model), given_dims, separable)), loss
    if compile and key in _compiled:
        return _compiled[key]
    caller = _Caller(model)
    places = _places(caller)

    def of_one(params: Any, rest: Any, rows: Any, given: Any) -> tuple[Tensor, Tensor]:
        value = loss(_F(caller, params, rest, places), *rows, **given)
        check_value(value, len(rows[0]), loss, separable)
        detached = value.detach()
        return value.mean(), detached.sum() if separable else detached.mean() * len(rows[0])

    of_all: Mapped = vmap(of_one, in_dims=(0, 0, 0, given_dims), randomness="error")
    if compile:
        _compiled[key] = model, torch.compile(of_all, dynamic=False)
        return _compiled[key]
    return model, of_all


class _Caller(nn.Module):
    """Makes every method of a model reachable for `functional_call`, which knows `forward` only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any) -> Any:
        return self.model(*args) if method == "forward" else getattr(self.model, method)(*args)


def _places(caller: _Caller) -> dict[str, str]:
    """The name of the tensor at each place of the caller: a shared parameter has one name and several places.

    A layer under two names is visited once: `functional_call` would leave a replaced tensor behind in it.
    """
    model = caller.model
    name_of = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    own = {"recurse": False, "remove_duplicate": False}
    return {
        place: name_of[id(t)]
        for prefix, layer in caller.named_modules()
        for place, t in [*layer.named_parameters(prefix, **own), *layer.named_buffers(prefix, **own)]
    }


class _F:
    """The `f` of a loss, for one model of the stack. Batch norm writes its statistics into `rest`."""

    def __init__(self, caller: _Caller, params: dict[str, Tensor], rest: dict[str, Tensor], places: dict[str, str]):
        self._caller = caller
        tensors = {**params, **rest}
        self._tensors = {place: tensors[name] for place, name in places.items()}
        self.params = {name: tensors[name] for name, _ in caller.model.named_parameters()}

    def _call(self, method: str, *args: Any) -> Any:
        return functional_call(self._caller, self._tensors, (method, *args), tie_weights=False)

    def __call__(self, *args: Any) -> Any:
        return self._call("forward", *args)

    def encode(self, x: Tensor) -> Tensor:
        return self._call("encode", x)

    def classify(self, e: Tensor) -> Tensor:
        return self._call("classify", e)


def _shape(job: Job) -> Any:
    """What must be the same for all models of a stack."""
    options = {name: value for name, value in job.options.items() if name != "given"}
    return _structure(job.model), [(row.shape, row.dtype) for row in job.rows], options


def _structure(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return str(model), [(name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors]


def _same_loss(a: Loss, b: Loss) -> bool:
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return _same_loss(a.func, b.func) and (a.args, a.keywords) == (b.args, b.keywords)
    return a == b


def _stacked(values: Sequence[Any]) -> tuple[Any, Any]:
    """Trees of one form as one tree with the tensors stacked, and the dimension that each leaf is mapped over."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ValueError("what their losses are given differs in form")
    if isinstance(first, Tensor):
        if any(value.shape != first.shape or value.dtype != first.dtype for value in values):
            raise ValueError("what their losses are given differs in shape")
        return torch.stack(list(values)).detach(), 0
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError("what their losses are given differs in form")
        parts = {key: _stacked([value[key] for value in values]) for key in first}
        return {key: part[0] for key, part in parts.items()}, {key: part[1] for key, part in parts.items()}
    if isinstance(first, list | tuple):
        if any(len(value) != len(first) for value in values):
            raise ValueError("what their losses are given differs in form")
        items = [_stacked(list(value)) for value in zip(*values, strict=True)]
        return type(first)(item[0] for item in items), type(first)(item[1] for item in items)
    if first is None or isinstance(first, bool | int | float | str):
        if any(value != first for value in values):
            raise ValueError("what their losses are given differs in its numbers")
        return first, None
    raise ValueError(f"their losses are given a {type(first).__name__}")
