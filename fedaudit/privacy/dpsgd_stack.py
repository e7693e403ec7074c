"""DP-SGD of many clients at once: the loop of `fit_private`, stacked.

Every client draws its own Poisson samples from its own generator, its rows' gradients are clipped to its own norm, and
its noise comes from its own generator, with exactly the numbers that it would draw alone. Samples have unequal sizes
and are filled up with rows that do not count. Each client gets the same result as alone, up to rounding. The entries
for the ledger are identical.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import pad

from fedaudit.errors import ContractError, PrivacyError
from fedaudit.privacy import dpsgd
from fedaudit.privacy.dpsgd import Planned, Progress, planned, trained
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import Step, Training
from fedaudit.privacy.persample import validate
from fedaudit.privacy.policy import Policy
from fedaudit.training.augment import Augment
from fedaudit.training.cuda_graphs import halves
from fedaudit.training.fit import Fitted, Opt, check_bare, traces
from fedaudit.training.stacked.mapped_loss import Caller, Functional, places
from fedaudit.training.stacked.stack import Job, Stack, build
from fedaudit.training.stacked.stackable import stacks
from fedaudit.training.stacked.steppers import Stepper, Tensors, stepper

ROWS = 512  # rows, over all clients, whose gradients are in memory at a time
Trained = tuple[Fitted, LedgerEntry]  # the summary of a training, and the entry for the ledger


@dataclass(frozen=True, eq=False)
class PrivateJob:
    """One call of `fit_private` that is yet to be carried out."""

    job: Job
    noise: torch.Generator
    policy: Policy
    fits: int
    gate: Training = field(default_factory=Training)  # lets out the noised gradients
    progress: Progress = field(default_factory=Progress)  # counts the steps that were made
    people: Tensor | None = None  # whose record each one is, if the guarantee is for persons

    @property
    def rows(self) -> Sequence[Tensor]:
        return self.job.rows

    @property
    def size(self) -> int:
        return self.job.size

    @property
    def generators(self) -> list[torch.Generator]:
        return [self.job.rng, self.noise]

    def alone(self) -> Trained:
        j = self.job
        return dpsgd.fit_private(
            j.model, j.loss, j.rows, rng=j.rng, noise=self.noise, policy=self.policy, fits=self.fits, gate=self.gate,
            progress=self.progress, people=self.people, **dict(j.options),
        )  # fmt: skip

    def planned(self) -> Planned:
        o = self.job.option
        return planned(len(self.rows[0]), o("batch"), o("epochs"), o("steps"), self.policy, self.fits)


def private_stacks(jobs: Sequence[PrivateJob]) -> tuple[list[list[int]], dict[int, str]]:
    """Return the groups of trainings that become one stack each, and why each of the others is carried out alone."""
    groups, alone = stacks([private.job for private in jobs])
    if halves() is not None:
        return [], dict.fromkeys(range(len(jobs)), "gradients of single rows are taken in full precision")
    kept = []
    for group in groups:
        if any(jobs[i].people is not None for i in group):
            alone |= dict.fromkeys(group, "gradients of a person's records are summed before they are clipped")
            continue
        how = stepper(jobs[group[0]].job.option("opt"))
        if isinstance(how, Stepper) and not how.together:
            kept.append(group)
        else:
            alone |= dict.fromkeys(group, "its optimiser counts steps for all of a stack")
    return kept, alone


def fit_private_together(jobs: Sequence[PrivateJob]) -> list[Trained]:
    """Carry out all trainings as one stack and return their results. Models are written when all are finished."""
    for private in jobs:
        check_bare(private.job.model)
        validate(private.job.model)
    before = [traces(private.job.loss, private.job.option("given") or {}) for private in jobs]
    plans = [private.planned() for private in jobs]
    order = sorted(range(len(jobs)), key=lambda i: -plans[i].steps)  # the client that finishes first is last
    training = _Training([jobs[i] for i in order], [plans[i] for i in order])
    training.go()
    if before != [traces(private.job.loss, private.job.option("given") or {}) for private in jobs]:
        raise ContractError("A loss changes an object outside of it while it trains.")  # run alone, it says more
    for slot, i in enumerate(order):
        training.stack.write(slot, jobs[i].job.model)
    epochs = [private.job.option("epochs") or 0 for private in jobs]
    return [(Fitted(e, plan.steps, math.nan), plan.entry()) for e, plan in zip(epochs, plans, strict=True)]


class _Training:
    def __init__(self, jobs: Sequence[PrivateJob], plans: Sequence[Planned]):
        self.jobs, self.plans = jobs, plans
        first = jobs[0].job
        how = stepper(first.option("opt"))
        assert isinstance(how, Stepper), how
        self.how, self.model = how, first.model
        self.stack: Stack = build([private.job for private in jobs], how)
        self.rows = [torch.cat([private.rows[i] for private in jobs]) for i in range(len(first.rows))]
        sizes = torch.tensor([0, *(plan.n for plan in plans)])
        self.offsets = sizes.cumsum(0)[:-1].to(self.rows[0].device)
        self.C = torch.tensor([plan.C for plan in plans], dtype=torch.float64, device=self.offsets.device)
        self.expected = torch.tensor([plan.expected for plan in plans], device=self.offsets.device)
        self.augment: Augment | None = first.option("augment")
        self.gradients = _row_gradients(first, self.stack.given_dims)
        for slot, (private, plan) in enumerate(zip(jobs, plans, strict=True)):
            private.progress.begin(plan)
            private.gate.restart(slot, [self._active(t) for t in range(plan.steps)])

    def _active(self, t: int) -> int:
        """Return how many clients take step t."""
        return sum(plan.steps > t for plan in self.plans)

    def go(self) -> None:
        was_training = self.model.training
        self.model.train()
        try:
            for t in range(self.plans[0].steps):
                self._step(t, self._active(t))
        finally:
            self.model.train(was_training)

    def _step(self, t: int, active: int) -> None:
        """Take step t for the first `active` clients."""
        if self.how.scheduled:
            ahead = zip(self.jobs[:active], self.plans, strict=False)
            done = [(private.job.option("opt"), plan.done(t, private.job.option("epochs"))) for private, plan in ahead]
            rates = torch.tensor([opt.factor(*at) for opt, at in done], dtype=torch.float64)
            self.stack.state["rate"][:active].copy_(rates)
        part = self.stack.take(range(active))
        drawn = [
            (torch.rand(plan.n, generator=private.job.rng, device=private.job.rng.device) < plan.q).nonzero()[:, 0]
            for private, plan in zip(self.jobs[:active], self.plans, strict=False)
        ]
        sums = self._clipped(part, drawn, self._numbers(drawn))
        grads: dict[str, Tensor | None] = {}
        noise = [self._noise(k, sums) for k in range(active)]
        for name, total in sums.items():
            noisy = total + torch.stack([of_one[name] for of_one in noise])
            grads[name] = noisy / _along(self.expected[:active], noisy).to(noisy.dtype)
        for k, private in enumerate(self.jobs[:active]):
            private.progress.made += 1
            at = self.plans[k].done(t, private.job.option("epochs"))
            private.gate.step({name: g[k] for name, g in grads.items() if g is not None}, at)
        self.how.step(part.params, grads, part.state)

    def _numbers(self, drawn: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the numbers of each client's augmentation, drawn as it would be alone."""
        if self.augment is None:
            return None
        return [
            self.augment.draw(len(index), private.job.rng) for private, index in zip(self.jobs, drawn, strict=False)
        ]

    def _rows(self, places: Tensor, u: Tensor | None) -> list[Tensor]:
        rows = [row[places] for row in self.rows]
        if self.augment is not None and u is not None:
            rows[0] = self.augment(rows[0].flatten(0, 1), u.flatten(0, 1)).view_as(rows[0])
        return rows

    def _clipped(self, part: Stack, drawn: Sequence[Tensor], numbers: Sequence[Tensor] | None) -> Tensors:
        """Return for each client the sum of its rows' gradients, each clipped to the client's norm C."""
        sums = {name: torch.zeros_like(p) for name, p in part.params.items()}
        counts = torch.tensor([len(index) for index in drawn], device=self.offsets.device)
        most = max(len(index) for index in drawn)
        if most == 0:  # a Poisson sample can be empty
            return sums
        filled = torch.stack([_filled(index, most) for index in drawn]) + self.offsets[: len(drawn), None]
        u = None if numbers is None else torch.stack([pad(of_one, (0, 0, 0, most - len(of_one))) for of_one in numbers])
        live = torch.arange(most, device=counts.device) < counts[:, None]
        for columns in torch.arange(most, device=counts.device).split(max(1, ROWS // len(drawn))):
            rows = self._rows(filled[:, columns], None if u is None else u[:, columns])
            grads = self.gradients(part.params, part.rest, part.given, *rows)
            flat = [g.flatten(2) if g.dim() > 2 else g[..., None] for g in grads.values()]
            norms = torch.stack([g.norm(2, dim=2) for g in flat], dim=2).norm(2, dim=2)
            counted = live[:, columns]
            if not bool((torch.isfinite(norms) | ~counted).all()):
                raise PrivacyError("a row's gradient is not finite, so clipping cannot bound it")
            factor = (self.C[: len(drawn), None].to(norms.dtype) / (norms + 1e-6)).clamp(max=1.0)
            factor = torch.where(counted, factor, 0.0)
            for name, g in grads.items():
                seen = torch.where(_along(counted, g), g, 0.0)  # a number that is not finite stays so when times 0
                sums[name] += torch.einsum("mi,mi...->m...", factor.to(g.dtype), seen)
        return sums

    def _noise(self, k: int, sums: Mapping[str, Tensor]) -> Tensors:
        """Return client k's noise, drawn in the order of the parameters as opacus does."""
        std = self.plans[k].multiplier * self.plans[k].C
        return {
            name: torch.normal(
                0.0, std, total.shape[1:], generator=self.jobs[k].noise, device=total.device, dtype=total.dtype
            )
            for name, total in sums.items()
        }


def fit_handed_over_in_stack(
    model: nn.Module, opt: Opt, gradients: Iterator[Step], slot: int, active: Sequence[int]
) -> int:
    """Take the steps of one client of a stack with gradients that are handed over, and return their number.

    The stack has the shape that it had, with this client in all places, so that the same calls round alike.
    """
    how, mine = stepper(opt), trained(model)
    assert isinstance(how, Stepper), how  # it was stacked
    most = max(active, default=1)
    params = {name: torch.stack([p.detach()] * most) for name, p in mine.items()}
    device = next(iter(params.values())).device
    stack, steps = Stack(params, {}, how.state(params), {}, {}, torch.zeros(most, device=device)), 0
    for count, (gradient, at) in zip(active, gradients, strict=False):
        if how.scheduled:
            stack.state["rate"][:count].fill_(opt.factor(*at))
        part = stack.take(range(count))
        how.step(part.params, {name: torch.stack([gradient[name]] * count) for name in part.params}, part.state)
        steps += 1
    with torch.no_grad():
        for name, p in mine.items():
            p.copy_(params[name][slot])
    return steps


def _row_gradients(job: Job, given_dims: Any) -> Any:
    """Return a function that gives the gradient of each row's loss in each client's parameters.

    A gradient has the shape (clients, rows, *shape of the parameter).
    """
    caller = Caller(job.model)
    where = places(caller)

    def value_of_one(params: Any, rest: Any, given: Any, *row: Tensor) -> Tensor:
        value = job.loss(Functional(caller, params, rest, where), *(r.unsqueeze(0) for r in row), **given)
        if value.shape != (1,):
            raise ContractError("Under DP-SGD a loss gives one value per row.")
        return value.squeeze(0)

    rows = [0] * len(job.rows)
    return vmap(vmap(grad(value_of_one), (None, None, None, *rows)), (0, 0, given_dims, *rows))


def _filled(index: Tensor, most: int) -> Tensor:
    """Return the index filled up to `most` entries: with its first entry, or with row 0 if it is empty."""
    first = index[:1] if len(index) else index.new_zeros(1)
    return torch.cat([index, first.expand(most - len(index))])


def _along(t: Tensor, like: Tensor) -> Tensor:
    return t.view(*t.shape, *[1] * (like.dim() - t.dim()))
