"""The command `fedaudit reproduce`, which runs a published table within a time budget and compares the results."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli.options import SeedsTogether
from fedaudit.cli.output import print_forecast, print_table, progress_bar
from fedaudit.errors import SettingError, unknown

if TYPE_CHECKING:
    from fedaudit.suite.published import Scale


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="A paper. Leave it out to list all papers.", show_default=False)
    ] = None,
    table: Annotated[str | None, typer.Argument(help="Its table's number.", show_default=False)] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="cpu: a small version, in minutes. gpu: as published. Default: what this machine has."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e6, help="Minutes. Runs that do not fit are left out.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the runs. Default: reproduced/PAPER-TABLE-SCALE.")
    ] = None,
    column: Annotated[list[str], typer.Option(help="Only columns whose name contains this; repeatable.")] = [],  # noqa: B006
    method: Annotated[list[str], typer.Option(help="Only these rows; repeatable.")] = [],  # noqa: B006
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Number of seeds per cell. Default: the suite's.", show_default=False),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Number of runs at a time.")] = 1,
    seeds_together: SeedsTogether = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and how long it takes.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --dry-run: time a round of each kind.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Run a table of one of the papers, and print published and measured figures side by side, with a verdict.

    Finished runs are not repeated: the same command with more minutes goes on.
    """
    from fedaudit.suite.published import find_table, tables

    if paper is None or table is None:
        there = tables()
        if paper is not None and not (there := [t for t in there if t.paper == paper]):
            raise SettingError(unknown("paper", paper, sorted({t.paper for t in tables()})))
        print_table(
            [{"paper": t.paper, "table": t.table, "what": t.title, "columns": len(t.column)} for t in there],
            "tables to reproduce: fedaudit reproduce PAPER TABLE",
        )
        return
    from fedaudit.suite.paper_settings import by_column
    from fedaudit.suite.reproduce import carry_out_plan, foreseen, plan, results

    found, size = find_table(paper, table), _scale(scale)
    folder = out or Path("reproduced") / f"{found.paper}-{found.table}-{size}"
    planned = plan(found, size, folder, budget, jobs, column, method, seeds, measure and dry_run, seeds_together)
    fits = [one for one in planned if one.fits]
    left_out = [one for one in planned if not one.fits]
    if not as_json:
        print(f"{found.title}\n{len(fits)} of {len(planned)} runs, in {folder}")
        for why, number in Counter(one.why_not for one in left_out).items():
            print(f"not run: {number} x {why}")
    cells = list({(one.cell.column.name, one.cell.method): one.cell for one in planned}.values())
    off = by_column(found, cells) if size == "gpu" else []
    if dry_run:
        if as_json:
            print(json.dumps([asdict(row) for row in foreseen(planned)], indent=1))
            return
        if fits:
            print_forecast([one.forecast for one in fits], jobs)
        for row in off:
            print(f"{row.column}: differs from the paper: {row.differs or 'nothing that the paper states'}")
        if size == "cpu":
            print(f"A small version on another data set: {found.small}")
        return
    try:
        with progress_bar("reproduce", remaining=False) as watch:
            carry_out_plan(planned, folder, watch, jobs, seeds_together)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from each run's last whole round", file=sys.stderr)
        raise typer.Exit(130) from None
    made = results(found, size, planned)
    if as_json:
        print(json.dumps([asdict(row) for row in made], indent=1))
        return
    for name in dict.fromkeys(row.column for row in made):
        shown = [
            {key: getattr(row, key) for key in ("method", "published", "ours", "verdict", "order")}
            for row in made
            if row.column == name
        ]
        print_table(shown, name)
    if size == "cpu":
        print(f"What this small run can and cannot show: {found.small}")
    for row in off:
        print(f"{row.column}: differs from the paper: {row.differs or 'nothing that the paper states'}")
    if found.reading and size == "gpu":
        print(f"read so: {found.reading}")


def _scale(scale: str | None) -> Scale:
    if scale is None:
        import torch

        return "gpu" if torch.cuda.is_available() else "cpu"
    from fedaudit.suite.published import SCALES

    for known in SCALES:
        if scale == known:
            return known
    raise SettingError(f"--scale {scale!r}: write cpu or gpu.")
