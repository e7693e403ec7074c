"""The picture of the README: accuracy over epsilon, and what the best attack found.

python benchmarks/studies/shared/curves.py audit
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedaudit.reports.figures import style, tradeoff
from fedaudit.reports.report import rows_below
from fedaudit.reports.summary_rows import refused

OUT = Path(__file__).resolve().parents[3] / "docs" / "curves.png"


def main(folder: str) -> None:
    rows = [row for row in rows_below(Path(folder))[0] if not refused(row.group)]
    with style("curves"):
        figure = tradeoff(rows)
        figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:2])
