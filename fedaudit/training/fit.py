"""The training loop: methods write losses, the loop lives here once.

A loss is `loss(f, *rows, **given)` and returns one value per row; the loop takes the mean. A loss closes over no tensor
and no module and reads nothing but its arguments. Because of that contract the loop can be metered, turned into DP-SGD,
compiled, and stacked over clients, without touching a method.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedaudit.errors import ContractError
from fedaudit.training.augment import Augmentation, augmented
from fedaudit.training.cuda_graphs import Recording, precision, record_giving_back, recordable
from fedaudit.training.plain_optimisers import Optimiser, plain_optimiser

Loss = Callable[..., Tensor]
Norms = Literal["batch", "running"]
Schedule = Literal["constant", "cosine"]
OFTEN = 4  # an unusual batch size is recorded once it has come so many times
CHUNK = 1000  # rows that are scored at once before training


@dataclass(frozen=True)
class Running:
    """Ends a training by its running score: after the epoch whose mean score is above the goal.

    The loss returns two columns then, (n, 2). The first is minimised. The second is a score of each row, 0 or 1, which
    counts as it was before the step on that row. If the model has a mean score of at least the goal before the first
    epoch, in evaluation mode and with each row augmented once, it is not trained.
    """

    goal: float

    def __post_init__(self) -> None:
        if not 0 <= self.goal <= 1:
            raise ContractError(f"Running(goal={self.goal}): the mean of scores lies in [0, 1]. Give a goal in there.")

    def passed(self, total: Tensor, seen: int) -> bool:
        """Return whether an epoch has passed the goal, by its sums of losses and of scores over the rows it saw."""
        return float(total[1]) / seen > self.goal

    def reached(
        self, model: nn.Module, loss: Loss, rows: Sequence[Tensor], *, rng: torch.Generator,
        given: Mapping[str, Any], augment: Augmentation | None,
    ) -> bool:  # fmt: skip
        """Return whether a model has reached the goal before it is trained.

        An augmentation draws its numbers for all rows at once.
        """
        n, was_training = len(rows[0]), model.training
        u = None if augment is None else augment.draw(n, rng)
        hits = torch.zeros((), device=rows[0].device)
        model.eval()
        try:
            for at in range(0, n, CHUNK):
                part = [row[at : at + CHUNK] for row in rows]
                if augment is not None and u is not None:
                    part[0] = augment(part[0], u[at : at + CHUNK])
                with torch.no_grad(), precision(rows[0].device):
                    value = loss(Live(model), *part, **given)
                check_value(value, len(part[0]), loss, True, scored=True)
                hits += value[:, 1].sum()
        finally:
            model.train(was_training)
        return float(hits) / n >= self.goal


Until = Callable[..., bool] | Running


@dataclass(frozen=True)
class Opt:
    """An optimiser to be: its class and its options. Each fit makes its state anew, unless `moments` carry it on."""

    make: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule = "constant"  # of the learning rate, over one training; "cosine": from lr down towards 0

    def factor(self, done: int, planned: int) -> float:
        """Return the share of the learning rate that is left after so many of the planned epochs, or steps.

        A training planned in epochs has one rate for each epoch, and a training planned in steps one for each step. The
        cosine is (1 + cos(pi t / T)) / 2, so that the first of T has the whole rate.
        """
        return 1.0 if self.schedule == "constant" else (1 + math.cos(math.pi * done / max(planned, 1))) / 2

    def set_rate(self, optimiser: Optimiser, done: int, planned: int) -> None:
        """Give the optimiser the learning rate of this point. A constant rate is left as it was made."""
        if self.schedule != "constant":
            for group, made in zip(optimiser.param_groups, self.rates(optimiser), strict=True):
                group["lr"] = made * self.factor(done, planned)

    def rates(self, optimiser: Optimiser) -> list[float]:
        """Return the learning rate of each group of parameters before any schedule."""
        return [float(group.setdefault("initial_lr", group["lr"])) for group in optimiser.param_groups]

    def build(self, parameters: Sequence[Tensor], moments: Mapping[str, Tensor] | None = None) -> Optimiser:
        plain = plain_optimiser(self.make, parameters, self.options)
        optimiser: Optimiser = self.make(parameters, **self.options) if plain is None else plain
        for key, value in (moments or {}).items():
            at, _, name = key.partition(".")
            # Adam looks at its step counter on the CPU; a record may have brought it to another device.
            optimiser.state[parameters[int(at)]][name] = value.clone().cpu() if name == "step" else value.clone()
        return optimiser


def moments_of(optimiser: Optimiser) -> dict[str, Tensor]:
    """Return what an optimiser remembers of its parameters, in the form that a record keeps and `Opt.build` takes."""
    return {
        f"{at}.{name}": value.detach().clone()
        for at, of_parameter in optimiser.state_dict()["state"].items()
        for name, value in of_parameter.items()
        if isinstance(value, Tensor)
    }


def sgd(
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    schedule: Schedule = "constant",
) -> Opt:
    options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return Opt(torch.optim.SGD, options, schedule)


def adam(
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    schedule: Schedule = "constant",
) -> Opt:
    return Opt(torch.optim.Adam, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, schedule)


class Live:
    """The `f` of a loss in ordinary training: the module itself, seen through the names that a loss may use."""

    def __init__(self, model: nn.Module):
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def encode(self, x: Tensor) -> Tensor:
        return self._model.encode(x)  # type: ignore[operator]

    def classify(self, e: Tensor) -> Tensor:
        return self._model.classify(e)  # type: ignore[operator]

    @property
    def params(self) -> dict[str, Tensor]:
        return dict(self._model.named_parameters())


@dataclass(frozen=True)
class Fitted:
    """The result of a fit. `loss` is the mean over the rows of the last epoch."""

    epochs: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Turns:
    """Rows that lie in parts one after the other and take turns: no batch mixes two parts.

    By step, an epoch takes a batch of each part in turn, and a longer part goes on alone at the end. By epoch, one part
    follows the other. Even: the batches of each part are spread evenly over the epoch. `times` says how often an epoch
    goes through each part, shuffled anew each time; once, if it is not given.
    """

    sizes: tuple[int, ...]
    by: Literal["step", "epoch", "even"] = "step"
    times: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.times and (len(self.times) != len(self.sizes) or min(self.times) < 1):
            raise ContractError(
                f"Turns(times={self.times}): an epoch goes through each of {len(self.sizes)} parts once or more often. "
                "Give a number from 1 up for each part, or none."
            )

    def steps(self, size: int) -> int:
        """Return the number of batches of an epoch."""
        return sum(often * -(-n // size) for n, often in zip(self.sizes, self._often, strict=True))

    @property
    def _often(self) -> tuple[int, ...]:
        return self.times or (1,) * len(self.sizes)

    def batches(self, size: int, rng: torch.Generator) -> Iterator[Tensor]:
        begins = accumulate(self.sizes, initial=0)
        parts = [
            [index for _ in range(often) for index in batches(n, size, rng, begin=begin)]
            for begin, n, often in zip(begins, self.sizes, self._often, strict=False)
            if n
        ]
        if self.by == "epoch":
            yield from chain.from_iterable(parts)
        elif self.by == "even":
            at = [((j + 0.5) / len(part), i, j) for i, part in enumerate(parts) for j in range(len(part))]
            yield from (parts[i][j] for _, i, j in sorted(at))
        else:
            yield from (index for turn in zip_longest(*parts) for index in turn if index is not None)


def batches(n: int, size: int, rng: torch.Generator, turns: Turns | None = None, *, begin: int = 0) -> Iterator[Tensor]:
    """Yield one epoch of shuffled index batches of n rows, which are counted from `begin` on. A last batch of one row
    joins the one before: batch norm needs two.
    """
    if turns is not None:
        yield from turns.batches(size, rng)
        return
    order = torch.randperm(n, generator=rng, device=rng.device)
    order = order + begin if begin else order
    sizes = [size] * (n // size) + ([n % size] if n % size else [])
    if len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    yield from order.split(sizes)


def fit(
    model: nn.Module,
    loss: Loss,
    rows: Sequence[Tensor],
    *,
    opt: Opt,
    batch: int,
    epochs: int | None = None,
    steps: int | None = None,
    rng: torch.Generator,
    given: Mapping[str, Any] | None = None,
    until: Until | None = None,
    separable: bool = True,
    turns: Turns | None = None,
    norms: Norms = "batch",
    augment: Augmentation | None = None,
) -> Fitted:
    """Minimise the mean of `loss` over `rows`, for so many epochs or steps, or until `until(f, *rows)` is true.

    `until` is asked after each epoch. It may be a `Running` score instead of a function. `turns` says that the rows are
    parts that take turns. `norms` is "batch" or "running". With "batch", a batch norm takes its statistics from the
    batch and keeps their running mean, as usual in training. With "running", it uses the running statistics as they are
    and does not change them. `augment` makes other images of each batch's first rows; a function `until` sees the rows
    as they are.
    """
    n = check_rows(rows)
    if turns is not None and sum(turns.sizes) != n:
        raise ContractError(
            f"fit: the parts that take turns have {turns.sizes} rows, the data {n}. Make the sizes sum to this number."
        )
    check_pure(loss)
    running = running_score(until, separable)
    if (epochs is None) == (steps is None):
        raise ContractError("fit: give either epochs or steps, and not both.")
    if (epochs or steps or 0) < 0:
        raise ContractError(
            f"fit: {epochs or steps} {'epochs' if steps is None else 'steps'}: give a number from 0 up."
        )
    given = dict(given or {})
    f = Live(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = opt.build(parameters)
    was_training = model.training
    stop = running is not None and running.reached(model, loss, rows, rng=rng, given=given, augment=augment)
    train_mode(model, norms)
    done_epochs = done_steps = 0
    total = torch.zeros(() if running is None else 2, device=rows[0].device)
    seen = n
    planned = steps if steps is not None else (epochs or 0) * -(-n // batch)
    gradient = _Gradient(model, loss, f, given, separable, total, min(batch, n), planned)
    while not stop and (done_epochs < epochs if epochs is not None else done_steps < (steps or 0)):
        total.zero_()
        seen = 0
        for index in batches(n, batch, rng, turns):
            picked = augmented(augment, [row[index] for row in rows], rng)
            opt.set_rate(optimiser, *((done_epochs, epochs) if epochs is not None else (done_steps, steps or 0)))
            gradient(picked)
            optimiser.step()
            seen += len(index)
            done_steps += 1
            if done_steps == steps:
                break
        done_epochs += 1
        if isinstance(until, Running):
            stop = until.passed(total, seen)
        elif until is not None:
            model.eval()
            with torch.no_grad():
                stop = bool(until(f, *rows))
            train_mode(model, norms)
    model.train(was_training)
    return Fitted(done_epochs, done_steps, float(total if running is None else total[0]) / max(seen, 1))


class _Gradient:
    """Writes the gradient of a batch's mean loss into the parameters.

    Losses are summed up in `total`. A total of two numbers is that of losses and of scores (see `Running`).
    On a GPU the computation is recorded, once for each batch size that comes often: the usual one, and that of an
    epoch's last batch.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, f: Live, given: Mapping[str, Any], separable: bool, total: Tensor,
        usual: int, planned: int,
    ):  # fmt: skip
        self._loss, self._f, self._given, self._separable, self._total = loss, f, given, separable, total
        self._scored = total.dim() > 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._usual, self._planned, self._records = usual, planned, recordable(model, total.device, planned)
        self._buffers = list(model.buffers())
        self._came: dict[int, int] = {}  # how often each batch size came
        self._recorded: dict[int, tuple[Recording, list[Tensor]]] = {}

    def __call__(self, rows: list[Tensor]) -> None:
        recorded = self._recording(rows) if self._records else None
        if recorded is None:
            self._eager(rows)
            return
        recording, mine = recorded
        for static, row in zip(mine, rows, strict=True):
            static.copy_(row)
        recording()
        for p, gradient in zip(self._parameters, recording.outputs, strict=True):
            p.grad = gradient

    def _recording(self, rows: list[Tensor]) -> tuple[Recording, list[Tensor]] | None:
        """Return the recording for rows of this size, or None if there is none yet or none can be made."""
        n = len(rows[0])
        if n in self._recorded:
            return self._recorded[n]
        self._came[n] = self._came.get(n, 0) + 1
        if n != self._usual and self._came[n] < OFTEN:
            return None
        mine = [row.clone() for row in rows]
        made = record_giving_back(lambda: self._eager(mine), [self._total, *self._buffers], self._total.device)
        if made is None:
            self._records = n != self._usual
            self._came[n] = -self._planned  # not again
            return None
        self._recorded[n] = made, mine
        return made, mine

    def _eager(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        with precision(rows[0].device):
            value = self._loss(self._f, *rows, **self._given)
        n = len(rows[0])
        check_value(value, n, self._loss, self._separable, self._scored)
        for p in self._parameters:
            p.grad = None
        if self._scored:
            value[:, 0].mean().backward()
            self._total += value.detach().sum(0)
            return [p.grad for p in self._parameters]
        value.mean().backward()
        self._total += value.detach().sum() if self._separable else value.detach().mean() * n
        return [p.grad for p in self._parameters]


def train_mode(model: nn.Module, norms: Norms) -> None:
    model.train()
    if norms == "running":
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def check_rows(rows: Sequence[Tensor]) -> int:
    if not rows or not all(isinstance(row, Tensor) and row.dim() > 0 for row in rows):
        raise ContractError(
            "fit: data is not a tuple of tensors. Give a tuple of tensors with the rows on dimension 0."
        )
    sizes = {len(row) for row in rows}
    if len(sizes) != 1 or 0 in sizes:
        raise ContractError(f"fit: the tensors of data must have one common, positive number of rows, not {sizes}.")
    return sizes.pop()


def running_score(until: Until | None, separable: bool) -> Running | None:
    """Return the running score that ends a training; None if none does. Refuse one of a loss without rows."""
    if not isinstance(until, Running):
        return None
    if not separable:
        raise ContractError(
            "fit: a loss that does not separate over rows (separable=False) has no score of each row, by which "
            "until=Running(...) ends a training. Give a loss of two columns per row, or a function as until."
        )
    return until


def check_value(value: Tensor, n: int, loss: Loss, separable: bool, scored: bool = False) -> None:
    if scored and value.shape != (n, 2):
        raise ContractError(
            f"The loss {_name(loss)} returned the shape {tuple(value.shape)} for {n} rows; with until=Running(...) it "
            f"must give two columns, {(n, 2)}: what is minimised, and the score of each row."
        )
    if not scored and separable and value.shape != (n,):
        raise ContractError(
            f"The loss {_name(loss)} returned the shape {tuple(value.shape)} for {n} rows; it must give one value per "
            'row (reduction="none"). If it does not separate over rows, call fit(..., separable=False).'
        )


def carried(loss: Callable[..., Any], but: tuple[type, ...] = ()) -> list[Any]:
    """Return, piece by piece, what a function brings with it beside its arguments, but for objects of some classes.

    These are closures, defaults, attributes, what lies inside containers, and what functions among them bring in turn.
    """
    found: list[Any] = []
    seen: set[int] = set()
    todo = _brought(loss)
    while todo:
        value = todo.pop()
        passed_over = isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, *but))
        if id(value) in seen or value is None or passed_over:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            todo += value
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            todo += _brought(value)
        elif isinstance(value, Tensor | nn.Module | int | float | str | bytes):
            found.append(value)
        elif inside := _attributes(value):
            todo += inside
        else:
            found.append(value)
    return found


def _brought(loss: Callable[..., Any]) -> list[Any]:
    """Return the first layer of `carried`."""
    if isinstance(loss, functools.partial):
        return [*loss.args, *loss.keywords.values(), *_brought(loss.func)]
    if isinstance(loss, types.MethodType):
        return [loss.__self__, *_brought(loss.__func__)]
    if isinstance(loss, types.FunctionType):
        cells = []
        for cell in loss.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                cells.append(cell.cell_contents)
        return [*cells, *(loss.__defaults__ or ()), *(loss.__kwdefaults__ or {}).values(), *vars(loss).values()]
    return [loss]


def named(loss: Callable[..., Any]) -> str:
    """Return the function's full name, without regard to what it brings with it."""
    if isinstance(loss, functools.partial):
        return named(loss.func)
    of = loss if isinstance(loss, types.FunctionType | types.MethodType) else type(loss)
    return f"{of.__module__}.{of.__qualname__}"


def _attributes(value: Any) -> list[Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return (
        [*vars(value).values()]
        if hasattr(value, "__dict__")
        else [getattr(value, n) for n in slots if hasattr(value, n)]
    )


def traces(loss: Callable[..., Any], given: Mapping[str, Any]) -> list[Any]:
    """Return the present state of everything that a function could write into while it runs.

    Two of these differ if the function wrote into something in between. Globals that its code names, and containers,
    objects and tensors in reach, are described by what they hold; so are functions among them.
    """
    found: list[Any] = []
    seen: set[int] = set()
    todo: list[Any] = [loss, *given.values()]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, int | float | str | bytes | types.NoneType):
            continue
        seen.add(id(value))
        inside: list[Any] = []
        if isinstance(value, types.ModuleType):
            if not _is_own_module(value):
                continue
            inside = list(vars(value).values())
        elif isinstance(value, Tensor):
            found.append((id(value), value._version))
        elif isinstance(value, array | bytearray | np.ndarray):
            found.append((id(value), hash(bytes(value.data if isinstance(value, np.ndarray) else value))))
        elif isinstance(value, deque):
            inside = list(value)
        elif isinstance(value, functools.partial | types.MethodType):
            todo += _brought(value)
        elif isinstance(value, types.FunctionType):
            if not _is_own(value):
                continue
            named = [value.__globals__.get(name) for code in _codes(value.__code__) for name in code.co_names]
            inside = [*_brought(value), *named]
        elif isinstance(value, Mapping):
            inside = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            inside = list(value)
        elif not isinstance(value, types.BuiltinFunctionType) and _is_own(value):
            classes = [cls for cls in type(value).__mro__ if _is_own(cls)]
            inside = list(vars(value).values()) if isinstance(value, type) else [*_attributes(value), *classes]
        found.append((id(value), [id(item) for item in inside]))
        todo += inside
    return found


TRAINED = ("_parameters", "_buffers", "_modules")  # attributes of a module: its children, and what training changes


def model_traces(model: nn.Module) -> list[Any]:
    """Return the present state of everything in which an own model could keep something of the rows that it sees.

    Two of these differ if the model kept something in between. Parameters are left out, for they are trained. Buffers
    must not change, because no noise is added to them.
    """
    found: list[Any] = [(name, b._version, id(b)) for name, b in model.named_buffers()]
    for module in model.modules():
        if _is_own(module):
            kept = {key: value for key, value in vars(module).items() if key not in TRAINED}
            found.append([(key, id(value)) for key, value in kept.items()])
            found.append(traces(type(module), kept))
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and the code of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_own_module(module: types.ModuleType) -> bool:
    """Return whether a module belongs to a method or to somebody's own code that is not installed."""
    name, file = module.__name__, getattr(module, "__file__", None) or ""
    own = name.partition(".")[0] not in sys.stdlib_module_names | LIBRARIES and "site-packages" not in file
    return name.startswith("fedaudit.methods") or own


def _is_own(value: Any) -> bool:
    """Return whether a function, a class or an object's class belongs to a method or to somebody's own code.

    Libraries' code and that of the framework do not.
    """
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    module = named.__module__ or ""
    top = module.partition(".")[0]
    return module.startswith("fedaudit.methods") or top not in sys.stdlib_module_names | LIBRARIES


LIBRARIES = {"torch", "numpy", "pydantic", "pydantic_core", "fedaudit", "opacus"}


def check_bare(model: nn.Module) -> None:
    """Refuse a model with hooks: they would see records, and gradients before any noise."""
    for name, module in model.named_modules():
        kinds = [key for key in vars(module) if key.endswith("_hooks") and key.startswith(("_forward", "_backward"))]
        if any(getattr(module, key) for key in kinds) or "forward" in vars(module):
            raise ContractError(
                f"{name or 'the model'} has a hook, or a forward of its own, which would see the records in a private "
                "training. Take it off before fit."
            )
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ContractError(
                f"{name} has a hook, which would see gradients before any noise. Take it off before fit."
            )


def check_pure(loss: Loss) -> None:
    """Refuse a loss that brings tensors or modules of its own: they would be neither metered nor protected."""
    for value in carried(loss):
        if isinstance(value, Tensor | nn.Module):
            raise ContractError(
                f"The loss {_name(loss)} carries a {type(value).__name__} of its own. Give rows through data=..., "
                "other tensors through given={'name': tensor}."
            )


def _name(loss: Loss) -> str:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return getattr(loss, "__qualname__", type(loss).__name__)
