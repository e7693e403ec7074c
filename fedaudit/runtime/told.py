"""What all audits of a run say together: each verdict again, at the level that is left after correction.

An audit judges its claim as if it were alone. Of several, the p-values are corrected (Holm), and a test's power counts
at its share of the level: one that alone could have told may not be able to among many.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedaudit.levels import Said, holm, said
from fedaudit.runtime.run_record import EpsilonAudit


def judged(audits: Sequence[EpsilonAudit]) -> list[tuple[EpsilonAudit, Said]]:
    """Each audit that was tried, with what it says among the others."""
    tried = [audit for audit in audits if audit.trials]
    # Where a repetition did not come out as the run, no p-value counts: the audit itself says that it cannot tell.
    ps = [audit.p_value if audit.verdict in ("refuted", "suspicious") else 1.0 for audit in tried]
    found = []
    for audit, p in zip(tried, holm(ps), strict=True):
        tells_at = audit.tells_at
        if audit.verdict == "cannot tell":
            tells_at = 1.0
        found.append((audit, said(1.0 if p is None else p, tells_at, audit.confidence, len(tried))))
    return found


def refuting(audits: Sequence[EpsilonAudit]) -> list[EpsilonAudit]:
    """Those that refute their claim, how many were tried being considered."""
    return [audit for audit, word in judged(audits) if word == "refuted"]


def told(audits: Sequence[EpsilonAudit]) -> Said:
    """One word for a run: the worst that is said of any of its claims.

    Of a claim that several tests were made of, those that look for the least lack of noise decide whether it could be
    told: what a test that looks for half of the noise does not find says nothing of nine tenths of it.
    """
    found = judged(audits)
    words = {word for _, word in found}
    for word in ("refuted", "suspicious"):
        if word in words:
            return word
    claims: dict[tuple[str, str], list[tuple[float, Said]]] = {}
    for audit, word in found:
        claims.setdefault((audit.kind, audit.claim), []).append((audit.seeks or 0.0, word))
    for tests in claims.values():
        sharpest = max(seeks for seeks, _ in tests)
        if all(word == "cannot tell" for seeks, word in tests if seeks == sharpest):
            return "cannot tell"
    return "not refuted"
