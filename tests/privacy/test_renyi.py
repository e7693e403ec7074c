"""The divergences behind every accountant: against opacus' loops, and against the integral itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import logsumexp

from fedaudit.privacy import accounting, renyi
from fedaudit.privacy.renyi import renyi_divergence, renyi_epsilon

ORDERS = (1.01, 1.1, 1.5, 2, 3.7, 8, 10.9, 32, 256, 1024)


@pytest.mark.parametrize("sigma", [0.4, 1.3, 20.0])
@pytest.mark.parametrize("q", [1e-3, 0.2277, 0.5, 0.95])
def test_it_is_what_opacus_sums_up(sigma, q):
    """log A to rounding: for much noise on few records A is 1 + 1e-13, and neither of the two knows more digits."""
    pytest.importorskip("opacus")
    theirs = accounting._rdp_analysis().compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=ORDERS)
    alpha = np.array(ORDERS)
    assert renyi_divergence(sigma, q, ORDERS) * (alpha - 1) == pytest.approx(theirs * (alpha - 1), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("alpha", [1.5, 2, 4.3])
def test_it_is_the_integral(alpha):
    """E over N(0, s^2) of (1 - q + q exp((2x - 1) / (2 s^2)))^alpha."""
    q, s = 0.2, 0.9

    def inside(x):
        return math.exp(-x * x / (2 * s * s)) * (1 - q + q * math.exp((2 * x - 1) / (2 * s * s))) ** alpha

    A = quad(inside, -12, 20, limit=200)[0] / (s * math.sqrt(2 * math.pi))
    assert renyi_divergence(s, q, [alpha])[0] == pytest.approx(math.log(A) / (alpha - 1), rel=1e-8)


def test_a_long_series_is_summed_in_pieces_to_the_same(monkeypatch):
    long = renyi_divergence(20.0, 0.5, (1.01, 2.5))
    monkeypatch.setattr(renyi, "FIRST", 3)
    assert renyi_divergence(20.0, 0.5, (1.01, 2.5)) == pytest.approx(long, rel=1e-6)


def test_where_the_series_gives_up_opacus_answers(monkeypatch):
    pytest.importorskip("opacus")
    monkeypatch.setattr(renyi, "MOST", 0)
    accounting._renyi.cache_clear()
    with pytest.raises(ArithmeticError, match=r"order 1\.01 does not end"):
        renyi_divergence(1.3, 0.2277, (1.01,))
    assert accounting._renyi(1.3, 0.2277, (1.01,))[0] > 0
    accounting._renyi.cache_clear()


def test_the_least_epsilon_over_the_orders_by_hand():
    """D + log(1 - 1/a) - log(delta a) / (a - 1) at orders 2 and 5, of which the second is less; never below 0."""
    two = 0.5 + math.log(1 / 2) - math.log(0.01 * 2)
    five = 0.75 + math.log(4 / 5) - math.log(0.01 * 5) / 4
    assert five < two
    assert renyi_epsilon([2, 5], np.array([0.5, 0.75]), 0.01) == pytest.approx(five)
    assert renyi_epsilon([2], np.array([0.5]), 0.01) == pytest.approx(two)
    assert renyi_epsilon([2, 5], np.array([0.5, 0.0]), 0.9) == 0.0


@pytest.mark.parametrize("alpha", [2, 3])
def test_a_whole_order_by_hand(alpha):
    """Of order 2: 1 + q^2 (e^(1/s^2) - 1). Of order 3: the binomial sum with e^(0, 0, 1/s^2, 3/s^2)."""
    q, s = 0.3, 0.8
    e = math.exp(1 / s**2)
    wanted = {
        2: 1 + q**2 * (e - 1),
        3: (1 - q) ** 3 + 3 * q * (1 - q) ** 2 + 3 * q**2 * (1 - q) * e + q**3 * e**3,
    }[alpha]
    assert renyi._whole(s, q, alpha) == pytest.approx(math.log(wanted))
    assert renyi_divergence(s, q, [1.5, alpha])[1] == pytest.approx(math.log(wanted) / (alpha - 1))


def test_orders_of_unequal_length_are_summed_in_unequal_pieces(monkeypatch):
    """Pieces of 3 terms, 6, 12 and so on: each order ends in its own, and is what it is by itself."""
    orders = (1.01, 1.5, 2.5, 7.3, 30.2)
    whole = renyi_divergence(1.1, 0.4, orders)
    monkeypatch.setattr(renyi, "FIRST", 3)
    assert renyi_divergence(1.1, 0.4, orders) == pytest.approx(whole, rel=1e-9)
    for order, wanted in zip(orders, whole, strict=True):
        assert renyi_divergence(1.1, 0.4, [order])[0] == pytest.approx(wanted, rel=1e-9)


def test_a_series_that_ends_in_its_first_piece_is_not_given_up(monkeypatch):
    wanted = renyi_divergence(1.1, 0.4, (2.5,))
    monkeypatch.setattr(renyi, "FIRST", 4096)
    monkeypatch.setattr(renyi, "MOST", 0)
    assert renyi_divergence(1.1, 0.4, (2.5,)) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "terms", [[0.5], [3.0, 3.0, 1.0], [-800.0, -801.5], [710.0, 5.0, -3.0], [np.inf, 1.0], [-np.inf] * 2]
)
def test_a_sum_of_logarithms_is_scipys_to_the_bit(terms):
    """Noise that was calibrated before is calibrated to the same number."""
    with np.errstate(all="ignore"):
        assert renyi._log_sum(np.array(terms)) == logsumexp(terms)
    drawn = np.random.default_rng(len(terms)).normal(0, 30, (20, 300))
    assert [renyi._log_sum(row[: 13 * k + 1]) for k, row in enumerate(drawn)] == [
        logsumexp(row[: 13 * k + 1]) for k, row in enumerate(drawn)
    ]


def test_coefficients_of_a_whole_order_by_hand():
    i, log_c = renyi._coefficients(4)
    assert i.tolist() == [0, 1, 2, 3, 4]
    assert np.exp(log_c) == pytest.approx([1, 4, 6, 4, 1])
