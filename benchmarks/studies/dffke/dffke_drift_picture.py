"""The picture of DFFKE on a fiftieth of CIFAR-10: what each exchange gains, and how docked embeddings grow beside it.

    python benchmarks/studies/dffke/dffke_drift_picture.py

draws docs/results/dffke_drift.png from `records/dffke_cifar_small`, `dffke_answers.json` and, for the author's code,
`../authors/dffke_rounds*.json`.
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
OUT = Path(__file__).resolve().parents[3] / "docs" / "results" / "dffke_drift.png"
RUNS = {  # by the name of the record
    "preset, ten local epochs": "as-it-is",
    "preset, no limit": "no-limit",
    "without the discrepancy": "no-discrepancy",
    "docking layers rest": "docking-rests",
    "docking layers begin anew": "docking-anew",
}
CODE = {  # by the name of the file
    "the author's code, ten local epochs": "dffke_rounds",
    "the author's code, no limit": "dffke_rounds_no_limit",
}
GAIN, LENGTH = "common test set, after the exchange minus before, points", "length of docked embeddings"
Curve = list[tuple[int, float]]


def curves() -> dict[str, dict[str, Curve]]:
    """Return for each run its gains and lengths, by round."""
    lengths = _read(STUDY / "dffke_answers.json")
    found = {}
    for label, name in RUNS.items():
        rounds = _read(STUDY / "records" / "dffke_cifar_small" / f"{name}.json")["rounds"]
        gains = [(row["round"], _mean(row, "exchanged") - _mean(row, "trained")) for row in rounds]
        found[label] = {GAIN: gains, LENGTH: [(row["round"], row["length"]) for row in lengths[name]]}
    for label, name in CODE.items():
        rows = _read(STUDY.parent / "authors" / f"{name}.json")["rows"]
        gains = [(row["round"], row["after"] - row["before"]) for row in rows if row["after"] is not None]
        found[label] = {GAIN: gains, LENGTH: [(row["round"], row["length"]) for row in rows]}
    return found


def _mean(row: dict[str, Any], point: str) -> float:
    return 100 * float(row["points"][point]["global_test"]["mean"])


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def draw(found: dict[str, dict[str, Curve]]) -> Figure:
    """Return a figure with a panel for the gains and one for the lengths."""
    figure = Figure(figsize=(8.8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, (label, of) in enumerate(found.items()):
        line = "--" if label in CODE else "-"
        for axis, name in ((left, GAIN), (right, LENGTH)):
            axis.plot(
                *zip(*of[name], strict=True),
                color=f"C{number}",
                linestyle=line,
                marker="." if len(of[name]) < 3 else None,
                label=label,
            )
    left.axhline(0, color="0.6", linewidth=0.8)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for axis, name in ((left, GAIN), (right, LENGTH)):
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("round")
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def main() -> None:
    with style("dffke"):
        draw(curves()).savefig(OUT, dpi=110)
    print(OUT)


if __name__ == "__main__":
    main()
