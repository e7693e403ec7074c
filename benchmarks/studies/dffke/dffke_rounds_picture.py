"""The picture of DFFKE on CIFAR-10: its clients' accuracy before and after each exchange, beside local training.

    python benchmarks/studies/dffke/dffke_rounds_picture.py

draws docs/results/dffke_cifar10.png from the kept records of `records/dffke_resnet18`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedaudit.reports.figures import style

RECORDS = Path(__file__).with_name("records") / "dffke_resnet18"
OUT = Path(__file__).resolve().parents[3] / "docs" / "results" / "dffke_cifar10.png"
Curve = list[tuple[int, float]]


def curves(seed: int) -> dict[str, Curve]:
    """Return accuracy on the common test set in %, by round: DFFKE's clients at both points, and local training."""
    ours, alone = (_rounds(f"{method}-{seed}") for method in ("dffke", "local"))
    found = {
        name: [(row["round"], 100 * row["points"][point]["global_test"]["mean"]) for row in ours]
        for name, point in (("before the exchange", "trained"), ("after the exchange", "exchanged"))
    }
    return {**found, "local training": [(row["round"], 100 * row["clients"]["mean"]) for row in alone]}


def _rounds(name: str) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = json.loads((RECORDS / f"{name}.json").read_text())["rounds"]
    return rounds


def draw(seeds: list[int]) -> Figure:
    """Return a figure with one panel for each seed."""
    figure = Figure(figsize=(4.2 * len(seeds), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, seed in zip(figure.subplots(1, len(seeds), sharey=True, squeeze=False)[0], seeds, strict=True):
        for (name, curve), colour in zip(curves(seed).items(), ("C0", "C3", "0.5"), strict=True):
            axis.plot(*zip(*curve, strict=True), color=colour, label=name, marker=".")
        axis.set(title=f"seed {seed}", xlabel="round")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("common test set, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    return figure


def main() -> None:
    seeds = sorted(int(path.stem.rpartition("-")[2]) for path in RECORDS.glob("dffke-*.json"))
    with style("dffke"):
        draw(seeds).savefig(OUT, dpi=110)
    print(OUT)


if __name__ == "__main__":
    main()
