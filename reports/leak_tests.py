"""Tests of whether the best membership attack on a row found more than guessing does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scipy.special import ndtr

from fedaudit.reports.attack_rows import Found, attacks_of, best_attack
from fedaudit.reports.runs import Group
from fedaudit.reports.summary_rows import SummaryRow
from fedaudit.reports.tests_over_seeds import LEVEL, holm
from fedaudit.runtime.attack_result import MembershipResult, leak_of


def leaks_by_seed(found: Found) -> list[bool]:
    """Say for each seed if the attack found a leak: by its own verdict if it has one, else by its interval."""
    told = []
    for seed, estimate in found.estimates("auc").items():
        leak_ = leak_of(found.results[seed])
        told.append(bool(leak_) if leak_ is not None else (estimate.low or 0.0) > 0.5)
    return told


@dataclass(frozen=True)
class Pooled:
    """The AUC of one attack over all seeds, with the uncertainty of the candidates."""

    found: Found
    value: float
    low: float
    high: float
    p: float  # p-value of the hypothesis that the AUC is 1/2 or less
    adjusted: float = 1.0  # p corrected for the number of attacks tried (Holm)
    broken: bool = False  # a blind baseline can tell some seed's split; an AUC of 1/2 is then as good as that baseline

    @property
    def beyond(self) -> bool:
        """Say if the attack is above chance, corrected for the number of attacks tried."""
        return self.adjusted < LEVEL / 2 and self.low > 0.5


def pooled(found: Found) -> Pooled | None:
    """Return an attack's mean AUC over seeds, with its variance; None if no seed has one.

    Seeds have candidates of their own, so their AUCs are independent. Each variance is taken from the seed's own
    interval. On a split that a blind baseline can tell, the figure is by how much the attack beats its best baseline.
    """
    values, variances = [], []
    broken = False
    for seed, e in found.estimates("auc").items():
        result, by, beyond = found.results[seed], e, 0.0
        if isinstance(result, MembershipResult) and result.split_broken:
            broken = True
            if not result.against_blind:
                continue
            by, beyond = min(result.against_blind.values(), key=lambda gap: gap.low), 0.5
        if by.value is None or by.low is None or by.high is None:
            continue
        values.append(beyond + by.value)
        variances.append(((by.high - by.low) / (2 * 1.959964)) ** 2)
    if not values:
        return None
    value, deviation = sum(values) / len(values), math.sqrt(sum(variances)) / len(values)
    p = float(ndtr((0.5 - value) / deviation)) if deviation > 0 else float(value <= 0.5)
    half = 1.959964 * deviation
    return Pooled(found, value, max(0.0, value - half), min(1.0, value + half), p, broken=broken)


def pooled_attacks(group: Group) -> list[Pooled]:
    """Return every membership attack of a setting that ran, the strongest first, corrected for their number."""
    able = [pooled(f) for f in attacks_of(group) if f.claims == "membership" and not f.blind and f.estimates("auc")]
    tried = [one for one in able if one is not None]
    adjusted = holm([one.p for one in tried])
    corrected = [replace(one, adjusted=1.0 if p is None else p) for one, p in zip(tried, adjusted, strict=True)]
    return sorted(corrected, key=lambda one: one.p)


def leak(row: SummaryRow) -> bool | None:
    """Return True if an attack is above chance over all seeds, corrected for how many were tried. Return None if one is
    above chance only by its own interval or in some seed, or if none ran. Otherwise return False."""
    tried = pooled_attacks(row.group)
    if not tried:
        return None
    if tried[0].beyond:
        return True
    if any(one.broken for one in tried):
        return None
    best = best_attack(row.group, "membership", "auc")
    doubtful = any(one.low > 0.5 for one in tried) or (best is not None and any(leaks_by_seed(best)))
    return None if doubtful else False


def rebuilt(row: SummaryRow) -> bool:
    """Say if a reconstruction identified records and did better than its baselines."""
    cell = row.cells["identified"]
    return cell.value is not None and not cell.flag


def above_chance(row: SummaryRow, key: str) -> bool:
    """Say if a column's figure is from an attack that found something. It is then never shown as mere noise."""
    if key in ("auc", "tpr"):
        return row.cells[key].value is not None and leak(row) is not False
    return key == "identified" and rebuilt(row)
