"""Checks of audits of epsilon: bounds from the kept numbers of guesses, verdicts from p-values, claims from the ledger.

The trials of a release path and the residuals of a run's noise are not kept. The commands that made them repeat them;
their bounds are the author's word, and their verdicts are checked against the p-values.
"""

from __future__ import annotations

import math

from fedaudit.epsilon.one_run import BOUNDS
from fedaudit.epsilon.sums import KIND
from fedaudit.errors import FedauditError
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.runtime.run_record import EpsilonAudit
from fedaudit.significance import said
from fedaudit.verify.case import Case

FILE = "audits.json"
CLOSE = 1e-6


def check_epsilon_audits(case: Case) -> None:
    """Check every audit of a claimed epsilon."""
    known = _epsilons(case)
    entries = [entry for ledger in case.record.ledger for entry in ledger.entries]
    gaussian = {e.kind: mechanism_of(e).normal or mechanism_of(e).trains for e in entries if e.noise_multiplier > 0}
    of_sums = [mechanism_of(e).normal for e in entries if e.unit == "client"]
    gaussian |= {KIND: all(of_sums)} if of_sums else {}
    for i, audit in enumerate(case.record.audits):
        figure, at = f"epsilon of {audit.claim}, {audit.test}", f"audits.{i}"
        # What other noise gives for one release depends on more than the ledger keeps.
        wrong = gaussian.get(audit.kind, True) and _check_claims(case, figure, at, audit, known)
        wrong = _check_verdict(case, figure, at, audit) or wrong
        if audit.guesses is not None:
            _check_guesses(case, figure, at, audit)
        elif not wrong:
            why = "it was not tried" if not audit.trials else f"its {audit.trials:,} trials are not kept"
            case.found.word(figure, f"{why}; its claim, and its verdict from p = {audit.p_value:.2g}, were recomputed")


def _epsilons(case: Case) -> list[float]:
    """Return all epsilons that the ledger and the setting know, which an audit may be about."""
    found = [0.0, math.inf]
    for ledger in case.record.ledger:
        found += [*ledger.by_kind.values(), *(total.epsilon for total in ledger.by_relation.values())]
        found += [value for value in (ledger.epsilon, ledger.claim) if value is not None]
        for entry in ledger.entries:
            if 0 < entry.noise_multiplier < math.inf and entry.delta:
                found.append(gaussian_epsilon(1 / entry.noise_multiplier, entry.delta))
    for policy in case.record.setting.privacy.values():
        if isinstance(policy, dict) and isinstance(policy.get("epsilon"), int | float):
            found.append(float(policy["epsilon"]))
    return found


def _check_claims(case: Case, figure: str, at: str, audit: EpsilonAudit, known: list[float]) -> bool:
    wrong = False
    for name in ("claim_epsilon", "ledger_epsilon"):
        value = getattr(audit, name)
        if value is None and name == "ledger_epsilon":
            continue
        if not any(value == other or math.isclose(value, other, rel_tol=CLOSE) for other in known):
            wrong = True
            nearest = min(known, key=lambda other: abs(other - value) if math.isfinite(other) else math.inf)
            case.found.contradicted(
                figure, FILE, f"{at}.{name}", value, nearest, "neither the ledger nor a policy has this epsilon"
            )
    return wrong


def _check_verdict(case: Case, figure: str, at: str, audit: EpsilonAudit) -> bool:
    if not audit.trials:
        if audit.verdict not in ("not tried", "cannot tell"):
            case.found.contradicted(figure, FILE, f"{at}.verdict", audit.verdict, "not tried", "it has no trials")
            return True
        return False
    now = said(audit.p_value, audit.tells_at, audit.confidence)
    # A repetition that did not come out as the run cannot tell, whatever its p-value is.
    if audit.verdict != now and audit.verdict != "cannot tell":
        case.found.contradicted(figure, FILE, f"{at}.verdict", audit.verdict, now, f"p = {audit.p_value:.3g}")
        return True
    if audit.verdict == "not refuted" and audit.lower_bound > audit.claim_epsilon * (1 + CLOSE):
        case.found.contradicted(
            figure, FILE, f"{at}.verdict", audit.verdict, "suspicious or refuted",
            f"the bound {audit.lower_bound:.4g} lies above the claim {audit.claim_epsilon:.4g}",
        )  # fmt: skip
        return True
    return False


def _check_guesses(case: Case, figure: str, at: str, audit: EpsilonAudit) -> None:
    kept = audit.guesses
    assert kept is not None  # the caller has looked
    if kept.bound not in BOUNDS:
        case.found.word(figure, f"the bound {kept.bound!r} is not known here")
        return
    bound, terms = BOUNDS[kept.bound], (audit.delta, audit.confidence, kept.steps)
    try:
        now, best = (bound(kept.pairs, kept.made, right, *terms) for right in (kept.right, kept.made))
        finite = math.isfinite(audit.claim_epsilon)
        p = now.p_value(audit.claim_epsilon) if finite else 1.0
    except (FedauditError, ValueError, ArithmeticError) as e:
        case.found.contradicted(figure, FILE, f"{at}.guesses", str(kept), "impossible numbers", str(e)[:200])
        return
    again = {"lower_bound": now.epsilon, "p_value": p, "ceiling": best.epsilon, "trials": now.trials}
    case.found.compare(
        figure, FILE, at, {name: getattr(audit, name) for name in again}, again, close=1e-4,
        reason=f"from {kept.right} of {kept.made} guesses on {kept.pairs} pairs",
    )  # fmt: skip
