"""Metrics of attacks: what the best attack of a sort reached. Blind baselines, which read nothing, do not count."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedaudit.metrics.metric import AttackMeasure, Metric, register
from fedaudit.runtime.attack_result import (
    MembershipResult,
    NotRun,
    Rate,
    ReconstructionResult,
    Scored,
    measures_of,
)
from fedaudit.runtime.run_record import RunRecord
from fedaudit.stats import Estimate

FPR = 0.01  # the false-positive rate at which the true-positive rate is taken


def estimates_of(result: Scored, measure: str) -> list[Estimate]:
    """Return the estimates of a measure, also those without a value. `tpr` is at a false-positive rate of 1 %."""
    if measure != "tpr":
        return [found for name, found in measures_of(result).items() if name == measure]
    at_fprs = result.pooled.tpr_at_fpr if isinstance(result, MembershipResult) else []
    return [at for at in at_fprs if math.isclose(at.fpr, FPR)]


def estimate_of(result: Scored, measure: str) -> Estimate | None:
    """Return what an attack reached in a measure; None if it has no such figure."""
    return next((found for found in estimates_of(result, measure) if found.value is not None), None)


def beats_baselines(result: Scored) -> bool:
    """Say if a reconstruction beats its baselines; False for other kinds of attack."""
    return isinstance(result, ReconstructionResult) and result.beats_baselines


def beyond_chance(found: Estimate) -> float:
    """Return by how much a figure is beyond chance, which differs between attacks that reconstruct (one of N records, a
    class, member or not)."""
    return (found.value or 0.0) - ((found.chance if isinstance(found, Rate) else None) or 0.0)


def _best(of: AttackMeasure) -> Callable[[RunRecord], float | None]:
    """Return the value of the best attack: one that beats its baselines, and of several the furthest beyond chance."""

    def value(record: RunRecord) -> float | None:
        able = [r for r in record.attacks if not isinstance(r, NotRun) and r.claims == of.claims and not r.blind]
        found = [(r, estimate) for r in able if (estimate := estimate_of(r, of.measure)) is not None]
        best = max(found, key=lambda pair: (beats_baselines(pair[0]), beyond_chance(pair[1])), default=None)
        return best[1].value if best is not None else None

    return value


def _not_attacked(of: AttackMeasure, words: str) -> Callable[[RunRecord], str]:
    def refusal(record: RunRecord) -> str:
        if _best(of)(record) is not None:
            return ""
        return (
            f"The run of {record.setting.method} has no {of.claims} attack with a {words}. Run fedaudit attack, or "
            "list attacks in the suite."
        )

    return refusal


TPR, AUC = AttackMeasure("membership", "tpr"), AttackMeasure("membership", "auc")
IDENTIFIED = AttackMeasure("reconstruction", "identification")

register(
    Metric(
        "tpr", "TPR at 1 % FPR", "Attacks", "share", "low", True,
        "Best membership attack: the share of the training records that it names while it wrongly names 1 % of the "
        "others. 1 % would be guessing. The best of all attacks that ran, by its mean over seeds.",
        _best(TPR), (0, 1), folded=True, attack=TPR, refusal=_not_attacked(TPR, "TPR at 1 % FPR"), line=False,
    )
)  # fmt: skip
register(
    Metric(
        "auc", "Attack AUC", "Attacks", "auc", "low", True,
        "Best membership attack: how often it ranks a record that was trained on above one that was not. 0.5 is a coin "
        "flip, 1 is certainty. The attack that found most, by its mean over seeds; what the best attacker reaches who "
        "sees nothing of the run is given below it. The interval is over the candidates of all seeds.",
        _best(AUC), (0, 1), attack=AUC, refusal=_not_attacked(AUC, "AUC"), line=False,
    )
)  # fmt: skip
register(
    Metric(
        "identified", "Images identified", "Attacks", "share", "low", True,
        "Best reconstruction attack: the share of its images from which the right training record can be picked out "
        "of the candidates. The share by guessing is given below it.",
        _best(IDENTIFIED), (0, 1), attack=IDENTIFIED, refusal=_not_attacked(IDENTIFIED, "share of images"), line=False,
    )
)  # fmt: skip
