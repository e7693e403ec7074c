"""Writing a report on a folder of runs, in the formats that were asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from fedaudit.errors import FedauditError, RunError, SettingError, unknown
from fedaudit.metrics.metric import report_columns
from fedaudit.reports.runs import Run, grouped, looked_at, read_runs
from fedaudit.reports.summary_rows import SummaryRow, rows_of
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.run_record import reading

FORMATS = {
    "html": "report.html", "md": "report.md", "json": "report.json", "csv": "report.csv", "latex": "report.tex",
    "brief": "brief.html",
}  # fmt: skip
FIGURES = "figures"


def write_report(
    folder: Path | str,
    formats: Sequence[str] = ("html", "md"),
    out: Path | None = None,
    failed: dict[str, str] | None = None,
    figures: bool = False,
    like: str | None = None,
    columns: Sequence[str] = (),
) -> list[Path]:
    """Write the report on all runs below `folder`, into `out` or beside the runs, and return the paths written.

    `failed` names runs that are missing, with the reason. `figures` adds every figure as SVG and PNG.
    `like` is a regular expression that the labels of the rows match; `columns` are those of the LaTeX table.
    """
    for name in formats:
        if name not in FORMATS:
            raise SettingError(unknown("format", name, FORMATS))
    folder = Path(folder)
    known = [metric.key for metric in report_columns()]
    for key in columns:
        if key not in known:
            raise SettingError(unknown("column", key, known))
    rows, problems = rows_below(folder)
    rows = rows if like is None else _like(rows, like)
    failed = {**(failed or {}), **problems}
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)
    title = f"Audit of {len(rows)} {'setting' if len(rows) == 1 else 'settings'}"
    written = []
    for name in formats:
        path = out / FORMATS[name]
        if path.is_symlink() or (path.exists() and not _ours(name, path)):
            raise RunError(f"{path} is not a report of fedaudit, so it was not changed. Choose another --out.")
        with reading(folder):
            text = _text(name, rows, failed, title, columns)
        write_atomic(path, text.encode())
        written.append(path)
        if name == "brief":
            from fedaudit.reports.brief import printed

            written += [pdf for pdf in [printed(path)] if pdf is not None]
    if figures:
        from fedaudit.reports.figures import write_figures

        written += write_figures(rows, out / FIGURES)
    return written


def rows_below(folder: Path) -> tuple[list[SummaryRow], dict[str, str]]:
    """Return the rows of all runs below a folder, and the runs that failed or cannot be read, with the reason."""
    if not folder.is_dir():
        raise SettingError(f"There is no folder {folder}. Name one that holds runs.")
    runs, problems = read_runs(folder)
    problems = {**failures(folder), **problems}
    return rows_of(grouped(looked_at(_whole(runs, folder, problems)))), problems


def _whole(runs: list[Run], folder: Path, problems: dict[str, str]) -> list[Run]:
    """Return the runs whose records hold what a report needs. The others are added to `problems`."""
    whole = []
    for run in runs:
        try:
            with reading(run.folder):
                rows_of(grouped([run]))
            whole.append(run)
        except FedauditError as e:
            problems[str(run.folder.relative_to(folder))] = str(e)
    if not whole:
        raise RunError(f"No run below {folder} can be read: {next(iter(problems.values()))}")
    return whole


BEGINS = {
    "html": "<!doctype html>", "md": "# Audit of ", "json": '{\n "report_schema"', "csv": "method,privacy,label,seeds,",
    "latex": "% Needs \\usepackage{booktabs}", "brief": "<!doctype html>",
}  # fmt: skip


def _ours(name: str, path: Path) -> bool:
    """Say if the file is an earlier report, which may be replaced."""
    with open(path, "rb") as file:
        head = file.read(4096).decode(errors="replace")
    titled = {"html": "<title>Audit of ", "brief": "<title>Brief: audit of "}
    return head.lower().startswith(BEGINS[name].lower()) and titled.get(name, "") in head


def failures(folder: Path) -> dict[str, str]:
    """Return the cells that failed in the last audit of this folder, by its audit.json."""
    try:
        cells = json.loads((folder / "audit.json").read_text())["cells"]
        return {cell["folder"]: cell["reason"] for cell in cells if cell["status"] == "failed"}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as e:
        raise RunError(f"{folder / 'audit.json'} cannot be read: {e}. Remove it, or audit again.") from e


def _like(rows: list[SummaryRow], pattern: str) -> list[SummaryRow]:
    try:
        kept = [row for row in rows if re.search(pattern, row.label)]
    except re.error as e:
        raise SettingError(
            f"--rows {pattern!r} is not a regular expression: {e}. Write one, such as ^fedavg."
        ) from None
    if not kept:
        raise SettingError(f"--rows {pattern!r} matches none of: {'; '.join(row.label for row in rows)}.")
    return kept


def _text(name: str, rows: list[SummaryRow], failed: dict[str, str], title: str, columns: Sequence[str] = ()) -> str:
    from fedaudit.reports import formats, html

    if name == "html":
        return html.page(rows, failed, title)
    if name == "md":
        return formats.markdown(rows, failed, title, html.facts(rows))
    if name == "brief":
        from fedaudit.reports.brief import brief

        return brief(rows, failed, title, html.facts(rows))
    if name == "json":
        return formats.as_json(rows, failed)
    return formats.as_csv(rows) if name == "csv" else formats.latex(rows, columns)
