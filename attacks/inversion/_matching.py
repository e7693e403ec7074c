"""Matching an update by the cosine, for several clients and restarts at once (Geiping et al., NeurIPS 2020).

The descent changes images. Restarts, and clients whose models have one architecture, are one stack: parameters get
one more dimension, a client's steps are simulated for all of them in one pass, and the losses are summed. The images of
one reach its own loss alone, so that each gets the gradient that it would get by itself. Adam and the gradient's sign
work entry by entry.

A search has several starts. All of them go a few steps (`trial`), and the one with the least loss goes on: the attacker
chooses by what it knows. The rate falls to a tenth after three, five and seven eighths of the steps (Geiping et al.),
or as soon as the loss has stopped falling; after the last such plateau the search ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cosine_similarity, one_hot
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from fedaudit.attacks.inversion._invert import stacks_on, total_variation
from fedaudit.progress import Watch, unwatched
from fedaudit.runtime.lockstep import join
from fedaudit.training.stacked.likeness import structure

Update = dict[str, Tensor]  # by parameter: the model before training minus the model after


@dataclass(frozen=True)
class Steps:
    """The client's training: which rows in which step, and with which learning rate."""

    plan: list[Tensor]
    eta: float

    @property
    def length(self) -> float:
        """Return the factor between the update and the mean gradient, as long as the model hardly moves."""
        return self.eta * len(self.plan)


# --- the client's steps -----------------------------------------------------------------------------------------------


def simulated(model: nn.Module, x: Tensor, y: Tensor, steps: Steps) -> Update:
    """Return the update that SGD on images x with soft labels y would make; it is differentiable in both."""
    start = {name: p.detach().to(x.dtype).requires_grad_() for name, p in model.named_parameters()}
    now = start
    for index in steps.plan:
        log_p = functional_call(model, now, (x[index],)).log_softmax(1)
        loss = -(y[index] * log_p).sum(1).mean()
        gradient = torch.autograd.grad(loss, list(now.values()), create_graph=True)
        now = {name: p - steps.eta * g for (name, p), g in zip(now.items(), gradient, strict=True)}
    return {name: start[name] - now[name] for name in start}


def flat(update: Update) -> Tensor:
    return torch.cat([change.flatten() for change in update.values()])


LEAST, MOST = 200, 2000  # steps of a search
WORK = {"cpu": 2e12}  # floating-point operations that a search may take: about a minute of one core
WORK_ELSEWHERE = 2e13


def forecast(model: nn.Module, x: Tensor, classes: int, steps: Steps) -> int:
    """Return the steps that a search for images like x may take: 2,000, or fewer if its operations are too many.

    The operations of one step are counted, not timed: the same attack takes the same steps on every machine.
    """
    x, y = x.clone().requires_grad_(), torch.full((len(x), classes), 1 / classes, dtype=x.dtype, device=x.device)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(flat(simulated(model, x, y, steps)).square().sum(), x)
    allowed = WORK.get(x.device.type, WORK_ELSEWHERE) / max(1, counter.get_total_flops())
    return int(min(MOST, max(LEAST, allowed)))


@dataclass(frozen=True)
class Models:
    """Models of one architecture, with their tensors stacked."""

    any: nn.Module
    parameters: Update
    buffers: Update

    @classmethod
    def of(cls, models: Sequence[nn.Module], dtype: torch.dtype) -> Models:
        own, kept = [dict(m.named_parameters()) for m in models], [dict(m.named_buffers()) for m in models]
        return cls(
            models[0],
            {name: torch.stack([p[name].detach().to(dtype) for p in own]).requires_grad_() for name in own[0]},
            {name: torch.stack([b[name] for b in kept]) for name in kept[0]},
        )

    def simulated(self, x: Tensor, y: Tensor, plan: Sequence[Tensor], eta: float) -> Tensor:
        """Return the updates, flat, as `simulated` does. Each model has its own images, labels and plan.

        A plan holds (models, rows) for each step.
        """

        def one(parameters: Update, buffers: Update, rows: Tensor) -> Tensor:
            return functional_call(self.any, (parameters, buffers), (rows,))

        mine, now = torch.arange(len(x), device=x.device)[:, None], self.parameters
        for index in plan:
            log_p = vmap(one)(now, self.buffers, x[mine, index]).log_softmax(2)
            loss = -(y[mine, index] * log_p).sum(2).mean(1).sum()
            gradient = torch.autograd.grad(loss, list(now.values()), create_graph=True)
            now = {name: p - eta * g for (name, p), g in zip(now.items(), gradient, strict=True)}
        return torch.cat([(p - now[name]).flatten(1) for name, p in self.parameters.items()], 1)


# --- matching --------------------------------------------------------------------------------------------------------


def match_cosine(
    model: nn.Module,
    update: Update,
    steps: Steps,
    labels: Tensor,
    begin: Callable[[int], Tensor],
    *,
    tv: float,
    lr: float,
    iterations: int,
    restarts: int = 1,
    trial: int = 0,
    tell: Watch = unwatched,
    together: int = 16,
) -> Tensor:
    """Return the images that match an update best over the restarts (Geiping et al., Eq. 4)."""
    first = [begin(r) for r in range(restarts)]
    y = one_hot(labels, _classes(model, first[0])).to(first[0])
    found: Tensor = join(Matching(model, flat(update), steps, y, first, tv, lr, iterations, tell, together, trial))
    return found


@dataclass(frozen=True, eq=False)
class Matching:
    """The search for the images of one update, from one or several starts."""

    model: nn.Module
    wanted: Tensor
    steps: Steps
    y: Tensor
    begin: list[Tensor]
    tv: float
    lr: float
    iterations: int
    tell: Watch = unwatched
    most: int = 16  # beginnings in a stack
    trial: int = 0  # steps after which the best beginning alone goes on; 0: all of them go to the end

    def like(self, other: object) -> bool:
        return (
            isinstance(other, Matching)
            and stacks_on(self.wanted.device)
            and self.wanted.device == other.wanted.device
            and (self.tv, self.lr, self.iterations, self.trial) == (other.tv, other.lr, other.iterations, other.trial)
            and self.steps.eta == other.steps.eta
            and [len(i) for i in self.steps.plan] == [len(i) for i in other.steps.plan]
            and (self.begin[0].shape, self.y.shape) == (other.begin[0].shape, other.y.shape)
            and structure(self.model) == structure(other.model)
        )

    def alone(self) -> Tensor:
        return self.together([])[0]

    def together(self, others: Sequence[Matching]) -> list[Tensor]:
        """Return the best images of each search. All starts of all searches run in stacks of at most `most`."""
        jobs = [self, *others]
        begin, left = [job.begin for job in jobs], self.iterations
        if 0 < self.trial < self.iterations and any(len(starts) > 1 for starts in begin):
            begin, left = [[best] for best in self._best(jobs, begin, self.trial, [])], self.iterations - self.trial
        return self._best(jobs, begin, left, [left * k // 8 for k in (3, 5, 7)])

    def _best(self, jobs: list[Matching], begin: list[list[Tensor]], steps: int, falls: Sequence[int]) -> list[Tensor]:
        """Return, for each search, where the best of its beginnings has led to."""
        asked = [(job, start) for job, starts in zip(jobs, begin, strict=True) for start in starts]
        size = self.most if self._stackable() else 1
        made: list[tuple[Tensor, float]] = []
        for first in range(0, len(asked), size):
            part = asked[first : first + size]
            rates = Rates(len(part), self.lr, steps, falls)
            made += self._descend([job for job, _ in part], [start for _, start in part], rates, first, len(asked))
        best, of_all = [], iter(made)
        for starts in begin:
            mine = [next(of_all) for _ in starts]
            best.append(min(mine, key=lambda pair: pair[1])[0])  # of equal ones the first
        return best

    def _stackable(self) -> bool:
        draws = any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in self.model.modules())
        return stacks_on(self.wanted.device) and not draws

    def _descend(
        self, jobs: list[Matching], begin: list[Tensor], rates: Rates, done: int, of: int
    ) -> list[tuple[Tensor, float]]:
        """Return the images, and the loss with which the last step began. The best of several is chosen by it."""
        x = torch.stack(begin).requires_grad_()
        y, wanted = torch.stack([job.y for job in jobs]), torch.stack([job.wanted for job in jobs])
        plan = [torch.stack([job.steps.plan[i].to(x.device) for job in jobs]) for i in range(len(self.steps.plan))]
        models = None if len(jobs) == 1 else Models.of([job.model for job in jobs], x.dtype)
        mean, square = torch.zeros_like(x), torch.zeros_like(x)
        last = torch.full((len(jobs),), math.inf, dtype=x.dtype, device=x.device)
        for step in range(rates.steps):
            self.tell(done + len(jobs) * step / rates.steps, of, f"step {step} of {rates.steps}")
            if models is None:
                made = flat(simulated(jobs[0].model, x[0], y[0], jobs[0].steps))[None]
            else:
                made = models.simulated(x, y, plan, self.steps.eta)
            smooth = total_variation(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)
            values = 1 - cosine_similarity(made, wanted, dim=1) + self.tv * smooth
            (gradient,) = torch.autograd.grad(values.sum(), x)
            values, rate = values.detach(), rates.now(x)
            last = torch.where(rate.flatten() > 0, values, last)
            with torch.no_grad():  # Adam, with a rate for each search
                sign = gradient.sign()
                mean.lerp_(sign, 0.1)
                square.lerp_(sign.square(), 0.001)
                size = (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                x -= rate * mean / (1 - 0.9 ** (step + 1)) / size
                x.clamp_(-1, 1)
            if rates.after(values):
                break
        return list(zip(x.detach().unbind(0), last.tolist(), strict=True))


BLOCK = 25  # steps after which the losses are looked at: each look waits for a GPU
PATIENCE = 8  # blocks without a gain that are a plateau
GAIN = 0.01  # share of the loss that is a gain


class Rates:
    """The rate of each search of a stack: a tenth after each fall or plateau, and 0 after the last of them."""

    def __init__(self, searches: int, lr: float, steps: int, falls: Sequence[int]):
        ends = [*falls, steps]
        self.lr, self.steps = lr, steps
        self.lengths = [end - begin for begin, end in zip([0, *falls], ends, strict=True)]
        self.phase, self.age, self.idle = [0] * searches, [0] * searches, [0] * searches
        self.best, self.made = [math.inf] * searches, 0
        self.low: Tensor | None = None  # of each search, the least loss since the losses were looked at
        self._rate: Tensor | None = None
        for k in range(searches):
            self._skip(k)

    def now(self, x: Tensor) -> Tensor:
        """Return the rates, to be multiplied with what there is for each image."""
        if self._rate is None:
            rates = [self.lr * 0.1**phase if phase < len(self.lengths) else 0.0 for phase in self.phase]
            self._rate = torch.tensor(rates, dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.dim() - 1))
        return self._rate

    def after(self, losses: Tensor) -> bool:
        """Count one step, with the losses that it began with. Return whether all searches are at their ends."""
        self.made += 1
        low = losses if self.low is None else torch.minimum(self.low, losses)
        seen = low.tolist() if self.made % BLOCK == 0 else None
        self.low = low if seen is None else None
        for k in range(len(self.phase)):
            if self.phase[k] == len(self.lengths):
                continue
            self.age[k] += 1
            if seen is not None:
                gained = seen[k] < (1 - GAIN) * self.best[k]
                self.idle[k] = 0 if gained else self.idle[k] + 1
                self.best[k] = min(self.best[k], seen[k])
            if self.age[k] == self.lengths[self.phase[k]] or self.idle[k] >= PATIENCE:
                self.phase[k] += 1
                self._skip(k)
                self.age[k], self.idle[k], self._rate = 0, 0, None
        return all(phase == len(self.lengths) for phase in self.phase)

    def _skip(self, k: int) -> None:
        """Pass over phases of no steps."""
        while self.phase[k] < len(self.lengths) and self.lengths[self.phase[k]] == 0:
            self.phase[k] += 1


def _classes(model: nn.Module, x: Tensor) -> int:
    with torch.no_grad():
        return model(x).shape[1]
