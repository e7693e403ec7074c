"""The rows of a report for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from fedaudit.metrics.guarantee import NOTHING_SENT
from fedaudit.reports import formats
from fedaudit.reports.leak_tests import leak
from fedaudit.reports.report import rows_below
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.reports.vocabulary import BY_KEY, text

WIDTH = 80
HEAD = ("accuracy", "ledger ε", "attack AUC", "sent")
WIDTHS = (11, 11, 10, 9)


def table(folder: Path) -> str:
    """Return one line per method and privacy setting. Rows that did not apply or failed are counted below."""
    rows, failed = rows_below(folder)
    ran = [row for row in rows if not refused(row.group)]
    name = WIDTH - sum(WIDTHS) - len(WIDTHS)
    lines = [_line("", HEAD, name), "-" * WIDTH]
    lines += [_line(_name(row), _figures(row), name) for row in ran]
    seeds = sorted({len(row.group.runs) for row in ran})
    over = "1 seed" if seeds == [1] else f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    spread = "" if seeds == [1] else ", ± half its 95 % interval"
    lines += ["-" * WIDTH, f"Accuracy in %{spread}; {over}."]
    lines.append("Sent: by one client in one round. δ and costs: the report.")
    lines += _below(rows, failed)
    return "\n".join(lines)


def _below(rows: Sequence[SummaryRow], failed: dict[str, str]) -> list[str]:
    lines = []
    if weak := sum(row.untrained for row in rows):
        lines.append(f"~ near chance, in {weak} of {len(rows)} rows: if nothing was learnt, attacks find nothing.")
    if wrong := [row.label for row in rows if row.refuted]:
        lines += [f"! claim refuted by measurement: {_cut(label, WIDTH - 32)}" for label in wrong]
    for row in (row for row in rows if row.doubts):
        lines += textwrap.wrap(
            f"!! do not rely on {row.label}: {'; '.join(row.doubts)}.", WIDTH, subsequent_indent="   "
        )
    if still := sum(bool(row.idle) for row in rows):
        lines.append(f"{_rows(still)}: a part of the method changed nothing; the report's notes name it.")
    if fallen := sum(row.clients_failed for row in rows):
        lines.append(f"{_rows(fallen)}: clients failed to answer; the report's notes say why.")
    if apart := [row for row in rows if row.open_models]:
        lines.append(f"* ∞ in {_rows(len(apart))}: clients' models, trained without noise, are published.")
        if noisy := sum(row.messages != NOTHING_SENT for row in apart):
            lines.append(f"  The report says what the messages alone have, in {noisy} of them.")
    if idle := sum(refused(row.group) for row in rows):
        lines.append(f"{_rows(idle)} did not run: the privacy setting applies to nothing that is sent.")
    return [*lines, *([f"{len(failed)} runs failed."] if failed else [])]


def _rows(n: int) -> str:
    return f"{n} row{'s' * (n != 1)}"


def _figures(row: SummaryRow) -> tuple[str, ...]:
    accuracy, epsilon, auc = (row.cells[key] for key in ("accuracy", "epsilon", "auc"))
    reached = text(BY_KEY["accuracy"], accuracy.value).replace(" %", "")
    if accuracy.low is not None and accuracy.high is not None and accuracy.value is not None and accuracy.n > 1:
        reached += f" ±{100 * (accuracy.high - accuracy.low) / 2:.1f}"
    guaranteed = "not sent" if epsilon.value == 0 else text(BY_KEY["epsilon"], epsilon.value)
    guaranteed += " *" if row.open_models else ""
    found = text(BY_KEY["auc"], auc.value)
    if auc.value is not None:
        found += {True: " leak", False: "", None: " ?"}[leak(row)]
    return (
        f"{'~' if row.untrained else ''}{reached}", f"{'!' if row.refuted else ''}{guaranteed}", found,
        text(BY_KEY["up"], row.cells["up"].value),
    )  # fmt: skip


def _name(row: SummaryRow) -> str:
    """Return the row's label, shortened by what a reader of a terminal knows."""
    short = row.label.replace("DP-SGD, ε = ", "DP-SGD ε=").replace("DP-SGD, noise", "DP-SGD noise")
    return short.replace(", clip 1", "")


def _line(name: str, cells: Sequence[str], width: int) -> str:
    padded = (f"{cell:>{size}}" for cell, size in zip(cells, WIDTHS, strict=True))
    return f"{_cut(name, width):<{width}} {' '.join(padded)}".rstrip()


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def as_json(folder: Path) -> str:
    return formats.as_json(*rows_below(folder)).rstrip("\n")
