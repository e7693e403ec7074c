"""Gates on the record of a run: what it sent, guarantees, leaked and reached, and whether its claims hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedaudit.attack.attack_run import attack_run
from fedaudit.epsilon.clipping import audit_clipping
from fedaudit.epsilon.joint_verdict import refuting, untried
from fedaudit.epsilon.joint_verdict import told as told_of
from fedaudit.epsilon.release_path import audit_releases
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.errors import SettingError
from fedaudit.gates.finding import Finding, enough, told
from fedaudit.metrics.attacks import estimate_of
from fedaudit.metrics.guarantee import EPSILON, REFUTED
from fedaudit.runtime.attack_result import MembershipResult, NotRun
from fedaudit.runtime.run_record import EpsilonAudit, RunRecord, read_record
from fedaudit.stats import Estimate
from fedaudit.suite.budgets import Outcome, check_budget, parse_budgets

TRIALS = 1000  # releases of each neighbour, where a gate has to test a claim itself


def finished(record: RunRecord | Path | str) -> RunRecord:
    """Return the record, read from a run folder or a record.json if it is a path. Refuse one that is not finished."""
    found = record if isinstance(record, RunRecord) else read_record(record)
    if found.status != "done":
        why = "; ".join(found.notes) if found.status == "refused" else "finish it with fedaudit run --resume"
        raise SettingError(f"The run of {found.setting.method} is {found.status}, and no gate can judge it: {why}.")
    return found


def communication(
    record: RunRecord,
    folder: Path,
    *,
    uplink: str | None = None,
    downlink: str | None = None,
    baseline: str | None = None,
    max_growth: str | None = None,
    per: str = "client-round",
    convention: str = "payload",
) -> list[Finding]:
    """Hold what a run sent against ceilings, or against an earlier record that lies in `folder`."""
    ways = (("up", uplink), ("down", downlink))
    limits: list[dict[str, Any]] = [{"direction": way, "max": most} for way, most in ways if most is not None]
    if baseline is not None or max_growth is not None:
        limits.append({"baseline": baseline, "max_growth": max_growth})
    if not limits:
        raise SettingError("comm_budget: give uplink= or downlink=, such as '12 MiB', or baseline= with max_growth=.")
    common = {"per": per, "convention": convention}
    budgets = parse_budgets([{**limit, **common} for limit in limits], "comm_budget")
    return [_of(check_budget(budget, record, record.setting.method, folder), "comm_budget") for budget in budgets]


def _of(outcome: Outcome, gate: str) -> Finding:
    return Finding(gate, "kept" if outcome.kept else "broken", outcome.message())


def accuracy(record: RunRecord, floor: float) -> Finding:
    """Hold the accuracy on the common test set against a floor."""
    (budget,) = parse_budgets([{"metric": "accuracy", "min": floor}], "accuracy_floor")
    found = _of(check_budget(budget, record, record.setting.method), "accuracy_floor")
    test = record.result.last.global_.test if record.result.last and record.result.last.global_ else None
    if test is None:
        return found
    interval = f" The 95 % interval of the last round is [{test.low:.3f}, {test.high:.3f}], on {test.n} records."
    return Finding(found.gate, found.told, found.message + interval)


def limited(
    record: RunRecord, metric: str, *, max: float | str | None = None, min: float | None = None
) -> Finding:  # fmt: skip
    """Hold any metric of `fedaudit.metrics`, by its name in budgets, against a ceiling or a floor."""
    given = {name: limit for name, limit in (("max", max), ("min", min)) if limit is not None}
    (budget,) = parse_budgets([{"metric": metric, **given}], "metric_budget")
    return _of(check_budget(budget, record, record.setting.method), "metric_budget")


def privacy(record: RunRecord, *, epsilon: float, delta: float | None = None) -> Finding:
    """Hold the epsilon that the ledger guarantees the worst-off client against a ceiling.

    With `delta`, every client's ledger is composed again at that failure probability. Without it, each client's own
    delta counts.
    """
    if not 0 <= epsilon < math.inf:
        raise SettingError(f"privacy_budget: epsilon = {epsilon} is not a ceiling. Give a finite number, 0 or more.")
    if delta is not None and not 0 < delta < 1:
        raise SettingError(f"privacy_budget: delta = {delta} is not a probability strictly between 0 and 1.")
    ledgers = [row.model_copy(deep=True, update={} if delta is None else {"delta": delta}) for row in record.ledger]
    if delta is not None:
        for row in ledgers:
            row.close()
    spent = EPSILON.limited(record.model_copy(update={"ledger": ledgers}))
    at = "each client's own delta" if delta is None else f"delta = {delta:g}"
    text = f"{record.setting.method}: epsilon is {spent:.4g} at {at}, the budget {epsilon:.4g}"
    if spent <= epsilon:
        return Finding("privacy_budget", "kept", text + ".")
    if math.isfinite(spent) and epsilon:
        text += f" ({spent / epsilon - 1:.1%} over)"
    if not record.models_covered:
        text += "; the clients' models are published, and no noise covers them"
    worst = max(ledgers, key=lambda row: math.inf if row.epsilon is None else row.epsilon, default=None)
    if worst is not None and worst.by_kind:
        kind, most = max(worst.by_kind.items(), key=lambda item: item[1])
        if math.isinf(most):
            kinds = ", ".join(name for name, value in sorted(worst.by_kind.items()) if math.isinf(value))
            text += f"; client {worst.client} releases {kinds} without protection"
        else:
            text += f"; of client {worst.client}, which spent most, {kind} cost most: {most:.4g}"
    return Finding("privacy_budget", "broken", text + ".")


def leak(
    record: RunRecord, *, attack: str, auc: float | None = None, tpr: float | None = None, threat: str = "server"
) -> list[Finding]:
    """Hold a membership attack's AUC, or its TPR at an FPR of 1 %, against a ceiling, by its interval."""
    limits = {name: most for name, most in (("auc", auc), ("tpr", tpr)) if most is not None}
    if not limits:
        raise SettingError("leak_budget: give auc= or tpr=, a number from 0 to 1.")
    for name, most in limits.items():
        if not 0 <= most <= 1:
            raise SettingError(f"leak_budget: {name} = {most} is not a ceiling. Give a number from 0 to 1.")
    result = attacked(record, attack, threat)
    who = f"{record.setting.method}: {attack} by {threat}"
    findings = []
    for name, most in limits.items():
        found, words = _figure(result, name)
        n = result.pooled.members + result.pooled.nonmembers
        text = f"{who} reaches {words} {found.shown()} on {n} candidates, the budget {most:g}"
        verdict = told(found, most)
        if verdict == "broken":
            text += f" (above it by at least {(found.low or 0.0) - most:.3f})"
        elif verdict == "cannot be told":
            more = enough(found.model_copy(update={"n": n}), most)
            text += ": its interval spans the budget, so it cannot be told"
            text += f"; about {more:,} candidates would tell" if more else ""
        text += "; the audit split is broken, so that this is not the run's fault alone" if result.split_broken else ""
        findings.append(Finding("leak_budget", verdict, text + "."))
    return findings


def _figure(result: MembershipResult, name: str) -> tuple[Estimate, str]:
    if name == "auc":
        return result.pooled.auc, "AUC"
    found = estimate_of(result, "tpr")
    if found is None:
        raise SettingError(f"leak_budget: {result.attack} has no TPR at 1 % FPR: there are too few candidates.")
    return found, "a TPR at 1 % FPR of"


def attacked(record: RunRecord, attack: str, threat: str) -> MembershipResult:
    """Return the result of a membership attack that the record holds; raise where it holds none."""
    of_name = [row for row in record.attacks if row.attack == attack and row.threat == threat]
    if not of_name:
        there = ", ".join(sorted({f"{row.attack} by {row.threat}" for row in record.attacks})) or "none"
        raise SettingError(
            f"leak_budget: the record of {record.setting.method} has no attack {attack} by {threat} (it has: {there}). "
            f"Run fedaudit attack RUN --attack {attack} --threat {threat}, or use federated_run, which attacks."
        )
    found = of_name[-1]
    if isinstance(found, NotRun):
        raise SettingError(f"leak_budget: {attack} did not run on {record.setting.method}: {found.reason}.")
    if not isinstance(found, MembershipResult):
        raise SettingError(f"leak_budget: {attack} is not a membership attack, so it has no AUC. Choose such a one.")
    return found


def claims(record: RunRecord) -> Finding:
    """Hold the record's claims against what tested them: a refuted epsilon or a broken declaration fails."""
    name = record.setting.method
    if record.declarations is not None and record.declarations.tested == "broken":
        return Finding(
            "claims_hold",
            "broken",
            f"{name}: the declarations of its messages do not hold; fedaudit check-method {name} names them.",
        )
    if not record.audits:
        REFUTED.limited(record)  # raises: no claim was tested
    if against := refuting(record.audits):
        return Finding("claims_hold", "broken", f"{name}: {'; '.join(_refuted(audit) for audit in against)}.")
    word = told_of(record.audits)
    if word == "not refuted":
        return Finding("claims_hold", "kept", f"{name}: none of {len(record.audits)} tests refutes a claim.")
    why = "the tests would miss a real violation; give more trials, or audit residuals"
    if word == "suspicious":
        why = "evidence as strong as this comes with one honest run in twenty; repeat it with another seed"
    elif (left := untried(record.audits)) is not None:
        why = f"{left.test} could not try the claim for {left.claim}: {left.how.rstrip('.')}"
    return Finding("claims_hold", "cannot be told", f"{name}: the verdict on its claims is {word!r}: {why}.")


def _refuted(audit: EpsilonAudit) -> str:
    text = f"the claim of epsilon = {audit.claim_epsilon:.4g} for {audit.claim} is refuted by {audit.test}: "
    if audit.bound is None:
        return f"{text}{audit.how} (p = {audit.p_value:.2g})"
    return (
        f"{text}at least {audit.bound:.4g} was measured with {audit.confidence:.0%} confidence in {audit.trials} "
        f"trials (p = {audit.p_value:.2g})"
    )


def make_attack(folder: Path, *, attack: str, threat: str = "server", set: Mapping[str, Any] | None = None) -> None:
    """Attack a run for `leak`, and keep the result in its folder."""
    attack_run(folder, attacks=[{"attack": attack, **(set or {})}], threat=threat)


def audit_claims(folder: Path, trials: int = TRIALS) -> None:
    """Test the claims of a run for `claims`, and keep the results in its folder."""
    audit_residuals(folder)
    audit_clipping(folder)
    audit_releases(folder, trials=trials)
