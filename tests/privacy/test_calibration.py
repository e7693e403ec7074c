"""The Gaussian mechanism's noise and cost against reference values, dp-accounting, and itself."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaudit.errors import PrivacyError
from fedaudit.privacy import calibration as cal

EPSILONS = st.floats(-4, 3).map(lambda x: 10.0**x)
DELTAS = st.floats(-12, -0.5).map(lambda x: 10.0**x)
MUS = st.floats(-4, 1.5).map(lambda x: 10.0**x)


def test_reference_values() -> None:
    assert cal.gaussian_epsilon(math.sqrt(50) / 5, 1e-5) == pytest.approx(6.57297006703, abs=1e-11)
    assert cal.classical(1, 1e-5, 1) == pytest.approx(4.8448052626, abs=1e-10)
    assert cal.analytic(1, 1e-5, 1) == pytest.approx(3.7306316348, abs=1e-10)
    assert cal.total(1, 1e-5, 1, 50) == pytest.approx(26.3795493, abs=1e-7)


@pytest.mark.parametrize(
    ("epsilon", "mu", "delta"),
    [
        (0.001, 0.001, 8.33571321252085e-5),
        (0.001, 0.1, 0.0393993035713169),
        (0.001, 5.0, 0.987574458330961),
        (0.1, 0.1, 0.00875176814580959),
        (1.0, 0.1, 1.23083598364271e-25),
        (1.0, 0.49, 0.00600058584882474),
        (1.0, 0.51, 0.00772652827511132),
        (1.0, 5.0, 0.979851678089775),
        (30.0, 5.0, 0.000131326271113373),
        (30.0, 60.0, 1.0),
    ],
)
def test_delta_against_sixty_digits(epsilon: float, mu: float, delta: float) -> None:
    """Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), with mpmath at 60 digits; both sides of every branch."""
    assert cal.gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-13, abs=0)


GRID = list(itertools.product([0.01, 0.1, 0.5, 1, 3, 10, 50], [1e-12, 1e-8, 1e-5, 1e-3, 0.1]))


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_agrees_with_dp_accounting(epsilon: float, delta: float) -> None:
    sigma = cal.analytic(epsilon, delta, 1)
    assert sigma == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), abs=1e-6)
    for noise_multiplier in (0.3, 1, 5, 40):
        ours = cal.gaussian_epsilon(1 / noise_multiplier, delta)
        assert ours == pytest.approx(dp_accounting.get_epsilon_gaussian(noise_multiplier, delta), abs=1e-6)


@pytest.mark.long
@given(EPSILONS, DELTAS, st.floats(1e-3, 1e3), st.integers(1, 10_000))
@settings(max_examples=200, deadline=None)
def test_round_trip(epsilon: float, delta: float, sensitivity: float, releases: int) -> None:
    mu = sensitivity / cal.analytic(epsilon, delta, sensitivity)
    assert cal.gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-9, abs=0)
    assert cal.gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-8)
    each = sensitivity / cal.total(epsilon, delta, sensitivity, releases)
    assert cal.gaussian_epsilon(cal.compose_mu([each] * releases), delta) == pytest.approx(epsilon, rel=1e-7)


@given(EPSILONS, DELTAS, MUS, st.floats(1.01, 3))
@settings(max_examples=200, deadline=None)
def test_monotone(epsilon: float, delta: float, mu: float, more: float) -> None:
    """More epsilon, more delta or less sensitivity need less noise; a larger mu promises less."""
    sigma = cal.analytic(epsilon, delta, 1)
    assert cal.analytic(epsilon * more, delta, 1) < sigma
    assert cal.analytic(epsilon, min(delta * more, 0.99), 1) < sigma
    assert cal.analytic(epsilon, delta, more) == pytest.approx(more * sigma)
    assert cal.gaussian_delta(epsilon, mu * more) >= cal.gaussian_delta(epsilon, mu)
    assert cal.gaussian_delta(epsilon * more, mu) <= cal.gaussian_delta(epsilon, mu)
    assert cal.gaussian_epsilon(mu * more, delta) >= cal.gaussian_epsilon(mu, delta)


@given(st.floats(-3, 0).map(lambda x: 10.0**x), DELTAS)
@settings(deadline=None)
def test_classical_is_enough_up_to_one(epsilon: float, delta: float) -> None:
    assert cal.classical(epsilon, delta, 1) > cal.analytic(epsilon, delta, 1)


def test_classical_is_refused_above_one_and_would_fail_far_above() -> None:
    with pytest.raises(PrivacyError, match=r"epsilon = 1\.5.*<= 1.*analytic"):
        cal.classical(1.5, 1e-5, 1)
    formula = math.sqrt(2 * math.log(1.25 / 1e-5)) / 50
    assert formula < cal.analytic(50, 1e-5, 1)


def test_extremes() -> None:
    assert cal.gaussian_epsilon(0, 1e-5) == 0
    assert cal.gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert cal.gaussian_epsilon(1e-6, 1e-5) == 0  # delta alone covers it: 2 Phi(mu/2) - 1 < 1e-5
    assert cal.gaussian_delta(1, 0) == cal.gaussian_delta(math.inf, 1) == 0
    assert cal.gaussian_delta(1, math.inf) == 1
    assert cal.gaussian_delta(1, 1e-300) == 0
    for epsilon, delta in itertools.product([1e-6, 1e6], [1e-300, 1e-30, 0.999]):
        assert cal.gaussian_delta(epsilon, 1 / cal.analytic(epsilon, delta, 1)) == pytest.approx(delta, rel=1e-8, abs=0)
    assert cal.compose_mu([]) == 0
    assert cal.compose_mu([3, 4]) == 5


def test_calibrate_by_name() -> None:
    assert cal.calibrate("classical", 1, 1e-5, 2) == cal.classical(1, 1e-5, 2)
    assert cal.calibrate("analytic", 1, 1e-5, 2, releases=50) == cal.analytic(1, 1e-5, 2)
    assert cal.calibrate("total", 1, 1e-5, 2, releases=50) == cal.total(1, 1e-5, 2, 50)
    with pytest.raises(PrivacyError, match="Did you mean 'analytic'"):
        cal.calibrate("analytical", 1, 1e-5, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["classical", "analytic", "total"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epsilon", v) for v in (0, -1, math.nan, math.inf, -math.inf, "1", None, True)),
        *(("delta", v) for v in (0, 1, -0.1, 1.5, math.nan, math.inf, "1e-5")),
        *(("sensitivity", v) for v in (0, -2, math.nan, math.inf)),
        *(("releases", v) for v in (0, -1, 1.5, math.nan, True, "2")),
    ],
)
def test_bad_input_is_named(kind: str, name: str, value: object) -> None:
    given = {"epsilon": 1.0, "delta": 1e-5, "sensitivity": 1.0, "releases": 1, name: value}
    with pytest.raises(PrivacyError, match=rf"^{name} = .*: give"):
        cal.calibrate(kind, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: cal.gaussian_delta(-1, 1), "epsilon"),
        (lambda: cal.gaussian_delta(math.nan, 1), "epsilon"),
        (lambda: cal.gaussian_delta(1, -1), "mu"),
        (lambda: cal.gaussian_epsilon(math.nan, 1e-5), "mu"),
        (lambda: cal.gaussian_epsilon(1, 0), "delta"),
        (lambda: cal.compose_mu([1, -1]), "mu"),
    ],
)
def test_bad_input_to_the_closed_forms(call, name: str) -> None:
    with pytest.raises(PrivacyError, match=f"^{name} = "):
        call()


def test_the_calibrations_by_hand_with_a_sensitivity() -> None:
    """classical: sqrt(2 ln 125) 3 / 0.5 at delta = 0.01. One release is what `calibrate` takes for granted."""
    assert cal.classical(0.5, 0.01, 3.0) == pytest.approx(math.sqrt(2 * math.log(125)) * 6)
    sigma = cal.analytic(0.5, 0.01, 3.0)
    assert cal.gaussian_delta(0.5, 3.0 / sigma) == pytest.approx(0.01, rel=1e-9)
    assert cal.calibrate("total", 0.5, 0.01, 3.0) == pytest.approx(sigma)
    assert (
        cal.calibrate("total", 0.5, 0.01, 3.0, 7) == cal.total(0.5, 0.01, 3.0, 7) == pytest.approx(math.sqrt(7) * sigma)
    )
    assert cal.calibrate("analytic", 0.5, 0.01, 3.0, 7) == sigma
    assert cal.calibrate("classical", 0.5, 0.01, 3.0, 7) == cal.classical(0.5, 0.01, 3.0)
    assert cal.compose_mu([0.5, 1.2, 0.3]) == pytest.approx(math.sqrt(0.25 + 1.44 + 0.09))


@pytest.mark.parametrize("guess", [1e-3, 0.4, 2.999, 3.0, 3.001, 50.0])
@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_a_root_is_found_from_any_guess(guess: float, sign: int) -> None:
    """x^3 - 27 and its negative: 3, from below, from above and from the root itself."""
    assert cal._root(lambda x: sign * (x**3 - 27), guess) == pytest.approx(3, rel=1e-12)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_the_delta_of_no_epsilon_is_the_distance_of_two_normals(mu: float) -> None:
    """2 Phi(mu / 2) - 1; at an epsilon that delta alone covers, it is 0."""
    apart = math.erf(mu / 2 / math.sqrt(2))
    assert cal.gaussian_delta(0, mu) == pytest.approx(apart, rel=1e-12)
    assert cal.gaussian_epsilon(mu, min(apart * (1 + 1e-9), 0.9999)) == 0.0
    assert cal.gaussian_epsilon(mu, apart * (1 - 1e-6)) > 0.0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("delta", [0.3, 0.5, 0.7])
def test_large_deltas_have_their_noise_too(epsilon: float, delta: float) -> None:
    assert cal.gaussian_delta(epsilon, 1 / cal.analytic(epsilon, delta, 1)) == pytest.approx(delta, rel=1e-9)
