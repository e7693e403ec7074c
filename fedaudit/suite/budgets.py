"""Budgets for continuous integration: ceilings on what a run may send and use, floors on what it must reach.

[[budget]]
method = "my.module:Method"             # the runs it is about; leave out for all
compress = "int8"             # runs with this compression; "none": runs without any
direction = "up"              # up or down; leave out for both
field = "Local.w"             # or message = "Local"; leave out for everything
max = "12 MiB"
per = "client-round"          # or "round", or "run"
convention = "payload"        # or "wire"

[[budget]]
baseline = "main.json"        # a saved record.json; relative to the budget file
max_growth = "1 %"

[[budget]]
metric = "accuracy"           # or "flops", "peak_memory", or any other metric of fedaudit.metrics
min = 0.9

[[budget]]
metric = "epsilon"            # as guaranteed; or "auc", "tpr" (at 1 % FPR) of the best membership attack; or
max = 8.0                     # "refuted", the number of refuted claims (max = 0)

[[budget]]
metric = "time"               # needs a baseline: seconds differ between machines
baseline = "main.json"
max_growth = "50 %"
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedaudit.errors import SettingError, did_you_mean, nearest
from fedaudit.metrics.metric import Metric, limit_named
from fedaudit.runtime.folder import STALE
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.setting import Frozen, read_toml, validated
from fedaudit.suite.junit import Case, junit
from fedaudit.units import bytes_text, parse_bytes

Per = Literal["client-round", "round", "run"]


class Budget(Frozen):
    """One table [[budget]] of a budget file."""

    method: str | None = None
    dataset: str | None = None
    compress: str | None = None  # "none": runs without compression
    direction: Literal["up", "down"] | None = None
    message: str | None = None
    field: str | None = None
    convention: Literal["payload", "wire"] = "payload"
    per: Per = "client-round"
    metric: str = "bytes"  # or the name that one of fedaudit.metrics has in budgets
    max: str | float | None = None
    min: float | None = None
    baseline: str | None = None
    max_growth: str | None = None

    def measured(self) -> Metric | None:
        """Return the metric that is limited; None for bytes, which are counted by field."""
        return None if self.metric == "bytes" else limit_named(self.metric)

    def in_bytes(self) -> bool:
        return (of := self.measured()) is None or of.unit == "bytes"

    def limit(self) -> float | None:
        return parse_bytes(self.max) if isinstance(self.max, str) else self.max

    def growth(self) -> float:
        text = (self.max_growth or "").strip()
        try:
            return float(text.removesuffix("%")) / 100
        except ValueError:
            raise SettingError(f"max_growth = {self.max_growth!r}: write a share such as '1 %'.") from None

    def is_about(self, record: RunRecord) -> bool:
        setting = record.setting
        pairs = ((self.method, setting.method), (self.dataset, setting.dataset), (self.compress, setting.compress))
        return all(wanted in (None, has or "none") for wanted, has in pairs)

    def title(self) -> str:
        what = self.field or self.message or ("traffic" if self.metric == "bytes" else self.metric)
        return " ".join(part for part in (self.method, self.compress, self.direction, what) if part)


@dataclass(frozen=True)
class Outcome:
    """The result of checking one budget against one run."""

    budget: Budget
    run: str
    value: float
    limit: float
    kept: bool
    fields: list[tuple[str, float, float | None]] = field(default_factory=list)  # name, bytes, bytes before

    def show(self, value: float) -> str:
        of = self.budget.measured()
        if of is None or of.unit == "bytes":
            return self._bytes(value)
        return f"{value:.4g}" + " s" * (of.unit == "seconds")

    def _bytes(self, n: float) -> str:
        """Return a size in the units of the budget; memory always in powers of two."""
        of = self.budget.measured()
        memory = of is not None and of.machine
        return bytes_text(n, binary=memory or "ib" in str(self.budget.max).lower())

    def row(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "budget": self.budget.title(),
            "measured": self.show(self.value),
            "allowed": self.show(self.limit),
            "kept": "yes" if self.kept else f"no{self.off(', ', ' off')}",
        }

    def off(self, before: str, after: str) -> str:
        """Return how far off the value is, in percent; empty if there is no finite share."""
        finite = self.limit and math.isfinite(self.value)
        return f"{before}{abs(self.value / self.limit - 1):.1%}{after}" if finite else ""

    def message(self) -> str:
        """Return a sentence: which budget broke, by how much, and which field grew."""
        share = self.off(" (", " under)" if self.budget.min is not None else " over)")
        text = (
            f"{self.run}: {self.budget.title()} is {self.show(self.value)}, the budget {self.show(self.limit)}{share}"
        )
        if self.fields:
            grown = [(name, now - before) for name, now, before in self.fields if before is not None and now > before]
            if grown:
                name, more = max(grown, key=lambda item: item[1])
                text += f"; {name} grew most, by {self._bytes(more)}"
            else:
                name, now, _ = max(self.fields, key=lambda item: item[1])
                text += f"; the largest field is {name} with {self._bytes(now)}"
        return text + "."


def read_budgets(path: Path | str) -> list[Budget]:
    raw = read_toml(path)
    extra = raw.keys() - {"budget"}
    if extra or not isinstance(raw.get("budget"), list) or not raw["budget"]:
        has = f"it has {', '.join(map(repr, sorted(extra)))}" if extra else "it has no table [[budget]]"
        raise SettingError(
            f"{path} is not a file of budgets: {has}.{nearest(min(extra), ['budget']) if extra else ''} Write one or "
            "more tables [[budget]], and nothing else."
        )
    return parse_budgets(raw["budget"], path)


def parse_budgets(rows: list[Any], path: Path | str) -> list[Budget]:
    """Return budgets from tables that were read from `path`."""
    if wrong := [row for row in rows if not isinstance(row, dict)]:
        raise SettingError(f"{path}: {wrong[0]!r} is not a budget. Write tables, such as {{ max = '1 MiB' }}.")
    budgets = [validated(Budget, values, f"key of a budget in {path}") for values in rows]
    for budget in budgets:
        _check(budget, path)
    return budgets


def _check(budget: Budget, path: Path | str) -> None:
    given = [name for name in ("max", "min", "baseline") if getattr(budget, name) is not None]
    if len(given) != 1:
        raise SettingError(
            f"{path}: the budget {budget.title()!r} needs one of max, min and baseline, not {given or 'none'}."
        )
    if (budget.baseline is None) != (budget.max_growth is None):
        raise SettingError(f"{path}: the budget {budget.title()!r}: give baseline and max_growth together.")
    of = _metric(budget, path)
    if (of is not None and of.better == "high") != (budget.min is not None):
        takes = "a ceiling (max)" if of is None or of.better == "low" else "a floor (min)"
        raise SettingError(f"{path}: the budget {budget.title()!r}: {budget.metric} takes {takes}.")
    if of is not None and (about := budget.direction or budget.message or budget.field):
        raise SettingError(f"{path}: the budget {budget.title()!r}: {budget.metric} has no {about!r}; leave it out.")
    if not budget.in_bytes() and isinstance(budget.max, str):
        raise SettingError(f"{path}: the budget {budget.title()!r}: {budget.metric} takes a number, such as max = 2.0.")
    if of is not None and of.unit == "seconds" and budget.baseline is None:
        raise SettingError(
            f"{path}: the budget {budget.title()!r}: seconds depend on the machine. Give baseline and max_growth, "
            "with a run of the same machine."
        )
    numbers = {
        "max": budget.limit(),
        "min": budget.min,
        "max_growth": None if budget.baseline is None else budget.growth(),
    }
    for name, number in numbers.items():
        if number is not None and not 0 <= number < math.inf:  # refuses nan, too
            raise SettingError(
                f"{path}: the budget {budget.title()!r}: {name} = {getattr(budget, name)!r} is not a limit. Write a "
                "finite number, 0 or more."
            )


def _metric(budget: Budget, path: Path | str) -> Metric | None:
    """Return the metric of a budget; None for bytes. Raise SettingError for one that nobody knows or can limit."""
    try:
        of = budget.measured()
    except SettingError as e:
        raise SettingError(f"{path}: {e}") from None
    if of is not None and of.better is None:
        raise SettingError(
            f"{path}: the budget {budget.title()!r}: neither more nor less of {budget.metric} is better, so it cannot "
            "be limited. Choose another metric."
        )
    return of


def check_runs(runs: list[Path], path: Path | str) -> list[Outcome]:
    """Check every budget of a file against every run that it is about. Baselines lie beside the file."""
    return check_budgets(read_budgets(path), runs, path)


def runs_below(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders. A folder of an audit is replaced by all runs below it."""
    found: list[Path] = []
    for folder in folders:
        below = sorted(path.parent for path in folder.glob("**/record.json")) if folder.is_dir() else []
        below = [path for path in below if STALE not in path.relative_to(folder).parts]
        found += [folder] if folder in below or not below else below
    return list(dict.fromkeys(found))


def contradicted_in(runs: Sequence[Path]) -> list[str]:
    """Return a sentence for each contradiction in run folders, of those that are found without data and models.

    A record by itself, without the folder of its run, has nothing to be held against.
    """
    from fedaudit.verify.check import cheap_check  # heavy, and only `fedaudit check` needs it

    return [
        f"{folder}: {finding.text()}."
        for folder in runs_below(runs)
        if (folder / "record.json").is_file()
        for finding in cheap_check(folder)
    ]


def check_budgets(budgets: list[Budget], runs: list[Path], path: Path | str) -> list[Outcome]:
    """Check every budget against every run that it is about. A budget that is about no run is an error."""
    records = [(str(run), read_record(run)) for run in runs_below(runs)]
    records = [(name, record) for name, record in records if record.status != "refused"]  # nothing was run there
    for name, record in records:
        if record.status == "running":
            raise SettingError(
                f"{name} is not finished ({len(record.rounds)} of {record.setting.rounds} rounds), so budgets cannot "
                "be checked. Finish it with fedaudit run --resume."
            )
    outcomes = []
    for budget in budgets:
        found = [
            check_budget(budget, record, name, Path(path).parent, ceilings(budgets, budget, record))
            for name, record in records
            if budget.is_about(record)
        ]
        if not found:
            raise SettingError(
                f"{path}: the budget {budget.title()!r} matches none of the {len(records)} runs. "
                "Correct its method, dataset or compress."
            )
        outcomes += found
    return outcomes


def ceilings(budgets: list[Budget], budget: Budget, record: RunRecord) -> dict[str, float]:
    """Return what other budgets allow single fields. A field above its ceiling, or without one, is what grew."""
    found = {}
    for other in budgets:
        alike = (other.per, other.convention, other.metric) == (budget.per, budget.convention, "bytes")
        about = (other.method, other.dataset) in itertools.product(
            (None, record.setting.method), (None, record.setting.dataset)
        )
        if alike and about and other.field is not None and (limit := other.limit()) is not None:
            for direction in ("up", "down") if other.direction is None else (other.direction,):
                found[f"{direction} {other.field}"] = limit
    return found


def check_budget(
    budget: Budget, record: RunRecord, name: str, folder: Path = Path(), allowed: Mapping[str, float] | None = None
) -> Outcome:
    """Check one budget against one record. `allowed` has ceilings of single fields, which show the one that grew."""
    value, fields = measure(budget, record)
    if budget.baseline is None:
        limit = budget.min if budget.min is not None else budget.limit()
        assert limit is not None  # _check made sure
        kept = value >= limit if budget.min is not None else value <= limit
        parts = [(f, size, allowed.get(f, 0.0) if allowed else None) for f, size in fields.items()]
        return Outcome(budget, name, value, limit, kept, parts)
    saved = folder / budget.baseline
    if not saved.exists():
        raise SettingError(f"The baseline {saved} is missing. Copy a run's record.json there.")
    baseline = read_record(saved)
    if baseline.setting.method != record.setting.method:
        raise SettingError(
            f"The baseline {saved} is of {baseline.setting.method}, but {name} is of {record.setting.method}. "
            "Name the method in the budget: method = ..."
        )
    before, fields_before = measure(budget, baseline)
    limit = before * (1 + budget.growth())
    compared: list[tuple[str, float, float | None]] = [(f, now, fields_before.get(f, 0.0)) for f, now in fields.items()]
    return Outcome(budget, name, value, limit, value <= limit, compared)


def measure(budget: Budget, record: RunRecord) -> tuple[float, dict[str, float]]:
    """Return the figure that a budget is about, and for bytes also its parts by field."""
    if (of := budget.measured()) is not None:
        return of.limited(record), {}
    divisor = {
        "client-round": sum(len(row.participants) for row in record.rounds),
        "round": len(record.rounds),
        "run": 1,
    }[budget.per] or 1
    fields = {
        f"{row.direction} {row.field}": getattr(row, budget.convention) / divisor
        for row in record.traffic
        if budget.direction in (None, row.direction)
        and budget.field in (None, row.field)
        and budget.message in (None, row.field.partition(".")[0])
    }
    if not fields and (budget.field or budget.message):
        known = sorted({row.field for row in record.traffic})
        hint = did_you_mean(budget.field or budget.message or "", known)
        raise SettingError(f"The budget {budget.title()!r} matches nothing that {record.setting.method} sends.{hint}")
    return sum(fields.values()), fields


def github_error(title: str, message: str) -> str:
    """Return a workflow command that GitHub shows beside the change."""
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::error title={title}::{escaped}"


def _github(outcomes: list[Outcome]) -> str:
    return "\n".join(github_error("fedaudit budget", o.message()) for o in outcomes if not o.kept)


def cases(outcomes: Sequence[Outcome]) -> list[Case]:
    """Return the outcomes as verdicts for a CI."""
    return [
        Case("budget", f"{o.run}: {o.budget.title()}", "passed" if o.kept else "failure", "" if o.kept else o.message())
        for o in outcomes
    ]


def _junit(outcomes: list[Outcome]) -> str:
    return junit(cases(outcomes))


FORMATS: dict[str, Callable[[list[Outcome]], str]] = {"table": lambda _: "", "github": _github, "junit": _junit}
