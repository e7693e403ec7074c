"""A report's rows as Markdown for a pull request, as CSV and JSON for further work, and as LaTeX for a paper."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from fedaudit.metrics.metric import Metric, report_columns
from fedaudit.reports import sentences
from fedaudit.reports.answers import answers, scope
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.checked import checked_runs
from fedaudit.reports.leak_tests import above_chance
from fedaudit.reports.row_comparisons import Mark, best_row, differences, is_noise, marks
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.reports.tests_over_seeds import LEVEL, SEEDS
from fedaudit.reports.vocabulary import interval_text, text
from fedaudit.stored_model import plain
from fedaudit.units import UNITS, bytes_text

SCHEMA = 1


def shown_columns(rows: Sequence[SummaryRow]) -> list[Metric]:
    """Return the columns in which some row has a figure."""
    return [c for c in report_columns() if any(row.cells[c.key].value is not None for row in rows)]


def short_cell(column: Metric, cell: ReportCell) -> str:
    """Return value, interval and seeds, such as `89.3 % [84.1, 94.5] (2)`."""
    if cell.value is None:
        return "–"
    spread = "" if cell.low == cell.high or column.seeds == "bound" else interval_text(column, cell)
    if column.seeds == "largest" and spread:
        spread = f"(from {text(column, cell.low)})"
    seeds = "" if column.seeds == "set" else f"({cell.n})"
    return " ".join(part for part in (text(column, cell.value), spread, seeds) if part)


def guaranteed(row: SummaryRow) -> bool:
    epsilon = row.cells["epsilon"].value
    return epsilon is not None and 0 < epsilon < math.inf


def _marked(rows: Sequence[SummaryRow], column: Metric) -> list[Mark]:
    """Return the marks of a column. A leak is never marked as about equal to the best."""
    found = zip(rows, marks(rows, column), strict=True)
    return ["" if mark == "tied" and above_chance(row, column.key) else mark for row, mark in found]


# --- Markdown ----------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[SummaryRow], failed: dict[str, str], title: str, facts: str) -> str:
    every, rows = rows, [row for row in rows if not refused(row.group)]
    columns = shown_columns(rows)
    marked = {column.key: _marked(rows, column) for column in columns}
    lines = [f"# {_md(title)}", "", f"{_md(facts)}.", ""]
    lines += [f"- **{answer.question}.** {_md(' '.join(answer.lines))}" for answer in answers(rows)]
    lines += ["", *(f"*{name}*: {_md(words)}.  " for name, words in scope(rows).items())]
    lines += ["", "| Method | Protection | " + " | ".join(c.title for c in columns) + " |"]
    lines += ["|---|---|" + "---:|" * len(columns)]
    for i, row in enumerate(rows):
        cells = []
        for column in columns:
            cell = row.cells[column.key]
            shown = short_cell(column, cell)
            shown += f" at δ = {row.delta:.2g}" if column.key == "epsilon" and guaranteed(row) else ""
            shown += f" ({cell.flag})" if column.flag_disqualifies and cell.flag else ""
            mark = marked[column.key][i]
            cells.append(f"**{shown}**" if mark == "best" else f"≈ {shown}" if mark == "tied" else shown)
        extra = "".join(f"<br>{_md(f'{key}={value}')}" for key, value in row.group.differs.items())
        lines.append(f"| {_md(row.group.name)} | {_md(row.group.privacy)}{extra} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Figures are means over seeds with their 95 % interval and, in brackets, the number of seeds. **Bold**: best "
        f"of its column, told from all others. ≈: about equal to the best, as a test could not tell them apart (t-test "
        f"over seeds, p ≥ {LEVEL:g} after Holm's correction). Counted figures, and rows with fewer than {SEEDS} seeds, "
        "carry no mark.",
    ]
    if idle := [row.label for row in every if refused(row.group)]:
        lines += [
            "",
            f"Not run, because their privacy setting applies to nothing that they send: {_md(', '.join(idle))}.",
        ]
    notes = [f"- **{_md(row.label)}**: {_md(note)}" for row in rows for note in row.notes]
    lines += ["", "## Notes", "", *notes] if notes else []
    lines += ["", "## In words", ""]
    for row in rows:
        lines += [f"**{_md(row.label)}**", "", *(f"- {_md(line)}" for line in sentences.verdict(row)), ""]
    if failed:
        lines += ["## Failed", "", *(f"- {_code(folder)}: {_md(error)}" for folder, error in failed.items()), ""]
    lines += ["<details><summary>What the columns mean</summary>", ""]
    lines += [f"- *{_md(column.title)}*: {_md(column.help)}" for column in columns]
    lines += ["", "</details>", "", "<details><summary>How it was made, and known limits</summary>", ""]
    lines += [f"- {_md(version)}" for version in sentences.versions(rows)]
    lines += [f"- {_md(row.label)}: {_code(sentences.made(row.group)['command'])}" for row in rows]
    lines += [f"- {_md(limit)}" for limit in sentences.LIMITS]
    return "\n".join([*lines, "", "</details>", ""])


def _md(text_: str) -> str:
    """Return a text that is safe inside a Markdown table: it ends no cell, emphasis, tag or line."""
    text_ = str(text_).replace("\\", "\\\\").replace("\n", " ")
    for character in "|*_`<[$~":
        text_ = text_.replace(character, f"\\{character}")
    return text_


def _code(text_: str) -> str:
    """Return a code span, fenced by more backticks than the text has in a row."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text_)), default=0))
    return f"{fence}{text_}{fence}" if fence == "`" else f"{fence} {text_} {fence}"


# --- JSON and CSV ------------------------------------------------------------------------------------------------


def as_json(rows: Sequence[SummaryRow], failed: dict[str, str]) -> str:
    """Return all that the page shows, and the values behind it, as JSON. Infinite numbers are the string "Infinity"."""
    document = {
        "report_schema": SCHEMA,
        "columns": [_column(c) for c in report_columns()],
        "rows": [_row(row) for row in rows],
        "comparisons": {c.key: _comparisons(rows, c) for c in report_columns()},
        "failed": failed,
        "checked": {**(found := checked_runs(rows)).model_dump(), "text": found.text()},
        "limits": list(sentences.LIMITS),
    }
    return json.dumps(plain(document), indent=1, ensure_ascii=False) + "\n"


def _column(column: Metric) -> dict[str, Any]:
    return {
        "key": column.key, "title": column.title, "part": column.part, "unit": column.unit, "better": column.better,
        "sampled": column.sampled, "help": column.help,
    }  # fmt: skip


def _row(row: SummaryRow) -> dict[str, Any]:
    made = sentences.made(row.group)
    attacks = [
        {**attack, "figures": {name: cell.as_json() for name, cell in attack["figures"].items()}}
        for attack in sentences.attack_rows(row)
    ]
    return {
        "label": row.label,
        "method": row.group.method,
        "privacy": row.group.privacy,
        "seeds": made["seeds"],
        "notes": row.notes,
        "verdict": sentences.verdict(row),
        "cells": {key: cell.as_json() for key, cell in row.cells.items()},
        "releases": [
            {**release, "protection": release["protection"][0] and release["protection"][0][0]}
            for release in sentences.releases([row])
        ],
        "ledger": sentences.ledger_rows(row),
        "attacks": attacks,
        "audits": sentences.audit_rows(row),
        "traffic": sentences.traffic(row),
        "time": sentences.phases(row),
        "setting": made["setting"],
        "command": made["command"],
        "device": made["device"],
        "versions": row.first.versions,
        "models": made["models"],
        "digests": made["digests"],
    }


def _comparisons(rows: Sequence[SummaryRow], column: Metric) -> list[dict[str, Any]]:
    """Return the comparison of every row with the best of its column."""
    best, tests = best_row(rows, column), differences(rows, column)
    found = []
    for i, row in enumerate(rows):
        j = best.get(row.group.arena)
        test = tests[j][i] if j is not None else None
        if test is None or j is None:
            continue
        found.append(
            {
                "row": row.label, "against": rows[j].label, "difference": test.difference, "low": test.low,
                "high": test.high, "p_holm": test.p, "test": test.how, "more_than_noise": not is_noise(test),
            }
        )  # fmt: skip
    return found


def as_csv(rows: Sequence[SummaryRow]) -> str:
    """Return one line per row, with four columns per figure: value, low, high, n."""
    buffer = io.StringIO()
    head = [
        "method",
        "privacy",
        "label",
        "seeds",
        *(f"{c.key}{end}" for c in report_columns() for end in CSV_ENDS),
        "delta",
        "notes",
    ]
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        line: list[Any] = [
            _cell(row.group.method),
            _cell(row.group.privacy),
            _cell(row.label),
            " ".join(str(r.seed) for r in row.group.runs),
        ]
        for column in report_columns():
            cell = row.cells[column.key]
            known = cell.value is not None
            line += [_number(cell.value), _number(cell.low), _number(cell.high), cell.n if known else 0]
        delta = _number(row.delta) if guaranteed(row) else ""
        writer.writerow([*line, delta, _cell(" ".join(row.notes))])
    return buffer.getvalue()


CSV_ENDS = ("", "_low", "_high", "_n")


def _cell(text_: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return f"'{text_}" if text_.startswith(("=", "+", "-", "@", "\t", "\r")) else text_


def _number(value: float | None) -> str:
    return "" if value is None else "inf" if math.isinf(value) else f"{value:.10g}"


# --- LaTeX -------------------------------------------------------------------------------------------------------


def latex(rows: Sequence[SummaryRow], keys: Sequence[str] = ()) -> str:
    """Return two LaTeX tables, utility with privacy and cost, for the package booktabs.

    If `keys` choose columns, there is one table. Rows without a figure are left out."""
    shown = [c for c in shown_columns(rows) if not keys or c.key in keys]
    rows = [row for row in rows if any(row.cells[c.key].value is not None for c in shown)]
    seeds = sorted({len(row.group.runs) for row in rows})
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "0"
    over = "One seed" if count == "1" else f"Mean $\\pm$ standard deviation over {count} seeds"
    told = (
        f"bold: told from all others of the column; grey: about equal to the best ($p \\ge {LEVEL:g}$, $t$-test over "
        f"seeds, Holm); no mark on counted figures or below {SEEDS} seeds"
    )
    guarantee = "$\\varepsilon$ is the largest over clients and seeds, all rounds composed, at the $\\delta$ beside it"
    parts = ["% Needs \\usepackage{booktabs} and \\usepackage{xcolor}."]
    doubted = "; ".join(escape(row.label) for row in rows if row.doubts)
    doubted = f" Not to be relied on, as files were changed or a check contradicted them: {doubted}." * bool(doubted)
    privacy = [c for c in shown if c.part != "Cost" or keys]
    cost = [c for c in shown if c.part == "Cost" and not keys]
    if privacy:
        parts.append(_latex_table(rows, privacy, f"{over}; {told}; {guarantee}.{doubted}", "tab:fedaudit-privacy"))
    if cost:
        words = f"Cost: bytes of one client in one round; compute and memory of a run. {over}.{doubted}"
        parts.append(_latex_table(rows, cost, words, "tab:fedaudit-cost"))
    return "\n\n".join(parts) + "\n"


def _latex_table(rows: Sequence[SummaryRow], columns: Sequence[Metric], caption: str, label: str) -> str:
    marked = {column.key: _marked(rows, column) for column in columns}
    titles = [
        part for c in columns for part in ([escape(c.title), "$\\delta$"] if c.key == "epsilon" else [escape(c.title)])
    ]
    lines = [
        "\\begin{table}",
        "\\centering\\small",
        f"\\caption{{{caption}}}",
        f"\\label{{{label}}}",
        "\\begin{tabular}{ll" + "r" * len(titles) + "}",
        "\\toprule",
        " & ".join(["Method", "Protection", *titles]) + " \\\\",
        "\\midrule",
    ]
    for i, row in enumerate(rows):
        cells = []
        for column in columns:
            cell = row.cells[column.key]
            shown = escape(text(column, cell.value))
            mark = marked[column.key][i]
            shown = f"\\textbf{{{shown}}}" if mark == "best" else shown
            shown += _deviation(column, cell)
            cells.append(f"\\textcolor{{gray}}{{{shown}}}" if mark == "tied" else shown)
            if column.key == "epsilon":
                cells.append(f"{row.delta:.2g}" if guaranteed(row) else "--")
        extra = "".join(f", {escape(key)}={escape(value)}" for key, value in row.group.differs.items())
        lines.append(" & ".join([escape(row.group.name), escape(row.group.privacy) + extra, *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"])


def _deviation(column: Metric, cell: ReportCell) -> str:
    """Return the sample standard deviation over seeds, in the unit of its value."""
    if not column.sampled or column.seeds == "bound" or len(cell.each) < 2 or cell.value is None:
        return ""
    spread = statistics.stdev(cell.each.values())
    if column.unit == "bytes":
        spread /= UNITS[bytes_text(cell.value).split()[1]]
    shown = (
        f"{100 * spread:.1f}"
        if column.unit == "share"
        else f"{spread:.3f}"
        if column.unit == "auc"
        else f"{spread:.2g}"
    )
    return f" {{\\scriptsize $\\pm$ {shown}}}"


_LATEX = {
    "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{", "}": "\\}",
    "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "ε": "$\\varepsilon$", "δ": "$\\delta$", "∞": "$\\infty$",
    "≥": "$\\ge$", "≤": "$\\le$", "–": "--", "·": "$\\cdot$", "<": "\\textless{}", ">": "\\textgreater{}",
}  # fmt: skip


def escape(value: Any) -> str:
    """Return any text escaped for LaTeX."""
    return "".join(_LATEX.get(character, character) for character in str(value))
