"""Printing what attacks found: a line each, or all figures with --verbose."""

from __future__ import annotations

from collections.abc import Sequence

from fedaudit.cli.output import print_lines
from fedaudit.runtime.attack_result import (
    AnyResult,
    MembershipResult,
    NotRun,
    ReconstructionResult,
    Scored,
    measures_of,
)
from fedaudit.stats import Estimate

FIRST = {"auc": "AUC", "identification": "identified", "error": "error of label shares"}


def print_attacks(results: Sequence[AnyResult], verbose: bool) -> None:
    ran = [r for r in results if not isinstance(r, NotRun)]
    width = max((len(r.attack) for r in results), default=0)
    print_lines([(r.attack, r.threat, _line(r)) for r in ran], (width, 8))
    for result in ran if verbose else ():
        print(f"\n{result.attack}, {result.threat}: {result.verdict or _verdict(result)}")
        for name, estimate in _estimates(result):
            print(f"  {name:<24} {_interval(estimate)}")
    idle = [r for r in results if isinstance(r, NotRun)]
    if idle and verbose:
        print()
        for one in idle:
            print(f"{one.attack}, {one.threat} did not run: {one.reason}")
    elif idle:
        print(f"{len(idle)} more had nothing to attack here; --verbose says why and shows all figures.")


def _line(result: Scored) -> str:
    """Return the first figure and what it means."""
    found = _estimates(result)
    name, estimate = next(((n, e) for n, e in found if n in FIRST.values()), found[0])
    return f"{name} {_interval(estimate)}  {_verdict(result)}"


def _verdict(result: Scored) -> str:
    if isinstance(result, MembershipResult) and result.split_broken:
        return "SPLIT BROKEN"
    if result.blind:
        return "blind baseline"
    if isinstance(result, ReconstructionResult):
        return "beats its baselines" if result.beats_baselines else "no better than its baselines"
    return {True: "a leak", False: "no leak shown", None: ""}[result.leak]


def _estimates(result: Scored) -> list[tuple[str, Estimate]]:
    found = [(FIRST.get(name, name), estimate) for name, estimate in measures_of(result).items()]
    if not isinstance(result, MembershipResult):
        return found
    if result.last_round is not None:
        found.append(("AUC, last round alone", result.last_round))
    return found + [(f"TPR at {t.fpr:.1%} FPR", t) for t in result.pooled.tpr_at_fpr]


def _interval(estimate: Estimate) -> str:
    return estimate.reason if estimate.value is None else estimate.shown()
