"""The joint verdict of all audits of a run: each verdict again, at the level that is left after correction.

An audit judges its claim as if it were alone. Of several, the p-values are corrected (Holm), and a test's power counts
at its share of the level: one that alone could have told may not be able to among many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedaudit.runtime.run_record import EpsilonAudit
from fedaudit.significance import Said, holm, said

Judged = tuple[EpsilonAudit, Said | Literal["not tried"]]


def judged(audits: Sequence[EpsilonAudit]) -> list[Judged]:
    """Each audit, with what it says among the others. Only those that were tried count as tests."""
    if certain := [audit for audit in audits if audit.certain]:
        rest = iter(judged([audit for audit in audits if not audit.certain]))
        words = {id(audit): _alone(audit) for audit in certain}
        return [(audit, words[id(audit)]) if audit.certain else next(rest) for audit in audits]
    tests = sum(audit.trials > 0 for audit in audits)
    # Where a repetition did not come out as the run, no p-value counts: the audit itself says that it cannot tell.
    accuses = [audit.trials > 0 and audit.verdict in ("refuted", "suspicious") for audit in audits]
    ps = [(a.p_value if accused else 1.0) if a.trials else None for a, accused in zip(audits, accuses, strict=True)]
    found: list[Judged] = []
    for audit, p in zip(audits, holm(ps), strict=True):
        if p is None:
            found.append((audit, "cannot tell" if audit.verdict == "cannot tell" else "not tried"))
            continue
        tells_at = 1.0 if audit.verdict == "cannot tell" else audit.tells_at
        found.append((audit, said(p, tells_at, audit.confidence, tests)))
    return found


def _alone(audit: EpsilonAudit) -> Said | Literal["not tried"]:
    """Return the word of an audit that is not random: no chance makes it err, and no other test makes it weaker."""
    return "refuted" if audit.verdict == "refuted" else "not refuted" if audit.trials else "not tried"


def refuting(audits: Sequence[EpsilonAudit]) -> list[EpsilonAudit]:
    """Those that refute their claim, how many were tried being considered."""
    return [audit for audit, word in judged(audits) if word == "refuted"]


def untried(audits: Sequence[EpsilonAudit]) -> EpsilonAudit | None:
    """Return an audit that leaves its claim untested, so that no gate may take it for one that stands; None: there is
    none.

    It is one that should have been made and could not be, of a kind that no other test tried (what a release does to
    made-up values is no trial of what was sent); or any at all, where no test tried anything. What was never released
    (the ledger has 0 for it) has no claim.
    """
    tried = {audit.kind for audit in audits if audit.trials and not audit.certain}
    left = [a for a in audits if not a.trials and a.kind not in tried and a.ledger_epsilon != 0]
    anything = any(audit.trials for audit in audits)
    return next((audit for audit in left if audit.seeks is not None or not anything), None)


def told(audits: Sequence[EpsilonAudit]) -> Said:
    """One word for a run: the worst that is said of any of its claims.

    Of a claim that several tests were made of, those that look for the least lack of noise decide whether it could be
    told: what a test that looks for half of the noise does not find says nothing of nine tenths of it. A test that
    should have been made and could not be is one that cannot tell.
    """
    found = judged(audits)
    words = {word for _, word in found}
    if "refuted" in words:
        return "refuted"
    if "suspicious" in words:
        return "suspicious"
    claims: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for audit, word in found:
        if (word != "not tried" or audit.seeks is not None) and not audit.certain:
            claims.setdefault((audit.kind, audit.claim), []).append((audit.seeks or 0.0, word))
    for tests in claims.values():
        sharpest = max(seeks for seeks, _ in tests)
        if all(word != "not refuted" for seeks, word in tests if seeks == sharpest):
            return "cannot tell"
    return "not refuted" if claims else "cannot tell"
