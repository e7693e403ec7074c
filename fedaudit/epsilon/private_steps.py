"""Every step of a private training, held against a step that this code makes by itself from the run's own key.

While a client's task is repeated on the path that its run took (alone or in a stack), each noised gradient is looked at
as it leaves the mechanism. Beside it the step is made again: the records that the key draws, the gradient of each at
the model as it is, clipped to C over all parameters, and their sum, in double precision. What the noised sum has beyond
that is the step's noise, in deviations of what the ledger says:

    (expected batch size * noised gradient - sum of clipped gradients) / (noise multiplier * C)

So each step's noise is tested by itself, by layer and by coordinate (fedaudit.epsilon.noise_tests). Records that were
in a step and should not have been, or the other way round, gradients that were clipped otherwise, and batches that were
drawn otherwise leave something of the span of all clipped gradients: `members` is the part of the noise in that span,
which is chi-square with as many degrees as it has dimensions. `outside` is the noise along the sum of the gradients of
records that the step should not hold, a normal number for each step: larger batches add up there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.special import chdtrc
from torch import Tensor, nn

from fedaudit.epsilon.noise_values import spacing
from fedaudit.privacy.mechanism_outputs import Training
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.persample import Functional, row_gradients
from fedaudit.privacy.policy import Policy
from fedaudit.rng import seed_of
from fedaudit.stats import Floats
from fedaudit.training.augment import Augmentation, augmented
from fedaudit.training.fit import Loss, Opt

MOST = 16  # steps of a training that are made again
SPANS = 6  # of these, steps whose span of gradients is computed
SPAN = 128  # records that span it
ROWS = 256  # gradients that are in memory at a time
RANK = 1e-9  # of the largest eigenvalue: directions with less of the gradients are left out
SAME = 1e-6  # relative difference of two ways to compute a gradient in double precision


@dataclass(frozen=True)
class MadeStep:
    """The noise of one step, by parameter."""

    number: int
    noise: dict[str, Floats]  # in deviations of the promised noise
    clean: dict[str, Floats]  # the sum of clipped gradients
    grain: dict[str, Floats]  # what the format of the noised gradient resolves, in the same deviations
    drawn: int  # records of the step


@dataclass(frozen=True)
class Span:
    """The part of the noise that lies in the span of the records' clipped gradients, over several steps."""

    squares: float = 0.0
    dimensions: int = 0
    outside: float = 0.0  # along the records that were not to be drawn
    steps: int = 0

    def __add__(self, other: Span) -> Span:
        return Span(
            self.squares + other.squares, self.dimensions + other.dimensions, self.outside + other.outside,
            self.steps + other.steps,
        )  # fmt: skip

    @property
    def p_outside(self) -> float:
        """P[so much of the noise lies along records that were not to be drawn]."""
        return math.erfc(abs(self.outside) / math.sqrt(2 * self.steps)) if self.steps else 1.0

    @property
    def p(self) -> float:
        """P[so much of the noise lies there]."""
        return float(chdtrc(self.dimensions, self.squares)) if self.dimensions else 1.0


@dataclass(frozen=True)
class Told:
    """All that a private training was told, as the auditor knows it."""

    model: nn.Module  # as it was before the first step
    loss: Loss
    rows: tuple[Tensor, ...]
    given: Mapping[str, Any]
    opt: Opt
    batch: int
    policy: Policy
    sigma: float  # of the noise on a sum, as promised
    key: tuple[object, ...]  # the task's, and the number of the training
    device: torch.device
    steps: int  # that are planned
    augment: Augmentation | None = None
    people: Tensor | None = None

    @property
    def n(self) -> int:
        return len(self.rows[0])

    @property
    def q(self) -> float:
        return min(1.0, self.batch / self.n)

    @property
    def C(self) -> float:
        return self.policy.clip or 1.0

    @property
    def lacks(self) -> str | None:
        """Return why single steps cannot be made again; None if they can."""
        if self.policy.secure:
            return "its noise and samples came from the operating system's entropy (secure = true)"
        if any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in self.model.modules()):
            return "the model has dropout, whose draws the record does not hold"
        if self.people is not None:
            return "gradients are summed by person"
        return None


class StepWatch(Training):
    """The gate of a training whose steps are made again as they leave."""

    def __init__(self, told: Told):
        self.told = told
        self.made = 0  # steps that left
        self.found: list[MadeStep] = []
        self.span = Span()
        self.wrong = ""  # where two ways to compute a gradient differ
        count = min(MOST, told.steps)
        rng = np.random.default_rng(seed_of("private steps", told.steps, told.n) % 2**32)
        self._chosen = {int(t) for t in rng.permutation(told.steps)[:count]}
        self._spans = set(sorted(self._chosen)[:: max(1, count // SPANS)][:SPANS])
        self._span_rows = torch.from_numpy(rng.permutation(told.n)[:SPAN].copy())

    def restart(self, slot: int = 0, active: list[int] | None = None) -> None:
        told = self.told
        self.made, self.found, self.span = 0, [], Span()
        self._model = copy.deepcopy(told.model).train()
        self._exact = copy.deepcopy(told.model).double().train()
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._stepping = told.opt.build(list(self._parameters.values()))
        # The names under which a client's sample is drawn: fedaudit.runtime.party.
        self._sample = noise_generator(told.key[:-1], f"sample {told.key[-1]}", device=told.device)

    def step(self, gradient: Mapping[str, Tensor], at: tuple[int, int] = (0, 1)) -> None:
        told, t = self.told, self.made
        self.made += 1
        drawn = torch.rand(told.n, generator=self._sample, device=told.device) < told.q
        index = drawn.nonzero()[:, 0]
        rows = [row[index] for row in told.rows]
        if told.augment is not None:
            rows = augmented(told.augment, rows, self._sample)
        if t in self._chosen:
            with torch.no_grad():
                for mine, theirs in zip(self._exact.parameters(), self._model.parameters(), strict=True):
                    mine.copy_(theirs)
                for kept, now in zip(self._exact.buffers(), self._model.buffers(), strict=True):
                    kept.copy_(now)
            self._look(t, gradient, rows, drawn)
        for name, p in self._parameters.items():
            p.grad = gradient[name].detach().clone()
        told.opt.set_rate(self._stepping, *at)
        self._stepping.step()

    def _look(self, t: int, gradient: Mapping[str, Tensor], rows: Sequence[Tensor], drawn: Tensor) -> None:
        told = self.told
        expected = max(1, round(told.q * told.n))
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self._parameters.items()}
        rows = [doubled(row) for row in rows]
        for begin in range(0, len(rows[0]), ROWS):
            part = [row[begin : begin + ROWS] for row in rows]
            for name, g in self._clipped(part, check=begin == 0).items():
                total[name] += g.sum(0)
        noise, clean, grain = {}, {}, {}
        for name, sum_ in total.items():
            sent = gradient[name].detach()
            noise[name] = _array((expected * sent.double() - sum_) / told.sigma)
            clean[name] = _array(sum_)
            size = spacing(_array(sent), torch.finfo(sent.dtype).eps)
            grain[name] = 2 * expected / told.sigma * size  # rounded after the noise, and after the division
        self.found.append(MadeStep(t, noise, clean, grain, len(rows[0])))
        if t in self._spans and told.augment is None:
            self.span += self._spanned(noise, drawn)

    def _spanned(self, noise: Mapping[str, Floats], drawn: Tensor) -> Span:
        told = self.told
        part = [doubled(row[self._span_rows.to(row.device)]) for row in told.rows]
        clipped = self._clipped(part)
        matrix = torch.cat([clipped[name].flatten(1) for name in noise], 1)  # records x parameters
        z = torch.from_numpy(np.concatenate([noise[name].ravel() for name in noise])).to(matrix)
        spread, turned = torch.linalg.eigh(matrix @ matrix.T)
        kept = spread > RANK * max(float(spread[-1]), 1e-300)
        onto = (turned.T @ (matrix @ z))[kept]
        others = matrix[~drawn[self._span_rows.to(drawn.device)].to(matrix.device)].sum(0)
        length = float(others.norm())
        along = float(z @ others) / length if length > 0 else 0.0
        return Span(float((onto.square() / spread[kept]).sum()), int(kept.sum()), along, int(length > 0))

    def _clipped(self, rows: Sequence[Tensor], check: bool = False) -> dict[str, Tensor]:
        """Return each record's gradient, no longer than C over all parameters."""
        grads = row_gradients(self._exact, self.told.loss, rows, _doubles(self.told.given))
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
        if check and len(rows[0]):
            self._check(rows, grads)
        short = torch.where(norms > self.told.C, self.told.C / norms, torch.ones_like(norms))
        # In place: these are the largest tensors here, and nobody else holds them. Where a parameter has no part in the
        # loss, its zeros are one number seen many times, and are copied.
        return {name: g.contiguous().mul_(short.reshape(-1, *[1] * (g.dim() - 1))) for name, g in grads.items()}

    def _check(self, rows: Sequence[Tensor], grads: Mapping[str, Tensor]) -> None:
        """Compute the first record's gradient without vectorisation, too."""
        params = {name: p.detach().clone().requires_grad_() for name, p in self._exact.named_parameters()}
        value = self.told.loss(
            Functional(self._exact, params), *(row[:1] for row in rows), **_doubles(self.told.given)
        ).sum()
        alone = torch.autograd.grad(value, [params[name] for name in grads], allow_unused=True)
        for (name, g), other in zip(grads.items(), alone, strict=True):
            other = torch.zeros_like(g[0]) if other is None else other
            if float((g[0] - other).norm()) > SAME * (1 + float(other.norm())):
                self.wrong = f"the gradient of a single record in {name} depends on the records beside it"


@dataclass(frozen=True)
class MadeTraining:
    """All that is known of one private training after its repetition."""

    client: int
    round: int
    n: int
    q: float  # from the batch size that it was called with
    steps: int  # that left the mechanism
    C: float
    sigma: float
    found: tuple[MadeStep, ...] = ()
    span: Span = field(default_factory=Span)
    wrong: str = ""
    lacks: str = ""  # why no step could be made again
    longest: float = 0.0  # how far one record moved a step's sum, in clipping norms

    @property
    def multiplier(self) -> float:
        return self.sigma / self.C


def sum_of_noise(made: MadeTraining) -> dict[str, Floats] | None:
    """Return the noise of all steps together, by parameter; None unless every step was made again."""
    if not made.found or len(made.found) < made.steps:
        return None
    return {name: sum(step.noise[name] for step in made.found) for name in made.found[0].noise}  # type: ignore[misc]


def _array(t: Tensor) -> Floats:
    flat = t.reshape(len(t), -1) if t.dim() > 1 else t.reshape(1, -1)
    return flat.detach().double().cpu().numpy()


def doubled(value: Any) -> Any:
    """Return a copy of a tree in which all that has decimals, models too, is in double precision."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, Mapping):
        return type(value)({key: doubled(item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(doubled(item) for item in value)
    return value


def _doubles(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: doubled(value) for name, value in (given or {}).items()}


def aligned(sent: Floats, again: Floats, noise: Floats) -> tuple[float, float]:
    """Return how far what was sent lies along the noise that is missing in it, and the p-value of that.

    `sent` and `again` are the weights that left and that come out of the repetition, `noise` the sum of the steps'
    noise, which went into `again` with a negative sign (a step goes against the gradient). Differences of rounding, or
    of another computation, have no direction in common with noise that nobody else knows: their cosine with it is
    that of a random direction, normal with variance 1 / d.
    """
    apart = sent - again
    size = float(np.linalg.norm(apart) * np.linalg.norm(noise))
    cosine = float(apart @ noise) / size if size > 0 else 0.0
    return cosine, math.erfc(abs(cosine) * math.sqrt(len(noise) / 2))
