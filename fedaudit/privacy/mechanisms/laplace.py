"""The Laplace mechanism: rows clipped in L1, and Laplace noise that meets epsilon with delta = 0.

The pair that the accountants are given is one number with noise of scale 1, shifted by e = sensitivity / scale. Its
curve is delta(x) = 1 - exp((x - e) / 2) for 0 <= x <= e. No release of several numbers, shifted by e_1 + e_2 + ... = e,
costs more: at x = x_1 + x_2 two of them have delta <= 1 - (1 - delta_1(x_1)) (1 - delta_2(x_2)), which is that curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import chdtr, chdtrc, chdtri, ndtri
from torch import Generator, Tensor

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.losses import Loss
from fedaudit.privacy.mechanisms.additive import LEAST, TINY, AddsNoise, as_array, as_matrix
from fedaudit.privacy.mechanisms.base import Noise, Prepared
from fedaudit.privacy.mechanisms.gaussian import system_uniform
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.sensitivity import Context
from fedaudit.stats import Floats
from fedaudit.wire.message import Declared


class Laplace(AddsNoise):
    name = "laplace"
    summary = "rows clipped in L1, Laplace noise: epsilon with delta = 0"
    noun = "Laplace noise"
    norm = 1
    deviation = math.sqrt(2)

    def check(self, where: str, kind: str, policy: Policy) -> None:
        super().check(where, kind, policy)
        if policy.calibration == "classical":
            raise PrivacyError(f"{where}: the classical calibration is for Gaussian noise. Remove it, or say total.")
        if policy.clip is None:
            raise PrivacyError(f"{where}: Laplace noise is scaled by a bound in L1. Use clip=C.")

    def delta(self, policy: Policy, n: int) -> float:
        return 0.0

    def prepare(self, value: object, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
        if declared.dtype is not None:
            raise NotApplicable(
                f"{where} travels as {declared.dtype}, and nobody could tell the scale of Laplace noise from it. Use "
                "mechanism = 'gaussian' here."
            )
        return super().prepare(value, where, declared, policy, context)

    def multiplier(self, policy: Policy, delta: float, releases: int, moves: int | None) -> float:
        assert policy.epsilon is not None  # the policy was checked when it was read
        return releases / policy.epsilon

    def draw(self, like: Tensor, scale: float, policy: Policy, key: tuple[object, ...]) -> Tensor:
        """Return scale sign(v) (-log(1 - |v|)) for v uniform in (-1, 1)."""
        if policy.secure:
            v = torch.from_numpy(2 * system_uniform(like.numel()) - 1).reshape(like.shape).to(like.device)
        else:
            rng = noise_generator(key, "noise", device=like.device)
            v = 2 * torch.rand(like.shape, generator=rng, device=like.device, dtype=torch.float64) - 1
        return _laplace(v).mul_(scale).to(like.dtype)

    def standard(self, like: Tensor, rng: Generator) -> Tensor:
        v = 2 * torch.rand(like.shape, generator=rng, device=like.device, dtype=torch.float64) - 1
        return (_laplace(v) / math.sqrt(2)).to(like.dtype)

    # --- its cost ---

    def event(self, entry: LedgerEntry) -> Event:
        m = entry.noise_multiplier
        loss = LaplaceLoss(1 / m) if 0 < m < math.inf else None
        return Event(m, 1.0, entry.steps * len(entry.rounds), loss)

    def epsilon(self, multiplier: float, delta: float) -> float:
        return 1 / multiplier if multiplier > LEAST else math.inf

    # --- the test of its noise ---

    def noise(self, sent: Floats, ready: Prepared, leaf: int, seed: int) -> Noise:
        """Return normal scores: the normal number at the share of the Laplace distribution that a number lies at."""
        e = as_matrix((sent - as_array(ready.leaves[leaf])) / max(ready.scales[leaf], TINY))
        z = np.sign(e) * -ndtri(np.maximum(0.5 * np.exp(-np.abs(e)), 1e-300))
        return Noise(z, LaplaceSizes(np.abs(e)))

    def direction(self, like: Tensor) -> Tensor:
        """Return the first axis: a shift of one number alone is the worst of its L1 norm."""
        row = torch.zeros_like(like)
        row.view(-1)[:1] = 1.0
        return row

    def quantiles(self, shares: Floats) -> Floats:
        v = 2 * shares - 1
        return -np.sign(v) * np.log1p(-np.abs(v)) / math.sqrt(2)

    # --- words ---

    def shown(self, entry: LedgerEntry) -> str:
        scale = "" if entry.sigma is None else f", scale {entry.sigma / math.sqrt(2):.4g} (L1)"
        return super().shown(entry) + scale


def _laplace(v: Tensor) -> Tensor:
    return -v.sign() * torch.log1p(-v.abs().clamp(max=1 - 2.0**-53))


@dataclass(frozen=True)
class LaplaceLoss(Loss):
    """The loss of one number with Laplace noise of scale 1 that is shifted by `shift`.

    With x the distance above the lower centre, it is shift - 2 x between the centres and +-shift beyond them. Under P
    it is `shift` with probability 1/2, and at most t < shift with probability exp(-(shift - t) / 2) / 2.
    """

    shift: float

    @property
    def pure(self) -> float:  # type: ignore[override]
        return self.shift

    @property
    def largest(self) -> float:
        return self.shift

    def cdf(self, t: Floats) -> Floats:
        t = np.asarray(t, dtype=np.float64)
        inner = 0.5 * np.exp(-(self.shift - np.minimum(t, self.shift)) / 2)
        return np.where(t >= self.shift, 1.0, np.where(t < -self.shift, 0.0, inner))

    def mean(self) -> float:
        """Return shift - 1 + exp(-shift), the Kullback-Leibler divergence."""
        return self.shift + math.expm1(-self.shift)

    def renyi(self, orders: Sequence[float]) -> Floats:
        """Return the divergence at each order (Mironov 2017, Table II)."""
        a, e = np.asarray(orders, dtype=np.float64), self.shift
        return np.logaddexp(np.log(a / (2 * a - 1)) + (a - 1) * e, np.log((a - 1) / (2 * a - 1)) - a * e) / (a - 1)


@dataclass(frozen=True)
class LaplaceSizes:
    """Magnitudes of Laplace noise over its scale."""

    sizes: Floats

    def test(self, parts: Sequence[LaplaceSizes]) -> LaplaceScale:
        return LaplaceScale(sum(part.sizes.size for part in parts), math.fsum(float(p.sizes.sum()) for p in parts))


@dataclass(frozen=True)
class LaplaceScale:
    """The test of the scale of n numbers: twice their magnitudes add up to a chi-square number of 2 n degrees."""

    n: int
    total: float

    @property
    def scale(self) -> float:
        return self.total / self.n

    def p_values(self) -> tuple[float, float]:
        return float(chdtr(2 * self.n, 2 * self.total)), float(chdtrc(2 * self.n, 2 * self.total))

    def limits(self, level: float, each: float) -> tuple[float, float]:
        twice = 2 * self.total
        return twice / float(chdtri(2 * self.n, level / 2)), twice / float(chdtri(2 * self.n, 1 - each))

    def finds(self, each: float, power: float) -> float:
        return float(chdtri(2 * self.n, 1 - each)) / float(chdtri(2 * self.n, 1 - power))

    def level(self, scale: float, power: float) -> float:
        return float(chdtr(2 * self.n, scale * float(chdtri(2 * self.n, 1 - power))))
