"""Rows made from run records: one per method and privacy setting, each figure a mean over seeds with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedaudit.metrics import guarantee
from fedaudit.metrics.attacks import AUC
from fedaudit.metrics.metric import AttackMeasure, Metric, report_columns
from fedaudit.metrics.utility import near_chance
from fedaudit.privacy.ledger import unit_in_words
from fedaudit.reports.attack_rows import Found, attacks_of, best_attack
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.leak_tests import auc_cell, beside, blind_auc, strongest
from fedaudit.reports.own_points import effects
from fedaudit.reports.runs import Group, Run
from fedaudit.reports.tests_over_seeds import over_seeds
from fedaudit.runtime.attack_result import MembershipResult, ReconstructionResult
from fedaudit.runtime.run_record import RunRecord

UNTRAINED = "Under-trained: accuracy is not clearly above"
DOUBTED = "Do not rely on these figures."
STILL_RISING = 0.02  # accuracy gained in the last evaluated round, above which a run is under-trained


@dataclass(frozen=True)
class SummaryRow:
    group: Group
    cells: dict[str, ReportCell]
    notes: list[str]

    @property
    def label(self) -> str:
        return self.group.label

    @property
    def untrained(self) -> bool:
        """Say if the row is near chance. Nothing was learnt then, so that attacks find nothing is no merit."""
        return any(note.startswith(UNTRAINED) for note in self.notes)

    @property
    def refuted(self) -> bool:
        """Say if a claim of this row is refuted, by an attack or by a check of the noise."""
        return bool(self.cells["lower"].flag or self.cells["noise"].flag)

    @property
    def doubts(self) -> list[str]:
        """Return why the row cannot be relied on, each with its seed; empty if nothing speaks against it."""
        return [f"seed {run.seed}: {why}" for run in self.group.runs for why in run.doubts]

    @property
    def clients_failed(self) -> bool:
        """Say if clients failed to answer: what the others sent alone made the figures."""
        return any(run.record.failures for run in self.group.runs)

    @property
    def idle(self) -> list[str]:
        """Return the steps of the method that changed nothing, by the points of its own rounds."""
        return [effect.step for effect in effects(self.group) if effect.nothing]

    @property
    def delta(self) -> float:
        """Return the largest delta of any client."""
        return guarantee.largest_delta(self.group.records)

    @property
    def weak_delta(self) -> bool:
        """Say if the guarantee has a delta that publishing one record at random would meet, at epsilon 0."""
        epsilon = self.cells["epsilon"].value
        return epsilon is not None and 0 < epsilon < math.inf and guarantee.weak_delta(self.group.records)

    @property
    def open_models(self) -> bool:
        """Say if epsilon is infinite for one reason alone: clients' models, trained without noise, are published."""
        return guarantee.open_models(self.group.records)

    @property
    def messages(self) -> str:
        """Return in words what the messages alone have, where published models undo it."""
        return guarantee.messages_text(self.group.records)

    @property
    def unit(self) -> str:
        """Return whom the guarantee protects, in words."""
        words = unit_in_words(client for run in self.group.runs for client in run.record.ledger)
        return words if "client" in words else f"{words} of any client"

    @property
    def relation(self) -> str:
        """Return the neighbouring relation of the guarantee."""
        found = {r for run in self.group.runs for c in run.record.ledger for r, t in c.by_relation.items() if t.epsilon}
        return ", ".join(sorted(found - {"any"}))

    @property
    def first(self) -> RunRecord:
        return self.group.runs[0].record


def rows_of(groups: Sequence[Group]) -> list[SummaryRow]:
    every = [record for group in groups for record in group.records]
    left_out = {m.key: m.left_out(every) for m in report_columns() if m.left_out is not None}
    return [SummaryRow(group, cells := _cells(group, left_out), _notes(group, cells)) for group in groups]


def _cells(group: Group, left_out: dict[str, str]) -> dict[str, ReportCell]:
    """Return the figures of a setting by metric. `left_out` has reasons for metrics that the report leaves out."""
    if refused(group):
        return {metric.key: ReportCell(reason="does not apply") for metric in report_columns()}
    return {
        m.key: ReportCell(reason=why) if (why := left_out.get(m.key)) else _cell(group, m) for m in report_columns()
    }


def _cell(group: Group, metric: Metric) -> ReportCell:
    """Return one figure of a setting: the values of its seeds, brought together as the metric says."""
    if metric.attack is not None:
        return _of_best_attack(group, metric.attack)
    records = group.records
    each = {record.setting.seed: float(value) for record in records if (value := metric.value(record)) is not None}
    if (why := metric.why_missing(records)) or not each:
        return ReportCell(reason=why or "not measured")
    detail = metric.detail(records) if metric.detail is not None else ""
    flag = metric.flag(records) if metric.flag is not None else ""
    low, high, first = min(each.values()), max(each.values()), next(iter(each.values()))
    if metric.seeds == "set":
        return ReportCell(first, first, first, len(group.runs), "as set", detail=detail, flag=flag)
    if metric.seeds == "largest":
        how = "computed; from the best seed to the worst"
        return ReportCell(high, low, high, len(each), how, each, detail, "", flag)
    if metric.seeds == "bound":
        how = metric.how(records) if metric.how is not None else "lower bound"
        return ReportCell(high, high, math.inf, len(each), how, each, detail, "", flag)
    if not metric.sampled and len(set(each.values())) == 1:
        return ReportCell(first, first, first, len(each), "counted, the same in each seed", each, detail, "", flag)
    within = None
    if metric.interval is not None and len(each) == 1:
        within = next(metric.interval(record) for record in records if record.setting.seed in each)
    cell = ReportCell.of(over_seeds(list(each.values()), metric.bounds, within), each, detail)
    return replace(cell, flag=flag)


# --- attacks -----------------------------------------------------------------------------------------------------


def _of_best_attack(group: Group, of: AttackMeasure) -> ReportCell:
    if of == AUC and (found := strongest(group)) is not None:
        return _auc(group, found)
    best = best_attack(group, of.claims, of.measure)
    if best is not None:
        return _with_chance(best, best.cell(of.measure, (0.0, 1.0)), of.measure)
    of_sort = [f for f in attacks_of(group) if f.claims == of.claims and not f.blind]
    return ReportCell(reason=of_sort[0].cell(of.measure).reason if of_sort else "not run")


def _auc(group: Group, best: Found) -> ReportCell:
    """Return the AUC of the strongest membership attack, with what the best blind attacker reaches beside it."""
    cell, blind = auc_cell(best), blind_auc(group)
    return replace(
        cell, detail=cell.detail + (f"; the best blind attacker has {blind:.3f}" if blind is not None else "")
    )


def _with_chance(best: Found, cell: ReportCell, measure: str) -> ReportCell:
    """Return the cell with what guessing would give, and a flag if the attack is no better than its baselines."""
    guessing = beside(best) if measure == "identification" else ""
    detail = cell.detail + (f"; {guessing}" if guessing else "")
    verdicts = [r.beats_baselines for r in best.results.values() if isinstance(r, ReconstructionResult)]
    flag = "no better than its baselines" if verdicts and not any(verdicts) else ""
    values = {name: getattr(cell, name) for name in ("value", "low", "high", "n", "interval", "each")}
    return ReportCell(**values, detail=detail, flag=flag)


# --- notes -------------------------------------------------------------------------------------------------------


def _notes(group: Group, cells: dict[str, ReportCell]) -> list[str]:
    """Return what a reader has to know before reading a row's figures."""
    notes = []
    if refused(group):
        return [f"The privacy setting does not apply to this method, so it was not run: {_why_refused(group)}."]
    notes += [f"{DOUBTED} Seed {run.seed}: {why}." for run in group.runs for why in run.doubts]
    unfinished = sorted(run.seed for run in group.runs if run.record.status != "done")
    if unfinished:
        notes.append(f"Unfinished: seed {', '.join(map(str, unfinished))} has not run all its rounds.")
    if group.passed_over:
        names = ", ".join(f"{run.folder.name} (seed {run.seed})" for run in group.passed_over)
        notes.append(f"Run more than once, with different results: the last to finish is shown, not {names}.")
    notes += [f"Seed {run.seed}: {said}" for run in group.runs if (said := run.record.failures)]
    notes += undertrained(group, cells["accuracy"])
    idle = sorted(guarantee.idle_kinds(group.records))
    if idle:
        of = ", ".join(idle).replace("_", " ")
        notes.append(
            f"The privacy setting on {of} applied to nothing, because this method sends none. It protects nothing here."
        )
    if len(group.runs) == 1:
        notes.append("One seed: no interval over seeds, and no difference can be told from noise.")
    notes += [effect.text() for effect in effects(group)]
    notes += [f"Measurement {cells[key].flag}." for key in ("lower", "noise") if cells[key].flag]
    results = [result for run in group.runs for result in run.record.attacks]
    if any(isinstance(result, MembershipResult) and result.split_broken for result in results):
        notes.append(
            "The audit split is broken: a baseline that looks at nothing tells members from others, so membership "
            "attacks show nothing here."
        )
    notes += [f"Declarations {told}." for told in dict.fromkeys(_declarations(run.record) for run in group.runs)]
    notes += [f"Twins: {told}." for told in dict.fromkeys(_twins(run.record) for run in group.runs) if told]
    known = [note for run in group.runs for note in run.record.notes if "applied to nothing" not in note]
    return notes + [note[:1].upper() + note[1:] + "." * (not note.endswith(".")) for note in dict.fromkeys(known)]


def _declarations(record: RunRecord) -> str:
    """Say if the method's declarations about its messages were tested, and for which version of its source."""
    said = record.declarations
    return "may have been tested or not: the record does not say" if said is None else said.text()


def _twins(record: RunRecord) -> str:
    """Say how many clients had a twin, and in how many tasks both answered the same."""
    return "" if record.twins is None else record.twins.text(len(record.data.members))


def refused(group: Group) -> bool:
    return all(run.record.status == "refused" for run in group.runs)


def _why_refused(group: Group) -> str:
    reason = (group.runs[0].record.notes or ["no reason given"])[0]
    return (reason.partition("does not apply: ")[2] or reason).rstrip(".")


def undertrained(group: Group, cell: ReportCell) -> list[str]:
    """Return a note if a row is near chance or was still gaining at the end, as privacy figures then say little."""
    if cell.value is None:
        return []
    if chance := near_chance(cell.value, group.runs[0].record.data):
        return [f"{UNTRAINED} the {chance}. What attacks find in an untrained model says nothing about a trained one."]
    curves = [curve(run)[1] for run in group.runs]
    gains = [scores[-1] - scores[-2] for scores in curves if len(scores) > 1]
    gain = math.fsum(gains) / len(gains) if gains else 0.0
    if gain > STILL_RISING:
        return [f"Under-trained: accuracy still rose by {100 * gain:.1f} points in the last evaluated round."]
    return []


def curve(run: Run) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds and the accuracy after each."""
    pairs = [(row.round, row.utility.test_score()) for row in run.record.rounds if row.utility]
    kept = [(t, score) for t, score in pairs if score is not None]
    return [t for t, _ in kept], [score for _, score in kept]
