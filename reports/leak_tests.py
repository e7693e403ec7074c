"""Tests of whether attacks on a row found more than guessing does, and more than an attacker who sees nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scipy.special import ndtr

from fedaudit.reports.attack_rows import Found, attacks_of, best_attack
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.runs import Group
from fedaudit.reports.tests_over_seeds import LEVEL, holm
from fedaudit.runtime.attack_result import MembershipResult, Rate, ReconstructionResult, leak_of
from fedaudit.stats import Estimate

if TYPE_CHECKING:
    from fedaudit.reports.summary_rows import SummaryRow

COIN = 0.5  # the AUC of guessing


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
    raw: Estimate | None = None  # the AUC as measured, whatever a blind baseline reaches

    @property
    def beyond(self) -> bool:
        """Say if the attack is above chance, corrected for the number of attacks tried."""
        return self.adjusted < LEVEL / 2 and self.low > 0.5


def pooled(found: Found) -> Pooled | None:
    """Return an attack's mean AUC over seeds, with its variance; None if no seed has one.

    Seeds have candidates of their own, so their AUCs are independent. Each variance is taken from the seed's own
    interval. On a split that a blind baseline can tell, the figure is by how much the attack beats its best baseline.
    """
    values, variances, ends = [], [], []
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
        ends.append((beyond + by.low, beyond + by.high))
    if not values:
        return None
    value, deviation = sum(values) / len(values), math.sqrt(sum(variances)) / len(values)
    p = float(ndtr((0.5 - value) / deviation)) if deviation > 0 else float(value <= 0.5)
    low, high = ends[0] if len(ends) == 1 else (value - 1.959964 * deviation, value + 1.959964 * deviation)
    raw = _over_candidates(found)
    return Pooled(found, value, max(0.0, low), min(1.0, high), p, broken=broken, raw=raw)


def _over_candidates(found: Found) -> Estimate | None:
    """Return the mean AUC over seeds with the uncertainty of all seeds' candidates; None if some seed has no interval.

    Of one seed it is that seed's own interval."""
    known = list(found.estimates("auc").values())
    if not known or any(e.value is None or e.low is None or e.high is None for e in known):
        return None
    if len(known) == 1:
        return known[0]
    value = math.fsum(e.value or 0.0 for e in known) / len(known)
    half = math.sqrt(math.fsum(((e.high or 0.0) - (e.low or 0.0)) ** 2 for e in known)) / (2 * len(known))
    words = "over the candidates of all seeds"
    return Estimate(value=value, low=max(0.0, value - half), high=min(1.0, value + half), interval=words, n=len(known))


def auc_cell(found: Found) -> ReportCell:
    """Return an attack's AUC with the one interval that a report shows of it: over the candidates of all seeds."""
    cell, raw = found.cell("auc", (0.0, 1.0)), _over_candidates(found)
    if cell.value is None or raw is None:
        return cell
    words = raw.interval if cell.n > 1 else cell.interval
    return replace(cell, low=raw.low, high=raw.high, interval=words)


def pooled_attacks(group: Group) -> list[Pooled]:
    """Return every membership attack of a setting that ran, the strongest first, corrected for their number."""
    able = [pooled(f) for f in attacks_of(group) if f.claims == "membership" and not f.blind and f.estimates("auc")]
    tried = [one for one in able if one is not None]
    adjusted = holm([one.p for one in tried])
    corrected = [replace(one, adjusted=1.0 if p is None else p) for one, p in zip(tried, adjusted, strict=True)]
    return sorted(corrected, key=lambda one: (not one.beyond, -one.value, one.p))


def strongest(group: Group) -> Found | None:
    """Return the membership attack that a row's AUC is of: above chance if any is, and then the one that found most."""
    tried = pooled_attacks(group)
    return tried[0].found if tried else best_attack(group, "membership", "auc")


# --- what somebody reaches who sees nothing ----------------------------------------------------------------------


def blind_auc(group: Group) -> float | None:
    """Return the AUC of the best blind baseline, in the mean over seeds; None if none ran."""
    blind = [f for f in attacks_of(group) if f.claims == "membership" and f.blind and f.estimates("auc")]
    return max((f.cell("auc").value or 0.0 for f in blind), default=None)


def membership_lift(row: SummaryRow) -> float:
    """Return by how much the AUC is above guessing and above the best blind attacker, whichever is more."""
    return (row.cells["auc"].value or 0.0) - max(COIN, blind_auc(row.group) or 0.0)


def guessed(found: Found) -> float | None:
    """Return the share of images that guessing identifies, in the mean over seeds; None if no result says it."""
    rates = [e.chance for e in found.estimates("identification").values() if isinstance(e, Rate)]
    known = [chance for chance in rates if chance is not None]
    return math.fsum(known) / len(known) if known else None


def best_baseline(found: Found) -> float | None:
    """Return the share of images that the best baseline identifies, in the mean over seeds; None if there is none."""
    of_seeds = [result for result in found.results.values() if isinstance(result, ReconstructionResult)]
    most = [[b.identification.value for b in result.baselines.values()] for result in of_seeds]
    known = [max(values) for of in most if (values := [value for value in of if value is not None])]
    return math.fsum(known) / len(known) if known else None


def beside(found: Found) -> str:
    """Return what guessing gives, and the best baseline if that is more."""
    chance, baseline = guessed(found), best_baseline(found)
    if chance is None:
        return ""
    more = f", the best baseline {100 * baseline:.1f} %" if baseline is not None and baseline > chance else ""
    return f"guessing gives {100 * chance:.1f} %{more}"


def reconstruction_lift(row: SummaryRow) -> float:
    """Return by how much the share of identified images is above guessing and above the best baseline."""
    best = best_attack(row.group, "reconstruction", "identification")
    without = max(guessed(best) or 0.0, best_baseline(best) or 0.0) if best else 0.0
    return (row.cells["identified"].value or 0.0) - without


# --- verdicts ----------------------------------------------------------------------------------------------------


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


def shown_leak(row: SummaryRow, key: str) -> bool:
    """Say if a column's figure is from an attack that found a leak. The page marks it, and the answers count it."""
    if key in ("auc", "tpr"):
        return row.cells[key].value is not None and leak(row) is True
    return key == "identified" and rebuilt(row)


def above_chance(row: SummaryRow, key: str) -> bool:
    """Say if a column's figure is from an attack that found something, or may have. It is never shown as mere noise."""
    if key in ("auc", "tpr"):
        return row.cells[key].value is not None and leak(row) is not False
    return shown_leak(row, key)
