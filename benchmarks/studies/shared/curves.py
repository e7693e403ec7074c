"""The picture of the README: accuracy over epsilon, and what the best attack found.

    fedaudit audit --out audit --jobs 2
    python benchmarks/studies/shared/curves.py audit

draws docs/curves.png, and keeps the figures of its rows in quickstart.json beside this file.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from fedaudit.reports.figures import style, tradeoff
from fedaudit.reports.report import rows_below
from fedaudit.reports.summary_rows import SummaryRow, refused

OUT = Path(__file__).resolve().parents[3] / "docs" / "curves.png"
KEPT = Path(__file__).with_name("quickstart.json")
SHOWN = ("accuracy", "epsilon", "auc")


def kept(row: SummaryRow) -> dict[str, object]:
    """Return a row's figures in the picture, with their intervals, and where they come from."""
    runs = [run.record for run in row.group.runs]
    cells = {key: [_plain(v) for v in (row.cells[key].value, row.cells[key].low, row.cells[key].high)] for key in SHOWN}
    return {"label": row.label, "seeds": [run.setting.seed for run in runs], "finished": runs[0].finished, **cells}


def _plain(value: float | None) -> float | str | None:
    """Return a figure as JSON has it, to six digits."""
    return None if value is None else float(f"{value:.6g}") if math.isfinite(value) else "Infinity"


def main(folder: str) -> None:
    rows = [row for row in rows_below(Path(folder))[0] if not refused(row.group)]
    with style("curves"):
        figure = tradeoff(rows)
        figure.savefig(OUT, dpi=110)
    lines = ",\n".join(f"  {json.dumps(kept(row))}" for row in rows)
    KEPT.write_text(f'{{\n "columns": "value, low, high (95 %)",\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:2])
