"""What attacks found, whatever they claim: one entry per attack and attacker, over the seeds of a setting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedaudit.reports.figure import Cell
from fedaudit.reports.runs import Group
from fedaudit.reports.tests_over_seeds import over_seeds


@dataclass(frozen=True)
class Found:
    """What one attack under one threat found in the runs of a group."""

    attack: str
    threat: str
    claims: str
    blind: bool  # reads nothing of the run: a baseline
    results: dict[int, dict[str, Any]]  # by seed, those that ran
    reason: str = ""  # why it ran in no seed
    settings: str = ""  # only where one attack ran with several

    @property
    def name(self) -> str:
        return f"{self.attack}{f' ({self.settings})' if self.settings else ''}, {self.threat}"

    def estimates(self, measure: str) -> dict[int, dict[str, Any]]:
        """One estimate per seed that has it. `tpr` is the one at 1 % FPR."""
        found = {}
        for seed, result in self.results.items():
            pooled = result.get("pooled") or {}
            if measure == "tpr":
                at = [t for t in pooled.get("tpr_at_fpr", []) if math.isclose(t["fpr"], 0.01)]
                estimate = at[0] if at else None
            else:
                estimate = pooled.get(measure)
            if isinstance(estimate, dict) and estimate.get("value") is not None:
                found[seed] = estimate
        return found

    def cell(self, measure: str, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Cell:
        found = self.estimates(measure)
        if not found:
            return Cell(reason=self.reason or self._why_none(measure))
        each = {seed: float(estimate["value"]) for seed, estimate in found.items()}
        first = next(iter(found.values()))
        within = None
        if first.get("low") is not None:
            within = (first["low"], first["high"], str(first.get("interval", "")))
        return Cell(**over_seeds(list(each.values()), bounds, within), each=each, detail=self.name)

    def success(self) -> float:
        """The share of seeds in which reconstructions beat their baselines; 0 where an attack claims something else."""
        return sum(bool(result.get("beats_baselines")) for result in self.results.values()) / max(len(self.results), 1)

    def beyond_chance(self, measure: str) -> float:
        found = self.estimates(measure).values()
        return sum(float(e["value"]) - float(e.get("chance") or 0.0) for e in found) / max(len(found), 1)

    def _why_none(self, measure: str) -> str:
        for result in self.results.values():
            pooled = result.get("pooled") or {}
            many = pooled.get("tpr_at_fpr", []) if measure == "tpr" else [pooled.get(measure)]
            reasons = [e["reason"] for e in many if isinstance(e, dict) and e.get("reason")]
            if reasons:
                return reasons[-1] if measure != "tpr" else reasons[0]
        return "not measured"


def attacks_of(group: Group) -> list[Found]:
    """Every attack under every threat, whatever it claims."""
    by_name: dict[tuple[str, str, str], list[tuple[int, dict[str, Any]]]] = {}
    for run in group.runs:
        for result in run.record.attacks:
            settings = ", ".join(f"{key}={value}" for key, value in sorted((result.get("settings") or {}).items()))
            by_name.setdefault((result["attack"], result["threat"], settings), []).append((run.seed, result))
    found = []
    for (attack, threat, settings), results in by_name.items():
        ran = {seed: result for seed, result in results if result["ran"]}
        first = next(iter(ran.values()), results[0][1])
        blind = bool(first.get("blind"))
        reason = "" if ran else str(first.get("reason", "did not run"))
        shown = settings if sum(key[:2] == (attack, threat) for key in by_name) > 1 else ""
        found.append(Found(attack, threat, _claims(group, attack, bool(ran)), blind, ran, reason, shown))
    return found


def _claims(group: Group, attack: str, ran: bool) -> str:
    """What an attack claims. Where it did not run it does not say; another threat's result may."""
    said = [r["claims"] for run in group.runs for r in run.record.attacks if r["attack"] == attack and r.get("claims")]
    return said[0] if said else "membership" if ran else ""


def best_attack(group: Group, claims: str, measure: str) -> Found | None:
    """The attack that found most, in the mean over seeds; baselines that look at nothing do not count.

    Chance differs between attacks that reconstruct (one of N records, a class, member or not): what counts is first
    whether the baselines were beaten, then how far beyond chance it is.
    """
    able = [f for f in attacks_of(group) if f.claims == claims and not f.blind and f.estimates(measure)]
    return max(able, key=lambda f: (f.success(), f.beyond_chance(measure)), default=None)
