"""Metrics of the guarantee: the epsilon that was asked for, the one that is guaranteed, and what audits say of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedaudit.epsilon.joint_verdict import refuting, untried
from fedaudit.metrics.metric import Metric, Records, register
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.update_policy import UPDATES
from fedaudit.runtime.run_record import EpsilonAudit, RunRecord

OPEN_MODELS = "clients' models, trained without noise, are published"
NOTHING_SENT = "nothing computed from records is sent"
NOT_COMPOSED = "releases under different neighbouring relations: not composed"

# --- the claim ---------------------------------------------------------------------------------------------------


def claimed(record: RunRecord) -> dict[str, float]:
    """Return the epsilon that the setting asks for, by kind."""
    asked = {kind: policy.get("epsilon") for kind, policy in record.setting.privacy.items()}
    return {kind: float(epsilon) for kind, epsilon in asked.items() if epsilon is not None}


def idle_kinds(records: Records) -> set[str]:
    """Return the kinds that have a policy but were never released, so that the policy protected nothing."""
    entries = _entries(records)
    used = {entry.kind for entry in entries} | {UPDATES for entry in entries if entry.unit == "client"}
    return {kind for kind in records[0].setting.privacy if kind not in used}


def _entries(records: Records) -> list[LedgerEntry]:
    return [entry for record in records for client in record.ledger for entry in client.entries]


def _no_claim(records: Records) -> str:
    if claimed(records[0]):
        return ""
    return "not asked for" if records[0].setting.privacy else "none made"


def _idle_claim(records: Records) -> str:
    idle = claimed(records[0]).keys() <= idle_kinds(records)
    return "applied to nothing that this method sends" if idle else ""


register(
    Metric(
        "claim", "Claim", "Guarantee", "epsilon", None, False,
        "The epsilon that the setting asked for, as papers state it: for one release of the named kinds, "
        "without the other rounds and without what else is sent.",
        lambda record: max(claimed(record).values(), default=None),
        seeds="set", folded=True, missing=_no_claim, flag=_idle_claim, line=False,
        detail=lambda records: ", ".join(sorted(claimed(records[0]))),
    )
)  # fmt: skip

# --- the guarantee -----------------------------------------------------------------------------------------------


def ledger_epsilon(record: RunRecord) -> float | None:
    """Return what the worst-off client's releases compose to, over all rounds; None if they cannot be composed.

    The ledger counts messages only. What a run guarantees is `epsilon`.
    """
    totals = [client.epsilon for client in record.ledger if client.entries]
    return None if None in totals else max((total for total in totals if total is not None), default=0.0)


def epsilon(record: RunRecord) -> float | None:
    """Return the epsilon that a finished run guarantees the worst-off client; None if there is no single one.

    It is infinite if something is released without protection, or if clients' models are published that no noise
    covers, whatever the ledger says of their messages.
    """
    if record.status != "done":
        return None
    return ledger_epsilon(record) if record.models_covered else math.inf


def largest_delta(records: Records) -> float:
    """Return the largest delta of any client that releases something; 0 if none does."""
    return max((client.delta for record in records for client in record.ledger if client.entries), default=0.0)


def weak_delta(records: Records) -> bool:
    """Say if publishing one record at random would meet the delta, at epsilon 0."""
    return any(c.delta * c.n >= 1 for record in records for c in record.ledger if c.entries)


def messages_epsilon(records: Records) -> float | None:
    """Return what the messages alone have, of the worst run that is finished; None if there is no single epsilon."""
    totals = [ledger_epsilon(record) for record in _done(records)]
    return None if None in totals else max((total for total in totals if total is not None), default=None)


def open_models(records: Records) -> bool:
    """Say if models are what undoes the guarantee: clients' models, trained without noise, are published."""
    return math.inf in map(epsilon, records) and messages_epsilon(records) != math.inf


def _done(records: Records) -> list[RunRecord]:
    return [record for record in records if record.status == "done"]


def _no_epsilon(records: Records) -> str:
    done = _done(records)
    if not done:
        return "no run is finished"
    return NOT_COMPOSED if any(epsilon(record) is None for record in done) else ""


def _not_composed(record: RunRecord) -> str:
    if record.status != "done" or epsilon(record) is not None:
        return ""
    return (
        f"The run of {record.setting.method} released under different neighbouring relations, which cannot "
        "be composed, so it has no single epsilon for a budget. Protect it under one relation."
    )


def _covers(records: Records) -> str:
    """Return what the guarantee is about, or why there is none."""
    done = _done(records)
    worst = max(epsilon(record) or 0.0 for record in done)
    entries = _entries(done)
    bare = sorted({entry.kind for entry in entries if entry.noise_multiplier == 0})
    if bare:
        return f"{', '.join(bare).replace('_', ' ')} sent unprotected"
    if open_models(done):
        return OPEN_MODELS
    detail = f"δ ≤ {largest_delta(done):.2g}" if worst else NOTHING_SENT
    of_clients = [entry for entry in entries if entry.unit == "client"]
    if of_clients and math.isfinite(worst):
        detail += f"; for whole clients, against {of_clients[0].to}"
    return detail


def _remark(records: Records) -> str:
    worst = max((epsilon(record) or 0.0 for record in _done(records)), default=0.0)
    if open_models(records):
        return f"the messages alone: {messages_text(records)}"
    if worst == 0:
        return "covers the messages alone: the models are published without protection"
    if math.isfinite(worst) and weak_delta(records):
        return "δ ≥ 1/n: publishing one record at random would meet it"
    return ""


def messages_text(records: Records) -> str:
    """Return in words what the messages alone have, where published models undo it."""
    messages = messages_epsilon(records)
    if messages is None:
        return NOT_COMPOSED
    return f"ε = {messages:.3g}, δ = {largest_delta(records):.2g}" if messages else NOTHING_SENT


EPSILON = register(
    Metric(
        "epsilon", "Ledger ε", "Guarantee", "epsilon", "low", False,
        "The guarantee by the accounting, for the worst-off client and all rounds together: the smaller, the less "
        "anybody can learn about one record. 0: nothing computed from the records was sent. ∞: something was sent "
        "without noise, or clients' models that were trained without it are published, so nothing is "
        "guaranteed. Computed, not estimated: the largest over seeds is shown.",
        epsilon, seeds="largest", missing=_no_epsilon, detail=_covers, flag=_remark, flag_disqualifies=True,
        refusal=_not_composed, line=False,
    )
)  # fmt: skip

# --- audits ------------------------------------------------------------------------------------------------------


def refuted_claims(records: Records) -> list[EpsilonAudit]:
    """Return the audits that refute a claim, corrected for how many were tried."""
    return refuting([audit for record in records for audit in record.audits])


def claim_text(audit: EpsilonAudit) -> str:
    return f"ε = {audit.claim_epsilon:.3g} for {audit.claim}"


@dataclass(frozen=True)
class _Bound:
    """Lower bounds of one sort: by attacks on planted records, or for the noise that was found."""

    of_noise: bool

    def tried(self, records: Records) -> list[EpsilonAudit]:
        return [audit for audit in self._all(records) if audit.trials]

    def value(self, record: RunRecord) -> float | None:
        return max((audit.lower_bound for audit in self.tried([record])), default=None)

    def missing(self, records: Records) -> str:
        audits = self._all(records)
        if self.tried(records):
            return ""
        return f"not tried: {audits[0].how}" if audits else "not audited"

    def how(self, records: Records) -> str:
        tried, best = self.tried(records), self._best(records)
        many = f"the largest of {len(tried)} audits, each by itself" if len(tried) > 1 else "the one audit"
        return f"one-sided {100 * best.confidence:g} %, {best.trials} trials, {many}"

    def detail(self, records: Records) -> str:
        return self._best(records).claim

    def refuted(self, records: Records) -> str:
        of_sort = [audit for audit in refuted_claims(records) if audit.of_noise == self.of_noise]
        texts = list(dict.fromkeys(map(claim_text, of_sort)))
        return f"refuted: {'; '.join(texts)}" if texts else ""

    def _all(self, records: Records) -> list[EpsilonAudit]:
        return [audit for record in records for audit in record.audits if audit.of_noise == self.of_noise]

    def _best(self, records: Records) -> EpsilonAudit:
        return max(self.tried(records), key=lambda audit: audit.lower_bound)


SHOWN, FOUND = _Bound(of_noise=False), _Bound(of_noise=True)

register(
    Metric(
        "lower", "Attacked ε ≥", "Guarantee", "epsilon", None, True,
        "Empirical lower bound, at 95 % confidence: what attacks on planted records show; the largest of all attacks. "
        "A claim below it is refuted if p < 0.001, corrected for all audits. A small value shows nothing.",
        SHOWN.value, seeds="bound", missing=SHOWN.missing, how=SHOWN.how, detail=SHOWN.detail, flag=SHOWN.refuted,
        line=False, table="lower_bound",
    )
)  # fmt: skip
register(
    Metric(
        "noise", "Noise found ε ≥", "Guarantee", "epsilon", None, True,
        "What the accounting gives for the noise that was found on the bytes as sent, at 95 % confidence. It is a "
        "check of the noise and no attack: nobody may be able to reach it. A claim below it is refuted if p < 0.001, "
        "corrected for all audits.",
        FOUND.value, seeds="bound", missing=FOUND.missing, how=FOUND.how, detail=FOUND.detail, flag=FOUND.refuted,
        line=False, folded=True, table="noise_bound",
    )
)  # fmt: skip


def _untested(record: RunRecord) -> str:
    """Return why the run's claims cannot be said to stand: nobody tested them, or one could not be tried."""
    if not record.audits:
        return (
            f"No claim of the run of {record.setting.method} was tested. Run fedaudit epsilon release-path, or set "
            "trials in the suite."
        )
    left = untried(record.audits)
    if left is None or refuted_claims([record]):
        return ""
    return (
        f"The claim for {left.claim} in the run of {record.setting.method} is untested, so it cannot count as not "
        f"refuted: {left.test} could not try it: {left.how.rstrip('.')}. Remove that cause and repeat the test, or try "
        "the claim with another one (fedaudit epsilon --help)."
    )


REFUTED = register(
    Metric(
        "refuted", "Refuted claims", "Guarantee", "count", "low", False,
        "Number of claims of epsilon that measurements refuted, corrected for all audits. There is none where a claim "
        "could not be tried.",
        lambda record: len(refuted_claims([record])), refusal=_untested, column=False, line=False,
    )
)  # fmt: skip
