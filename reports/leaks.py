"""Whether the best membership attack on a row found more than guessing does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scipy.special import ndtr

from fedaudit.reports.attack_rows import Found, attacks_of, best_attack
from fedaudit.reports.runs import Group
from fedaudit.reports.table import Row
from fedaudit.reports.tests_over_seeds import LEVEL, holm
from fedaudit.runtime.attack_result import MembershipResult, leak_of


def leaks_by_seed(found: Found) -> list[bool]:
    """By seed: the attack's own verdict where it has one, else its interval."""
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
    p: float  # of an AUC of 1/2 or less
    adjusted: float = 1.0  # for how many attacks were tried (Holm)
    broken: bool = False  # the split of some seed can be told by a blind baseline, and 1/2 is as good as that one

    @property
    def beyond(self) -> bool:
        """Above chance, how many attacks were tried being considered."""
        return self.adjusted < LEVEL / 2 and self.low > 0.5


def pooled(found: Found) -> Pooled | None:
    """Seeds have candidates of their own, so that their AUCs are independent: the mean, and the variance of the mean.

    Each variance is taken from the seed's own interval. On a split that a blind baseline could tell, what counts is by
    how much an attack beats the baseline that it beats least.
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
    """Every membership attack of a setting that ran, the strongest first, corrected for how many there are."""
    able = [pooled(f) for f in attacks_of(group) if f.claims == "membership" and not f.blind and f.estimates("auc")]
    tried = [one for one in able if one is not None]
    adjusted = holm([one.p for one in tried])
    corrected = [replace(one, adjusted=1.0 if p is None else p) for one, p in zip(tried, adjusted, strict=True)]
    return sorted(corrected, key=lambda one: one.p)


def leak(row: Row) -> bool | None:
    """True: an attack is above chance over all seeds, corrected for how many were tried. None: above chance by its own
    interval only, or in some seed; or none ran. False: none of it."""
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


def rebuilt(row: Row) -> bool:
    """Whether a reconstruction identified records, and did better than its baselines."""
    cell = row.cells["identified"]
    return cell.value is not None and not cell.flag


def above_chance(row: Row, key: str) -> bool:
    """Whether a column's figure is of an attack that found something: it is then never shown as mere noise."""
    if key in ("auc", "tpr"):
        return row.cells[key].value is not None and leak(row) is not False
    return key == "identified" and rebuilt(row)
