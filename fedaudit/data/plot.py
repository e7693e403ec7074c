"""A picture of the partition: how many records of each class each client holds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedaudit.errors import SettingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _FAINT, _PAPER, _FILL = "#333333", "#e4e7eb", "#fbfcfd", "#2f6f9f"


def bubbles(
    counts: np.ndarray, path: Path | str | None, *, title: str, class_names: Sequence[str] | None = None
) -> Figure:
    """Draw the records per client (x) and class (y) as bubbles whose area is the count, and return the figure.

    It is also written to `path` (.png or .svg), if that is given.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a class's name does not start a formula
        return _bubbles(counts, path, title, class_names)


def _bubbles(counts: np.ndarray, path: Path | str | None, title: str, class_names: Sequence[str] | None) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    counts = np.asarray(counts)
    if counts.ndim != 2 or not counts.size or (counts < 0).any():
        raise SettingError(
            f"Bubble plot: the counts have shape {counts.shape}; give a table clients x classes, none negative."
        )
    clients, classes = counts.shape
    if class_names is not None and len(class_names) != classes:
        raise SettingError(
            f"Bubble plot: there are {len(class_names)} class names for {classes} classes; give one for each class."
        )
    target = None if path is None else Path(path)
    if target is not None and target.suffix.lower() not in (".png", ".svg"):
        raise SettingError(f"Bubble plot: cannot write {target}; the name has to end in .png or .svg.")

    # All lengths are in inches. A cell is as large as the page allows; only as many labels are written as then fit.
    cell_w, cell_h = min(0.62, 10.0 / clients), min(0.36, 11.0 / classes)
    wide, high = max(clients * cell_w, 2.4), max(classes * cell_h, 2.0)
    cell_w, cell_h = wide / clients, high / classes
    labels = [str(c) for c in range(classes)] if class_names is None else [_short(name) for name in class_names]
    step_x, step_y = _step(clients, wide / (0.1 * len(str(clients - 1)) + 0.14)), _step(classes, high / 0.17)
    heading = textwrap.wrap(title, max(int((wide + 1.2) / 0.085), 24))
    left, right = 0.62 + 0.075 * max(len(labels[c]) for c in range(0, classes, step_y)), 1.25
    bottom, top = 0.62, 0.25 + 0.2 * len(heading)
    width, height = left + wide + right, bottom + high + top

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    axes = figure.add_axes((left / width, bottom / height, wide / width, high / height), facecolor=_PAPER)
    largest = max(float(counts.max()), 1.0)
    # The diameter for the largest count, in points. If cells are tiny, a few large bubbles may overlap the next cell.
    diameter = min(0.92 * 72 * max(min(cell_w, cell_h), min(0.1, math.sqrt(cell_w * cell_h))), 26.0)
    client, kind = np.nonzero(counts)
    # No count above 0 may be invisible: a bubble is never thinner than 1.3 points.
    areas = np.maximum(diameter**2 * counts[client, kind] / largest, 1.3**2)
    axes.scatter(
        client,
        kind,
        s=areas,
        color=_FILL,
        alpha=0.85,
        linewidths=(0.3 * (areas > 9)).tolist(),
        edgecolors="white",
        zorder=3,
    )

    axes.set_xlim(-0.5, clients - 0.5)
    axes.set_ylim(classes - 0.5, -0.5)  # class 0 on top, as in a table
    axes.set_xticks(range(0, clients, step_x))
    axes.set_yticks(range(0, classes, step_y), labels[::step_y])
    axes.grid(color=_FAINT, linewidth=0.6, zorder=0)
    axes.tick_params(length=0, labelsize=8, colors=_INK)
    for spine in axes.spines.values():
        spine.set_color(_FAINT)
    axes.set_xlabel("client", fontsize=9, color=_INK)
    axes.set_ylabel("class", fontsize=9, color=_INK)
    figure.text(left / width, 1 - 0.12 / height, "\n".join(heading), va="top", fontsize=11, color=_INK)

    sizes = _legend_sizes(int(largest))
    points = [diameter * math.sqrt(n / largest) for n in sizes]
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=max(d, 1.3), color=_FILL, alpha=0.85, markeredgewidth=0)
        for d in points
    ]
    legend = axes.legend(
        handles,
        [f"{n:,}" for n in sizes],
        title="records",
        loc="upper left",
        alignment="left",
        bbox_to_anchor=(1.0 + 0.15 / wide, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        labelcolor=_INK,
        labelspacing=max(0.5, points[0] / 8 - 0.4),
        handlelength=max(points[0] / 8, 0.8),  # in units of the font size
        handletextpad=0.7,
        borderpad=0.0,
    )
    legend.get_title().set_color(_INK)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        fixed = {"Date": None} if target.suffix.lower() == ".svg" else None  # same counts, same bytes
        with matplotlib.rc_context({"svg.hashsalt": "fedaudit", "text.parse_math": False}):
            figure.savefig(target, metadata=fixed)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"


def _step(items: int, room: float) -> int:
    """Return 1, 2, 5, 10, ...: labelling every item at this distance writes at most `room` labels."""
    steps = (base * 10**power for power in range(9) for base in (1, 2, 5))
    return next(step for step in steps if math.ceil(items / step) <= max(room, 1))


def _legend_sizes(largest: int) -> list[int]:
    """Return the largest count and two or three round numbers below it."""

    def round_down(value: float) -> int:
        power = 10 ** int(math.log10(value))
        return max(base for base in (1, 2, 5) if base * power <= value) * power

    smaller = [round_down(largest * share) for share in (0.5, 0.15, 0.03) if largest * share >= 1]
    return [largest, *sorted(set(smaller) - {largest}, reverse=True)]
