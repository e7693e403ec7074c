"""The figures of one run that a budget can limit, besides its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedaudit.epsilon.joint_verdict import refuting
from fedaudit.errors import SettingError
from fedaudit.runtime.attack_result import MembershipResult, MembershipScores
from fedaudit.runtime.run_record import RunRecord
from fedaudit.stats import Estimate

OUTER = ("decode", "task", "protect", "encode", "round")  # phases that contain all others
NEAR_CHANCE = 1.5  # an accuracy below this many times that of guessing is near chance
FPR = 0.01  # the false-positive rate at which the true-positive rate is taken


def accuracy(record: RunRecord) -> float:
    last = record.result.last
    if last is None:
        raise SettingError(
            f"The run of {record.setting.method} has no evaluated round, so it has no accuracy. Run at "
            "least one round with evaluation."
        )
    reached = last.test_score()
    if reached is None:
        raise SettingError(f"The run of {record.setting.method} evaluated no model: run it with --eval-clients.")
    return reached


def near_chance(reached: float | None, classes: int | None) -> bool:
    """Say if a model is little better than guessing."""
    return bool(reached is not None and classes and reached < NEAR_CHANCE / classes)


def peak_memory(record: RunRecord) -> float:
    return float(record.peak_gpu_bytes or record.peak_rss_bytes)


def flops(record: RunRecord) -> float:
    counted = [row.flops for row in record.timings if row.phase == "task" and row.flops is not None]
    if not counted:
        raise SettingError("A budget on FLOPs needs a run that counted them: fedaudit run --flops.")
    return float(sum(counted))


def time(record: RunRecord) -> float:
    """Return the seconds of all parties' work, without evaluation."""
    outer = [row for row in record.timings if row.phase in OUTER]
    gpu = any(row.gpu_s is not None for row in outer)
    return math.fsum((row.gpu_s if gpu else row.wall_s) or 0.0 for row in outer)


def epsilon(record: RunRecord) -> float:
    """Return the epsilon that the ledger guarantees the worst-off client, over all rounds.

    It is infinite if something is released without protection, or if clients' models are published that no noise
    covers: the ledger counts messages only."""
    if not record.models_covered:
        return math.inf
    totals = [ledger.epsilon for ledger in record.ledger if ledger.entries]
    if None in totals:
        raise SettingError(
            f"The run of {record.setting.method} released under different neighbouring relations, which cannot "
            "be composed, so it has no single epsilon for a budget. Protect it under one relation."
        )
    return max((total for total in totals if total is not None), default=0.0)


def refuted(record: RunRecord) -> float:
    """Return the number of claims of epsilon that measurements refuted."""
    if not record.audits:
        raise SettingError(
            f"No claim of the run of {record.setting.method} was tested. Run fedaudit epsilon release-path, or set "
            "trials in the suite."
        )
    return float(len(refuting(record.audits)))


def auc(record: RunRecord) -> float:
    return _best(record, "AUC", lambda pooled: [pooled.auc])


def tpr(record: RunRecord) -> float:
    return _best(record, "TPR at 1 % FPR", lambda pooled: [t for t in pooled.tpr_at_fpr if t.fpr == FPR])


def _best(record: RunRecord, what: str, of: Callable[[MembershipScores], Sequence[Estimate]]) -> float:
    """Return the largest figure of all membership attacks that ran, blind baselines left out."""
    ran = [r for r in record.attacks if isinstance(r, MembershipResult) and not r.blind]
    found = [e.value for r in ran for e in of(r.pooled) if e.value is not None]
    if not found:
        raise SettingError(
            f"The run of {record.setting.method} has no membership attack with a {what}. Run fedaudit attack, or "
            "list attacks in the suite."
        )
    return float(max(found))


METRICS: dict[str, Callable[[RunRecord], float]] = {
    "accuracy": accuracy, "peak_memory": peak_memory, "flops": flops, "time": time, "epsilon": epsilon, "auc": auc,
    "tpr": tpr, "refuted": refuted,
}  # fmt: skip
