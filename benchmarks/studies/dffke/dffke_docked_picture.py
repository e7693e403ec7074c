"""The picture of DFFKE's docked embeddings with the stock ResNet-18: how long they get, and what teachers make of them.

    python benchmarks/studies/dffke/dffke_docked_picture.py

draws docs/results/dffke_docked.png from `dffke_answers.json` and, for the author's code,
`../authors/dffke_rounds_resnet18.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from fedaudit.reports.figures import style

STUDY = Path(__file__).parent
OUT = Path(__file__).resolve().parents[3] / "docs" / "results" / "dffke_docked.png"
RUNS = {  # by the name of the figures
    "fedaudit, all of CIFAR-10 (seed 2)": "resnet18-2",
    "fedaudit, a fiftieth": "fiftieth-resnet18",
}
CODE = "the author's code, a fiftieth"
LENGTH, SAID = "length of docked embeddings", "own images whose class the teacher names, %"
Curve = list[tuple[int, float]]


def curves() -> dict[str, dict[str, Curve]]:
    """Return for each run the lengths and the shares, by round."""
    seen = _read(STUDY / "dffke_answers.json")
    rows = {label: seen[name] for label, name in RUNS.items()}
    rows[CODE] = _read(STUDY.parent / "authors" / "dffke_rounds_resnet18.json")["rows"]
    return {
        label: {
            LENGTH: [(row["round"], row["length"]) for row in of],
            SAID: [(row["round"], 100 * row["said"]) for row in of],
        }
        for label, of in rows.items()
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def draw(found: dict[str, dict[str, Curve]]) -> Figure:
    """Return a figure with a panel for the lengths and one for the shares."""
    figure = Figure(figsize=(8.8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, name in zip(figure.subplots(1, 2), (LENGTH, SAID), strict=True):
        for number, (label, of) in enumerate(found.items()):
            line = "--" if label == CODE else "-"
            axis.plot(*zip(*of[name], strict=True), color=f"C{number}", linestyle=line, label=label)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("round")
        axis.grid(alpha=0.3)
    left, right = figure.axes
    left.set_yscale("log")
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    right.set_ylim(0, 100)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def main() -> None:
    with style("dffke"):
        draw(curves()).savefig(OUT, dpi=110)
    print(OUT)


if __name__ == "__main__":
    main()
