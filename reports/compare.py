"""Comparison of two folders of runs: what changed, and is it more than noise?

Equal settings are paired. If a setting itself changed, rows are paired by method and privacy, provided that these name
one row on either side, and the change is listed. Figures are compared seed by seed (paired t-test) if both sides have
the same seeds, otherwise by Welch's t-test. All estimated comparisons of one call are one family: p-values are Holm's.

A figure that differs is more than noise, within noise, or cannot be told (one or two seeds, no figure on one side). The
last is not a verdict, and has its own exit code. `Limit` is a gate: how much worse a figure may become.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedaudit.errors import SettingError, unknown
from fedaudit.metrics.metric import Metric, report_columns
from fedaudit.reports.formats import plain
from fedaudit.reports.runs import Group, flat_setting, grouped, looked_at, read_runs
from fedaudit.reports.summary_rows import SummaryRow, rows_of
from fedaudit.reports.tests_over_seeds import LEVEL, SEEDS, Test, compared, holm
from fedaudit.reports.vocabulary import text
from fedaudit.runtime.attack_result import MembershipResult
from fedaudit.runtime.code_digest import comparable, differences
from fedaudit.runtime.run_record import RunRecord, same_machine_type


@dataclass(frozen=True)
class Change:
    """One figure of one setting, before and after."""

    label: str
    column: Metric
    before: float | None
    after: float | None
    test: Test

    @property
    def counts(self) -> bool:
        """Say if the change is more than noise, and about the method rather than the machine."""
        return self.test.more_than_noise and not self.column.machine

    @property
    def untold(self) -> bool:
        """Say if the figure differs, or is missing on one side, with too few seeds to tell if that is noise."""
        few = self.test.p is None or (math.isfinite(self.test.seeds) and self.test.seeds < SEEDS)
        return few and self.test.difference != 0 and not self.test.more_than_noise

    @property
    def worse_by(self) -> float | None:
        """Return how much worse it became, in the column's unit; negative if better, None if this cannot be told."""
        if self.before is None or self.after is None or self.column.better is None:
            return None
        gap = 0.0 if self.before == self.after else self.after - self.before  # inf - inf is nan
        return -gap if self.column.better == "high" else gap

    @property
    def direction(self) -> str:
        if not self.test.difference or self.column.better is None:
            return "changed"
        return "better" if (self.test.difference > 0) == (self.column.better == "high") else "worse"


@dataclass(frozen=True)
class Comparison:
    pairs: list[tuple[SummaryRow, SummaryRow]]
    changes: list[Change]
    settings: dict[str, dict[str, list[Any]]]  # label: key: [before, after]
    other_code: dict[str, list[str]]  # label: what differs in the code that made them
    not_compared: list[str]  # labels whose code was recorded by two schemes of digests
    same_bits: list[str]  # labels whose shared seeds all gave the same transcript
    only_before: list[str]
    only_after: list[str]
    environment: dict[str, list[Any]]  # versions and devices that differ
    problems: dict[str, str]
    # Broken seals, equal messages and unequal results, or the other way round.
    alarms: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Say if a figure about the method changed by more than noise, which sets the exit code."""
        return any(change.counts for change in self.changes)

    @property
    def untold(self) -> bool:
        """Say if a figure about the method differs and it cannot be told if that is noise."""
        return any(change.untold and not change.column.machine for change in self.changes)


@dataclass(frozen=True)
class Limit:
    """The most that one figure may become worse: in points for shares, in its own unit, or relative to before."""

    column: Metric
    amount: float
    relative: bool

    @classmethod
    def parse(cls, text_: str) -> Limit:
        """Return the limit in a text: `accuracy=2` is two points, `auc=0.02` an AUC, `up=10%` relative to before."""
        key, equals, amount = (part.strip() for part in text_.partition("="))
        gated = [column.key for column in report_columns() if column.better is not None]
        if not equals:
            raise SettingError(f"--max-drop {text_!r}: write COLUMN=AMOUNT, for example accuracy=2.")
        if key not in gated:
            raise SettingError(unknown("column to gate", key, gated))
        column = next(c for c in report_columns() if c.key == key)
        try:
            number = float(amount.removesuffix("%"))
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise SettingError(
                f"--max-drop {text_!r}: the amount is not a number of 0 or more. Write one, such as 2 or 10%."
            )
        relative = amount.endswith("%")
        return cls(column, number / 100 if relative or column.unit == "share" else number, relative)

    def breaks(self, result: Comparison) -> list[str]:
        """Return a line for each figure whose mean over seeds became worse by more than allowed, or that is gone."""
        lines = []
        for change in (c for c in result.changes if c.column is self.column):
            if change.before is not None and change.after is None:
                lines.append(f"{change.label}: {self.column.title} has no figure any more")
                continue
            if change.worse_by is None or change.before is None:
                continue
            allowed = self.amount * abs(change.before) if self.relative else self.amount
            if change.worse_by > allowed + 1e-12:  # a drop of exactly 2 points is within a limit of 2
                lines.append(_line(change))
        return lines


def compare(before: Path | str, after: Path | str) -> Comparison:
    before, after = Path(before), Path(after)
    sides: list[list[SummaryRow]] = []
    problems: dict[str, str] = {}
    for folder in (before, after):
        if not folder.is_dir():
            raise SettingError(f"There is no folder {folder}. Name two that hold runs.")
        runs, broken = read_runs(folder)
        sides.append(rows_of(grouped(runs)))
        problems |= {str(folder / name): error for name, error in broken.items()}
    pairs = _paired(*sides)
    if not pairs:
        raise SettingError(
            f"{before} and {after} have no setting in common, nor a method with one setting of the same privacy on "
            "each side, so there is nothing to compare. Name folders with runs of the same method."
        )
    changes = _changes(pairs)
    return Comparison(
        pairs=pairs,
        changes=changes,
        settings={a.label: of for a, b in pairs if (of := _settings(a.group, b.group))},
        other_code={a.label: told for a, b in pairs if (told := _other_code(a.group, b.group))},
        not_compared=[a.label for a, b in pairs if _not_compared(a.group, b.group)],
        same_bits=[a.label for a, b in pairs if _same_bits(a.group, b.group)],
        only_before=[row.label for row in sides[0] if not any(row is a for a, _ in pairs)],
        only_after=[row.label for row in sides[1] if not any(row is b for _, b in pairs)],
        environment=_environment(pairs),
        problems=problems,
        alarms=[*_doubts(pairs), *(f"{a.label}: {told}" for a, b in pairs for told in _alarms(a.group, b.group))],
    )


def _paired(before: Sequence[SummaryRow], after: Sequence[SummaryRow]) -> list[tuple[SummaryRow, SummaryRow]]:
    def exact(row: SummaryRow) -> str:
        return json.dumps(
            [row.group.method, row.group.setting.privacy, flat_setting(row.group.setting)], sort_keys=True
        )

    def loose(row: SummaryRow) -> str:
        return json.dumps([row.group.method, row.group.privacy])

    found: list[tuple[SummaryRow, SummaryRow]] = []
    for key in (exact, loose):
        left = [row for row in before if not any(row is a for a, _ in found)]
        right = [row for row in after if not any(row is b for _, b in found)]
        for row in left:
            mine = [a for a in left if key(a) == key(row)]
            theirs = [b for b in right if key(b) == key(row)]
            if len(mine) == len(theirs) == 1:
                found.append((row, theirs[0]))
    return sorted(found, key=lambda pair: before.index(pair[0]))


def _changes(pairs: Sequence[tuple[SummaryRow, SummaryRow]]) -> list[Change]:
    changes = []
    for a, b in pairs:
        for column in report_columns():
            x, y = a.cells[column.key], b.cells[column.key]
            if x.value is None and y.value is None:
                continue
            changes.append(Change(a.label, column, x.value, y.value, _test(a, b, column)))
    sampled = [i for i, change in enumerate(changes) if math.isfinite(change.test.seeds)]
    for i, p in zip(sampled, holm([changes[i].test.p for i in sampled]), strict=True):
        changes[i] = replace(changes[i], test=replace(changes[i].test, p=p))
    return changes


def _test(a: SummaryRow, b: SummaryRow, column: Metric) -> Test:
    x, y = a.cells[column.key], b.cells[column.key]
    if x.value is None or y.value is None:
        return Test(None, None, f"no figure {'before' if x.value is None else 'after'}", seeds=0)
    if not column.sampled:
        if x.value == y.value:
            return Test(0.0, 1.0, "counted or computed: equal")
        gap = y.value - x.value
        return Test(gap, 0.0, "counted or computed: no noise in it")
    test = _possible(compared(x.each, y.each), column)
    return replace(test, seeds=min(len(x.each), len(y.each))) if math.isinf(test.seeds) else test


def _possible(test: Test, column: Metric) -> Test:
    """Return the test with its interval cut to the differences that this column can have."""
    most = column.bounds[1] - column.bounds[0]
    if test.low is None or test.high is None or math.isinf(most):
        return test
    return replace(test, low=max(-most, test.low), high=min(most, test.high))


def _settings(a: Group, b: Group) -> dict[str, list[Any]]:
    x, y = flat_setting(a.setting), flat_setting(b.setting)
    return {key: [x.get(key), y.get(key)] for key in sorted(x.keys() | y.keys()) if x.get(key) != y.get(key)}


def _same_bits(a: Group, b: Group) -> bool:
    x, y = ({run.seed: run.record.transcript_digest for run in group.runs} for group in (a, b))
    shared = x.keys() & y.keys()
    if _other_code(a, b):
        return False  # equal messages by other code are not the same run
    return bool(shared) and all(x[seed] and x[seed] == y[seed] for seed in shared)


def _doubts(pairs: Sequence[tuple[SummaryRow, SummaryRow]]) -> list[str]:
    """Return what the seals and the last checks of compared runs say against them. That reads all their files."""
    runs = {run.folder: run for pair in pairs for row in pair for run in row.group.runs}
    return [
        f"do not rely on {run.folder}: {'; '.join(run.doubts)}. `fedaudit verify {run.folder}` names each file and "
        "figure"
        for run in looked_at(list(runs.values()))
        if run.doubts
    ]


FROM_MESSAGES = ("traffic", "releases", "ledger")  # parts of a record that follow from the messages


def _alarms(a: Group, b: Group) -> Iterator[str]:
    """Yield what cannot be if both folders are as their runs left them."""
    theirs = {run.seed: run.record for run in b.runs}
    for run in a.runs:
        one, other = run.record, theirs.get(run.seed)
        if other is None or not one.transcript_digest or "done" not in (one.status, other.status):
            continue
        if one.transcript_digest == other.transcript_digest:
            for where, x, y in _results_apart(one, other):
                yield (
                    f"seed {run.seed}: every message is the same to the bit, but {where} is {x} in one and {y} in the "
                    "other. One of the folders was changed: `fedaudit verify` tells which"
                )
        elif _must_be_equal(one, other) and not _other_code(a, b) and not _settings(a, b):
            yield (
                f"seed {run.seed}: the setting, the code and the machine type are the same, and the messages are not. "
                "One of the folders was changed, or the method is not deterministic: `fedaudit verify --rerun` tells"
            )


def _results_apart(a: RunRecord, b: RunRecord) -> list[tuple[str, Any, Any]]:
    """Return the first figures that differ, of those that follow from the messages, the models and the data."""
    # Elsewhere a few records may lie on the other side of a boundary.
    close = 1e-9 if same_machine_type(a, b) else 0.01
    found = []
    for x, y in zip(a.rounds, b.rounds, strict=False):
        if x.utility is None or y.utility is None:
            continue  # they were evaluated in other rounds
        for name, one, other in (
            ("accuracy", x.utility.test_score(), y.utility.test_score()),
            ("validation accuracy", x.utility.validation_score(), y.utility.validation_score()),
        ):
            if one is not None and other is not None and abs(one - other) > close:
                found.append((f"{name} of round {x.round}", one, other))
    if len(a.rounds) != len(b.rounds):
        found.append(("the number of rounds", len(a.rounds), len(b.rounds)))
    for part in FROM_MESSAGES:
        one, other = (_without_chance(part, record) for record in (a, b))
        if one != other:
            found.append((part, *_first_apart(one, other)))
    attacks = {(r.attack, r.threat): r for r in b.attacks}
    for result in a.attacks:
        again = attacks.get((result.attack, result.threat))
        same = again is not None and (again.source, again.settings) == (result.source, result.settings)
        if same and isinstance(result, MembershipResult) and isinstance(again, MembershipResult):
            x_, y_ = result.pooled.auc.value, again.pooled.auc.value
            if abs(x_ - y_) > close and result.clients == again.clients:
                found.append((f"the AUC of {result.attack} by the {result.threat}", x_, y_))
    return found


def _without_chance(part: str, record: RunRecord) -> Any:
    rows = [row.model_dump() for row in getattr(record, part)]
    if part == "ledger":  # means over releases, and epsilons by accountants of other versions, are rounded otherwise
        return [
            [row["client"], row["n"], [{k: v for k, v in e.items() if k != "cosine"} for e in row["entries"]],
             None if row["epsilon"] is None else float(f"{row['epsilon']:.3g}")]
            for row in rows
        ]  # fmt: skip
    return rows


def _first_apart(one: Any, other: Any) -> tuple[Any, Any]:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((_first_apart(x, y) for x, y in zip(one, other, strict=True) if x != y), (one, other))
    return one, other


def _must_be_equal(a: RunRecord, b: RunRecord) -> bool:
    """Return whether two runs must have sent the same bits. With a privacy policy, each run draws its own noise."""
    resumed = any(note.startswith("resumed") for record in (a, b) for note in record.notes)
    alike = a.harness is not None and a.harness == b.harness and same_machine_type(a, b) and not resumed
    deterministic = a.setting.deterministic and b.setting.deterministic and not a.setting.privacy
    options = ("engine", "together", "threads", "onednn")
    return alike and deterministic and all(getattr(a.setting, key) == getattr(b.setting, key) for key in options)


def _other_code(a: Group, b: Group) -> list[str]:
    """Return what differs in the code that made two groups. Runs from before this was recorded tell nothing."""
    x, y = ([run.record.code for run in group.runs if run.record.code is not None] for group in (a, b))
    told = [text for before in x for after in y for text in differences(before, after)]
    return list(dict.fromkeys([*told, *(["the code of one side is not known"] if bool(x) != bool(y) else [])]))


def _not_compared(a: Group, b: Group) -> bool:
    """Tell whether code of the two groups was recorded by other schemes of digests, so that it tells nothing."""
    x, y = ([run.record.code["modules"] for run in group.runs if run.record.code is not None] for group in (a, b))
    return any(not comparable(m[key], n[key]) for m in x for n in y for key in m.keys() & n.keys())


def _environment(pairs: Sequence[tuple[SummaryRow, SummaryRow]]) -> dict[str, list[Any]]:
    a, b = pairs[0][0].first, pairs[0][1].first
    known = {
        name: [a.versions.get(name), b.versions.get(name)] for name in sorted(a.versions.keys() | b.versions.keys())
    }
    known["device"] = [a.device, b.device]
    return {name: both for name, both in known.items() if both[0] != both[1]}


# --- output ------------------------------------------------------------------------------------------------------


def as_text(result: Comparison) -> str:
    lines = [f"ALARM: {alarm}" for alarm in result.alarms]
    for label, keys in result.settings.items():
        changed = ", ".join(f"{key} {x!r} -> {y!r}" for key, (x, y) in keys.items())
        lines.append(f"{label}: the setting changed: {changed}")
    if result.environment:
        known = ", ".join(f"{name} {x} -> {y}" for name, (x, y) in result.environment.items())
        lines.append(f"made with: {known}")
    for label, changes in result.other_code.items():
        lines.append(f"{label}: made by other code: {'; '.join(changes)}")
    if result.not_compared:
        lines.append(f"code not compared, recorded by two schemes of digests: {', '.join(result.not_compared)}")
    for label in result.same_bits:
        lines.append(f"{label}: every message is the same to the bit")
    told = [change for change in result.changes if change.test.more_than_noise]
    lines += ["", f"More than noise: {len(told)} of {len(result.changes)} figures"]
    lines += [f"  {_line(change)}" for change in told]
    untold = [change for change in result.changes if change.untold]
    if untold:
        lines += ["", f"Cannot be told, with fewer than {SEEDS} seeds or no figure on a side: {len(untold)} figures"]
        lines += [f"  {_line(change)}" for change in untold]
    noise = [c for c in result.changes if not c.test.more_than_noise and not c.untold and c.test.difference != 0]
    lines += ["", f"Within noise: {len(noise)} figures"]
    lines += [f"  {_line(change)}" for change in noise]
    equal = sum(change.test.difference == 0 for change in result.changes)
    lines += ["", f"Equal: {equal} figures"]
    for names, where in ((result.only_before, "before"), (result.only_after, "after")):
        lines += [f"Only {where}: {name}" for name in names]
    lines += [f"Not read: {folder}: {error}" for folder, error in result.problems.items()]
    family = sum(1 for c in result.changes if math.isfinite(c.test.seeds) and c.test.p is not None)
    lines += [
        "",
        f"Estimated figures: t-tests over seeds (paired where both sides have the same seeds), at {LEVEL:g} after "
        f"Holm's correction for {family} comparisons, at least {SEEDS} seeds a side. Time and memory depend on the "
        "machine and do not count for the exit code.",
    ]
    return "\n".join(lines).strip("\n")


def _line(change: Change) -> str:
    test, column = change.test, change.column
    values = f"{text(column, change.before)} -> {text(column, change.after)}"
    spread = ""
    if test.low is not None and test.high is not None:
        scale = 100 if column.unit == "share" else 1
        unit = " points" if column.unit == "share" else ""
        spread = f", difference [{scale * test.low:+.3g}, {scale * test.high:+.3g}]{unit}"
    p = f", p = {test.p:.2g}" if test.p is not None and test.seeds < math.inf else ""
    word = f" {change.direction}" if test.more_than_noise else ""
    return f"{change.label}: {column.title} {values}{word}{spread}{p} ({test.how})"


def as_json(result: Comparison) -> str:
    document = {
        "compare_schema": 1,
        "alarms": result.alarms,
        "changed": result.changed,
        "untold": result.untold,
        "changes": [
            {
                "label": c.label, "column": c.column.key, "before": c.before, "after": c.after,
                "difference": c.test.difference, "low": c.test.low, "high": c.test.high, "p_holm": c.test.p,
                "test": c.test.how, "more_than_noise": c.test.more_than_noise, "cannot_be_told": c.untold,
                "counts": c.counts, "direction": c.direction,
            }
            for c in result.changes
        ],
        "settings": result.settings,
        "other_code": result.other_code,
        "not_compared": result.not_compared,
        "same_bits": result.same_bits,
        "only_before": result.only_before,
        "only_after": result.only_after,
        "environment": result.environment,
        "problems": result.problems,
    }  # fmt: skip
    return json.dumps(plain(document), indent=1, ensure_ascii=False)
