"""Rows made from run records: one per method and privacy setting, each figure a mean over seeds with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedaudit.epsilon.joint_verdict import refuting
from fedaudit.privacy.update_policy import UPDATES
from fedaudit.reports.attack_rows import Found, attacks_of, best_attack
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.leak_tests import auc_cell, beside, blind_auc, strongest
from fedaudit.reports.own_points import effects
from fedaudit.reports.runs import Group, Run
from fedaudit.reports.tests_over_seeds import over_seeds
from fedaudit.reports.vocabulary import COLUMNS, Column
from fedaudit.runtime.attack_result import MembershipResult, ReconstructionResult
from fedaudit.runtime.run_record import EpsilonAudit, RunRecord
from fedaudit.suite.measured import OUTER, near_chance
from fedaudit.units import UNITS

UNTRAINED = "Under-trained: accuracy is near"
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
    def idle(self) -> list[str]:
        """Return the steps of the method that changed nothing, by the points of its own rounds."""
        return [effect.step for effect in effects(self.group) if effect.nothing]

    @property
    def delta(self) -> float:
        """Return the largest delta of any client."""
        return max((c.delta for run in self.group.runs for c in run.record.ledger if c.entries), default=0.0)

    @property
    def weak_delta(self) -> bool:
        """Say if the guarantee has a delta that publishing one record at random would meet, at epsilon 0."""
        epsilon = self.cells["epsilon"].value
        return epsilon is not None and 0 < epsilon < math.inf and _weak_delta(self.group)

    @property
    def open_models(self) -> bool:
        """Say if the guarantee covers the messages alone: clients' models, trained without noise, are published."""
        epsilon = self.cells["epsilon"].value
        return epsilon is not None and 0 < epsilon < math.inf and not _models_covered(self.group)

    @property
    def relation(self) -> str:
        """Return the neighbouring relation of the guarantee."""
        found = {r for run in self.group.runs for c in run.record.ledger for r, t in c.by_relation.items() if t.epsilon}
        return ", ".join(sorted(found - {"any"}))

    @property
    def first(self) -> RunRecord:
        return self.group.runs[0].record


def rows_of(groups: Sequence[Group]) -> list[SummaryRow]:
    compressed = any(group.setting.compress for group in groups)
    return [SummaryRow(group, cells := _cells(group, compressed), _notes(group, cells)) for group in groups]


def _cells(group: Group, compressed: bool = True) -> dict[str, ReportCell]:
    if refused(group):
        return {column.key: ReportCell(reason="does not apply") for column in COLUMNS}
    cells = {}
    for column in COLUMNS:
        make = MAKERS.get(column.key)
        if column.key == "per_byte" and not compressed:
            cells[column.key] = ReportCell(reason="no run compresses what clients send")
            continue
        cells[column.key] = make(group) if make else _plain(group, column)
    return cells


# --- figures of one run ------------------------------------------------------------------------------------------


def accuracy(record: RunRecord) -> float | None:
    return record.result.last.test_score() if record.result.last else None


def _own(record: RunRecord) -> float | None:
    clients = record.result.last.clients if record.result.last else None
    return clients.local_test.mean if clients and clients.local_test else None


def _global_own(record: RunRecord) -> float | None:
    of_global = record.result.last.global_ if record.result.last else None
    return of_global.local_test.mean if of_global and of_global.local_test else None


def asked(record: RunRecord) -> int:
    """Return how often clients took part in rounds, in total."""
    return sum(len(row.participants) for row in record.rounds)


def _bytes(direction: str) -> Callable[[RunRecord], float | None]:
    return lambda record: record.bytes(direction) / asked(record) if asked(record) else None


def per_byte(record: RunRecord) -> float | None:
    """Return the percent of accuracy per megabyte that the clients sent in the whole run."""
    reached, sent = accuracy(record), record.bytes("up")
    return None if reached is None or not sent else 100 * reached / (sent / UNITS["MB"])


def uses_gpu(record: RunRecord) -> bool:
    return any(row.gpu_s is not None for row in record.timings)


def seconds(record: RunRecord) -> float | None:
    gpu = uses_gpu(record)
    outer = [row for row in record.timings if row.phase in OUTER]
    return math.fsum((row.gpu_s if gpu else row.wall_s) or 0.0 for row in outer) if outer else None


def _memory(record: RunRecord) -> float | None:
    return float(record.peak_gpu_bytes if uses_gpu(record) else record.peak_rss_bytes) or None


PLAIN: dict[str, Callable[[RunRecord], float | None]] = {
    "accuracy": accuracy, "own": _own, "global_own": _global_own, "up": _bytes("up"), "down": _bytes("down"),
    "seconds": seconds, "memory": _memory, "per_byte": per_byte,
}  # fmt: skip


def _plain(group: Group, column: Column) -> ReportCell:
    each = {run.seed: value for run in group.runs if (value := PLAIN[column.key](run.record)) is not None}
    if not each:
        return ReportCell(reason="not measured")
    within = None
    if column.key in ("accuracy", "per_byte") and len(each) == 1:
        last = group.runs[0].record.result.last
        if last and last.global_:
            test = last.global_.test
            scale = 1.0 if column.key == "accuracy" or not test.accuracy else next(iter(each.values())) / test.accuracy
            within = (scale * test.low, scale * test.high, "Wilson, over test records")
    if not column.sampled and len(set(each.values())) == 1:
        value = next(iter(each.values()))
        return ReportCell(value, value, value, len(each), "counted, the same in each seed", each)
    detail = ("GPU" if uses_gpu(group.runs[0].record) else "CPU") if column.machine else ""
    return ReportCell.of(over_seeds(list(each.values()), column.bounds, within), each, detail)


# --- privacy -----------------------------------------------------------------------------------------------------


def _claim(group: Group) -> ReportCell:
    policies = {kind: p["epsilon"] for kind, p in group.setting.privacy.items() if p.get("epsilon") is not None}
    if not policies:
        return ReportCell(reason="not asked for" if group.setting.privacy else "none made")
    value = max(float(e) for e in policies.values())
    idle = idle_kinds(group)
    flag = "applied to nothing that this method sends" if policies.keys() <= idle else ""
    return ReportCell(value, value, value, len(group.runs), "as set", detail=", ".join(sorted(policies)), flag=flag)


def idle_kinds(group: Group) -> set[str]:
    """Return the kinds that have a policy but were never released, so that the policy protected nothing."""
    entries = [entry for run in group.runs for client in run.record.ledger for entry in client.entries]
    used = {entry.kind for entry in entries} | {UPDATES for entry in entries if entry.unit == "client"}
    return {kind for kind in group.setting.privacy if kind not in used}


def _epsilon(group: Group) -> ReportCell:
    done = [run for run in group.runs if run.record.status == "done"]
    each: dict[int, float] = {}
    for run in done:
        epsilons = [client.epsilon for client in run.record.ledger if client.entries]
        if None in epsilons:
            return ReportCell(reason="releases under different neighbouring relations: not composed", n=len(done))
        each[run.seed] = max((e for e in epsilons if e is not None), default=0.0)
    if not each:
        return ReportCell(reason="no run is finished")
    worst = max(each.values())
    delta = max(client.delta for run in done for client in run.record.ledger)
    open_kinds = sorted({e.kind for r in done for c in r.record.ledger for e in c.entries if e.noise_multiplier == 0})
    detail = f"{', '.join(open_kinds).replace('_', ' ')} sent unprotected" if open_kinds else ""
    detail = detail or (f"δ ≤ {delta:.2g}" if worst else "nothing computed from records is sent")
    of_clients = [e for r in done for c in r.record.ledger for e in c.entries if e.unit == "client"]
    if of_clients and math.isfinite(worst):
        detail += f"; for whole clients, against {of_clients[0].to}"
    flag = ""
    if worst == 0 or (math.isfinite(worst) and not _models_covered(group)):
        flag = "covers the messages alone: the models are published without protection"
    elif math.isfinite(worst) and _weak_delta(group):
        flag = "δ ≥ 1/n: publishing one record at random would meet it"
    low = min(each.values())
    return ReportCell(
        worst, low, worst, len(each), "computed; from the best seed to the worst", each, detail, flag=flag
    )


def _models_covered(group: Group) -> bool:
    return all(run.record.models_covered for run in group.runs)


def _weak_delta(group: Group) -> bool:
    return any(c.delta * c.n >= 1 for run in group.runs for c in run.record.ledger if c.entries)


def _lower(of_noise: bool) -> Callable[[Group], ReportCell]:
    """Return what makes the cell of the largest bound: by attacks on planted records, or for the noise found."""

    def make(group: Group) -> ReportCell:
        audits = [(run.seed, audit) for run in group.runs for audit in run.audits if audit.of_noise == of_noise]
        found = [(seed, audit) for seed, audit in audits if audit.trials]
        if not found:
            return ReportCell(reason=f"not tried: {audits[0][1].how}" if audits else "not audited")
        each: dict[int, float] = {}
        for seed, audit in found:
            each[seed] = max(each.get(seed, 0.0), audit.lower_bound)
        best = max(found, key=lambda pair: pair[1].lower_bound)[1]
        refuted = list(
            dict.fromkeys(claim_text(audit) for audit in refuted_claims(group) if audit.of_noise == of_noise)
        )
        many = f"the largest of {len(found)} audits, each by itself" if len(found) > 1 else "the one audit"
        how = f"one-sided {100 * best.confidence:g} %, {best.trials} trials, {many}"
        flag = f"refuted: {'; '.join(refuted)}" if refuted else ""
        largest = max(each.values())
        return ReportCell(largest, largest, math.inf, len(each), how, each, best.claim, flag=flag)

    return make


def refuted_claims(group: Group) -> list[EpsilonAudit]:
    """Return the audits that refute a claim, corrected for how many were tried."""
    return refuting([audit for run in group.runs for audit in run.audits])


def claim_text(audit: EpsilonAudit) -> str:
    return f"ε = {audit.claim_epsilon:.3g} for {audit.claim}"


# --- attacks -----------------------------------------------------------------------------------------------------


def _best(claims: str, measure: str) -> Callable[[Group], ReportCell]:
    def make(group: Group) -> ReportCell:
        best = best_attack(group, claims, measure)
        if best is not None:
            return _with_chance(best, best.cell(measure, (0.0, 1.0)), measure)
        of_sort = [f for f in attacks_of(group) if f.claims == claims and not f.blind]
        if not of_sort:
            return ReportCell(reason="not run")
        return ReportCell(reason=of_sort[0].cell(measure).reason)

    return make


def _auc(group: Group) -> ReportCell:
    """Return the AUC of the strongest membership attack, with what the best blind attacker reaches beside it."""
    best = strongest(group)
    if best is None:
        return _best("membership", "auc")(group)
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


MAKERS: dict[str, Callable[[Group], ReportCell]] = {
    "claim": _claim,
    "epsilon": _epsilon,
    "lower": _lower(of_noise=False),
    "noise": _lower(of_noise=True),
    "tpr": _best("membership", "tpr"),
    "auc": _auc,
    "identified": _best("reconstruction", "identification"),
}


# --- notes -------------------------------------------------------------------------------------------------------


def _notes(group: Group, cells: dict[str, ReportCell]) -> list[str]:
    """Return what a reader has to know before reading a row's figures."""
    notes = []
    if refused(group):
        return [f"The privacy setting does not apply to this method, so it was not run: {_why_refused(group)}."]
    unfinished = sorted(run.seed for run in group.runs if run.record.status != "done")
    if unfinished:
        notes.append(f"Unfinished: seed {', '.join(map(str, unfinished))} has not run all its rounds.")
    if group.passed_over:
        names = ", ".join(f"{run.folder.name} (seed {run.seed})" for run in group.passed_over)
        notes.append(f"Run more than once, with different results: the last to finish is shown, not {names}.")
    notes += undertrained(group, cells["accuracy"])
    idle = sorted(idle_kinds(group))
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
    return "" if record.twins is None else record.twins.text()


def refused(group: Group) -> bool:
    return all(run.record.status == "refused" for run in group.runs)


def _why_refused(group: Group) -> str:
    reason = (group.runs[0].record.notes or ["no reason given"])[0]
    return (reason.partition("does not apply: ")[2] or reason).rstrip(".")


def undertrained(group: Group, cell: ReportCell) -> list[str]:
    """Return a note if a row is near chance or was still gaining at the end, as privacy figures then say little."""
    classes = group.runs[0].record.data.classes
    if cell.value is None:
        return []
    if near_chance(cell.value, classes):
        return [
            f"{UNTRAINED} the {100 / classes:.0f} % of guessing. What attacks find in an untrained "
            "model says nothing about a trained one."
        ]
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
