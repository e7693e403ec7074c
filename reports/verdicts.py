"""Verdicts of an audit that a CI can fail on: claims of epsilon, leaks, runs that failed, budgets.

A verdict is about a setting over all its seeds, corrected for how many attacks and audits were tried. If nothing could
be concluded, it is neither passed nor failed, but skipped, with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedaudit.epsilon.joint_verdict import judged
from fedaudit.metrics.guarantee import claim_text
from fedaudit.reports.attack_rows import attacks_of
from fedaudit.reports.leak_tests import leak, pooled_attacks, rebuilt
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.significance import level_of
from fedaudit.suite.budgets import cases as budget_cases
from fedaudit.suite.budgets import check_runs
from fedaudit.suite.junit import Case

if TYPE_CHECKING:
    from fedaudit.reports.export import Export


def cases_of(found: Export, budget: Path | None = None) -> list[Case]:
    rows, failed = found.rows()
    cases = [Case("run", name, "error", reason) for name, reason in sorted(failed.items())]
    for row in rows:
        cases += [*_run(row), *_claims(row), *_leaks(row)]
    return cases + (budget_cases(check_runs([found.folder], budget)) if budget is not None else [])


def _run(row: SummaryRow) -> list[Case]:
    if refused(row.group):
        return [Case("run", row.label, "skipped", "; ".join(row.notes))]
    if row.doubts:
        return [Case("run", row.label, "error", f"not to be relied on: {'; '.join(row.doubts)}")]
    unfinished = [str(run.seed) for run in row.group.runs if run.record.status != "done"]
    said = f"seed {', '.join(unfinished)} has not run all its rounds" if unfinished else ""
    return [Case("run", row.label, "error" if unfinished else "passed", said)]


def _claims(row: SummaryRow) -> list[Case]:
    """Return a verdict on each claim by each test, over all seeds."""
    audits = [audit for run in row.group.runs for audit in run.audits]
    together = judged(audits)
    refuted = {(a.test, a.claim): a for a, word in reversed(together) if word == "refuted"}
    cases = []
    for test, claim in dict.fromkeys((a.test, a.claim) for a in audits):
        of_claim = [a for a in audits if (a.test, a.claim) == (test, claim)]
        name = f"{row.label}: {claim_text(of_claim[0])} ({test})"
        if (test, claim) in refuted:
            a = refuted[test, claim]
            least = "" if a.bound is None else f"at least {a.bound:.3g} at {100 * a.confidence:g} %; "
            said = f"refuted at a level of {level_of(a.confidence):g}, p = {a.p_value:.2g}: {least}{a.how}"
            cases.append(Case("claim", name, "failure", said))
            continue
        words = {word: a for a, word in together if (a.test, a.claim) == (test, claim)}
        if "suspicious" in words:
            a = words["suspicious"]
            said = f"suspicious, p = {a.p_value:.2g}: repeat it with another seed or more trials; {a.how}"
            cases.append(Case("claim", name, "skipped", said))
        elif "not refuted" in words:
            cases.append(Case("claim", name, "passed"))
        else:
            word = next(iter(words), of_claim[0].verdict)
            cases.append(Case("claim", name, "skipped", f"{word}: {of_claim[0].how}"))
    return cases


def _leaks(row: SummaryRow) -> list[Case]:
    """Return verdicts on membership, rebuilt records and label shares; empty for a row that was not attacked."""
    ran = [found for found in attacks_of(row.group) if found.results and not found.blind]
    cases = []
    if any(found.claims == "membership" for found in ran):
        told, name = leak(row), f"{row.label}: membership"
        best = next(iter(pooled_attacks(row.group)), None)
        how = "no attack could be scored"
        if best is not None:
            how = f"{best.found.name}: AUC {best.value:.3f} [{best.low:.3f}, {best.high:.3f}], p = {best.adjusted:.2g}"
        outcome = {True: "failure", None: "skipped", False: "passed"}[told]
        said = {True: f"a leak by {how}", None: f"cannot tell: {how}", False: ""}[told]
        cases.append(Case("leak", name, outcome, said))  # type: ignore[arg-type]
    if any(found.claims == "reconstruction" for found in ran):
        cell = row.cells["identified"]
        said = f"{100 * (cell.value or 0):.1f} % of the images are identified by {cell.detail}"
        name, bad = f"{row.label}: reconstruction", rebuilt(row)
        cases.append(Case("leak", name, "failure" if bad else "passed", said if bad else ""))
    for found in ran:
        leaks = [result for result in found.results.values() if found.claims == "histogram" and result.leak]  # type: ignore[union-attr]
        if found.claims == "histogram":
            said = leaks[0].verdict if leaks else ""
            cases.append(Case("leak", f"{row.label}: {found.name}", "failure" if leaks else "passed", said))
    return cases
