"""DP-SGD inside `fit`: Poisson samples, per-row gradients by torch.func, opacus' optimizer for the noise.

opacus' own hooks see only the layers' backward passes. They are silently wrong for losses with a proximal term or with
extra rows. opacus' optimizer takes per-sample gradients from any source.

Raw sums lie on stand-ins for the parameters, which only this loop holds. The method's optimiser, its network and its
loss find the noised gradient on the parameters, and nothing else. Each noised gradient goes through the task's gate
(see `mechanism_outputs`), and is counted when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.errors import ContractError, PrivacyError
from fedaudit.extras import install
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import Step, Training
from fedaudit.privacy.mechanisms.dp_sgd import DpSgd
from fedaudit.privacy.persample import clip_and_sum, row_gradients, validate
from fedaudit.privacy.persons import drawn_persons, parts_of, summed_by_person
from fedaudit.privacy.policy import Policy
from fedaudit.training.augment import Augmentation, augmented, treats_rows_alone
from fedaudit.training.fit import Fitted, Loss, Opt, check_bare, check_pure, check_rows, traces
from fedaudit.training.plain_optimisers import Optimiser

CHUNK = 64  # the least number of rows whose gradients are in memory at a time
ROOM = 32 << 20  # bytes of gradients up to which it may be more rows: one call for a whole sample of a small model


def fit_private(
    model: nn.Module,
    loss: Loss,
    rows: Sequence[Tensor],
    *,
    opt: Opt,
    batch: int,
    epochs: int | None,
    steps: int | None,
    rng: torch.Generator,
    noise: torch.Generator,
    given: Mapping[str, Any] | None,
    policy: Policy,
    fits: int,
    augment: Augmentation | None = None,
    gate: Training | None = None,
    progress: Progress | None = None,
    people: Tensor | None = None,
) -> tuple[Fitted, LedgerEntry]:
    """Train on private rows; return a summary of the training and the entry for the ledger.

    One step draws every record with probability q = batch / n, so an epoch is n / batch steps of random size. `fits`
    trainings like this one together meet the policy's epsilon. `augment` makes another image of each drawn record; it
    looks at one record at a time. `gate` lets out the noised gradients. `progress` counts steps.

    `people` says whose record each one is, if the guarantee is for persons. A step then draws every person with
    probability q, takes all records of whoever is drawn, and clips the sum of a person's gradients to C.
    """
    check_augmentation(augment)
    gate, progress = gate or Training(), progress or Progress()
    optimizer_class = _dp_optimizer()
    n = check_rows(rows)
    check_pure(loss)
    check_bare(model)
    validate(model)
    before = traces(loss, given or {})
    plan = planned(n, batch, epochs, steps, policy, fits)
    progress.begin(plan)
    gate.restart()
    q, C = plan.q, plan.C
    parameters = trained(model)
    stand_ins = {name: nn.Parameter(torch.empty_like(p)) for name, p in parameters.items()}  # never filled: no memory
    stepping = opt.build(list(parameters.values()))
    optimizer = optimizer_class(
        optimizer=torch.optim.SGD(stand_ins.values(), lr=0.0),
        noise_multiplier=plan.multiplier,
        max_grad_norm=C,
        expected_batch_size=plan.expected,
        generator=noise,
    )
    whose = None if people is None else people.unique(return_inverse=True)[1].to(rows[0].device)
    together = max(CHUNK, ROOM // max(1, sum(p.numel() * p.element_size() for p in parameters.values())))
    was_training = model.training
    model.train()
    for t in range(plan.steps):
        index = _drawn(n, q, rng) if whose is None else drawn_persons(whose, q, rng)
        optimizer.zero_grad()
        for p in stand_ins.values():
            p.summed_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
            p.grad_sample = p.new_zeros((0, *p.shape))  # type: ignore[attr-defined] # opacus counts one batch by it
        drawn = augmented(augment, [row[index] for row in rows], rng) if augment is not None else None
        for of_chunk in parts_of(index, whose, together):
            # Clip and sum chunk by chunk: memory holds one model copy per row, or per person.
            gradients: dict[str, Tensor] = {}
            for at in of_chunk.split(together):
                picked = [row[index[at]] for row in rows] if drawn is None else [row[at] for row in drawn]
                of_rows = row_gradients(model, loss, picked, given)
                if whose is None:
                    gradients = of_rows
                    continue
                persons, place = whose[index[of_chunk]].unique(return_inverse=True)
                if not gradients:
                    gradients = {name: g.new_zeros((len(persons), *g.shape[1:])) for name, g in of_rows.items()}
                summed_by_person(of_rows, place[at - of_chunk[0]], gradients)
            for name, total in clip_and_sum(gradients, C)[0].items():
                stand_ins[name].summed_grad += total  # type: ignore[attr-defined]
        optimizer.add_noise()
        optimizer.scale_grad()
        progress.made += 1
        gradient, at = {name: _gradient(p) for name, p in stand_ins.items()}, plan.done(t, epochs)
        gate.step(gradient, at)
        opt.set_rate(stepping, *at)
        take_step(stepping, parameters, gradient)
    if traces(loss, given or {}) != before:
        raise ContractError(
            "The loss changes an object outside of it while it trains. That object could carry records out of the "
            "training unprotected. Let the loss compute one value per row, and nothing else."
        )
    for p in parameters.values():
        p.grad = None
    model.train(was_training)
    return Fitted(0 if epochs is None else epochs, plan.steps, math.nan), plan.entry()


def _drawn(n: int, q: float, rng: torch.Generator) -> Tensor:
    """Return the places of the records that a step takes: each with probability q."""
    return (torch.rand(n, generator=rng, device=rng.device) < q).nonzero()[:, 0]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a training changes, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None  # opacus has put it there
    return p.grad


def take_step(stepping: Optimiser, parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]) -> None:
    """Let the method's optimiser take one step with a noised gradient."""
    for name, p in parameters.items():
        p.grad = gradient[name]
    stepping.step()


def fit_handed_over(model: nn.Module, opt: Opt, gradients: Iterable[Step]) -> int:
    """Take the steps of `fit_private` with gradients that are handed over, and return their number.

    No record is looked at. The steps are the same calls on the same shapes, so that equal numbers stay equal.
    """
    parameters = trained(model)
    stepping, steps, was_training = opt.build(list(parameters.values())), 0, model.training
    model.train()
    for gradient, at in gradients:
        opt.set_rate(stepping, *at)
        take_step(stepping, parameters, gradient)
        steps += 1
    for p in parameters.values():
        p.grad = None
    model.train(was_training)
    return steps


@dataclass(frozen=True)
class Planned:
    """The plan of a training under DP-SGD."""

    n: int
    q: float  # the probability with which a step draws each record
    steps: int
    C: float
    multiplier: float
    delta: float
    claim: float | None
    unit: str = "record"

    @property
    def expected(self) -> int:
        """Return the expected number of records in a step. The noisy sum is divided by it."""
        return max(1, round(self.q * self.n))

    def done(self, t: int, epochs: int | None) -> tuple[int, int]:
        """Return how many of how many epochs, or steps if it is planned in steps, are through before step t."""
        return (t, self.steps) if not epochs else (t * epochs // self.steps, epochs)

    def entry(self, made: int | None = None) -> LedgerEntry:
        """Return the entry for the ledger: for all steps, or for so many that were made."""
        return LedgerEntry(
            field="training",
            kind="training",
            mechanism=DpSgd.name,
            noise_multiplier=self.multiplier,
            sample_rate=self.q,
            steps=self.steps if made is None else made,
            sensitivity=self.C,
            sigma=self.multiplier * self.C,
            clip=self.C,
            relation="add-or-remove",
            condition="n is public" if self.unit == "record" else "n, and who has how many records, is public",
            delta=self.delta,
            claim=self.claim,
            unit=self.unit,
        )


@dataclass
class Progress:
    """The plan of a private training, and how many of its steps were made."""

    plan: Planned | None = None
    made: int = 0

    def begin(self, plan: Planned) -> None:
        self.plan, self.made = plan, 0

    def entry(self) -> LedgerEntry | None:
        """Return the entry for the steps that were made; None if there were none."""
        return None if self.plan is None or not self.made else self.plan.entry(self.made)


def planned(n: int, batch: int, epochs: int | None, steps: int | None, policy: Policy, fits: int) -> Planned:
    """Return the plan of a training on n records. `fits` such trainings together meet the policy's epsilon."""
    if (epochs is None) == (steps is None):
        raise ContractError("fit: give either epochs or steps, not both or neither.")
    q = min(1.0, batch / n)
    count = steps if steps is not None else (epochs or 0) * math.ceil(n / batch)
    delta, C = policy.delta_for(n), policy.clip or 1.0
    multiplier = policy.noise_multiplier or multiplier_for(policy.epsilon or 0.0, delta, q, max(count * fits, 1))
    return Planned(n, q, count, C, multiplier, delta, policy.epsilon, policy.unit)


def check_augmentation(augment: Augmentation | None) -> None:
    """Refuse an augmentation under which what one record does to a step could depend on the others."""
    if not treats_rows_alone(augment):
        raise PrivacyError(
            f"{type(augment).__name__} is not known to treat each record alone. Under DP-SGD a step may mix records in "
            "no way but in the clipped sum. Use fedaudit.Augment, or train without privacy.training."
        )


TOLERANCE = 1e-3  # of the search for a multiplier's logarithm
SMALLEST, STEP = 1e-2, 0.3  # a multiplier below which the search does not look for the least one, and its steps


def multiplier_for(epsilon: float, delta: float, q: float, steps: int) -> float:
    """Return a noise multiplier that meets epsilon.

    Rates and steps are rounded up and delta down, to two digits. So clients of nearly the same size share one search,
    and none of them gets too little noise.
    """
    return calibrated(epsilon, *_rounded(delta, q, steps))


def is_multiplier_for(multiplier: float, epsilon: float, delta: float, q: float, steps: int) -> bool:
    """Return whether `multiplier_for` would find this multiplier, up to the tolerance of its search.

    It must meet epsilon, and a little less noise must not. That takes two calls of the accountant; a search takes more.
    Other versions of an accountant's libraries round otherwise: epsilon may differ by one in ten thousand.
    """

    def spent(by: float) -> float:
        delta_, q_, steps_ = _rounded(delta, q, steps)
        return compose([Event(multiplier * by, q_, steps_)], delta_, compare=False).epsilon_of_record

    least = multiplier <= SMALLEST * math.exp(STEP)
    return spent(1.0) <= epsilon * (1 + 1e-4) and (least or spent(math.exp(-2.5 * TOLERANCE)) > epsilon * (1 - 1e-4))


def _rounded(delta: float, q: float, steps: int) -> tuple[float, float, int]:
    return _down(delta, 2), min(1.0, _up(q, 2)), math.ceil(_up(steps, 2))


def _up(value: float, digits: int) -> float:
    scale = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.ceil(value / scale - 1e-9) * scale


def _down(value: float, digits: int) -> float:
    scale = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.floor(value / scale + 1e-9) * scale


@lru_cache(maxsize=4096)
def calibrated(epsilon: float, delta: float, q: float, steps: int) -> float:
    """Return the noise multiplier for which `steps` sub-sampled steps together meet epsilon.

    The accountant of record decides. One call of it takes a second, so the search starts where the central limit
    theorem puts the root: mu = q sqrt(steps (e^(1/m^2) - 1)) (Bu et al. 2020).
    """
    from scipy.optimize import brentq

    def excess(log_m: float) -> float:
        return compose([Event(math.exp(log_m), q, steps)], delta, compare=False).epsilon_of_record - epsilon

    def limit(log_m: float) -> float:
        mu = q * math.sqrt(steps * math.expm1(min(math.exp(-2 * log_m), 600.0)))
        return (gaussian_epsilon(mu, delta) if mu < 1e3 else 1e6) - epsilon

    low, high = math.log(0.05), math.log(1e7)
    if limit(high) > 0:
        raise PrivacyError(
            f"No noise makes {steps} steps at sample rate {q:g} meet epsilon = {epsilon:g}. Raise epsilon, or take "
            "fewer steps."
        )
    guess = brentq(limit, low, high, xtol=1e-6) if limit(low) > 0 else low
    low, high = guess - 0.05, guess + 0.1
    while excess(high) > 0:
        low, high = high, high + STEP
    while excess(low) <= 0:
        low, high = low - STEP, low
        if low < math.log(SMALLEST):
            return math.exp(high)  # hardly any noise is enough
    return math.exp(brentq(excess, low, high, xtol=TOLERANCE) + TOLERANCE)  # on the safe side of the root


def _dp_optimizer() -> Any:
    try:
        from opacus.optimizers import DPOptimizer
    except ImportError:
        raise PrivacyError(f"DP-SGD needs opacus: {install('opacus')}.") from None
    return DPOptimizer
