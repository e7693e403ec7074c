"""Running a published table within a time budget, and comparing our figures with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedaudit.data import available
from fedaudit.errors import FedauditError, RunError
from fedaudit.progress import TimedWatch
from fedaudit.runtime.run_record import RunRecord
from fedaudit.suite.cell import Cell, look
from fedaudit.suite.forecast import Forecast, duration, forecast
from fedaudit.suite.paper_settings import differs_text
from fedaudit.suite.published import (
    Ours,
    Scale,
    Table,
    Wanted,
    figure,
    figure_text,
    order,
    order_verdict,
    verdict,
    wanted,
)
from fedaudit.suite.scheduler import audit, make_cells
from fedaudit.suite.suite_file import Suite


@dataclass
class Planned:
    """One run of a cell: a seed, its forecast, and if the budget has room for it."""

    cell: Wanted
    run: Cell
    forecast: Forecast
    fits: bool = True
    why_not: str = ""


def plan(
    table: Table,
    scale: Scale,
    out: Path,
    budget: float | None = None,
    jobs: int = 1,
    columns: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: int | None = None,
    measure: bool = False,
    seeds_together: bool = False,
) -> list[Planned]:
    """Return all runs of a table, first seeds first, and mark those that fit into `budget` minutes.

    With a budget, or with `measure`, one round is run of each kind of which nothing similar was measured.
    """
    cells = wanted(table, scale, columns, methods, seeds)
    if not cells:
        raise RunError(f"{table.name} has no cell to run with these choices. Drop --column or --method.")
    runs = []
    for seed in range(max(len(cell.settings) for cell in cells)):
        for cell in cells:
            if seed < len(cell.settings):
                setting = cell.settings[seed]
                made = make_cells(_suite([setting.model_dump()]), out, seeds_together=seeds_together)[-1]
                runs.append((cell, made, available(setting.dataset, setting.data_dir)))
    there = [run for _, run, has_data in runs if has_data]
    found_for = forecast(there, measure or budget is not None)
    forecasts = {id(run): found for run, found in zip(there, found_for, strict=True)}
    planned, spent = [], 0.0
    for cell, run, has_data in runs:
        if not has_data:
            why = f"the data set {run.setting.dataset} is not here (`fedaudit list datasets` says how to get it)"
            planned.append(Planned(cell, run, Forecast(run, "no data", None, None), False, why))
            continue
        found = forecasts[id(run)]
        seconds = (found.seconds or 0.0) / max(1, jobs)
        if budget is not None and found.seconds is None and found.state not in ("done", "does not apply"):
            planned.append(Planned(cell, run, found, False, f"{found.state}: {found.note}"))
        elif budget is not None and spent + seconds > 60 * budget:
            why = f"about {duration(found.seconds or 0)}, over the budget of {budget:g} min"
            planned.append(Planned(cell, run, found, False, why))
        else:
            spent += seconds
            planned.append(Planned(cell, run, found))
    return planned


def _suite(settings: list[dict[str, object]]) -> Suite:
    return Suite(methods=settings, attacks=[], threats=[], trials=0)


def carry_out_plan(
    planned: list[Planned],
    out: Path,
    watch: TimedWatch | None = None,
    jobs: int = 1,
    seeds_together: bool = False,
) -> None:
    """Carry out the runs that fit, those of a cell side by side if `seeds_together` says so. A failed run says so in
    its row."""
    settings = [one.run.setting.model_dump() for one in planned if one.fits]
    if not settings:
        return
    done = {cell.folder: cell for cell in audit(_suite(settings), out, watch, jobs, seeds_together=seeds_together)}
    for one in planned:
        if one.fits and one.run.folder in done:
            one.run = done[one.run.folder]
            one.why_not = one.run.error or ""


@dataclass(frozen=True)
class Foreseen:
    """The forecast of a cell, for all its seeds one after another. None means not known; `note` says why."""

    column: str
    method: str
    runs: int
    seconds: float | None
    bytes: int | None
    note: str


def foreseen(planned: list[Planned]) -> list[Foreseen]:
    """Return one row per cell, for a table of forecasts."""
    cells: dict[tuple[str, str], list[Planned]] = {}
    for one in planned:
        cells.setdefault((one.cell.column.name, one.cell.method), []).append(one)
    rows = []
    for (column, method), of in cells.items():
        seconds, sizes = [one.forecast.seconds for one in of], [one.forecast.bytes for one in of]
        note = "; ".join(dict.fromkeys(filter(None, (one.why_not or one.forecast.note for one in of))))
        rows.append(
            Foreseen(
                column,
                method,
                len(of),
                None if None in seconds else sum(s or 0.0 for s in seconds),
                None if None in sizes else sum(size or 0 for size in sizes),
                note,
            )
        )
    return rows


@dataclass(frozen=True)
class TableRow:
    """One cell of the result: the published figure, ours, and the verdicts."""

    column: str
    method: str
    published: str
    ours: str
    verdict: str
    order: str


def results(table: Table, scale: Scale, planned: list[Planned]) -> list[TableRow]:
    """Return one row per cell. At the small scale only orders are judged, because its data set is another one."""
    cells: dict[tuple[str, str], Ours] = {}
    kinds: dict[tuple[str, str], Wanted] = {}
    by_seed: dict[tuple[str, str], dict[int, float]] = {}
    for one in planned:
        key = (one.cell.column.name, one.cell.method)
        kinds[key], old = one.cell, cells.get(key, Ours())
        seeds = by_seed.setdefault(key, {})
        record = _record(one)
        value = None if record is None else figure(table, one.cell, record)
        if record is None or value is None:
            cells[key] = Ours(old.values, old.rounds, old.why_not or one.why_not or "no round was evaluated")
        else:
            rounds = min(old.rounds, len(record.rounds)) if old.values else len(record.rounds)
            cells[key] = Ours((*old.values, value), rounds, old.why_not)
            seeds[one.run.setting.seed] = value
    rows = []
    for (column, method), ours in cells.items():
        cell = kinds[column, method]
        rival, compared = table.rival(method), ""
        if method != rival and rival in cell.column.figures:
            first, second = by_seed.get((column, rival), {}), by_seed[column, method]
            common = sorted(first.keys() & second.keys())  # a seed that failed on one side does not make a pair
            found = order([first[seed] for seed in common], [second[seed] for seed in common])
            figures = cell.column.figures[rival][0], cell.published[0]
            off = differs_text(table, [cell, kinds[column, rival]]) if (column, rival) in kinds else table.differs
            compared = f"{rival} {order_verdict(*figures, found, off if scale == 'gpu' else table.small)}"
        said = (
            verdict(cell.published, ours, table.rounds, table.seeds, differs_text(table, [cell]))
            if scale == "gpu" or not ours.values
            else "another data set: only the order is judged"
        )
        rows.append(TableRow(column, method, figure_text(*cell.published), ours.text(), said, compared))
    return rows


def _record(one: Planned) -> RunRecord | None:
    try:
        return look(one.run)
    except FedauditError as e:  # a damaged record: its row says so
        one.why_not = str(e)
        return None
