"""A claim held against scores of two neighbours, or against a bound: the one place where such an audit is filled in.

Two Gaussians, as far apart as the claim's noise leaves two neighbours, are what a path of releases gives (through a
method's mechanism, a Flower app's mods, a private training). An audit of it says what it would have found, and how
strict a level that takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from fedaudit.epsilon.lower_bounds import Bound, ceiling
from fedaudit.epsilon.noise_tests import POWER
from fedaudit.runtime.run_record import EpsilonAudit, Guesses
from fedaudit.significance import level_of, said
from fedaudit.stats import Floats

SCALES = (0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01)  # of the promised noise, to say which would be found
SEEKS = 0.5  # an audit that would miss half of the promised noise cannot tell


@dataclass(frozen=True)
class AuditedClaim:
    """Whose claim it is, of what, and who could see it."""

    kind: str
    threat: str
    claim: str  # in words
    epsilon: float
    ledger: float | None  # None where the ledger's entries cannot be composed


def held(
    place: AuditedClaim, test: str, bound: Bound, top: float, how: str, *, tells_at: float | None,
    seeks: float | None = None, finds: float | None = None, guesses: Guesses | None = None,
) -> EpsilonAudit:  # fmt: skip
    """The audit of one claim by one bound. `top`: the largest bound that so many trials could have given."""
    p = bound.p_value(place.epsilon) if math.isfinite(place.epsilon) else 1.0
    return EpsilonAudit(
        test=test,
        kind=place.kind,
        threat=place.threat,
        claim=place.claim,
        claim_epsilon=place.epsilon,
        ledger_epsilon=place.ledger,
        lower_bound=bound.epsilon,
        p_value=p,
        trials=bound.trials,
        confidence=bound.confidence,
        delta=bound.delta,
        verdict=said(p, tells_at, bound.confidence),
        method=bound.method,
        how=f"{how}; assumes: {bound.assumes}",
        ceiling=top,
        finds=finds,
        seeks=seeks,
        tells_at=tells_at,
        guesses=guesses,
    )


def held_path(
    place: AuditedClaim, test: str, bound: Callable[..., Bound], scores: Floats, member: Floats, distance: float,
    delta: float, confidence: float, how: str, quantiles: Callable[[Floats], Floats] = ndtri,
    quick: Callable[..., Bound] | None = None,
) -> EpsilonAudit:  # fmt: skip
    """The audit of a path's scores. `distance`: of the two neighbours, in deviations of the promised noise, which has
    these quantiles. `quick`: a bound that finds less and takes less time, to say what would be found."""
    trials = len(scores) // 2
    top = ceiling(bound, len(scores), delta, confidence)
    words = f"{how}; these trials could show at most epsilon = {top:.3g}"
    finds = tells_at = None
    if place.epsilon > 0:
        finds, tells_at = would_find(quick or bound, distance, trials, place.epsilon, delta, confidence, quantiles)
        words += f" and would find noise x {finds:g}" if finds else ", and would find no lack of noise"
        words += f" at a level of {level_of(confidence):g}"
    measured = bound(scores, member, delta, confidence)
    return held(place, test, measured, top, words, tells_at=tells_at, seeks=SEEKS, finds=finds)


def would_find(
    bound: Callable[..., Bound], distance: float, trials: int, claim: float, delta: float, confidence: float,
    quantiles: Callable[[Floats], Floats] = ndtri,
) -> tuple[float, float]:  # fmt: skip
    """The largest share of the promised noise that such an audit would refute with a probability of about 99 %, and the
    strictest level at which it would find half of it.

    On the quantiles of two neighbours (Gaussians, by default), as far apart as they would be with so little noise, less
    what chance takes from the difference of means of so many draws (its deviation is that of a standardised
    difference).
    """
    values = quantiles((np.arange(trials) + 0.5) / trials)
    member = np.repeat([True, False], trials)

    def p(scale: float) -> float:
        apart = distance / scale
        unlucky = apart - float(ndtri(POWER)) * math.sqrt((2 + apart**2 / 4) / trials)
        return bound(np.concatenate([values + unlucky, values]), member, delta, confidence).p_value(claim)

    level = level_of(confidence)
    return next((scale for scale in SCALES if p(scale) < level), 0.0), p(SEEKS)
