"""Canaries in gradient space: records whose gradient points along one parameter alone (Nasr et al. 2023, Dirac).

A canary is a row of the client's training like any other: drawn by the Poisson sample, differentiated, clipped, summed
and noised by the code that trains. Its loss is K w_j, with K beyond the clipping norm, so that its clipped gradient is
C e_j. A fair coin says of each whether it is in; out, it is not there. Every canary has a parameter of its own, so that
one training tries hundreds of them at once.

The attacker repeats the training without canaries and without noise (a replayed update), and looks at what the real one
has beyond that along e_j: over T steps of sample rate q a canary that is in adds C Bin(T, q), and the noise sigma
sqrt(T). These scores are held against what the ledger says of all trainings of the run: as Gaussians, by the shift of
their means; and, guess by guess, by the f-DP of Mahloujifar et al. 2024. In or out is add-or-remove, as the claim is.

The model is held where it was (steps are tiny, in double precision): what canaries do to the direction of training is
no part of what they show.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.epsilon.audit_result import AuditedClaim, held, held_path
from fedaudit.epsilon.client_replay import QUIET, STEP, PrivateFit, Probe, repeat
from fedaudit.epsilon.lower_bounds import best_guesses, gdp_mean_shift, one_run_fdp
from fedaudit.errors import DataError, FedauditError, RunError, SettingError
from fedaudit.privacy.policy import TRAINING
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import generator
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit, save_audits
from fedaudit.runtime.task import compute
from fedaudit.stats import Floats, check_confidence

TEST = "gradient canaries"
STEEP = 1e3  # K over the clipping norm


@dataclass
class Scores:
    """The scores of one client's canaries over its trainings, and the truth: what each adds, in deviations of the
    promised noise."""

    inside: Tensor
    total: Tensor
    steps: int = 0
    rate: float = 0.0

    @property
    def scaled(self) -> Floats:
        return (self.total / math.sqrt(max(self.steps, 1))).cpu().numpy()


def audit_canaries(
    folder: Path | str,
    *,
    canaries: int = 400,
    clients: Sequence[int] | None = None,
    confidence: float = 0.95,
    watch: Watch | None = None,
) -> list[EpsilonAudit]:
    """Hold the claim for private training against `canaries` per client. The results are kept in the run folder."""
    begun = time.perf_counter()
    check_confidence(confidence)
    run = RunFolder(folder)
    if run.record.status != "done":
        raise RunError(f"The run in {folder} is not finished, so its ledger is open. Finish it with --resume.")
    if TRAINING not in run.world.policies:
        raise SettingError(f"Training in {folder} was not private: there is no claim to try. Use a run with DP-SGD.")
    for k in clients or ():
        if not 0 <= k < run.world.setting.clients:
            raise SettingError(f"There is no client {k}; the run has {run.world.setting.clients}, numbered from 0.")
    found = Canaries(canaries)
    with compute(run.world):
        for row in run.record.ledger:
            if clients is None or row.client in clients:
                try:
                    repeat(run, row.client, watch or unwatched, found.of(run, row.client))
                except FedauditError as e:
                    found.reason = str(e)
    audits = found.audit(run, confidence)
    save_audits(run.folder, run.record.transcript_digest, audits, time.perf_counter() - begun)
    return audits


@dataclass
class Canaries:
    """Those of all clients, whose trainings are being repeated."""

    each: int = 400
    scores: dict[int, Scores] = field(default_factory=dict)  # by client
    reason: str = "no client took part"  # why there are none

    def of(self, run: RunFolder, k: int) -> Probe:
        """Return what to do with each private training of client k."""
        scores = self.scores[k] = Scores(*_coins(run, k, self.each))
        return functools.partial(self._try, k, scores)

    def _try(self, k: int, scores: Scores, fit: PrivateFit) -> None:
        if k not in self.scores:
            return
        try:
            _probe(fit, scores)
        except FedauditError as e:  # a loss that does not bear a canary: the repetition goes on without
            del self.scores[k]
            self.reason = str(e)

    def audit(self, run: RunFolder, confidence: float = 0.95) -> list[EpsilonAudit]:
        found = {k: scores for k, scores in self.scores.items() if scores.steps}
        if not found:
            raise DataError(f"No private training could be repeated: {self.reason}.")
        return _audit(run, found, confidence)


def keep_canaries(folder: Path | str, found: Canaries) -> list[EpsilonAudit]:
    """Keep in the run folder what canaries showed that were tried beside something else."""
    run = RunFolder(folder)
    audits = found.audit(run)
    save_audits(run.folder, run.record.transcript_digest, audits, 0.0)  # the time is that of the other
    return audits


def _coins(run: RunFolder, k: int, canaries: int) -> tuple[Tensor, Tensor]:
    coins = torch.rand(canaries, generator=generator(run.world.setting.seed, TEST, k)) < 0.5
    return coins, torch.zeros(canaries, dtype=torch.float64)


def _probe(fit: PrivateFit, scores: Scores) -> None:
    """One training with canaries, and without them or noise; what the first has beyond the second, along each."""
    name = max(fit.start, key=lambda at: fit.start[at].numel())
    m, n = min(len(scores.inside), fit.start[name].numel()), len(fit.rows[0])
    if m < len(scores.inside):  # fewer parameters than canaries: the others are never asked
        scores.inside, scores.total = scores.inside[:m], scores.total[:m]
    at = torch.randperm(fit.start[name].numel(), generator=generator(TEST, "at"))[:m]  # the same in every round
    inside = at[scores.inside]
    more = len(inside)
    rows = [torch.cat([row, row[torch.zeros(more, dtype=torch.long, device=row.device)]]) for row in fit.rows]
    mark = torch.cat([torch.full((n,), REAL), inside]).to(fit.device)
    blank = torch.arange(n + more, device=fit.device) < n  # drawn as they were
    without = functools.partial(_without_canaries, loss=fit.loss)
    loss = functools.partial(_with_canaries, loss=fit.loss, name=name, steep=STEEP * fit.C)
    # The sample rate stays that of the real training, and so does the number of steps.
    batch = max(1, round(fit.batch * (n + more) / n))
    made = replace(fit, loss=loss, batch=batch, epochs=None, steps=fit.count, people=None)
    noisy = replace(made, rows=(mark, *rows)).after(fit.sigma / fit.C)
    clean = replace(made, loss=without, rows=(blank, *rows)).after(QUIET)
    gone = (clean[name] - noisy[name]).reshape(-1)[at.to(fit.device)] / STEP * replace(made, rows=(mark,)).expected
    scores.total += gone.cpu() / fit.sigma
    scores.steps += fit.count
    scores.rate = batch / (n + more)


REAL = -1  # instead of a canary's parameter: a record of the client


def _with_canaries(
    f: Any, mark: Tensor, *rows: Tensor, loss: Callable[..., Tensor], name: str, steep: float, **given: Any
) -> Tensor:
    """The method's loss for its records; K w_j for a canary at j."""
    own = loss(f, *rows, **given)
    w = f.params[name].reshape(-1)[mark.clamp(min=0)]
    return torch.where(mark == REAL, own, steep * w)


def _without_canaries(f: Any, real: Tensor, *rows: Tensor, loss: Callable[..., Tensor], **given: Any) -> Tensor:
    """The method's loss for its records, and 0 for a row that counts nothing. It does not look at any parameter
    itself: the gradient of picking one, which is 0 here, would take more time than all others."""
    own = loss(f, *rows, **given)
    return torch.where(real, own, torch.zeros_like(own))


def _audit(run: RunFolder, found: dict[int, Scores], confidence: float) -> list[EpsilonAudit]:
    ledger = max((row for row in run.record.ledger if row.client in found), key=lambda r: r.by_kind.get(TRAINING, 0.0))
    claim, delta = ledger.by_kind.get(TRAINING, 0.0), ledger.delta
    scores = np.concatenate([s.scaled for s in found.values()])
    member = np.concatenate([s.inside.numpy() for s in found.values()])
    some = next(iter(found.values()))
    entry = next(e for e in ledger.entries if e.kind == TRAINING)
    shift = some.rate * math.sqrt(some.steps) / entry.noise_multiplier  # of a canary that is in, if all is as promised
    m = len(scores)
    gaps = scores - shift / 2
    guesses = best_guesses(m, claim, delta, confidence)
    order = np.argsort(-np.abs(gaps), kind="stable")[:guesses]
    right = int(((gaps > 0) == member)[order].sum())
    how = (
        f"{m} canaries of {len(found)} clients, {some.steps} steps at sample rate {some.rate:.3g}; with the promised "
        f"noise {shift:.3g} deviations apart"
    )
    place = AuditedClaim(TRAINING, "whoever sees every step of training", "training, all rounds", claim, claim)
    gaussian = held_path(place, f"{TEST}, Gaussian", gdp_mean_shift, scores, member, shift, delta, confidence, how)
    best = one_run_fdp(m, guesses, guesses, delta, confidence)
    guessed = held(
        place, f"{TEST}, f-DP", one_run_fdp(m, guesses, right, delta, confidence), best.epsilon,
        f"{how}; {right} of {guesses} guesses right; so many canaries can show {best.epsilon:.3g}",
        tells_at=best.p_value(claim),
    )  # fmt: skip
    return [gaussian, guessed]
