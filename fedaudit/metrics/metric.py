"""The type of a metric: its value in one run, its words, its direction, and how the values of seeds come together.

A metric is added by a call of `register` in a file of this folder, which is found by being there. Nothing else has to
be edited: it is a column of the report (HTML, Markdown, JSON, CSV, LaTeX) and of `compare`, a column of the table of
runs (CSV, pandas), a figure in trackers, a line of `fedaudit show`, and a name that a budget can limit.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from fedaudit.errors import SettingError, unknown
from fedaudit.runtime.run_record import RunRecord
from fedaudit.units import bytes_text

Part = Literal["Utility", "Guarantee", "Attacks", "Cost"]
Unit = Literal["share", "auc", "epsilon", "bytes", "seconds", "points", "count"]
Records = Sequence[RunRecord]  # the runs of one setting, which differ in their seed alone


@dataclass(frozen=True)
class AttackMeasure:
    """A measure of the best attack of a sort. `fedaudit.metrics.attacks` says which attack is the best."""

    claims: str  # what attacks of this sort claim
    measure: str  # one of `measures_of`, or "tpr"


@dataclass(frozen=True)
class Metric:
    """One figure of a run, and all that its readers need to know about it."""

    key: str
    title: str
    part: Part
    unit: Unit
    better: Literal["high", "low"] | None  # which direction is better for whoever runs the federation
    sampled: bool  # estimated over seeds; otherwise counted or computed, so that every difference is real
    help: str
    value: Callable[[RunRecord], float | None]  # in one run; infinite or None (no figure) in every output if it is here
    bounds: tuple[float, float] = (0.0, math.inf)
    machine: bool = False  # depends on the machine as much as on the method
    # How the values of several seeds become one figure: their mean with its interval; the largest, with the smallest
    # beside it; the largest as a lower bound; or the first, because the setting fixes it.
    seeds: Literal["mean", "largest", "bound", "set"] = "mean"
    attack: AttackMeasure | None = None  # of the best attack over all seeds, for a figure of an attack
    # The interval of one run and its name, which is shown if there is one seed.
    interval: Callable[[RunRecord], tuple[float, float, str] | None] | None = None
    missing: Callable[[Records], str] | None = None  # why these runs have no figure; empty if they have one
    left_out: Callable[[Records], str] | None = None  # why a report on all these runs has no such figure; or empty
    detail: Callable[[Records], str] | None = None  # what the figure is about: which kinds, which device
    flag: Callable[[Records], str] | None = None  # a remark that changes how to read the figure; or empty
    flag_disqualifies: bool = False  # a flagged figure is never the best of its column
    how: Callable[[Records], str] | None = None  # for a bound: how it was found
    refusal: Callable[[RunRecord], str] | None = None  # why a budget cannot be held against this run; or empty
    column: bool = True  # a column of the report
    folded: bool = False  # hidden on the page at first, so that the other columns fit a screen
    line: bool = True  # a line of `fedaudit show`; False: the summary has other words for it
    table: str = ""  # its name in the table of runs and in trackers, if not its key
    budget: str = ""  # its name in a budget, if not its key

    @property
    def in_table(self) -> str:
        return self.table or self.key

    @property
    def in_budget(self) -> str:
        return self.budget or self.key

    def text(self, value: float | None) -> str:
        """Return a value in the metric's unit, as text."""
        if value is None:
            return "–"
        if math.isnan(value):
            return "not a number"
        if math.isinf(value):
            return "∞"
        if self.unit == "share":
            return f"{100 * value:.1f} %"
        if self.unit == "auc":
            return f"{value:.3f}"
        if self.unit == "bytes":
            return bytes_text(value)
        if self.unit == "seconds":
            return f"{value:.1f} s" if value < 1000 else f"{value:,.0f} s"
        return f"{value:.3g}"

    def why_missing(self, records: Records) -> str:
        """Return why these runs have no figure; empty if they have one."""
        if self.missing is not None:
            return self.missing(records)
        return "" if any(self.value(record) is not None for record in records) else "not measured"

    def limited(self, record: RunRecord) -> float:
        """Return the value that a budget is held against. Raise SettingError, with the remedy, if there is none."""
        value = self.value(record)
        why = self.refusal(record) if self.refusal is not None else ""
        if why or value is None:
            name = f"The run of {record.setting.method} has no {self.in_budget}"
            raise SettingError(why or f"{name}: {self.why_missing([record])}. Leave the budget out for such runs.")
        return float(value)


_known: dict[str, Metric] = {}


def register(metric: Metric) -> Metric:
    """Add a metric. Its names in tables and budgets must be free."""
    for other in _known.values():
        shared = {metric.key, metric.in_table, metric.in_budget} & {other.key, other.in_table, other.in_budget}
        if shared:
            raise SettingError(f"The metric {metric.key!r}: the name {min(shared)!r} is taken. Choose another one.")
    _known[metric.key] = metric
    return metric


def _read_files() -> None:
    for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def metrics() -> Mapping[str, Metric]:
    """Return all metrics by key. The mapping is live: it also has what is registered later."""
    _read_files()
    return MappingProxyType(_known)


def report_columns() -> list[Metric]:
    """Return the metrics that are columns of the report, part by part."""
    order = get_args(Part)
    return sorted((m for m in metrics().values() if m.column), key=lambda m: order.index(m.part))


def metric_named(key: str) -> Metric:
    """Return a metric by its key."""
    if key not in metrics():
        raise SettingError(unknown("metric", key, list(metrics())))
    return metrics()[key]


def limit_named(name: str) -> Metric:
    """Return a metric by its name in budgets."""
    known = {metric.in_budget: metric for metric in metrics().values()}
    if name not in known:
        raise SettingError(unknown("metric", name, ["bytes", *known]))
    return known[name]
