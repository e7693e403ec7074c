"""Randomised response on labels: each label stays with probability p = e^epsilon / (e^epsilon + k - 1), and is else one
of the other k - 1 classes, all equally probable (Warner 1965; k classes: Kairouz, Bonawitz and Ramage 2016).

`labels`, one class number per record, are flipped one by one. `label_counts` are the counts of flipped labels, from
which an unbiased estimate is made: (m - n r) / (p - r) with r = (1 - p) / (k - 1). That is post-processing, as n, p and
k are public. That the counts do not say which record has which label is left out of account.

Any change of one record's label changes the probability of an answer by a factor of e^epsilon at most. That holds for
replace-one; and for zero-out with a blank record whose answer is any class with equal probability, which is a mixture
of answers to labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.special import bdtr, bdtrc, ndtri
from torch import Generator, Tensor

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.losses import Atoms
from fedaudit.privacy.mechanisms.additive import REFUSED, as_array, counted
from fedaudit.privacy.mechanisms.base import Mechanism, Noise, Prepared, Words, times
from fedaudit.privacy.mechanisms.gaussian import system_uniform
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.score_sums import ScoredScale
from fedaudit.privacy.sensitivity import Bounding, Context, dependence
from fedaudit.privacy.trees import leaves_of
from fedaudit.stats import Floats
from fedaudit.wire.message import Declared
from fedaudit.wire.release import Protection

KINDS = ("labels", "label_counts")
WHOLE = 0.01  # how far from a whole number a count may be that comes out of single precision; of 1,000 records
FAR_OUT = 37.0  # the normal score of what cannot be


def keeps(epsilon: float, k: int) -> float:
    """Return the probability that a label of k classes stays as it is."""
    return 1 / (1 + (k - 1) * math.exp(-epsilon))


class RandomisedResponse(Mechanism):
    name = "randomised-response"
    summary = "labels and label counts: each label stays, or becomes any other: epsilon with delta = 0"
    path = "which labels were flipped is looked at one by one, by `fedaudit epsilon residuals`"

    # --- a policy's options ---

    def refuses(self, kind: str) -> str | None:
        if kind in KINDS:
            return None
        return REFUSED.get(kind, f"randomised response is for {' and '.join(KINDS)}. Use mechanism = 'gaussian'.")

    def check(self, where: str, kind: str, policy: Policy) -> None:
        if policy.noise_multiplier is not None:
            raise PrivacyError(f"{where}: randomised response takes an epsilon, and no noise_multiplier.")
        super().check(where, kind, policy)
        if policy.calibration == "classical":
            raise PrivacyError(f"{where}: the classical calibration is for Gaussian noise. Remove it, or say total.")

    def label(self, policy: Policy) -> str:
        total = ", whole run" if policy.calibration == "total" else ""
        return f"ε={policy.epsilon:g}{total}, randomised response"

    # --- a release ---

    def prepare(self, value: Any, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
        leaves, counts = leaves_of(value, where), dependence(declared) == "histogram"
        if declared.dtype is not None:
            raise NotApplicable(f"{where} travels as {declared.dtype}: randomised response sends labels as they are.")
        if len(leaves) != 1 or leaves[0].dim() != 1:
            raise NotApplicable(f"{where}: randomised response takes one vector, of labels or of label counts.")
        if counts:
            k = len(leaves[0])
            if bool((leaves[0] != leaves[0].round()).any()) or bool((leaves[0] < 0).any()):
                raise PrivacyError(f"{where} holds numbers that are not counts. Send whole numbers from 0 up.")
            if (total := float(leaves[0].sum())) != context.n:
                raise PrivacyError(
                    f"{where} counts {total:g} labels, but the client has {context.n} records: randomised response "
                    "needs a label of each. Send one histogram of all records."
                )
        elif declared.unit != "record" or leaves[0].is_floating_point():
            raise NotApplicable(f"{where}: randomised response takes one class number per record, as whole numbers.")
        elif len(leaves[0]) > context.n:
            raise PrivacyError(
                f"{where} has more labels than the client has records ({context.n}). Send one label per record."
            )
        elif context.classes is None:
            raise NotApplicable(f"{where}: the number of classes is not known here, which randomised response needs.")
        else:
            k = context.classes
            if len(leaves[0]) and not 0 <= int(leaves[0].min()) <= int(leaves[0].max()) < k:
                raise PrivacyError(f"{where} holds labels outside of 0 to {k - 1}. Send class numbers.")
        if k < 2:
            raise NotApplicable(f"{where}: randomised response needs at least two classes.")
        assert policy.epsilon is not None  # the policy was checked when it was read
        epsilon = policy.epsilon / counted(policy, declared, where, context)
        p = keeps(epsilon, k)
        r = (1 - p) / (k - 1)
        deviation = _deviation(context.n, p, r) * epsilon if counts else 1.0
        return Prepared(
            leaves, [1.0], 1 / epsilon, 0.0, Bounding(policy.relation), deviation, k, moves=2 if counts else None
        )

    def noised(self, ready: Prepared, where: str, declared: Declared, policy: Policy, context: Context) -> list[Tensor]:
        (leaf,), k, p = ready.leaves, _classes(ready), _keep(ready)
        counts = dependence(declared) == "histogram"
        labels = torch.repeat_interleave(torch.arange(k, device=leaf.device), leaf.long()) if counts else leaf.long()
        u = self._uniform(labels, policy, (*context.key, where, 0))
        flipped = flip(labels, u, p, k)
        if not counts:
            return [flipped.to(leaf.dtype)]
        made, r = torch.bincount(flipped, minlength=k).double(), (1 - p) / (k - 1)
        return [((made - len(labels) * r) / (p - r)).to(leaf.dtype if leaf.is_floating_point() else torch.float32)]

    def _uniform(self, like: Tensor, policy: Policy, key: tuple[object, ...]) -> Tensor:
        if policy.secure:
            return torch.from_numpy(system_uniform(like.numel())).reshape(like.shape).to(like.device)
        rng = noise_generator(key, "noise", device=like.device)
        return torch.rand(like.shape, generator=rng, device=like.device, dtype=torch.float64)

    def entry(self, where: str, kind: str, policy: Policy, ready: Prepared) -> LedgerEntry:
        counts = ready.moves is not None
        return LedgerEntry(
            field=where,
            kind=kind,
            mechanism=self.name,
            noise_multiplier=ready.multiplier,
            relation=ready.bounded.relation,
            sigma=max(ready.sigmas) if counts else None,
            sensitivity=1.0 if counts else None,
            delta=0.0,
            claim=policy.epsilon,
            keep=_keep(ready),
        )

    def follows(
        self, entry: LedgerEntry, policy: Policy, n: int, classes: int, releases: int | None
    ) -> dict[str, float | str | None]:
        found: dict[str, float | str | None] = {
            "mechanism": self.name, "relation": policy.relation, "delta": 0.0, "claim": policy.epsilon,
        }  # fmt: skip
        if releases is not None and policy.epsilon is not None:
            p = keeps(policy.epsilon / releases, classes)
            found |= {"noise_multiplier": releases / policy.epsilon, "keep": p}
            if entry.sigma is not None:
                found["sigma"] = _deviation(n, p, (1 - p) / (classes - 1))
        return found

    def imitated(self, rows: Tensor, protection: Protection, rng: Generator) -> Tensor:
        k = int(rows.max()) + 1
        u = torch.rand(rows.shape, generator=rng, device=rows.device, dtype=torch.float64)
        return flip(rows.long(), u, protection.keep or 1.0, k).to(rows.dtype)

    def label_counts(self, counts: Tensor, protection: Protection) -> Tensor:
        p, n = protection.keep or 1.0, counts.sum()
        r = (1 - p) / (len(counts) - 1)
        return ((counts - n * r) / (p - r)).clamp(min=0)

    # --- its cost ---

    def event(self, entry: LedgerEntry) -> Event:
        m, count = entry.noise_multiplier, entry.steps * len(entry.rounds)
        if not 0 < m < math.inf or entry.keep is None:
            return Event(m, 1.0, count)
        return Event(m, 1.0, count, ResponseLoss(1 / m, entry.keep))

    def epsilon_at(self, ready: Prepared, scale: float, delta: float) -> float:
        """Return the epsilon if a label is flipped so many times as often as promised."""
        flips, k = scale * (1 - _keep(ready)), _classes(ready)
        if flips <= 0:
            return math.inf
        return max(0.0, math.log(max(1 - flips, 1e-300) * (k - 1) / flips))

    # --- the test of its noise ---

    def noise(self, sent: Floats, ready: Prepared, leaf: int, seed: int) -> Noise:
        clean, k, p = as_array(ready.leaves[leaf]), _classes(ready), _keep(ready)
        rng = np.random.default_rng(seed)
        if ready.moves is None:
            return _noise_of_labels(sent, clean, k, p, rng)
        return _noise_of_counts(sent, clean, k, p, rng)

    # --- words ---

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        worst = min(entries, key=lambda e: e.noise_multiplier)
        asked = f"; asked for: ε = {worst.claim:g} per release" if worst.claim is not None else ""
        return f"randomised response: a label stays in {worst.keep or 1:.1%}, {times(entries)}{asked}", "noise"

    def shown(self, entry: LedgerEntry) -> str:
        return f"{entry.mechanism}, a label stays with probability {entry.keep or 1:.4g}, {entry.relation}"


def _deviation(n: int, p: float, r: float) -> float:
    """Return the deviation of an estimated count, at most. It depends on n alone, and is public."""
    return math.sqrt(n * max(p * (1 - p), r * (1 - r))) / (p - r)


def flip(labels: Tensor, u: Tensor, p: float, k: int) -> Tensor:
    """Return the labels, each of them where u < p, and else the one of the others that u points at."""
    step = ((u - p) / (1 - p) * (k - 1)).floor().clamp(0, k - 2).long() + 1
    return torch.where(u < p, labels, (labels + step) % k)


def _classes(ready: Prepared) -> int:
    assert ready.classes is not None  # `prepare` has set it
    return ready.classes


def _keep(ready: Prepared) -> float:
    return keeps(1 / ready.multiplier, _classes(ready))


@dataclass(frozen=True)
class ResponseLoss(Atoms):
    """The loss of one answer: +-epsilon for the two labels that may be true, and 0 for the others."""

    epsilon: float
    keep: float

    @property
    def pure(self) -> float:  # type: ignore[override]
        return self.epsilon

    @cached_property
    def atoms(self) -> tuple[Floats, Floats]:
        r = self.keep * math.exp(-self.epsilon)
        chances = np.array([r, max(1 - self.keep - r, 0.0), self.keep])
        return np.array([-self.epsilon, 0.0, self.epsilon]), chances / chances.sum()

    @property
    def infinite(self) -> float:
        return 0.0


def _noise_of_labels(sent: Floats, clean: Floats, k: int, p: float, rng: np.random.Generator) -> Noise:
    """Return a normal score of each label: flipped ones below, by where they went, and those that stayed above."""
    went = np.mod(np.round(sent - clean), k)
    r, u = (1 - p) / (k - 1), rng.random(went.shape)
    share = np.where(went == 0, (1 - p) + u * p, (went - 1 + u) * r)
    z = ndtri(np.clip(share, 1e-300, 1 - 1e-16))
    return Noise(z.reshape(1, -1), Flips(int((went > 0).sum()), went.size, 1 - p), free=False)


@dataclass(frozen=True)
class Flips:
    """The number of n labels that were flipped, each with probability q."""

    flipped: int
    n: int
    q: float

    def test(self, parts: Sequence[Flips]) -> FlipScale:
        return FlipScale(sum(f.flipped for f in parts), sum(f.n for f in parts), parts[0].q)


@dataclass(frozen=True)
class FlipScale:
    """The test of how often labels are flipped: binomial. A scale of 0.9 flips 0.9 times as often as promised."""

    flipped: int
    n: int
    q: float

    @property
    def scale(self) -> float:
        return self.flipped / self.n / self.q

    def p_values(self) -> tuple[float, float]:
        more = 1.0 if self.flipped == 0 else float(bdtrc(self.flipped - 1, self.n, self.q))
        return float(bdtr(self.flipped, self.n, self.q)), more

    def limits(self, level: float, each: float) -> tuple[float, float]:
        """Return the limits of Clopper and Pearson."""
        from fedaudit.stats import cp_lower, cp_upper

        low, high = cp_lower(self.flipped, self.n, level / 2), cp_upper(self.flipped, self.n, each)
        return float(low) / self.q, float(high) / self.q

    def level(self, scale: float, power: float) -> float:
        from scipy.stats import binom  # the slow part of importing scipy

        most = float(binom.ppf(power, self.n, min(1.0, scale * self.q)))
        return float(bdtr(most, self.n, self.q))

    def finds(self, each: float, power: float) -> float:
        grid = np.arange(0.99, 0.0, -0.01)
        return next((float(scale) for scale in grid if self.level(float(scale), power) < each), 0.0)


def _noise_of_counts(sent: Floats, clean: Floats, k: int, p: float, rng: np.random.Generator) -> Noise:
    """Return one normal score of a release: by the count of its largest class, of which the distribution is known.

    That count is Bin(N, p) + Bin(n - N, r) if N of n labels are of the class. If no whole counts give the estimate that
    was sent, it was made with other probabilities than promised, and the score is as far out as a number can be.
    """
    from scipy.stats import binom  # the slow part of importing scipy

    n, r = round(clean.sum()), (1 - p) / (k - 1)
    found = sent * (p - r) + n * r
    made = np.round(found)
    if np.abs(found - made).max() > WHOLE * max(n, 1000) / 1000:
        return Noise(np.array([[FAR_OUT]]), CountSizes(clean, np.clip(made, 0, n), p), free=False)
    top = int(clean.argmax())
    N = round(clean[top])
    chances = np.convolve(binom.pmf(np.arange(N + 1), N, p), binom.pmf(np.arange(n - N + 1), n - N, r))
    at = int(np.clip(made[top], 0, n))
    share = chances[:at].sum() + rng.random() * chances[at]
    z = float(ndtri(np.clip(share, 1e-300, 1 - 1e-16)))
    return Noise(np.array([[z]]), CountSizes(clean, made, p), free=False)


@dataclass(frozen=True)
class CountSizes:
    clean: Floats
    made: Floats  # counts of flipped labels
    p: float

    def test(self, parts: Sequence[CountSizes]) -> CountScale:
        return CountScale(parts)


class CountScale(ScoredScale):
    """The test of how often labels are flipped, by counts: the true count of each answer's class, added up.

    Answers stay with large classes if few labels are flipped, so that less noise makes that sum larger; its negative is
    the score. Equal counts tell nothing.
    """

    def __init__(self, parts: Sequence[CountSizes]):
        self._p = parts[0].p
        groups: dict[tuple[float, ...], list[Floats]] = {}  # releases of one histogram, as one client makes them
        for part in parts:
            groups.setdefault(tuple(part.clean), []).append(part.made)
        clean = [np.array(counts) for counts in groups]
        self._scores = [np.broadcast_to(-c / max(c.sum(), 1), (len(c), len(c))) for c in clean]
        self._times = [len(made) * c for c, made in zip(clean, groups.values(), strict=True)]
        self.value = math.fsum(
            float(s[0] @ of) for s, made in zip(self._scores, groups.values(), strict=True) for of in made
        )
        self._chances = self._at(1.0)

    def _at(self, scale: float) -> list[Floats]:
        q = min(1.0, scale * (1 - self._p))
        made = []
        for s in self._scores:
            k = len(s)
            made.append(np.full((k, k), q / (k - 1)) + (1 - q - q / (k - 1)) * np.eye(k))
        return made
