"""The picture of docs/results/speed.md: the seconds of a round, one model after the other and together, line by line.

    python benchmarks/studies/speed/speed_picture.py

draws docs/results/speed.png from the kept records. The factors stand in the page's table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedaudit.reports.figures import style

sys.path.append(str(Path(__file__).parent))
from speed_table import PRECISIONS, UNTOLD, floors

KEPT = Path(__file__).with_name("records")
OUT = Path(__file__).resolve().parents[3] / "docs" / "results" / "speed.png"
LINES = {
    "fedavg": "FedAvg, ten ConvNets",
    "fedfree_cnn": "FedAvg, ten of FedFree's networks",
    "fedzge_row": "FedAvg, ten ResNet-18",
    "fedaf": "FedAF, Fashion-MNIST",
    "fedaf_cifar10": "FedAF, CIFAR-10",
    "dfrd": "DFRD, ten ConvNets",
    "dffke": "DFFKE, ten ConvNets, first round",
    "dffke_resnet18": "DFFKE, ten ResNet-18, few epochs",
    "shadows": "64 shadows",
    "decoders": "attack decoder, ten clients",
    "matching": "attack gradient_match, ten clients",
}
MARKERS = {"one after the other": "o", "together": "s", "together, compiled": "^", "floor": "|"}
COLOURS = {"float32": "0.35", "TF32": "C0", "bf16": "C3"}


@dataclass(frozen=True)
class Point:
    """What one way of carrying out a line took, in seconds."""

    line: str
    how: str
    precision: str
    seconds: float


def how(way: str) -> str:
    """Return in words how a way trains its models."""
    if way.startswith(("serial", "one_by_one")):
        return "one after the other"
    return "together, compiled" if way.endswith("compiled") else "together"


def points() -> list[Point]:
    """Return every way of every line that the picture has. Ways that train eagerly, but together, are left out."""
    found = []
    for line in LINES:
        figures: dict[str, Any] = json.loads((KEPT / f"{line}.json").read_text())
        if "one_by_one_s" in figures:
            figures = {"one_by_one": {"s": figures["one_by_one_s"]}, **figures}
        for way, of in figures.items():
            if isinstance(of, dict) and ("round_s" in of or "s" in of) and way != "stacked_eager":
                precision = PRECISIONS[of.get("precision", UNTOLD.get(line))]
                found.append(Point(line, how(way), precision, of["round_s"] if "round_s" in of else of["s"]))
    return found


def least() -> list[Point]:
    """Return the floor of each line in each precision in which it was measured."""
    counted = floors(KEPT)
    measured = {(point.line, point.precision) for point in points()}
    keys = {name: key for key, name in PRECISIONS.items()}
    found = []
    for line, precision in sorted(measured):
        own = json.loads((KEPT / f"{line}.json").read_text()).get("floor_s", {})
        found.append(Point(line, "floor", precision, {**counted.get(line, {}), **own}[keys[precision]]))
    return found


def draw() -> Figure:
    """Return a figure with a row for each line."""
    figure = Figure(figsize=(8.6, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    rows = {line: len(LINES) - i for i, line in enumerate(LINES)}
    for point in [*least(), *points()]:
        (drawn,) = axis.plot([point.seconds], [rows[point.line]], MARKERS[point.how], color=COLOURS[point.precision])
        drawn.set(label=point.how, markersize=13 if point.how == "floor" else 6, alpha=0.85)
    axis.set(xscale="log", xlim=(0.001, 100), xlabel="seconds of a round, or of the whole work of shadows and attacks")
    axis.set_yticks(list(rows.values()), list(LINES.values()))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    shapes = [Line2D([], [], marker=m, color="0.35", linestyle="", label=name) for name, m in MARKERS.items()]
    shades = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=[*shapes, *shades], loc="outside upper center", ncols=7, fontsize=8, columnspacing=1.0)
    return figure


def main() -> None:
    with style("speed"):
        draw().savefig(OUT, dpi=110)
    print(OUT)


if __name__ == "__main__":
    main()
