"""The Gaussian mechanism: rows clipped in L2, and normal noise that meets (epsilon, delta)."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Generator, Tensor

from fedaudit.errors import PrivacyError
from fedaudit.privacy.calibration import calibrate, gaussian_epsilon
from fedaudit.privacy.mechanisms.additive import LEAST, AddsNoise
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import Policy


class Gaussian(AddsNoise):
    name = "gaussian"
    summary = "rows clipped in L2, normal noise: (epsilon, delta)"
    rounds = True
    noun = "Gaussian noise"
    normal = True
    persons = True

    def check(self, where: str, kind: str, policy: Policy) -> None:
        super().check(where, kind, policy)
        if policy.calibration == "classical" and policy.epsilon is not None and policy.epsilon > 1:
            raise PrivacyError(
                f"{where}: the classical calibration (DFFKE, Eq. 15) is proven for epsilon <= 1 only, not "
                f"{policy.epsilon:g}. Use calibration = 'analytic'."
            )

    def multiplier(self, policy: Policy, delta: float, releases: int, moves: int | None) -> float:
        assert policy.epsilon is not None  # the policy was checked when it was read
        return calibrate(policy.calibration, policy.epsilon, delta, 1.0, releases)

    def draw(self, like: Tensor, scale: float, policy: Policy, key: tuple[object, ...]) -> Tensor:
        return normal_noise(like, scale, policy, key)

    def standard(self, like: Tensor, rng: Generator) -> Tensor:
        return torch.randn(like.shape, generator=rng, device=like.device, dtype=like.dtype)

    def epsilon(self, multiplier: float, delta: float) -> float:
        return gaussian_epsilon(1 / multiplier, delta) if multiplier > LEAST else float("inf")


def normal_noise(like: Tensor, sigma: float, policy: Policy, key: tuple[object, ...]) -> Tensor:
    """Return normal noise of deviation sigma, from the key or from the operating system's entropy."""
    if policy.secure:
        return torch.from_numpy(system_normal(like.numel())).to(like).reshape(like.shape).mul_(sigma)
    rng = noise_generator(key, "noise", device=like.device)
    return torch.randn(like.shape, generator=rng, device=like.device, dtype=like.dtype).mul_(sigma)


def system_normal(n: int, chunk: int = 1 << 20) -> np.ndarray:
    """Return n standard normal numbers from the operating system's entropy, by inversion of 52-bit uniforms."""
    from scipy.special import ndtri

    out = np.empty(n)
    for begin in range(0, n, chunk):
        count = min(chunk, n - begin)
        out[begin : begin + count] = ndtri(system_uniform(count))
    return out


def system_uniform(n: int) -> np.ndarray:
    """Return n numbers strictly between 0 and 1 from the operating system's entropy, of 52 bits each.

    A half is added, for which a double has room beside 52 bits: with 53 the largest would be rounded up to 1.
    """
    uniform = (np.frombuffer(os.urandom(8 * n), dtype=np.uint64) >> np.uint64(12)).astype(np.float64)
    return (uniform + 0.5) * 2.0**-52
