"""Noise of whole numbers: the part that the discrete Gaussian and the Skellam mechanism share.

Counts take noise in steps of 1. Rows are clipped in L2 and cut off towards zero to a grid, a power of two between 1/256
and 1/512 of the noise: that lengthens no row, and no rounding of floating-point numbers tells anything of the release.
The noise is drawn by its distribution function in double precision; what is rarer than 2^-53 is not drawn.

An accountant is given the exact pair for counts: each count that one record can change is noise shifted by 1, or not.
For rows it is given a bound on the Renyi divergence by the L2 norm of a record's effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from scipy.special import ndtri
from torch import Generator, Tensor

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.losses import Atoms, Loss
from fedaudit.privacy.mechanisms.additive import AddsNoise, as_array, as_matrix, moves_of
from fedaudit.privacy.mechanisms.base import Noise, Prepared
from fedaudit.privacy.mechanisms.gaussian import system_uniform
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.renyi import renyi_epsilon
from fedaudit.privacy.score_sums import ScoredScale
from fedaudit.privacy.sensitivity import Context
from fedaudit.stats import Floats
from fedaudit.wire.message import Declared

FINE = 256  # steps of the grid in a deviation of the noise on rows, at least
FAR = 14  # deviations up to which probabilities are computed
ORDERS = tuple(np.unique(np.concatenate([1 + np.geomspace(0.01, 1, 40), np.geomspace(2, 1e4, 200).round()])).tolist())

Chances = Callable[[float], Floats]  # probabilities of -K, ..., K with noise of this deviation


class WholeNoise(AddsNoise):
    """Noise of whole numbers. A subclass says how probable each is, and what shifts of it cost."""

    def chances(self, sigma: float) -> Floats:
        """Return the probabilities of -K, ..., K, where K = reach(sigma)."""
        raise NotImplementedError

    def of_rows(self, multiplier: float, steps: float) -> Loss:
        """Return the loss of rows: noise of `multiplier` times the L2 sensitivity, and of `steps` steps of the grid."""
        raise NotImplementedError

    def unit_renyi(self, orders: Sequence[float], sigma: float) -> Floats:
        """Return a bound on the Renyi divergence of noise that is shifted by 1."""
        raise NotImplementedError

    def of_counts(self, sigma: float) -> Loss:
        """Return the loss of one count that a record changes by 1."""
        return UnitShift(self, sigma)

    def one_release(self, multiplier: float, moves: int | None) -> Floats:
        """Return a bound on the Renyi divergence of one release, at each of the ORDERS."""
        if moves is None:
            return self.of_rows(multiplier, float(FINE)).renyi(ORDERS)
        return moves * self.unit_renyi(ORDERS, multiplier * math.sqrt(moves))

    # --- a policy's options ---

    def check(self, where: str, kind: str, policy: Policy) -> None:
        super().check(where, kind, policy)
        if policy.calibration == "classical":
            raise PrivacyError(f"{where}: the classical calibration is for Gaussian noise. Remove it, or say total.")
        if policy.clip is None:
            raise PrivacyError(f"{where}: noise of whole numbers needs a bound on rows. Use clip=C.")

    def multiplier(self, policy: Policy, delta: float, releases: int, moves: int | None) -> float:
        """Return sigma / sensitivity by the Renyi divergence, which adds up over releases and counts."""
        assert policy.epsilon is not None  # the policy was checked when it was read
        return _calibrated(self, policy.epsilon, delta, releases, moves)

    # --- a release ---

    def prepare(self, value: object, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
        if declared.dtype is not None:
            raise NotApplicable(
                f"{where} travels as {declared.dtype}, which would move the noise off its grid. Use mechanism = "
                "'gaussian' here."
            )
        ready = super().prepare(value, where, declared, policy, context)
        moves = moves_of(declared, ready.sensitivities, self.norm)
        if moves is not None:
            return replace(ready, grid=1.0, moves=moves)
        grid = 2.0 ** math.floor(math.log2(min(ready.sigmas, default=1.0) / FINE))
        return replace(ready, grid=grid, leaves=[torch.trunc(leaf / grid) * grid for leaf in ready.leaves])

    def noised(self, ready: Prepared, where: str, declared: Declared, policy: Policy, context: Context) -> list[Tensor]:
        return [
            (leaf + self._drawn(leaf, sigma, ready.grid or 1.0, policy, (*context.key, where, i))).to(leaf.dtype)
            for i, (leaf, sigma) in enumerate(zip(ready.leaves, ready.sigmas, strict=True))
        ]

    def _drawn(self, like: Tensor, sigma: float, grid: float, policy: Policy, key: tuple[object, ...]) -> Tensor:
        if policy.secure:
            u = torch.from_numpy(system_uniform(like.numel())).reshape(like.shape).to(like.device)
        else:
            rng = noise_generator(key, "noise", device=like.device)
            u = torch.rand(like.shape, generator=rng, device=like.device, dtype=torch.float64)
        return self.whole(u, sigma / grid) * grid

    def whole(self, u: Tensor, sigma: float) -> Tensor:
        """Return the whole numbers at the shares u of the distribution with this deviation, as doubles."""
        below = torch.from_numpy(_below(self, sigma)).to(u.device)
        return (torch.searchsorted(below, u, right=True).clamp(max=len(below) - 1) - len(below) // 2).double()

    def standard(self, like: Tensor, rng: Generator) -> Tensor:
        """Return noise of deviation 1 on a grid so fine that it is as good as continuous."""
        u = torch.rand(like.shape, generator=rng, device=like.device, dtype=torch.float64)
        return (self.whole(u, float(FINE)) / FINE).to(like.dtype)

    def entry(self, where: str, kind: str, policy: Policy, ready: Prepared) -> LedgerEntry:
        return super().entry(where, kind, policy, ready).model_copy(update={"grid": ready.grid, "moves": ready.moves})

    def follows(
        self, entry: LedgerEntry, policy: Policy, n: int, classes: int, releases: int | None
    ) -> dict[str, float | str | None]:
        found = super().follows(entry, policy, n, classes, releases)
        if entry.moves is not None:  # of counts: whole numbers, as many as the sensitivity says
            found |= {"grid": 1.0, "moves": round((entry.sensitivity or 0.0) ** self.norm)}
        return found

    # --- its cost ---

    def event(self, entry: LedgerEntry) -> Event:
        m, count = entry.noise_multiplier, entry.steps * len(entry.rounds)
        if not 0 < m < math.inf or not entry.sigma or not entry.grid:
            return Event(m, 1.0, count)
        if entry.moves is not None:
            return Event(m, 1.0, count * entry.moves, self.of_counts(entry.sigma / entry.grid))
        return Event(m, 1.0, count, self.of_rows(m, float(FINE)))  # no noise has fewer steps

    def epsilon_at(self, ready: Prepared, scale: float, delta: float) -> float:
        if (m := ready.multiplier * scale) <= 1e-3:
            return math.inf
        return renyi_epsilon(ORDERS, self.one_release(m, ready.moves), delta)

    # --- the test of its noise ---

    def noise(self, sent: Floats, ready: Prepared, leaf: int, seed: int) -> Noise:
        """Return normal scores: within the share of the distribution that a whole number takes up, one at random."""
        grid = ready.grid or 1.0
        sigma = ready.sigmas[leaf] / grid
        k = as_matrix(np.round((sent - as_array(ready.leaves[leaf])) / grid))
        chances = self.chances(sigma)
        reach = len(chances) // 2
        below = np.concatenate([[0.0], np.cumsum(chances)])
        at = np.clip(k, -reach, reach).astype(int) + reach
        u = np.random.default_rng(seed).random(k.shape)
        share = below[at] + u * chances[at]
        # Above the middle the share from above is exact, and 1 - share is not.
        above = np.concatenate([[0.0], np.cumsum(chances[::-1])])[::-1]
        rest = above[at + 1] + (1 - u) * chances[at]
        z = np.where(at < reach, ndtri(np.maximum(share, 1e-300)), -ndtri(np.maximum(rest, 1e-300)))
        return Noise(z, WholeSizes(k, sigma, self.chances), free=False)

    # --- words ---

    def shown(self, entry: LedgerEntry) -> str:
        return super().shown(entry) + ("" if entry.grid is None else f", in steps of {entry.grid:g}")


def reach(sigma: float) -> int:
    """Return the largest whole number whose probability is computed."""
    return math.ceil(FAR * sigma + 12)


@lru_cache(maxsize=64)
def _below(how: WholeNoise, sigma: float) -> Floats:
    return np.cumsum(how.chances(sigma))


@lru_cache(maxsize=1024)
def _calibrated(how: WholeNoise, epsilon: float, delta: float, releases: int, moves: int | None) -> float:
    """Return the least multiplier, to one in a million, whose Renyi divergence over all releases meets epsilon."""

    def spent(m: float) -> float:
        return renyi_epsilon(ORDERS, releases * how.one_release(m, moves), delta)

    low, high = 1e-3, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e9:
            raise PrivacyError(f"No noise makes {releases} releases meet epsilon = {epsilon:g}. Raise epsilon.")
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


@dataclass(frozen=True)
class UnitShift(Atoms):
    """The loss of a whole number with noise that is shifted by 1, or not: log p(k) - log p(k - 1) under p."""

    how: WholeNoise
    sigma: float

    @cached_property
    def atoms(self) -> tuple[Floats, Floats]:
        p = self.how.chances(self.sigma)
        loss = np.log(p[1:]) - np.log(p[:-1])
        order = np.argsort(loss, kind="stable")
        return loss[order], p[1:][order]

    def renyi(self, orders: Sequence[float]) -> Floats:
        return self.how.unit_renyi(orders, self.sigma)

    def __repr__(self) -> str:
        return f"UnitShift({self.how.name}, {self.sigma!r})"

    @property
    def infinite(self) -> float:
        """Return the probability beyond the numbers that are computed, which is far below any delta."""
        return 1e-30


@dataclass(frozen=True)
class WholeSizes:
    """Whole-numbered noise of one deviation, in steps of its grid."""

    k: Floats
    sigma: float
    chances: Chances

    def test(self, parts: Sequence[WholeSizes]) -> WholeScale:
        return WholeScale(parts)


class WholeScale(ScoredScale):
    """The test of the scale by k^2 / sigma^2, added up: the sufficient statistic of a discrete Gaussian."""

    def __init__(self, parts: Sequence[WholeSizes]):
        groups: dict[float, list[Floats]] = {}
        for part in parts:
            groups.setdefault(part.sigma, []).append(part.k.ravel())
        self._sigmas, self._of = list(groups), parts[0].chances
        self.value = sum(float((np.concatenate(k) ** 2).sum()) / sigma**2 for sigma, k in groups.items())
        self._times = [np.array([float(sum(map(len, k)))]) for k in groups.values()]
        self._chances = self._at(1.0)
        self._scores = [_squares(p)[None] / sigma**2 for p, sigma in zip(self._flat, self._sigmas, strict=True)]

    @property
    def _flat(self) -> list[Floats]:
        return [p[0] for p in self._chances]

    def _at(self, scale: float) -> list[Floats]:
        made = []
        for sigma in self._sigmas:
            p, wide = self._of(scale * sigma), 2 * reach(sigma) + 1
            extra = (len(p) - wide) // 2
            p = p[extra : extra + wide] if extra > 0 else np.pad(p, -extra)
            made.append((p / p.sum())[None])
        return made


def _squares(p: Floats) -> Floats:
    k = np.arange(len(p)) - len(p) // 2
    return (k * k).astype(np.float64)
