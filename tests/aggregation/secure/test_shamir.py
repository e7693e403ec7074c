"""Shares of a secret: by hand in a small field, and that too few tell nothing."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest

from fedaudit.aggregation.secure import shamir
from fedaudit.errors import RunError


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shamir, "PRIME", 13)
    shamir._weights.cache_clear()
    yield
    shamir._weights.cache_clear()


def number(x: int) -> bytes:
    return x.to_bytes(32, "little")


def test_by_hand_in_a_field_of_13(small):
    """f(x) = 5 + 3 x + 2 x^2: f(1) = 10, f(2) = 19 = 6, f(3) = 32 = 6, f(4) = 49 = 10 modulo 13.

    At 0 from the points 1, 2, 4: weights 2*4 / ((2-1)(4-1)) = 8/3 = 7, 1*4 / ((1-2)(4-2)) = 4/-2 = -2 = 11,
    1*2 / ((1-4)(2-4)) = 2/6 = 9 (1/3 = 9); 7 * 10 + 11 * 6 + 9 * 10 = 226 = 5.
    """
    shares = shamir.split(number(5), [1, 2, 3, 4], 3, [3, 2])
    assert shares == {1: 10, 2: 6, 3: 6, 4: 10}
    assert shamir._weights((1, 2, 4)) == (7, 11, 9)
    for some in itertools.combinations(shares, 3):
        assert shamir.joined({x: shares[x] for x in some}, 3) == number(5)


def test_too_few_shares_tell_nothing(small):
    """Two of three shares fit every secret equally often, over all polynomials of the small field."""
    seen: dict[tuple[int, int], list[int]] = {}
    for secret, a, b in itertools.product(range(13), repeat=3):
        shares = shamir.split(number(secret), [1, 2, 3], 3, [a, b])
        seen.setdefault((shares[1], shares[2]), []).append(secret)
    assert len(seen) == 13 * 13
    assert all(sorted(secrets) == list(range(13)) for secrets in seen.values())


def test_in_the_field_that_is_used():
    rng = random.Random(0)
    secret = rng.randbytes(32)
    points = rng.sample(range(1, 1000), 20)
    shares = shamir.split(secret, points, 12, [rng.randrange(shamir.PRIME) for _ in range(11)])
    for _ in range(5):
        some = rng.sample(points, rng.randint(12, 20))
        assert shamir.joined({x: shares[x] for x in some}, 12) == secret
    with pytest.raises(RunError, match="11 shares are there, and 12 are needed"):
        shamir.joined({x: shares[x] for x in points[:11]}, 12)
    wrong = dict(shares)
    wrong[min(points)] ^= 1
    with contextlib.suppress(RunError):
        assert shamir.joined({x: wrong[x] for x in sorted(points)[:12]}, 12) != secret


def test_the_modulus_is_the_least_prime_above_2_to_256():
    def is_prime(n: int) -> bool:  # Miller and Rabin, 20 bases
        d, r = n - 1, 0
        while d % 2 == 0:
            d, r = d // 2, r + 1
        for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71):
            x = pow(a, d, n)
            if x in (1, n - 1):
                continue
            for _ in range(r - 1):
                x = x * x % n
                if x == n - 1:
                    break
            else:
                return False
        return True

    assert [k for k in range(1, 298, 2) if is_prime((1 << 256) + k)] == [297]
    assert shamir.PRIME == (1 << 256) + 297
    assert shamir.PRIME < 1 << (8 * shamir.BYTES)


@pytest.mark.parametrize(
    ("points", "threshold", "coefficients"),
    [([1, 2], 3, [1, 1]), ([1, 1], 2, [1]), ([0, 1], 2, [1]), ([1, 2], 0, []), ([1, 2], 2, [])],
)
def test_what_cannot_be_shared_is_refused(points, threshold, coefficients):
    with pytest.raises(RunError):
        shamir.split(number(1), points, threshold, coefficients)
