"""The results of attacks of all kinds: one entry per attack and attacker, over the seeds of a setting."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedaudit.metrics.attacks import beats_baselines, beyond_chance, estimate_of, estimates_of
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.runs import Group
from fedaudit.reports.tests_over_seeds import over_seeds
from fedaudit.runtime.attack_result import AnyResult, NotRun, Scored
from fedaudit.stats import Estimate


@dataclass(frozen=True)
class Found:
    """The results of one attack under one threat in the runs of a group."""

    attack: str
    threat: str
    claims: str
    blind: bool  # a baseline, which reads nothing of the run
    results: dict[int, Scored]  # by seed, for seeds in which it ran
    reason: str = ""  # why it ran in no seed
    settings: str = ""  # only if one attack ran with several settings

    @property
    def name(self) -> str:
        return f"{self.attack}{f' ({self.settings})' if self.settings else ''}, {self.threat}"

    def estimates(self, measure: str) -> dict[int, Estimate]:
        """Return one estimate per seed that has it. `tpr` is the TPR at 1 % FPR."""
        found = {seed: estimate_of(result, measure) for seed, result in self.results.items()}
        return {seed: estimate for seed, estimate in found.items() if estimate is not None}

    def cell(self, measure: str, bounds: tuple[float, float] = (-math.inf, math.inf)) -> ReportCell:
        found = self.estimates(measure)
        if not found:
            return ReportCell(reason=self.reason or self._why_none(measure))
        each = {seed: estimate.value for seed, estimate in found.items() if estimate.value is not None}
        first = next(iter(found.values()))
        within = None
        if first.low is not None and first.high is not None:
            within = (first.low, first.high, first.interval)
        return ReportCell.of(over_seeds(list(each.values()), bounds, within), each, self.name)

    def success(self) -> float:
        """Return the share of seeds in which reconstructions beat their baselines; 0 for other kinds of attack."""
        won = [beats_baselines(result) for result in self.results.values()]
        return sum(won) / max(len(won), 1)

    def beyond_chance(self, measure: str) -> float:
        found = [beyond_chance(estimate) for estimate in self.estimates(measure).values()]
        return sum(found) / max(len(found), 1)

    def _why_none(self, measure: str) -> str:
        for result in self.results.values():
            if reasons := [e.reason for e in estimates_of(result, measure) if e.reason]:
                return reasons[0]
        return "not measured"


def attacks_of(group: Group) -> list[Found]:
    """Return every attack under every threat, of all kinds."""
    by_name: dict[tuple[str, str, str], list[tuple[int, AnyResult]]] = {}
    for run in group.runs:
        for result in run.record.attacks:
            settings = ", ".join(f"{key}={value}" for key, value in sorted(result.settings.items()))
            by_name.setdefault((result.attack, result.threat, settings), []).append((run.seed, result))
    found = []
    for (attack, threat, settings), results in by_name.items():
        ran = {seed: result for seed, result in results if not isinstance(result, NotRun)}
        first: AnyResult = next(iter(ran.values()), results[0][1])
        blind = first.blind
        reason = first.reason if isinstance(first, NotRun) else ""
        shown = settings if sum(key[:2] == (attack, threat) for key in by_name) > 1 else ""
        found.append(Found(attack, threat, _claims(group, attack, bool(ran)), blind, ran, reason, shown))
    return found


def _claims(group: Group, attack: str, ran: bool) -> str:
    """Return what an attack claims. If it did not run, the result under another threat may tell."""
    results = [r for run in group.runs for r in run.record.attacks if r.attack == attack]
    said = [r.claims for r in results if not isinstance(r, NotRun)]
    return said[0] if said else "membership" if ran else ""


def best_attack(group: Group, claims: str, measure: str) -> Found | None:
    """Return the attack that found most, in the mean over seeds. Blind baselines do not count.

    Chance differs between attacks that reconstruct (one of N records, a class, member or not). So attacks that beat
    their baselines come first, then those that are furthest beyond chance.
    """
    able = [f for f in attacks_of(group) if f.claims == claims and not f.blind and f.estimates(measure)]
    return max(able, key=lambda f: (f.success(), f.beyond_chance(measure)), default=None)
