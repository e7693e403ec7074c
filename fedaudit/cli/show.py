"""The commands that read finished runs: `show`, `transcript`, `report`, `compare` and `export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli.options import Json, RunArgument
from fedaudit.cli.output import print_summary, print_table, wrapped
from fedaudit.errors import SettingError


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder of runs such as an audit's.")],
    as_json: Json = False,
) -> None:
    """Summarise a run: what it reached and what it cost. For an audit, print a table of its rows."""
    from fedaudit.runtime.folder import check_transcript
    from fedaudit.runtime.run_record import read_record, reading

    if run.is_file() and run.suffix != ".json":
        raise SettingError(f"{run} is a file, not a run folder. Name the folder of a run or of an audit: {run.parent}.")
    of_runs = not (run / "record.json").exists() and run.is_dir() and any(run.glob("*/record.json"))
    if of_runs or (run / "audit.json").is_file() or (run / "runs").is_dir():
        show_audit(run, as_json)
        return
    record = read_record(run)
    if (run / "transcript").is_dir():
        check_transcript(run, record)
    if as_json:
        print(record.model_dump_json(indent=1))
    else:
        with reading(run):
            print_summary(record)
        if (run / "transcript").is_dir():
            from fedaudit.verify.check import checked_lines

            print(wrapped("\n".join(f"  {line}" for line in checked_lines(run))))


def show_audit(folder: Path, as_json: bool) -> None:
    from fedaudit.reports import terminal
    from fedaudit.runtime.run_record import reading

    with reading(folder):
        print(terminal.as_json(folder) if as_json else terminal.table(folder))


def transcript(
    run: RunArgument,
    by: Annotated[str, typer.Option(help="message | field | client | round | entry")] = "field",
    threat: Annotated[str, typer.Option(help="Show what this one sees: server, peer:k or outsider.")] = "server",
    as_json: Json = False,
) -> None:
    """Show what crossed the wire: who sent how many bytes of what."""
    from fedaudit.cli.listing import protections, traffic_table
    from fedaudit.runtime.folder import RunFolder
    from fedaudit.runtime.run_record import reading
    from fedaudit.wire.transcript import Threat

    of = RunFolder(run)
    peer, clients = Threat.parse(threat).peer, of.record.setting.clients
    if peer is not None and peer >= clients:
        raise SettingError(f"--threat {threat}: there is no client {peer}; the run has {clients}, numbered from 0.")
    with reading(run):
        rows = traffic_table(of.transcript.view(threat), by, protections(of.record))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        # By field, a message counts once for each of its fields, so a sum of messages would mean nothing.
        total = () if by == "entry" or threat == "outsider" else ("payload", "wire")
        title = (
            f"{run}, by {by}" if threat != "outsider" else f"{run}: sizes and times, which is all that an outsider sees"
        )
        print_table(rows, title, total=total if by == "field" or not total else ("messages", *total), narrow=True)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs.")],
    format: Annotated[str, typer.Option(help="html, md, json, csv, latex, brief; several with commas.")] = "html,md",
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to write to, with all figures as SVG and PNG. Default: DIR.", show_default=False),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only rows whose label matches.", show_default=False)
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Columns of the LaTeX table, such as accuracy,epsilon. Default: all.")
    ] = "",
) -> None:
    """Write a report on the runs below a folder: one row per method and privacy setting, over seeds."""
    from fedaudit.reports.report import write_report

    names = list(dict.fromkeys(name.strip() for name in format.split(",") if name.strip()))
    if not names:
        raise SettingError(f"--format {format!r} names no format. Write html, md, json, csv, latex or brief.")
    keys = [key.strip() for key in columns.split(",") if key.strip()]
    for path in write_report(folder, names, out, figures=out is not None, like=rows, columns=keys):
        print(path)


def compare(
    before: Annotated[Path, typer.Argument(metavar="DIR_A", help="A folder of runs.")],
    after: Annotated[Path, typer.Argument(metavar="DIR_B", help="The later folder of runs.")],
    max_drop: Annotated[
        list[str], typer.Option(metavar="COLUMN=AMOUNT", help="A gate: accuracy=2 (points), up=10%; repeatable.")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Compare two folders of runs: what changed, and is it more than noise?

    Exit code 0 if nothing changed, 1 if a figure changed by more than noise (time and memory do not count) or on an
    alarm: a seal is broken, a check contradicted a figure, or messages are equal and results are not, or the other way
    round. 3 if no figure changed by more than noise but one differs and the seeds are too few to tell, 2 if there is
    nothing to compare. With --max-drop only the named figures count: 1 if the mean of one became worse by more than
    allowed or on an alarm, otherwise 0.
    """
    from fedaudit.reports import compare as compare_
    from fedaudit.runtime.run_record import reading

    limits = [compare_.Limit.parse(text) for text in max_drop]
    with reading(f"{before} or {after}"):
        result = compare_.compare(before, after)
    print(compare_.as_json(result) if as_json else wrapped(compare_.as_text(result)))
    if limits:
        broken = [line for limit in limits for line in limit.breaks(result)]
        for line in broken:
            print(f"worse than allowed: {line}", file=sys.stderr)
        raise typer.Exit(1 if broken or result.alarms else 0)
    if result.alarms or result.changed or result.untold:
        raise typer.Exit(1 if result.alarms or result.changed else 3)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN|AUDIT", help="A run folder, or the folder of an audit.")],
    to: Annotated[str, typer.Option(help="tensorboard | mlflow | wandb | junit | csv")],
    out: Annotated[
        str, typer.Option(help="A folder. For junit: a file. For mlflow: a folder or the address of a store.")
    ],
    project: Annotated[str, typer.Option(help="For mlflow: the experiment. For wandb: the project.")] = "fedaudit",
    budget: Annotated[Path | None, typer.Option(help="For junit: a file of budgets, whose verdicts are added.")] = None,
) -> None:
    """Write runs for TensorBoard, MLflow or Weights & Biases, their verdicts as JUnit, or their tables as CSV.

    Nothing is sent anywhere else: wandb is written offline, mlflow into the folder or the store that you name.
    """
    from fedaudit.reports.export import export as write

    def warn(doubt: str) -> None:
        print(f"warning: {doubt}.", file=sys.stderr)

    print(write(run, to, out, project=project, budget=budget, warn=warn))
