"""Composition against the closed form, opacus as it is, and dp-accounting's privacy loss distributions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from fedaudit.errors import PrivacyError
from fedaudit.privacy import accounting as acc
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.calibration import gaussian_epsilon


def test_reference_values() -> None:
    c = compose([Event(5.0, count=50)], 1e-5)
    assert c.accountant == "gaussian-closed-form"
    assert c.epsilon_of_record == c.by_accountant["gaussian-closed-form"] == pytest.approx(6.57297006703, abs=1e-11)
    assert c.by_accountant["rdp"] == pytest.approx(7.07739, abs=5e-6)
    assert c.epsilon_of_record < c.by_accountant["prv"] < c.epsilon_of_record + 2 * acc.EPS_ERROR
    assert c.reason == ""


@given(st.lists(st.tuples(st.floats(0.3, 100), st.integers(1, 100)), min_size=1, max_size=5), st.floats(-12, -1))
@settings(max_examples=60, deadline=None)
def test_gaussians_agree_with_dp_accounting(parts: list[tuple[float, int]], log_delta: float) -> None:
    events = [Event(sigma, count=n) for sigma, n in parts]
    together = 1 / math.sqrt(sum(n / sigma**2 for sigma, n in parts))
    c = compose(events, 10**log_delta, compare=False)
    assert list(c.by_accountant) == ["gaussian-closed-form"]
    expected = dp_accounting.get_epsilon_gaussian(together, 10**log_delta)
    assert c.epsilon_of_record == pytest.approx(expected, abs=1e-6)


@functools.cache
def _pld(sigma: float, q: float, n: int) -> pld.PrivacyLossDistribution:
    """dp-accounting's upper estimate (connect the dots), both directions of add-or-remove."""
    one = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-4)
    return one.self_compose(n)


GRID = [*itertools.product([1.5, 5.0], [0.004, 0.05], [1, 1500]), (0.9, 0.01, 60), (5.0, 0.4, 1), (20.0, 0.1, 100)]


@pytest.mark.parametrize("delta", [1e-4, pytest.param(1e-9, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("sigma", "q", "n"), [pytest.param(*case, marks=pytest.mark.long if i % 2 else []) for i, case in enumerate(GRID)]
)
def test_subsampled_is_never_below_dp_accounting(sigma: float, q: float, n: int, delta: float) -> None:
    """Its estimate is itself an upper bound, but within about 1e-4; the PRV's upper end lies 0.01 above the truth."""
    c = compose([Event(sigma, q, n)], delta)
    theirs = _pld(sigma, q, n).get_epsilon_for_delta(delta)
    assert c.accountant == "prv"
    assert c.reason == ""
    assert theirs <= c.epsilon_of_record <= theirs + 2 * acc.EPS_ERROR
    assert theirs <= c.by_accountant["rdp"]


def test_mixed_events_are_never_below_dp_accounting() -> None:
    c = compose([Event(1.5, 0.01, 500), Event(3.0, 0.05, 100), Event(9.0, count=6), Event(9.0, count=4)], 1e-5)
    theirs = _pld(1.5, 0.01, 500).compose(_pld(3.0, 0.05, 100)).compose(_pld(9.0, 1.0, 10)).get_epsilon_for_delta(1e-5)
    assert c.accountant == "prv"
    assert theirs <= c.epsilon_of_record <= theirs + 2 * acc.EPS_ERROR


def test_merging_changes_nothing() -> None:
    whole = compose([Event(2.0, 0.01, 300), Event(5.0, 0.1, 20)], 1e-5)
    split = compose([Event(2.0, 0.01, 100), Event(5.0, 0.1, 20), Event(2.0, 0.01, 200)], 1e-5)
    assert whole == split


@pytest.mark.filterwarnings("ignore")
def test_rounding_errors_do_not_pass_for_privacy() -> None:
    """opacus' PRV at delta = 1e-14 answers less than the truth; we see it coming and take RDP."""
    from opacus.accountants import PRVAccountant

    truth = gaussian_epsilon(math.sqrt(2000) / 50, 1e-14)
    plain = PRVAccountant()
    plain.history = [(50.0, 1.0, 2000)]
    try:
        answer = plain.get_epsilon(1e-14)
    except ValueError as e:  # where long doubles are short, opacus sees it coming itself
        assert "Floating point errors" in str(e)  # noqa: PT017
    else:
        assert answer < truth - 0.1  # should this fail, opacus has mended it
    c = compose([Event(50.0, 0.999999, 2000)], 1e-14)
    assert c.accountant == "rdp"
    assert "rounding" in c.reason
    assert "prv" not in c.by_accountant
    assert c.epsilon_of_record > truth
    less = compose([Event(50.0, 0.999999, 2000)], 1e-12)  # errors of 4e-13: below delta, and far above a thousandth
    assert less.accountant == "rdp"
    assert "rounding" in less.reason


@pytest.mark.parametrize(
    ("events", "delta", "why"),
    [
        ([Event(0.02, 0.1, 3)], 1e-5, "overflow"),
        ([Event(1.0, 0.01, 10**6)], 1e-5, "grid"),
    ],
)
def test_falls_back_to_rdp_and_says_why(events: list[Event], delta: float, why: str) -> None:
    c = compose(events, delta)
    assert c.accountant == "rdp"
    assert why in c.reason
    assert 0 < c.epsilon_of_record < math.inf


def test_prv_failure_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *args: object, **kwargs: object) -> float:
        raise RuntimeError("Discrete mean differs significantly from continuous mean.")

    monkeypatch.setattr("opacus.accountants.PRVAccountant.get_epsilon", fail)
    c = compose([Event(1.2345, 0.05, 7)], 1e-5)
    assert c.accountant == "rdp"
    assert "Discrete mean" in c.reason
    assert c.epsilon_of_record == c.by_accountant["rdp"]


def test_both_failing_leaves_the_bound_without_amplification(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(history: object, delta: float) -> float:
        raise acc._Numerical("out of luck")

    monkeypatch.setattr(acc, "_prv", fail)
    monkeypatch.setattr(acc, "_rdp", fail)
    c = compose([Event(2.0, 0.1, 10)], 1e-5)
    assert c.epsilon_of_record == pytest.approx(gaussian_epsilon(math.sqrt(10) / 2, 1e-5))
    assert "upper bound" in c.reason


def test_no_amplification_is_an_upper_bound() -> None:
    for q in (0.9, 0.9999):
        assert compose([Event(1.0, q, 3)], 1e-5).epsilon_of_record < gaussian_epsilon(math.sqrt(3), 1e-5) + 0.02


def test_more_steps_rate_or_less_noise_cost_more() -> None:
    def epsilon(sigma: float, q: float, n: int) -> float:
        return compose([Event(sigma, q, n)], 1e-6, compare=False).epsilon_of_record

    base = epsilon(1.0, 0.02, 100)
    assert epsilon(1.0, 0.02, 200) > base
    assert epsilon(1.0, 0.03, 100) > base
    assert epsilon(0.9, 0.02, 100) > base


@pytest.mark.parametrize("q", [1.0, 0.1])
def test_nothing_and_everything(q: float) -> None:
    for free in ([], [Event(math.inf, q, 9)], [Event(1.0, q, 0)], [Event(0.0, 0.0, 3)]):
        assert compose(free, 1e-5).epsilon_of_record == 0
        assert set(compose(free, 1e-5).by_accountant.values()) == {0.0}
    c = compose([Event(5.0, q, 50), Event(0.0, q)], 1e-5)
    assert c.epsilon_of_record == math.inf
    assert set(c.by_accountant.values()) == {math.inf}
    assert "without noise" in c.reason


def test_without_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    c = compose([Event(5.0, count=50)], 1e-5)
    assert list(c.by_accountant) == ["gaussian-closed-form"]
    assert 'pip install "opacus>=1.5"' in c.reason
    with pytest.raises(PrivacyError, match=r"pip install .opacus>=1\.5"):
        compose([Event(5.0, 0.123, 50)], 1e-5)


def test_import_leaves_opacus_alone() -> None:
    code = "import sys, fedaudit.privacy.accounting, fedaudit.privacy.calibration; sys.exit('opacus' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *(({"noise_multiplier": v}, "noise_multiplier") for v in (-1.0, math.nan, "1", True)),
        *(({"noise_multiplier": 1.0, "sample_rate": v}, "sample_rate") for v in (-0.1, 1.1, math.nan, None)),
        *(({"noise_multiplier": 1.0, "count": v}, "count") for v in (-1, 1.5, True)),
    ],
)
def test_bad_events(settings: dict, name: str) -> None:
    with pytest.raises(PrivacyError, match=rf"^{name} = .*: give"):
        Event(**settings)


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan, "1e-5"])
def test_bad_delta(delta: float) -> None:
    with pytest.raises(PrivacyError, match=r"^delta = "):
        compose([Event(1.0)], delta)


@pytest.mark.parametrize(
    ("history", "delta"),
    [(((2.0, 0.1, 84), (3.0, 0.01, 13)), 1e-5), (((5.0, 0.01, 33),), 1e-3), (((1.0, 0.3, 1),), 1e-3)],
)
def test_the_quick_prv_is_opacus_to_the_bit(history: acc.History, delta: float) -> None:
    """It takes the divergences over from elsewhere; the grid is the one that opacus lays out."""
    epsilons = []
    for cls in (acc._accountants().PRVAccountant, acc._prv_accountant()):
        accountant = cls()
        accountant.history = list(history)
        epsilons.append(accountant.get_epsilon(delta, eps_error=0.01, delta_error=delta / 1000))
    assert epsilons[0] == epsilons[1] > 0


def test_equal_losses_add_up():
    """Two entries of three and four Laplace releases are seven; a Gaussian beside them costs what it costs."""
    from fedaudit.privacy.mechanisms.laplace import LaplaceLoss

    apart = compose([Event(2.0, 1.0, 3, LaplaceLoss(0.5)), Event(2.0, 1.0, 4, LaplaceLoss(0.5))], 1e-5)
    assert apart == compose([Event(2.0, 1.0, 7, LaplaceLoss(0.5))], 1e-5)
    assert apart.by_accountant["sum"] == pytest.approx(3.5)
    both = compose([Event(2.0, 1.0, 1, LaplaceLoss(0.5)), Event(5.0)], 1e-5)
    assert "sum" not in both.by_accountant
    theirs = pld.from_laplace_mechanism(2.0).compose(pld.from_gaussian_mechanism(5.0)).get_epsilon_for_delta(1e-5)
    assert theirs - 1e-3 <= both.epsilon_of_record <= theirs + 0.03


def test_losses_beyond_all_bounds_are_not_left_out():
    """Noise of a tenth of the sensitivity: losses are around 1 / (2 x 0.01) = 50 with a deviation of 10, and the curve
    ends at 60. What lies beyond may be anything, so that the numerical accountant says nothing."""
    from fedaudit.privacy.mechanisms.discrete_gaussian import DiscreteGaussianRows

    done = compose([Event(0.1, 1.0, 1, DiscreteGaussianRows(0.1))], 1e-5)
    assert "prv" not in done.by_accountant
    assert "beyond all bounds" in done.reason
    assert done.epsilon_of_record == done.by_accountant["rdp"] > 90


def test_a_single_step_that_is_sampled_makes_the_whole_history_so() -> None:
    """Events of both regimes have no closed form. Its value without sub-sampling is an upper bound far above."""
    mixed = [Event(9.0), Event(1.0, 0.001, 1)]
    for events in (mixed, mixed[::-1]):
        c = compose(events, 1e-5, compare=False)
        assert c.accountant == "prv"
        assert list(c.by_accountant) == ["prv"]
        assert c.epsilon_of_record < 0.6 < gaussian_epsilon(math.hypot(1 / 9, 1), 1e-5) / 5


def test_events_that_tell_nothing_do_not_decide_the_accountant() -> None:
    """No steps, a rate of 0, infinite noise: all of them are left out before it is asked what is sub-sampled."""
    nothing = [Event(1.0, 0.5, 0), Event(1.0, 0.0, 7), Event(math.inf, 0.5, 7)]
    c = compose([*nothing, Event(2.0, count=3)], 1e-5, compare=False)
    assert (c.accountant, c.reason) == ("gaussian-closed-form", "")
    assert c.epsilon_of_record == gaussian_epsilon(math.sqrt(3) / 2, 1e-5)
    assert compose(nothing, 1e-5).epsilon_of_record == 0
    assert compose([*nothing, Event(0.0, 0.5, 1)], 1e-5).accountant == "prv"
    assert compose([Event(0.0, 1.0, 0)], 1e-5).epsilon_of_record == 0, "no release without noise was made"


def test_a_history_merges_what_is_equal_and_nothing_else() -> None:
    """Gaussians that read all records: 1 / sqrt(2 / 3^2 + 1 / 4^2). Steps are merged by noise and rate together."""
    events = [Event(3.0, count=2), Event(4.0), Event(1.0, 0.2, 5), Event(1.0, 0.1, 3), Event(1.0, 0.2, 2)]
    plain, *steps = acc._history(events)
    assert plain == (pytest.approx(1 / math.sqrt(2 / 9 + 1 / 16)), 1.0, 1)
    assert steps == [(1.0, 0.1, 3), (1.0, 0.2, 7)]


def test_an_event_is_one_release_of_all_records_unless_it_says_else() -> None:
    assert Event(2.0) == Event(2.0, 1.0, 1)
    assert compose([Event(2.0)], 1e-5, compare=False).epsilon_of_record == gaussian_epsilon(0.5, 1e-5)
    assert set(compose([Event(2.0)], 1e-5).by_accountant) == {"gaussian-closed-form", "prv", "rdp"}


def test_a_history_has_one_order_whatever_the_events_had() -> None:
    from fedaudit.privacy.mechanisms.laplace import LaplaceLoss

    events = [Event(2.0, 1.0, 3, LaplaceLoss(0.5)), Event(3.0, 1.0, 3, LaplaceLoss(0.25))]
    assert acc._history(events) == acc._history(events[::-1]), "equal numbers of releases do not decide it"


def test_the_grid_ends_beyond_a_quarter_of_what_the_error_may_be() -> None:
    """A Gaussian of multiplier 0.0345 loses 597 + 3 at most but for delta / 4000 (Gopi et al. 2021, Theorem 5.5), and
    less than 600 with it but for delta / 1000: the grid's last point must be the first of the two.
    """
    sigma, delta = 0.0345, 1e-5
    for error, beyond in ((delta / 4000, True), (delta / 1000, False)):
        # Renyi's bound by its formula (Canonne et al. 2020, Proposition 12), at the best of finely spaced orders.
        orders = [1 + i / 1000 for i in range(1, 1000)]
        bounds = [a / (2 * sigma**2) + math.log1p(-1 / a) - math.log(error * a) / (a - 1) for a in orders]
        assert (min(bounds) + 3 > acc.MAX_LOSS) is beyond
    with pytest.raises(acc._Numerical, match="overflow the grid"):
        acc._prv(((sigma, 1.0, 1),), delta)


# --- whole functions, on histories of which no two entries are alike


@pytest.mark.parametrize(("q", "sigma"), [(0.3, 1.7), (0.05, 0.6)])
def test_the_loss_of_leaving_a_record_out_by_the_density(q: float, sigma: float) -> None:
    """log Q/P under Q = N(0, s^2) falls with x: it is at most t from the x on at which it is t."""

    def loss(x: float) -> float:
        return -math.log(1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2)))

    largest = -math.log(1 - q)
    ts = [-2.0, -0.1, 0.0, 0.6 * largest, largest + 0.1]
    wanted = [
        1.0 if t >= largest else float(norm.sf(brentq(lambda x, t=t: loss(x) - t, -40, 40, xtol=1e-13) / sigma))
        for t in ts
    ]
    assert acc._Reverse(q, sigma).cdf(ts) == pytest.approx(wanted, rel=1e-9)


def test_both_directions_count_where_steps_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger one is taken. One kind of step alone, or none that is sampled, has one direction."""
    asked: list[tuple] = []

    class Fake:
        reverse = False

        def get_epsilon(self, delta: float, eps_error: float, delta_error: float) -> float:
            asked.append((self.reverse, delta, eps_error, delta_error, tuple(self.history)))
            return {False: 1.25, True: 1.5}[self.reverse] - len(self.history)

    monkeypatch.setattr(acc, "_prv_accountant", lambda: Fake)
    mixed = ((3.5, 1.0, 1), (2.5, 0.01, 7))
    prv = acc._prv.__wrapped__
    assert prv(mixed, 1e-3) == 0.0, "an epsilon is not negative"
    assert [(reverse, delta, error) for reverse, delta, _, error, _ in asked] == [
        (False, 1e-3, 1e-6),
        (True, 1e-3, 1e-6),
    ]
    assert all(history == mixed for *_, history in asked)
    monkeypatch.setattr(Fake, "get_epsilon", lambda self, *_, **__: {False: 1.25, True: 1.5}[self.reverse])
    assert prv(mixed, 1e-3) == 1.5
    assert prv(((2.5, 0.01, 7),), 1e-3) == 1.25
    assert prv(((3.5, 1.0, 1), (4.5, 1.0, 2)), 1e-3) == 1.25
    monkeypatch.setattr(Fake, "get_epsilon", lambda self, *_, **__: {False: 1.75, True: 1.5}[self.reverse])
    assert prv(mixed, 1e-3) == 1.75


def test_of_losses_the_least_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedaudit.privacy.mechanisms.laplace import LaplaceLoss

    events = [Event(2.0, 1.0, 3, LaplaceLoss(0.5)), Event(4.0, 1.0, 2, LaplaceLoss(0.25))]
    answers = {"prv": 1.75, "rdp": 1.5}
    monkeypatch.setattr(acc, "_prv", lambda history, delta: answers["prv"])
    monkeypatch.setattr(acc, "_rdp", lambda history, delta: answers["rdp"])
    found = compose(events, 1e-5)
    assert (found.epsilon_of_record, found.accountant, found.reason) == (1.5, "rdp", "")
    assert found.by_accountant == {"sum": pytest.approx(2.0), "prv": 1.75, "rdp": 1.5}
    mixed = compose([*events, Event(5.0)], 1e-5)
    assert mixed.by_accountant == {"prv": 1.75, "rdp": 1.5}

    def fails(history: acc.History, delta: float) -> float:
        raise acc._Numerical("too coarse")

    monkeypatch.setattr(acc, "_rdp", fails)
    found = compose([*events, Event(5.0)], 1e-5)
    assert (found.epsilon_of_record, found.accountant, found.reason) == (1.75, "prv", "rdp: too coarse")
    monkeypatch.setattr(acc, "_prv", fails)
    found = compose([*events, Event(5.0)], 1e-5)
    assert (found.epsilon_of_record, found.by_accountant) == (math.inf, {})
    assert found.reason == "prv: too coarse; rdp: too coarse"
    monkeypatch.setattr(acc, "_have_opacus", lambda: False)
    found = compose(events, 1e-5)
    assert (found.epsilon_of_record, found.accountant) == (pytest.approx(2.0), "sum")
    assert found.reason.startswith("prv and rdp are left out: they need opacus")


def test_a_sampled_steps_divergence_is_computed_here_and_others_by_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acc, "renyi_divergence", lambda sigma, q, orders: (sigma, q, orders))
    assert acc._renyi.__wrapped__(1.5, 0.25, (2.0, 3.0)) == (1.5, 0.25, (2.0, 3.0))
    assert acc._renyi.__wrapped__(1.5, 1.0, (2.0, 3.0)) == pytest.approx([2 / 4.5, 3 / 4.5])

    def overflows(*_: object) -> None:
        raise OverflowError

    monkeypatch.setattr(acc, "renyi_divergence", overflows)
    assert acc._renyi.__wrapped__(1.5, 0.25, (2.0,))[0] == pytest.approx(math.log1p(0.0625 * math.expm1(1 / 2.25)))


def test_every_answer_of_a_composition_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accountants that answer at once: which of them is asked, and all that is said."""
    from fedaudit.privacy.accounting import Composed

    asked: list[str] = []
    monkeypatch.setattr(acc, "_prv", lambda history, delta: asked.append("prv") or 1.25)
    monkeypatch.setattr(acc, "_rdp", lambda history, delta: asked.append("rdp") or 1.5)
    plain, sampled = "gaussian-closed-form", Event(2.0, 0.1, 3)
    for compare in (True, False):
        nothing = compose([], 1e-5, compare=compare)
        assert nothing == Composed(0.0, 1e-5, plain, dict.fromkeys([plain, "rdp", "prv"], 0.0), "")
        free = compose([Event(1.0, 0.5, 0)], 1e-5, compare=compare)
        assert free == nothing
        bare = compose([sampled, Event(0.0)], 1e-5, compare=compare)
        assert bare == Composed(
            math.inf, 1e-5, "prv", dict.fromkeys(["prv", "rdp"], math.inf), "a release without noise"
        )
        bare = compose([Event(1.0), Event(0.0)], 1e-5, compare=compare)
        assert (bare.accountant, set(bare.by_accountant)) == (plain, {plain, "rdp", "prv"})
    assert asked == []
    exact = pytest.approx(gaussian_epsilon(math.sqrt(3 / 4 + 1 / 9), 1e-5))
    events = [Event(2.0, count=3), Event(3.0)]
    assert compose(events, 1e-5, compare=False) == Composed(exact, 1e-5, plain, {plain: exact}, "")
    assert asked == []
    assert compose(events, 1e-5) == Composed(exact, 1e-5, plain, {plain: exact, "prv": 1.25, "rdp": 1.5}, "")
    assert asked == ["prv", "rdp"]
    assert compose([sampled], 1e-5, compare=False) == Composed(1.25, 1e-5, "prv", {"prv": 1.25}, "")
    assert asked == ["prv", "rdp", "prv"]
    assert compose([sampled], 1e-5) == Composed(1.25, 1e-5, "prv", {"prv": 1.25, "rdp": 1.5}, "")


@pytest.mark.parametrize("history", [((40.0, 0.02, 3),), ((0.01, 1.0, 1),), ((30.0, 1.0, 1), (20.0, 0.01, 2))])
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_the_grid_is_laid_out_by_opacus_own_orders(history: acc.History) -> None:
    """Much noise and little have their best order beyond opacus' own, which would make the grid shorter. The domain is
    -L to L, L the largest divergence of the whole at a quarter of the error, and of each step at an eighth of its
    share, and 3; the mesh is eps / sqrt(steps log(12 / error) / 2)."""
    from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

    orders = acc._accountants().RDPAccountant.DEFAULT_ALPHAS

    def epsilon(parts: acc.History, delta: float) -> float:
        total = sum(n * compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=orders) for sigma, q, n in parts)
        return get_privacy_spent(orders=orders, rdp=total, delta=delta)[0]

    accountant = acc._prv_accountant()()
    accountant.history = list(history)
    steps = sum(n for *_, n in history)
    domain = accountant._get_domain(None, [n for *_, n in history], 0.01, 1e-8)
    single = [epsilon(((sigma, q, 1),), 1e-8 / (8 * steps)) for sigma, q, _ in history]
    wide = max(epsilon(history, 1e-8 / 4), *single) + 3
    mesh = 0.01 / math.sqrt(steps * math.log(12 / 1e-8) / 2)
    assert domain.t_max == pytest.approx(wide, abs=2 * mesh)
    assert domain.t_min == pytest.approx(-wide, abs=2 * mesh)
    assert domain.dt == pytest.approx(mesh, rel=1e-9)


def test_the_grid_holds_the_largest_loss() -> None:
    """A release that loses 9 at most, but rarely anything: the grid ends 3 beyond. So it does beyond the error."""
    from fedaudit.privacy.losses import Atoms

    @dataclasses.dataclass(frozen=True)
    class Rare(Atoms):
        most: float

        @property
        def atoms(self):  # type: ignore[override]
            return np.array([-self.most, 0.0, self.most]), np.array([1e-12, 1 - 2e-12, 1e-12])

        def renyi(self, orders):
            return np.full(len(orders), 1e-9)

    for loss, error, wide in ((Rare(9.0), 0.01, 12.0), (Rare(0.001), 5.0, 8.0)):
        accountant = acc._prv_accountant()()
        accountant.history = [(loss, 1.0, 2)]
        domain = accountant._get_domain(None, [2], error, 1e-1)
        assert domain.t_max == pytest.approx(wide, abs=2 * domain.dt)


def test_an_epsilon_by_renyi_takes_orders_beyond_opacus_own() -> None:
    """Noise of a hundredth has its best order at 1.05, and much noise above 63. By the formula of Balle et al. 2020,
    Theorem 21, at each order."""
    orders = acc._accountants().RDPAccountant.DEFAULT_ALPHAS
    more = (1.01, 1.02, 1.05, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)

    def best(sigma: float, count: int, of: tuple[float, ...]) -> float:
        return min(
            count * a / (2 * sigma**2) - (math.log(1e-5) + math.log(a)) / (a - 1) + math.log((a - 1) / a) for a in of
        )

    for sigma, count in ((0.01, 1), (90.0, 2)):
        within, all_of_them = (best(sigma, count, tuple(of)) for of in (orders, (*orders, *more)))
        assert acc._rdp(((sigma, 1.0, count),), 1e-5) == pytest.approx(all_of_them)
        assert acc._rdp(((sigma, 1.0, count),), 1e-5, beyond=False) == pytest.approx(within)
        assert all_of_them < within * (1 - 1e-3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("laplace", [False, True])
def test_each_direction_of_a_sampled_step_by_its_densities(reverse: bool, laplace: bool) -> None:
    """One step at q = 0.4 and sigma = 0.8, with or without a Laplace release that costs next to nothing. The exact
    delta is the integral of P - e^epsilon Q, or of Q - e^epsilon P, where that is above 0."""
    from fedaudit.privacy.mechanisms.laplace import LaplaceLoss

    q, sigma, delta = 0.4, 0.8, 0.02
    x = np.linspace(-8, 9, 20_001)
    without = norm.pdf(x, 0, sigma)
    both = ((1 - q) * without + q * norm.pdf(x, 1, sigma), without)
    first, second = both[::-1] if reverse else both
    exact = brentq(lambda e: np.maximum(first - math.exp(e) * second, 0).sum() * (x[1] - x[0]) - delta, 0, 20)
    accountant = acc._prv_accountant()()
    accountant.reverse = reverse
    accountant.history = [(sigma, q, 1), *([(LaplaceLoss(1e-4), 1.0, 1)] if laplace else [])]
    found = accountant.get_epsilon(delta, eps_error=0.02, delta_error=delta / 1000)
    assert exact - 1e-3 <= found <= exact + 0.05
