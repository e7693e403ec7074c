"""The report as one HTML page that needs nothing else: styles, script, figures and pictures are inside it."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from fedaudit.metrics.metric import Metric, report_columns
from fedaudit.reports import sentences
from fedaudit.reports.answers import DOUBTS, answers, scope
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.checked import checked
from fedaudit.reports.figures import (
    against_bytes,
    inline,
    inside,
    looks,
    partition,
    per_round,
    privacy_utility,
    relied_on,
    roc,
    style,
    tradeoff,
)
from fedaudit.reports.leak_tests import above_chance, shown_leak
from fedaudit.reports.row_comparisons import Mark, best_row, differences, marks, tested
from fedaudit.reports.runs import Run
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.reports.tests_over_seeds import Test
from fedaudit.reports.vocabulary import BY_KEY, interval_text, text
from fedaudit.runtime.attack_result import ReconstructionResult
from fedaudit.units import bytes_text

FIRST = "Up is more accurate, left is a stricter guarantee. Bars are 95 % intervals over seeds."
PICTURES = 2_500_000  # the most bytes of all reconstruction pictures of a page together


def page(rows: Sequence[SummaryRow], failed: dict[str, str], title: str) -> str:
    tests = {column.key: differences(rows, column) for column in report_columns()}
    marked = {column.key: marks(rows, column) for column in report_columns()}
    return _environment().get_template("report.html").render(
        title=title,
        rows=rows,
        lines=[_line(i, row, rows, marked) for i, row in enumerate(rows) if not refused(row.group)],
        columns=report_columns(),
        parts=_parts(),
        facts=facts(rows),
        doubts=DOUBTS,
        answers=answers(rows),
        scope=scope(rows),
        idle=[row for row in rows if refused(row.group)],
        failed=failed,
        empty=(empty := [c for c in report_columns() if all(row.cells[c.key].value is None for row in rows)]),
        folded=[c for c in report_columns() if c in empty or c.folded],
        few=min((len(row.group.runs) for row in rows), default=0) < 3,
        data=_data(rows, tests, marked),
        first=_drawn(rows, "privacy", privacy_utility, "Accuracy over the guarantee", FIRST),
        figures=_overview(rows),
        cards=_cards(rows),
        limits=sentences.LIMITS,
        versions=sentences.versions(rows),
        made=[sentences.made(row.group) for row in rows],
        bytes_text=bytes_text,
        epsilon_text=lambda value: text(BY_KEY["epsilon"], value),
        dumps=lambda value: json.dumps(value, sort_keys=True, ensure_ascii=False),
    )  # fmt: skip


def facts(rows: Sequence[SummaryRow]) -> str:
    """Return what all rows have in common, in one line."""
    runs = sum(len(row.group.runs) for row in rows)
    setting = rows[0].group.setting
    parts = [f"{runs} {'run' if runs == 1 else 'runs'}", f"{len(rows)} {'setting' if len(rows) == 1 else 'settings'}"]
    words = {"dataset": "{}", "clients": "{} clients", "partition": "partition {}", "rounds": "{} rounds"}
    for key, form in words.items():
        if all(getattr(row.group.setting, key) == getattr(setting, key) for row in rows):
            parts.append(form.format(getattr(setting, key)))
    return " · ".join([*parts, checked(rows)])


def _parts() -> list[tuple[str, int]]:
    parts: dict[str, int] = {}
    for column in report_columns():
        parts[column.part] = parts.get(column.part, 0) + 1
    return list(parts.items())


# --- the table ---------------------------------------------------------------------------------------------------


def cell_text(column: Metric, cell: ReportCell) -> dict[str, str]:
    """Return a figure as the page shows it: the value, its interval and seeds below it, the rest on hover."""
    if cell.value is None:
        return {"main": "–", "sub": cell.reason, "more": "", "title": cell.reason, "flag": ""}
    spread = interval_text(column, cell)
    if cell.low == cell.high or column.seeds == "bound":
        spread = ""
    seeds = f"n = {cell.n}" if column.seeds != "set" else ""
    if column.seeds == "largest" and spread:
        spread = f"from {text(column, cell.low)}"
    more = "" if column.machine else cell.detail
    title = f"{cell.interval}; {cell.n} {'seed' if cell.n == 1 else 'seeds'}"
    if len(cell.each) > 1:
        title += ": " + ", ".join(f"{text(column, v)}" for _, v in sorted(cell.each.items()))
    if cell.detail:
        title = f"{cell.detail}. {title}"
    sub = " ".join(part for part in (spread, seeds) if part)
    return {"main": text(column, cell.value), "sub": sub, "more": more, "title": title, "flag": cell.flag}


LOOKS: dict[Mark, str] = {"best": "ref", "tied": "noise", "worse": "worse", "": ""}


def _line(i: int, row: SummaryRow, rows: Sequence[SummaryRow], marked: dict[str, list[Mark]]) -> dict[str, Any]:
    cells = []
    for column in report_columns():
        cell = row.cells[column.key]
        look = LOOKS[marked[column.key][i]]
        if look == "noise" and above_chance(row, column.key):
            look = ""
        value = cell.value
        key = "" if value is None else ("1e999" if math.isinf(value) else repr(float(value)))
        shown = cell_text(column, cell)
        told = {
            "leak": shown_leak(row, column.key),
            "open": above_chance(row, column.key),
            "good": shown["flag"].startswith("no better"),
        }
        cells.append({**shown, **told, "key": column.key, "look": look, "sort": key})
    pills = []
    if any(note.startswith("Under-trained") for note in row.notes):
        pills.append("under-trained")
    pills += [f"{step} changes nothing" for step in row.idle]
    if any("applied to nothing" in note for note in row.notes):
        pills.append("setting applied to nothing")
    if any(note.startswith("Unfinished") for note in row.notes):
        pills.append("unfinished")
    if row.clients_failed:
        pills.append("clients failed")
    extra = ", ".join(f"{key}={value}" for key, value in row.group.differs.items())
    return {
        "index": i,
        "row": row,
        "cells": cells,
        "pills": pills,
        "doubted": bool(row.doubts),
        "extra": extra,
        "look": looks(rows)[i],
        "anchor": _anchor(row),
    }


def _anchor(row: SummaryRow) -> str:
    return "method-" + "".join(c if c.isalnum() else "-" for c in row.group.method)


def _data(rows: Sequence[SummaryRow], tests: dict[str, list[list[Test | None]]], marked: dict[str, list[Mark]]) -> str:
    """Return what the page needs to compare rows: by column and reference, [p, sign, test's name, more than noise,
    could be tested]. Counted figures are not compared, as no test was made of them."""
    names: list[str] = []

    def short(test: Test | None) -> list[Any] | None:
        if test is None:
            return None
        if test.how not in names:
            names.append(test.how)
        sign = 0 if not test.difference else (1 if test.difference > 0 else -1)
        p = None if test.p is None else float(f"{test.p:.2g}")
        return [p, sign, names.index(test.how), int(test.more_than_noise), int(tested(test))]

    compared = {
        key: [[short(test) for test in line] for line in table] if BY_KEY[key].sampled else None
        for key, table in tests.items()
    }
    best = {c.key: [best_row(rows, c).get(row.group.arena) for row in rows] for c in report_columns()}
    facts_ = {
        "tests": compared, "names": names, "best": best,
        "marks": {key: [LOOKS[mark] for mark in of] for key, of in marked.items()},
        "better": {c.key: c.better for c in report_columns()}, "labels": [row.label for row in rows],
    }  # fmt: skip
    return json.dumps(facts_, separators=(",", ":")).replace("<", "\\u003c")


# --- figures and cards -------------------------------------------------------------------------------------------


def _overview(rows: Sequence[SummaryRow]) -> list[dict[str, str]]:
    made = []
    for name, draw, heading, caption in (
        (
            "tradeoff", tradeoff, "Privacy against utility",
            "Up is more accurate, left gives less away. Every mark is at its true place; marks at one place share a "
            "label. A line joins the settings of one method over ε; bars are 95 % intervals. Dashed: the settings that "
            "no other beats in both, by their means. Overlap alone decides nothing; see the table's tests.",
        ),
        ("bytes", against_bytes, "Bytes against utility", "What accuracy costs on the wire, logarithmic axes."),
        (
            "rounds", per_round, "Utility per round",
            "Accuracy on the common test set after each round; lines are means, bands run from the worst seed to the "
            "best.",
        ),
    ):  # fmt: skip
        made.append(_drawn(rows, name, draw, heading, caption))
    return made


def _drawn(
    rows: Sequence[SummaryRow], name: str, draw: Callable[[Sequence[SummaryRow]], Figure], heading: str, caption: str
) -> dict[str, str]:
    with style(name):
        svg = inline(draw(rows), name)
    drawn = relied_on(rows)
    described = ", ".join(f"{row.label} {text(BY_KEY['accuracy'], row.cells['accuracy'].value)}" for row in drawn)
    if left_out := [row.label for row in rows if row.doubts]:
        caption += f" Left out, because they are not to be relied on: {'; '.join(left_out)}."
    alt = f"{heading}. {caption} Accuracy in the last round: {described}."
    return {"name": name, "heading": heading, "caption": caption, "svg": svg, "alt": alt}


def _cards(rows: Sequence[SummaryRow]) -> list[dict[str, Any]]:
    cards = []
    drawn: dict[str, str] = {}
    budget = PICTURES // max(1, sum(len(_pictures(row)) for row in rows))
    for method in dict.fromkeys(row.group.method for row in rows if not refused(row.group)):
        mine = [row for row in rows if row.group.method == method and not refused(row.group)]
        first = rows.index(mine[0]) + 1
        bubbles = _bubbles(mine[0], f"partition-{first}", drawn)
        cards.append(
            {
                "method": method, "anchor": _anchor(mine[0]), "look": looks(rows)[first - 1], "partition": bubbles,
                "seed": mine[0].group.runs[0].seed, "releases": sentences.releases(mine),
                "arena": f"{mine[0].group.setting.dataset}, {mine[0].group.setting.partition}",
                "settings": [_section(row, rows.index(row) + 1, budget) for row in mine],
            }
        )  # fmt: skip
    return cards


def _bubbles(row: SummaryRow, name: str, drawn: dict[str, str]) -> str:
    """Return the drawing of the partition. Methods that share the partition share it, with ids of their own."""
    key = json.dumps([row.first.data.counts, row.first.data.class_names])
    if key not in drawn:
        with style("partition"):
            figure = partition(row)
            drawn[key] = inline(figure, "partition-NAME") if figure else ""
    return drawn[key].replace("partition-NAME", name)


def _section(row: SummaryRow, number: int, budget: int) -> dict[str, Any]:
    with style(f"roc-{number}"):
        drawn = roc(row)
        curves = inline(drawn, f"roc-{number}") if drawn else ""
    with style(f"inside-{number}"):
        drawn = inside(row)
        rounds = inline(drawn, f"inside-{number}") if drawn else ""
    alt = "ROC curves of membership attacks, logarithmic axes: " + (row.cells["auc"].detail or "none")
    if row.cells["auc"].value is not None:
        alt += f", AUC {row.cells['auc'].value:.3f}"
    return {
        "row": row, "label": row.group.privacy, "extra": row.group.differs, "verdict": sentences.verdict(row),
        "ledger": sentences.ledger_rows(row), "attacks": sentences.attack_rows(row), "audits": _audits(row),
        "roc": curves, "roc_alt": alt, "inside": rounds, "inside_alt": _inside_alt(row),
        "pictures": [_picture(*found, budget) for found in _pictures(row)],
        "traffic": sentences.traffic(row), "phases": sentences.phases(row),
    }  # fmt: skip


def _inside_alt(row: SummaryRow) -> str:
    """Return the numbers of the first seed's last round, in words."""
    last = row.first.rounds[-1] if row.first.rounds else None
    points = last.utility.global_points if last and last.utility else {}
    said = [f"global model {name} {100 * p.test.accuracy:.1f} %" for name, p in points.items()]
    said += [f"{name.replace('_', ' ')} {value:.2f}" for name, value in (last.diagnostics if last else {}).items()]
    return "Numbers of the method's own rounds; in the last one: " + ", ".join(said)


def _audits(row: SummaryRow) -> list[dict[str, Any]]:
    return sentences.audit_rows(row)


def _pictures(row: SummaryRow) -> list[tuple[Run, ReconstructionResult]]:
    """Return the pictures of the first seed that has any, one per attack."""
    for run in row.group.runs:
        results = [result for result in run.record.attacks if isinstance(result, ReconstructionResult)]
        if found := [(run, result) for result in results if result.picture]:
            return found
    return []


def _picture(run: Run, result: ReconstructionResult, budget: int) -> dict[str, str]:
    """Return a picture as a data URI, made smaller until it fits. A path that leaves the run folder is not followed."""
    name = f"{result.attack}, {result.threat}"
    path = (run.folder / str(result.picture)).resolve()
    if not path.is_relative_to(run.folder.resolve()) or not path.is_file():
        return {"name": name, "src": "", "missing": f"The picture {result.picture} is not in the run folder."}
    data = path.read_bytes()
    if len(data) > budget:
        data = _smaller(data, budget)
    if not data:
        return {"name": name, "src": "", "missing": f"The picture {result.picture} cannot be read."}
    src = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"name": f"{name}, seed {run.seed}", "src": src, "missing": ""}


def _smaller(data: bytes, budget: int) -> bytes:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data)).convert("RGB")
    except OSError:
        return b""
    while len(data) > budget and min(image.size) > 32:
        image = image.resize((max(1, image.width * 3 // 4), max(1, image.height * 3 // 4)))
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", optimize=True)
        data = buffer.getvalue()
    return data


def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    return jinja2.Environment(
        loader=loader, autoescape=jinja2.select_autoescape(["html"]), trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
