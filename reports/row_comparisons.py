"""Comparisons of rows: which differences are more than noise, which row is best, and which no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from fedaudit.metrics.metric import Metric
from fedaudit.reports.summary_rows import SummaryRow
from fedaudit.reports.tests_over_seeds import SEEDS, Test, compared, holm

Mark = Literal["best", "tied", "worse", ""]


def differences(rows: Sequence[SummaryRow], column: Metric) -> list[list[Test | None]]:
    """Return a test of each row against each row; None if they are not comparable (other data, no figure). p-values are
    Holm's, adjusted for all comparisons with the same reference (the first index)."""
    table: list[list[Test | None]] = []
    for reference in rows:
        tests = [_difference(reference, row, column) for row in rows]
        adjusted = holm([test.p if test else None for test in tests])
        table.append([
            test and replace(test, p=p)
            for test, p in zip(tests, adjusted, strict=True)
        ])  # fmt: skip
    return table


def _difference(a: SummaryRow, b: SummaryRow, column: Metric) -> Test | None:
    one, two = a.cells[column.key], b.cells[column.key]
    if a is b or one.value is None or two.value is None or a.group.arena != b.group.arena:
        return None
    if not column.sampled or (not one.each and not two.each):
        equal = one.value == two.value
        infinite = math.isinf(one.value) or math.isinf(two.value)
        gap = 0.0 if equal else (math.copysign(math.inf, two.value - one.value) if infinite else two.value - one.value)
        return Test(gap, 1.0 if equal else 0.0, "counted or computed, not estimated")
    return compared(one.each, two.each)


def is_noise(test: Test | None) -> bool:
    return test is None or not test.more_than_noise


def tested(test: Test | None) -> bool:
    """Say if a test could have told the two apart: there is a p-value, and both sides have enough seeds."""
    return test is not None and test.p is not None and test.seeds >= SEEDS


def marks(rows: Sequence[SummaryRow], column: Metric) -> list[Mark]:
    """Return each row's mark in a column, by tests over seeds alone: counted and computed figures have none.

    The best is told from all others that have a figure. If it is not, it and those that it is not told from are tied,
    and nobody is the best. A row that could not be tested has no mark.
    """
    found: list[Mark] = [""] * len(rows)
    if not column.sampled:
        return found
    tests = differences(rows, column)
    for arena, top in best_row(rows, column).items():
        others = [i for i, t in enumerate(tests[top]) if t is not None and rows[i].group.arena == arena]
        for i in others:
            if tested(tests[top][i]):
                found[i] = "tied" if is_noise(tests[top][i]) else "worse"
        if others and all(found[i] == "worse" for i in others):
            found[top] = "best"
        elif any(found[i] == "tied" for i in others):
            found[top] = "tied"
    return found


def best_row(rows: Sequence[SummaryRow], column: Metric) -> dict[tuple[Any, ...], int]:
    """Return the best row of a column for each arena in which two or more have a figure.

    A row near chance is the best only if all are. An epsilon of 0, which says nothing about published models, or with
    delta >= 1/n, is never the best, nor is a row that cannot be relied on."""
    best: dict[tuple[Any, ...], int] = {}
    if column.better is None:
        return best
    sign = 1 if column.better == "high" else -1

    def rank(i: int) -> tuple[bool, float]:
        return not rows[i].untrained, sign * (rows[i].cells[column.key].value or 0.0)

    def counts(row: SummaryRow) -> bool:
        cell = row.cells[column.key]
        return cell.value is not None and not row.doubts and not (column.flag_disqualifies and cell.flag)

    for i, row in enumerate(rows):
        known = best.get(row.group.arena)
        if counts(row) and (known is None or rank(i) > rank(known)):
            best[row.group.arena] = i
    figures = [row.group.arena for row in rows if row.cells[column.key].value is not None]
    finite = {arena: i for arena, i in best.items() if math.isfinite(rows[i].cells[column.key].value or 0.0)}
    return {arena: i for arena, i in finite.items() if figures.count(arena) > 1}  # if all are infinite, none is best


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points (cost, gain) that no other beats in both, the cheapest first."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front
