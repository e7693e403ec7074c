"""The divergences behind every accountant: against opacus' loops, and against the integral itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad

from fedaudit.privacy import accounting, renyi
from fedaudit.privacy.renyi import renyi_divergence

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
