"""Real numbers in the ring of 32-bit words: clipped, rounded, and summed without overflow.

A value x of at most `bound` becomes the whole number nearest to x / step, with step = bound / levels and
levels = floor((2^31 - 1) / clients): the sum of so many clients stays below 2^31 in size. Beyond the bound a value is
cut off. Each client's rounding moves the sum by at most step / 2, and the mean of weights w by at most
clients step / (2 sum w): `Ring.error` says so, and the run's record keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedaudit.errors import RunError

HALF = (1 << 31) - 1
BLOCK = 1 << 16  # numbers that are converted at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class Part:
    """A stretch of a vector: how many numbers, and the largest size of each."""

    length: int
    bound: float


@dataclass(frozen=True)
class Ring:
    """The way from a vector of real numbers to one of 32-bit words, for a sum of at most `clients` clients."""

    parts: tuple[Part, ...]
    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1 or self.clients > HALF // 256:
            raise RunError(f"A ring of 32 bits cannot sum {self.clients} clients. Ask fewer in a round.")

    @property
    def levels(self) -> int:
        return HALF // self.clients

    def steps(self) -> list[float]:
        return [part.bound / self.levels for part in self.parts]

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    def encoded(self, vectors: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        """Return the vector's words, and how many of its numbers were cut off at their bound."""
        words, at, clipped = np.empty(self.length, np.uint32), 0, 0
        if [v.size for v in vectors] != [part.length for part in self.parts]:
            raise RunError("A reply has other sizes than the sum was set up for. All clients send the same fields.")
        for part, step, vector in zip(self.parts, self.steps(), vectors, strict=True):
            flat = vector.reshape(-1)
            for begin in range(0, part.length, BLOCK):
                block = flat[begin : begin + BLOCK].astype(np.float64)
                if not np.isfinite(block).all():
                    raise RunError("A reply holds NaN or infinity, which no sum can carry. Training has diverged.")
                np.multiply(block, 1 / step, out=block)
                np.rint(block, out=block)
                clipped += int(np.count_nonzero(np.abs(block) > self.levels))
                np.clip(block, -self.levels, self.levels, out=block)
                words[at : at + len(block)] = block.astype(np.int64).astype(np.uint32)
                at += len(block)
        return words, clipped

    def decoded(self, words: np.ndarray) -> list[np.ndarray]:
        """Return the sum that the words stand for, part by part."""
        signed, found, at = words.view(np.int32), [], 0
        for part, step in zip(self.parts, self.steps(), strict=True):
            found.append(signed[at : at + part.length].astype(np.float64) * step)
            at += part.length
        return found

    def error(self, clients: int, weights: float) -> float:
        """Return the most by which rounding moves a real number of a mean of so many clients with weights of this sum.

        Real numbers are the first part of a vector.
        """
        return clients * self.steps()[0] / (2 * weights)
