"""Whether the best membership attack on a row found more than guessing does."""

from __future__ import annotations

from fedaudit.reports.attack_rows import Found, best_attack
from fedaudit.reports.table import Row
from fedaudit.reports.tests_over_seeds import SEEDS
from fedaudit.runtime.attack_result import leak_of


def leaks_by_seed(found: Found) -> list[bool]:
    """By seed: the attack's own verdict where it has one (it then beats blind baselines too), else its interval."""
    told = []
    for seed, estimate in found.estimates("auc").items():
        leak_ = leak_of(found.results[seed])
        told.append(bool(leak_) if leak_ is not None else (estimate.low or 0.0) > 0.5)
    return told


def judged(found: Found) -> bool:
    return any(leak_of(result) is not None for result in found.results.values())


def leak(row: Row) -> bool | None:
    """True: in most seeds, or over all of them. False: in none. None: in some, or no attack ran."""
    best = best_attack(row.group, "membership", "auc")
    if best is None:
        return None
    above = leaks_by_seed(best)
    if 2 * sum(above) > len(above):
        return True
    auc = row.cells["auc"]
    if not judged(best) and auc.n >= SEEDS and (auc.low or 0.0) > 0.5:
        return True
    return None if any(above) else False
