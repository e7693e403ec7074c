"""The papers' tables: the published figures, the runs that reproduce them, and the verdicts.

`suites/published/tables.toml` has the figures. Beside it lie two suites per table: one as published (for a GPU) and a
small one (for a CPU). A verdict is computed from runs, never written by hand.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedaudit.errors import SettingError, did_you_mean
from fedaudit.runtime.run_record import RunRecord
from fedaudit.runtime.scores import Utility
from fedaudit.setting import Frozen, Setting, read_toml, validated
from fedaudit.stats import student_t
from fedaudit.suite.suite_file import Suite, read_suite

FOLDER = Path(__file__).parents[1] / "suites" / "published"
Scale = Literal["cpu", "gpu"]
SCALES: tuple[Scale, ...] = ("cpu", "gpu")


class Column(Frozen):
    """One column of a table: the cells' common setting, and the published figure of each method."""

    name: str
    gpu: dict[str, Any]
    cpu: dict[str, Any] | None = None
    rows: dict[str, dict[str, Any]] = Field(default_factory=dict)
    models: list[str] = Field(default_factory=list)
    global_own: list[str] = Field(default_factory=list)
    figures: dict[str, tuple[float, float]]


class Table(Frozen):
    """One table of one paper."""

    paper: str
    own: str
    table: str
    title: str
    score: Literal["test", "own"]
    round: Literal["best", "last"]
    rounds: int = Field(ge=0)
    seeds: int = Field(ge=1)
    gpu: str
    cpu: str
    small: str
    differs: str
    reading: str
    compared: dict[str, str] = Field(default_factory=dict)
    column: list[Column]

    @property
    def name(self) -> str:
        return f"{self.paper} {self.table}"

    def rival(self, method: str) -> str:
        """Return the row that the paper compares this one with."""
        return self.compared.get(method, self.own)

    def suite(self, scale: Scale) -> Suite:
        return read_suite(FOLDER / (self.gpu if scale == "gpu" else self.cpu))

    def columns(self, scale: Scale, names: Sequence[str] = ()) -> list[Column]:
        """Return the columns at a scale. With `names`, only those whose name contains one of the texts."""
        there = [column for column in self.column if scale == "gpu" or column.cpu is not None]
        for name in names:
            if not any(name.lower() in column.name.lower() for column in there):
                known = [column.name for column in there]
                raise SettingError(
                    f"{self.name} has no column {name!r} at --scale {scale}. Choose from: {'; '.join(known)}."
                )
        return [c for c in there if not names or any(name.lower() in c.name.lower() for name in names)]


@dataclass(frozen=True)
class Wanted:
    """A cell of the table, with the settings of its runs, one per seed."""

    column: Column
    method: str
    settings: tuple[Setting, ...]

    @property
    def published(self) -> tuple[float, float]:
        return self.column.figures[self.method]


def tables() -> list[Table]:
    return [validated(Table, values, "key of the table") for values in read_toml(FOLDER / "tables.toml")["table"]]


def find_table(paper: str, table: str) -> Table:
    known = {found.name: found for found in tables()}
    name = f"{paper.lower()} {table.lower().removeprefix('table').strip()}"
    if name not in known:
        raise SettingError(f"There is no table {name!r} to reproduce.{did_you_mean(name, known)}")
    return known[name]


def wanted(
    table: Table, scale: Scale, columns: Sequence[str] = (), methods: Sequence[str] = (), seeds: int | None = None
) -> list[Wanted]:
    """Return the cells of a table with their settings: the suite's base and rows, and the column's keys."""
    suite = table.suite(scale)
    chosen = table.columns(scale, columns)
    given = suite.grid.get("seed", [suite.base.get("seed", 0)])
    numbers = given if seeds is None else list(range(seeds))
    base = {**suite.base, **{key: values[0] for key, values in suite.grid.items()}}
    cells = []
    for column in chosen:
        over = column.gpu if scale == "gpu" else column.cpu or {}
        rows: dict[str, dict[str, Any]] = {}
        for row in suite.methods:
            if not column.models or row.get("model") in column.models:
                rows.setdefault(row["method"], row)  # later rows of the same method are variants of it
        for method in methods:
            if method not in column.figures:
                raise SettingError(
                    f"{table.name}, column {column.name!r}, has no row {method!r}."
                    f"{did_you_mean(method, column.figures)}"
                )
        for method in column.figures:
            if method not in rows or (methods and method not in methods):
                continue
            own = column.rows.get(method, {}) if scale == "gpu" else {}
            merged = {**base, **over, **rows[method], **own}
            settings = tuple(Setting.make(**{**merged, "seed": seed}) for seed in numbers)
            cells.append(Wanted(column, method, settings))
    return cells


# --- the figures of a run ---------------------------------------------------------------------------------------


def figure(table: Table, cell: Wanted, record: RunRecord) -> float | None:
    """Return the run's figure as the table counts it, in percent; None if no round was evaluated."""
    return scored((r.utility for r in record.rounds), table.score, table.round, cell.method in cell.column.global_own)


def scored(rounds: Iterable[Utility | None], score: str, which: str, of_global: bool = False) -> float | None:
    """Return the accuracy of the best or of the last evaluated round, in percent."""
    values = [value for utility in rounds if utility is not None and (value := _value(utility, score, of_global))]
    if not values:
        return None
    return 100 * (max(values) if which == "best" else values[-1])


def _value(utility: Utility, score: str, of_global: bool) -> float | None:
    if score == "test":
        return utility.test_score()
    holder = utility.global_ if of_global else utility.clients
    return None if holder is None or holder.local_test is None else holder.local_test.mean


@dataclass(frozen=True)
class Ours:
    """The figures that the runs of a cell reached, one per seed."""

    values: tuple[float, ...] = ()
    rounds: int = 0  # the least number of rounds that a run has done
    why_not: str = ""  # the reason, if there are no values
    rise: float | None = None  # the most that a seed's figure rose in the second half of its rounds; None: not known

    def text(self) -> str:
        if not self.values:
            return "-"
        if len(self.values) == 1:
            return f"{self.values[0]:.2f} (1 seed)"
        return f"{statistics.mean(self.values):.2f} ± {statistics.stdev(self.values):.2f} ({len(self.values)} seeds)"


def figure_text(mean: float, spread: float) -> str:
    return f"{mean:.2f}" if spread < 0 else f"{mean:.2f} ± {spread:.2f}"


def verdict(
    published: tuple[float, float],
    ours: Ours,
    rounds: int = 0,
    seeds: int = 1,
    differs: str = "",
    why: str = "",
) -> str:
    """Return the verdict on our figure beside the published one, which is one of these:

    - "reproduced": within the published mean ± spread, with the paper's rounds and seeds, in its setting.
    - "within the spread, in another setting": as above, but something in the setting differs.
    - "undecided": the run was cut short and is still below. If the best round counts, more rounds can only raise it.
      Not so if few rounds are missing, no more than half of those done, and the gap to the published spread is larger
      than what the second half of the rounds brought.
    - "outside the spread, in another setting": off by the amount named, and something in the setting differs.
    - "not reproduced": off in the paper's own setting.
    """
    if not ours.values:
        return f"not run: {ours.why_not}"
    mean, spread = published
    off = statistics.mean(ours.values) - mean
    short = ours.rounds < rounds
    if spread < 0:
        where = ", in another setting" if differs else ""
        return f"{abs(off):.1f} {'above' if off > 0 else 'below'} a figure without a spread{where}"
    if abs(off) <= spread:
        same = not short and len(ours.values) >= seeds and not differs
        return "reproduced" if same else "within the spread, in another setting"
    flat = ours.rise is not None and 2 * (rounds - ours.rounds) <= ours.rounds and -off - spread > ours.rise
    if off < 0 and short and not flat:
        return f"undecided: {-off:.1f} below after {ours.rounds} of {rounds} rounds"
    said = "outside the spread, in another setting" if differs else "not reproduced"
    after = f" after {ours.rounds} of {rounds} rounds" if off < 0 and short else ""
    return f"{said}: {abs(off):.1f} {'above' if off > 0 else 'below'}{after}" + (f"; {why}" if why else "")


def order(first: Sequence[float], second: Sequence[float]) -> str:
    """Say if the first lies above the second, by Student's interval of the differences seed by seed."""
    pairs = [a - b for a, b in zip(first, second, strict=False)]
    if len(pairs) < 2:
        return "cannot be told from one seed" if pairs else "not run"
    found = student_t(pairs)
    if all(math.isclose(pair, pairs[0], abs_tol=1e-12) for pair in pairs):
        found = found.model_copy(update={"low": pairs[0], "high": pairs[0]})
    assert found.low is not None  # two values or more
    assert found.high is not None
    interval = f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"
    if found.low > 0:
        return f"above, {interval}"
    return f"below, {interval}" if found.high < 0 else f"cannot be told, {interval}"


def order_verdict(published_first: float, published_second: float, ours: str, differs: str = "") -> str:
    """Say if our order is the published one. `differs` tells what differs from the paper's setting."""
    said = "above" if published_first > published_second else "below"
    if ours.startswith(("cannot", "not run")):
        return ours
    where = " in another setting" if differs else ""
    return f"order {'reproduced' if ours.startswith(said) else 'turned round'}{where}: {ours}"
