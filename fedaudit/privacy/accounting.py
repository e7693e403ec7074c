"""Accounting: the joint cost of a sequence of releases.

An `Event` is a Gaussian mechanism with noise of `noise_multiplier` times the L2 sensitivity, applied `count` times, or
another mechanism with a `loss` of its own (fedaudit.privacy.losses). There are two regimes of Gaussian mechanisms:

- `sample_rate` 1: every release reads all records. The composition is one Gaussian and its epsilon a closed form. It
  holds under the neighbouring relation in which the sensitivity was measured (replace-one: 2C under clipping to C;
  zero-out with public n: C).
- `sample_rate` below 1: each step reads a Poisson sample, every record independently with that probability. opacus'
  accountants hold under **add-or-remove-one** and for Poisson sampling only: sensitivity C, and neither shuffled
  batches of a fixed size nor replace-one are covered.

A Poisson sample has two directions: from the data with the record to those without it, and back. opacus computes the
first. Where sampled steps are composed with other releases, both are computed and the larger one counts.

Epsilons of different relations do not compose. The ledger keeps them apart; the functions here do not know a relation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy

from fedaudit.errors import PrivacyError
from fedaudit.extras import install
from fedaudit.privacy.calibration import check_delta, compose_mu, gaussian_epsilon
from fedaudit.privacy.losses import Loss
from fedaudit.privacy.renyi import renyi_divergence

CLOSED_FORM = "gaussian-closed-form"
PRV = "prv"
RDP = "rdp"
PURE = "sum"  # epsilons of releases with delta = 0, added up

EPS_ERROR = 0.01  # the PRV accountant's default: its answer lies at most about twice this above the truth
MAX_BINS = 2**21  # bins of the PRV's grid: if more are needed, the error is widened, so that memory stays bounded
MAX_LOSS = 600.0  # e^t in the PRV's grid must stay a finite double

# (noise multiplier or loss, sample rate, steps), as opacus keeps it
History = tuple[tuple[float | Loss, float, int], ...]


@dataclass(frozen=True)
class Event:
    """`count` mechanisms with one noise multiplier. Infinite noise costs nothing, no noise costs infinity.

    They are Gaussian, or have the loss that is given.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    count: int = 1
    loss: Loss | None = None

    def __post_init__(self) -> None:
        def number(value: object) -> bool:
            return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)

        if not number(self.noise_multiplier) or self.noise_multiplier < 0:
            raise PrivacyError(
                f"noise_multiplier = {self.noise_multiplier!r} of a privacy event: give sigma / sensitivity, a number "
                "from 0 (unprotected) to infinity (nothing released)."
            )
        if not number(self.sample_rate) or not 0 <= self.sample_rate <= 1:
            raise PrivacyError(
                f"sample_rate = {self.sample_rate!r} of a privacy event: give the probability with which a record is "
                "in a Poisson sample, from 0 to 1 (1 if every release reads all records)."
            )
        if isinstance(self.count, bool) or not isinstance(self.count, numbers.Integral) or self.count < 0:
            raise PrivacyError(
                f"count = {self.count!r} of a privacy event: give a whole number of releases, from 0 up."
            )


@dataclass(frozen=True)
class Composed:
    """The cost of a sequence of events: the guaranteed epsilon, its accountant, and the other accountants' epsilons.

    `reason` says why an accountant other than the usual one gave the epsilon of record, or why one is missing.
    """

    epsilon_of_record: float
    delta: float
    accountant: str
    by_accountant: dict[str, float] = field(default_factory=dict)
    reason: str = ""


class _Numerical(Exception):
    """An accountant has no trustworthy answer; the message is the reason."""


def compose(events: Sequence[Event], delta: float, *, compare: bool = True) -> Composed:
    """Return (epsilon, delta) of all `events` together. The epsilon of record is never below the truth.

    It is the closed form if no event is sub-sampled. Otherwise it is the upper end of opacus' PRV accountant (Gopi, Lee
    and Wutschitz 2021), or RDP (Mironov, Talwar and Zhang 2019) if that has no trustworthy answer. `compare=False`
    leaves out the accountants that the epsilon of record does not need.
    """
    delta = check_delta(delta)
    events = [e for e in events if e.count > 0 and e.sample_rate > 0 and e.noise_multiplier < math.inf]
    plain = all(e.sample_rate == 1 for e in events)
    usual = CLOSED_FORM if plain else PRV
    names = [CLOSED_FORM, RDP, PRV] if plain else [PRV, RDP]
    if not events:
        return Composed(0.0, delta, usual, dict.fromkeys(names, 0.0))
    if any(e.noise_multiplier == 0 for e in events):
        return Composed(math.inf, delta, usual, dict.fromkeys(names, math.inf), "a release without noise")

    history = _history(events)
    epsilons: dict[str, float] = {}
    reasons: list[str] = []
    if any(e.loss is not None for e in events):
        return _compose_losses(events, history, delta)
    if plain:
        mu = compose_mu(math.sqrt(e.count) / e.noise_multiplier for e in events)
        epsilons[CLOSED_FORM] = gaussian_epsilon(mu, delta)
        if not compare:
            return Composed(epsilons[CLOSED_FORM], delta, CLOSED_FORM, epsilons)
        if not _have_opacus():
            missing = f"prv and rdp are left out: they need opacus ({install('opacus')})"
            return Composed(epsilons[CLOSED_FORM], delta, CLOSED_FORM, epsilons, missing)

    for name, accountant in ((PRV, _prv), (RDP, _rdp)):
        if name == RDP and PRV in epsilons and not compare:
            continue
        try:
            epsilons[name] = accountant(history, delta)
        except _Numerical as why:
            reasons.append(f"{name}: {why}")
    accountant_of_record = next((name for name in (CLOSED_FORM, PRV, RDP) if name in epsilons), None)
    if accountant_of_record is None:
        # A Poisson sample of rate q turns the pair (P, Q) into (qP + (1-q)Q, Q), and "keep the output with probability
        # q, else draw from Q" maps the one to the other: without amplification the cost is an upper bound.
        mu = compose_mu(math.sqrt(e.count) / e.noise_multiplier for e in events)
        reasons.append("the sub-sampling is left out of account, which is an upper bound")
        accountant_of_record, epsilons[CLOSED_FORM] = CLOSED_FORM, gaussian_epsilon(mu, delta)
    return Composed(epsilons[accountant_of_record], delta, accountant_of_record, epsilons, "; ".join(reasons))


def _compose_losses(events: Sequence[Event], history: History, delta: float) -> Composed:
    """Return the cost of events of which some have a loss of their own. Every accountant's answer is an upper bound.

    The least of them counts.
    """
    epsilons: dict[str, float] = {}
    reasons: list[str] = []
    pure = [None if e.loss is None else e.loss.pure for e in events]
    if all(epsilon is not None for epsilon in pure):
        epsilons[PURE] = math.fsum(e.count * (epsilon or 0.0) for e, epsilon in zip(events, pure, strict=True))
    if not _have_opacus():
        reasons.append(f"prv and rdp are left out: they need opacus ({install('opacus')})")
    else:
        for name, accountant in ((PRV, _prv), (RDP, _rdp)):
            try:
                epsilons[name] = accountant(history, delta)
            except _Numerical as why:
                reasons.append(f"{name}: {why}")
    if not epsilons:
        return Composed(math.inf, delta, PRV, {}, "; ".join(reasons))
    best = min(epsilons, key=lambda name: epsilons[name])
    return Composed(epsilons[best], delta, best, epsilons, "; ".join(reasons))


def _history(events: Sequence[Event]) -> History:
    """Return the events in a fixed order, equal ones merged. Gaussians without sub-sampling compose to one Gaussian."""
    steps: dict[tuple[float, float], int] = {}
    others: dict[Loss, int] = {}
    for e in events:
        if e.loss is not None:
            others[e.loss] = others.get(e.loss, 0) + int(e.count)
        elif e.sample_rate < 1:
            key = (float(e.noise_multiplier), float(e.sample_rate))
            steps[key] = steps.get(key, 0) + int(e.count)
    plain = [math.sqrt(e.count) / e.noise_multiplier for e in events if e.sample_rate == 1 and e.loss is None]
    merged = [(1 / compose_mu(plain), 1.0, 1)] if plain else []
    of_losses = ((loss, 1.0, n) for loss, n in sorted(others.items(), key=lambda item: repr(item[0])))
    return (*merged, *((sigma, q, n) for (sigma, q), n in sorted(steps.items())), *of_losses)


def _have_opacus() -> bool:
    try:
        _accountants()
    except PrivacyError:
        return False
    return True


def _accountants() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # opacus warns on import about things that do not concern the user
            import opacus.accountants as accountants
    except ImportError as e:
        raise PrivacyError(
            "opacus' accountants compute the cost of sub-sampled releases, but opacus is not installed: "
            f"{install('opacus')}."
        ) from e
    return accountants


def _rdp_analysis() -> Any:
    return _accountants().analysis.rdp


@functools.lru_cache(maxsize=256)
def _renyi(sigma: float | Loss, q: float, orders: tuple[float, ...]) -> np.ndarray:
    """Return the Renyi divergence of one step at each order; opacus computes it if a series does not work for all."""
    if isinstance(sigma, Loss):
        return sigma.renyi(orders)
    if 0 < q < 1:
        with contextlib.suppress(ArithmeticError):
            return renyi_divergence(sigma, q, orders)
    return np.asarray(_rdp_analysis().compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=orders))


@functools.lru_cache(maxsize=1024)  # clients of one size share a history
def _rdp(history: History, delta: float, beyond: bool = True) -> float:
    """Return epsilon by RDP with the conversion of Balle et al. 2020, Theorem 21.

    Any order is valid; the least epsilon is taken. The orders are opacus' own and, if `beyond`, some more: below 1.1
    for little noise, above 63 for much.
    """
    defaults = _accountants().RDPAccountant.DEFAULT_ALPHAS
    orders = (1.01, 1.02, 1.05, *defaults, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
    taken = slice(None) if beyond else slice(3, 3 + len(defaults))
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "optimal order is the largest alpha": looser, not wrong
            divergence = sum(n * _renyi(sigma, q, orders)[taken] for sigma, q, n in history)
            epsilon, _ = _rdp_analysis().get_privacy_spent(orders=orders[taken], rdp=divergence, delta=delta)
    except (ArithmeticError, ValueError, RuntimeError, IndexError) as e:
        raise _Numerical(f"{type(e).__name__}: {e}") from e
    if not math.isfinite(epsilon):
        raise _Numerical("no order gives a finite epsilon")
    return max(float(epsilon), 0.0)


class _Whole:
    """A loss that lies within the grid, as opacus discretises it."""

    def __init__(self, loss: Loss):
        self.cdf, self.mean = loss.cdf, loss.mean


class _Reverse:
    """The loss log Q/P under Q = N(0, s^2), where P = (1 - q) Q + q N(1, s^2) is the step with the record."""

    def __init__(self, sample_rate: float, noise_multiplier: float):
        self.q, self.sigma = sample_rate, noise_multiplier

    def cdf(self, t: Any) -> Any:
        """Return P[log P/Q >= -t]: x >= s^2 log((e^-t - 1 + q) / q) + 1/2."""
        inner = (np.exp(-np.asarray(t, dtype=float)) - 1 + self.q) / self.q
        x = self.sigma**2 * np.log(np.where(inner > 0, inner, 1.0)) + 0.5
        return np.where(inner > 0, scipy.special.ndtr(-x / self.sigma), 1.0)


@functools.lru_cache(maxsize=1)
def _prv_accountant() -> Any:
    """Return opacus' PRV accountant with its own grid, but with our cached divergences, because these take the time."""
    plain: Any = _accountants().PRVAccountant
    import opacus.accountants.analysis.prv as prv

    class Quick(plain):
        reverse = False  # from the data without the record to those with it

        def _get_dprv(self, eps_error: float, delta_error: float) -> Any:
            others = [(loss, n) for loss, _, n in self.history if isinstance(loss, Loss)]
            if not others and not self.reverse:
                return super()._get_dprv(eps_error, delta_error)
            counts = [n for _, _, n in self.history]
            domain = self._get_domain(None, counts, eps_error, delta_error)
            of = _Reverse if self.reverse else prv.PoissonSubsampledGaussianPRV
            parts = [
                _Whole(sigma)
                if isinstance(sigma, Loss)
                else prv.TruncatedPrivacyRandomVariable(of(q, sigma), domain.t_min, domain.t_max)
                for sigma, q, _ in self.history
            ]
            return prv.compose_heterogeneous([prv.discretize(part, domain) for part in parts], counts)

        def _get_domain(self, prvs: Any, num_self_compositions: Any, eps_error: float, delta_error: float) -> Any:
            # Gopi et al. 2021, Remark 5.6, as opacus reads it.
            steps = sum(num_self_compositions)
            L = _rdp(tuple(self.history), delta_error / 4, beyond=False)
            for sigma, q, _ in self.history:
                L = max(L, _rdp(((sigma, q, 1),), delta_error / (8 * steps), beyond=False))
            L = max([L, eps_error, *(loss.largest for loss, _, _ in self.history if isinstance(loss, Loss))]) + 3
            return prv.Domain.create_aligned(-L, L, eps_error / np.sqrt(steps * np.log(12 / delta_error) / 2))

    return Quick


@functools.lru_cache(maxsize=1024)
def _prv(history: History, delta: float) -> float:
    """Return the upper end of the PRV accountant's interval. Raise `_Numerical` if double precision is not enough.

    opacus checks its rounding error against the precision of long double, but the Fourier transform runs in double, and
    the error grows with the number of steps: at delta = 1e-14 and 2000 steps it answers 6.79, and the truth is 6.98.
    We require the error to stay within the delta_error of delta / 1000 that the upper end already allows for.
    """
    steps = sum(n for _, _, n in history)
    delta_error = delta / 1000
    if steps * sys.float_info.epsilon > delta_error:
        raise _Numerical(f"the rounding errors over {steps} step(s) exceed a thousandth of delta = {delta:g}")
    # The grid that opacus will lay out (Gopi et al. 2021, Theorem 5.5): [-L, L] in steps of the mesh.
    loss = max([_rdp(history, delta_error / 4), *(of.largest for of, _, _ in history if isinstance(of, Loss))]) + 3
    if loss > MAX_LOSS:
        raise _Numerical(f"privacy losses up to {loss:.0f} overflow the grid")
    eps_error = max(EPS_ERROR, 2 * loss * math.sqrt(steps * math.log(12 / delta_error) / 2) / MAX_BINS)
    if eps_error > 0.5:
        raise _Numerical(f"{steps} steps need a grid of more than {MAX_BINS} points")
    infinite = math.fsum(n * part.infinite for part, _, n in history if isinstance(part, Loss))
    if infinite > delta / 2:
        raise _Numerical(f"losses beyond all bounds have a probability of {infinite:.2g}")
    accountant = _prv_accountant()()
    accountant.history = list(history)
    epsilons = []
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Alone, opacus' direction is the larger one (Mironov, Talwar and Zhang 2019, Theorem 5).
            for reverse in (False, True) if len(history) > 1 and any(q < 1 for _, q, _ in history) else (False,):
                accountant.reverse = reverse
                found = accountant.get_epsilon(delta - infinite, eps_error=eps_error, delta_error=delta_error)
                epsilons.append(float(found))
            epsilon = max(epsilons)
    except (ArithmeticError, ValueError, RuntimeError, IndexError, MemoryError) as e:
        raise _Numerical(f"{type(e).__name__}: {e}") from e
    if not math.isfinite(epsilon):
        raise _Numerical(f"the answer is {epsilon}")
    return max(epsilon, 0.0)
