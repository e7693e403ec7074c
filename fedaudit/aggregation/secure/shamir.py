"""Shamir's secret sharing over a prime field: any `threshold` shares give the secret back, fewer tell nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from fedaudit.errors import RunError

PRIME = (1 << 256) + 297  # the least prime above 2^256, so that every secret of 32 bytes is an element
BYTES = 33  # of an element
SECRET = 32  # bytes of a secret


def split(secret: bytes, points: Sequence[int], threshold: int, coefficients: Iterable[int]) -> dict[int, int]:
    """Return one share for each point: the values of a polynomial of degree threshold - 1 whose constant is the secret.

    `coefficients` are threshold - 1 numbers, uniform in the field. Points are numbers from 1 up, all different.
    """
    if not 1 <= threshold <= len(points):
        raise RunError(f"{threshold} of {len(points)} shares cannot be asked for. Lower the threshold.")
    if len(set(points)) < len(points) or not all(0 < x < PRIME for x in points):
        raise RunError("The points of shares are numbers from 1 up, all different.")
    polynomial = [int.from_bytes(secret, "little"), *(c % PRIME for c in coefficients)]
    if len(polynomial) != threshold:
        raise RunError(f"{threshold} shares need {threshold - 1} coefficients, not {len(polynomial) - 1}.")
    shares = {}
    for x in points:
        value = 0
        for c in reversed(polynomial):  # Horner
            value = (value * x + c) % PRIME
        shares[x] = value
    return shares


@lru_cache(maxsize=512)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Lagrange weights at 0: the value there is the sum of weight x share."""
    weights = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)


def joined(shares: Mapping[int, int], threshold: int) -> bytes:
    """Return the secret of `threshold` or more shares, by point. Raise if there are fewer."""
    if len(shares) < threshold:
        raise RunError(f"{len(shares)} shares are there, and {threshold} are needed: the secret stays unknown.")
    points = tuple(sorted(shares)[:threshold])
    value = sum(w * shares[x] for w, x in zip(_weights(points), points, strict=True)) % PRIME
    if value >> (8 * SECRET):
        raise RunError("The shares do not belong together: what they give is not a secret of 32 bytes.")
    return value.to_bytes(SECRET, "little")
