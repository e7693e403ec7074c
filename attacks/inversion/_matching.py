"""Matching an update by the cosine, for several clients and restarts at once (Geiping et al., NeurIPS 2020).

The descent changes images. Restarts, and clients whose models have one architecture, are one stack: parameters get
one more dimension, a client's steps are simulated for all of them in one pass, and the losses are summed. The images of
one reach its own loss alone, so that each gets the gradient that it would get by itself. Adam and the gradient's sign
work entry by entry.
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

from fedaudit.attacks.inversion._invert import stacks_on, total_variation
from fedaudit.progress import Watch, unwatched
from fedaudit.runtime.lockstep import join
from fedaudit.training.stacked.stackable import structure

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
    tell: Watch = unwatched,
    together: int = 16,
) -> Tensor:
    """Return the images that match an update best over the restarts (Geiping et al., Eq. 4)."""
    first = [begin(r) for r in range(restarts)]
    y = one_hot(labels, _classes(model, first[0])).to(first[0])
    found: Tensor = join(Matching(model, flat(update), steps, y, first, tv, lr, iterations, tell, together))
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

    def like(self, other: object) -> bool:
        return (
            isinstance(other, Matching)
            and stacks_on(self.wanted.device)
            and self.wanted.device == other.wanted.device
            and (self.tv, self.lr, self.iterations) == (other.tv, other.lr, other.iterations)
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
        asked = [(job, start) for job in jobs for start in job.begin]
        size = self.most if self._stackable() else 1
        made: list[tuple[Tensor, float]] = []
        for first in range(0, len(asked), size):
            part = asked[first : first + size]
            made += self._descend([job for job, _ in part], [start for _, start in part], first, len(asked))
        best, of_all = [], iter(made)
        for job in jobs:
            mine = [next(of_all) for _ in job.begin]
            best.append(min(mine, key=lambda pair: pair[1])[0])  # of equal ones the first
        return best

    def _stackable(self) -> bool:
        draws = any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in self.model.modules())
        return stacks_on(self.wanted.device) and not draws

    def _descend(self, jobs: list[Matching], begin: list[Tensor], done: int, of: int) -> list[tuple[Tensor, float]]:
        """Return the images, and the loss with which the last step began. The best of several is chosen by it."""
        x = torch.stack(begin).requires_grad_()
        y, wanted = torch.stack([job.y for job in jobs]), torch.stack([job.wanted for job in jobs])
        plan = [torch.stack([job.steps.plan[i].to(x.device) for job in jobs]) for i in range(len(self.steps.plan))]
        models = None if len(jobs) == 1 else Models.of([job.model for job in jobs], x.dtype)
        optimiser = torch.optim.Adam([x], lr=self.lr)
        falls = [self.iterations * k // 8 for k in (3, 5, 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, falls, gamma=0.1)
        values = torch.full((len(jobs),), math.inf)
        for step in range(self.iterations):
            self.tell(done + len(jobs) * step / self.iterations, of, f"step {step} of {self.iterations}")
            if models is None:
                made = flat(simulated(jobs[0].model, x[0], y[0], jobs[0].steps))[None]
            else:
                made = models.simulated(x, y, plan, self.steps.eta)
            smooth = total_variation(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)
            values = 1 - cosine_similarity(made, wanted, dim=1) + self.tv * smooth
            (x.grad,) = torch.autograd.grad(values.sum(), x)
            x.grad.sign_()
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                x.clamp_(-1, 1)
        return list(zip(x.detach().unbind(0), values.tolist(), strict=True))


def _classes(model: nn.Module, x: Tensor) -> int:
    with torch.no_grad():
        return model(x).shape[1]
