"""Figures: SVG for the page, which takes the page's colours, and SVG and PNG files for a paper."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fedaudit.data.plot import bubbles
from fedaudit.errors import RunError
from fedaudit.reports.attack_rows import Found, attacks_of
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.row_comparisons import pareto
from fedaudit.reports.runs import Run
from fedaudit.reports.summary_rows import SummaryRow, curve
from fedaudit.runtime.attack_result import MembershipResult
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.folder import MARKER
from fedaudit.stats import mean_std
from fedaudit.units import bytes_text

Series = dict[int, list[float]]  # by round: the values of all seeds
INK, FAINT, PAPER = "#262b33", "#dfe3e8", "#fefefe"
SERIES = ("#1f5fa8", "#c8551b", "#1d8a63", "#9a4a97", "#b8860b", "#3a93b8", "#7a5230", "#5d6674")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":", "-.")
# Every colour of a figure and the page's name for it. The page decides between light and dark.
NAMES = {
    INK: "--ink", FAINT: "--line", PAPER: "--paper", "#333333": "--ink", "#e4e7eb": "--line", "#fbfcfd": "--paper",
    "#2f6f9f": "--s0", "#ffffff": "--paper", **{colour: f"--s{i}" for i, colour in enumerate(SERIES)},
}  # fmt: skip
STYLE = {
    "text.parse_math": False,  # a user's name must not be read as a formula
    "svg.fonttype": "none", "font.size": 9.5, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": FAINT, "grid.linewidth": 0.7, "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0,
    "ytick.minor.size": 0, "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    "legend.frameon": False, "legend.fontsize": 9, "axes.titlesize": 10, "axes.titlelocation": "left",
}  # fmt: skip


@contextmanager
def style(salt: str = "fedaudit") -> Iterator[None]:
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        yield


@dataclass(frozen=True)
class Look:
    """The look of a row in all figures: a method has a colour, its privacy settings have markers and dashes."""

    index: int
    colour: str
    marker: str
    dash: str


def looks(rows: Sequence[SummaryRow]) -> list[Look]:
    methods = list(dict.fromkeys(row.group.method for row in rows))
    seen: dict[str, int] = {}
    made = []
    for row in rows:
        method, variant = methods.index(row.group.method), seen.get(row.group.method, 0)
        seen[row.group.method] = variant + 1
        marker = MARKERS[(variant + method // len(SERIES)) % len(MARKERS)]
        made.append(Look(method % len(SERIES), SERIES[method % len(SERIES)], marker, DASHES[variant % len(DASHES)]))
    return made


# --- trade-offs --------------------------------------------------------------------------------------------------


def tradeoff(rows: Sequence[SummaryRow]) -> Figure:
    """Draw accuracy against the ledger's epsilon, and against what the best membership attack found."""
    figure, (left, right) = _panels(2)
    kept = [
        row for row in rows if row.cells["epsilon"].value != 0
    ]  # sending nothing guarantees nothing about the models
    _scatter(left, kept, "epsilon", "ε by the ledger, worst client (∞: nothing guaranteed)", broken=True, of=rows)
    _scatter(right, rows, "auc", "AUC of the best membership attack (0.5: a coin flip)")
    right.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    right.axvline(0.5, color=INK, linewidth=0.8, linestyle=":")
    left.set_title("What is guaranteed")
    right.set_title("What was found")
    _legend(figure, rows)
    return figure


def against_bytes(rows: Sequence[SummaryRow]) -> Figure:
    """Draw accuracy against the bytes that a client sends in a round, and against all bytes as a run goes on."""
    figure, (left, right) = _panels(2)
    _scatter(left, rows, "up", "bytes that one client sends in one round", broken=True, show=_round_bytes)
    left.set_title("What a round costs")
    for row, look in zip(rows, looks(rows), strict=True):
        for j, run in enumerate(row.group.runs):
            points = [(total, score) for total, score in _spent(run) if total > 0]
            if points:
                xs, ys = zip(*points, strict=True)
                mark = {"marker": look.marker, "markersize": 4, "markevery": [-1]}
                right.plot(
                    xs, ys, color=look.colour, linestyle=look.dash, linewidth=1.6, alpha=1 if j == 0 else 0.5, **mark
                )
    right.set(xscale="log", xlabel="all bytes so far, both ways, all clients", ylabel="accuracy", ylim=(0, 1.02))
    right.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _round_bytes(v)))
    right.margins(x=0.08)
    low, high = right.get_xlim()
    right.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    right.xaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    right.set_title("As a run goes on, one line per seed")
    _legend(figure, rows)
    return figure


def _spent(run: Run) -> list[tuple[int, float]]:
    """Return the payload sent up to each evaluated round, and the accuracy after it."""
    scores = dict(zip(*curve(run), strict=True))
    total, points = 0, []
    for row in run.record.rounds:
        total += row.up_payload + row.down_payload
        if row.round in scores:
            points.append((total, scores[row.round]))
    return points


def _round_bytes(n: float) -> str:
    return bytes_text(n).replace(".00", "")


def _panels(count: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    return figure, figure.subplots(1, count)


def _scatter(
    axes: Axes,
    rows: Sequence[SummaryRow],
    key: str,
    label: str,
    broken: bool = False,
    show: Callable[[float], str] | None = None,
    of: Sequence[SummaryRow] = (),
) -> None:
    drawn = {row.label: look for row, look in zip(of or rows, looks(of or rows), strict=True)}
    points = [(row, row.cells[key], row.cells["accuracy"]) for row in rows]
    points = [(row, x, y) for row, x, y in points if x.value is not None and y.value is not None]
    place = _broken(axes, [x.value for _, x, _ in points if x.value is not None], show) if broken else lambda v: v
    xs = [place(x.value) for _, x, _ in points]
    if broken:
        xs = _apart(xs)
    for at, (row, x, y) in zip(xs, points, strict=True):
        _point(axes, at, None if broken else x, y, drawn[row.label])
    if key == "epsilon":
        _join(axes, xs, [(row, y.value or 0.0) for row, _, y in points], drawn)
    else:
        _front(axes, xs, [(x.value or 0.0, y.value or 0.0) for _, x, y in points])
    if broken and xs:  # marks near the edge must not be cut
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, min(xs) - 0.15), max(high, max(xs) + 0.15))
    axes.set(xlabel=label, ylabel="accuracy", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    if not points:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)


def _join(axes: Axes, xs: Sequence[float], points: Sequence[tuple[SummaryRow, float]], drawn: dict[str, Look]) -> None:
    """Draw a curve per method and data over epsilon, through its settings from strict to open."""
    curves: dict[tuple[Any, ...], list[tuple[float, float, Look]]] = {}
    for at, (row, y) in zip(xs, points, strict=True):
        curves.setdefault((row.group.method, row.group.arena), []).append((at, y, drawn[row.label]))
    for of in curves.values():
        if len(of) > 1:
            of.sort(key=lambda point: point[0])
            axes.plot([p[0] for p in of], [p[1] for p in of], color=of[0][2].colour, linewidth=1.4, zorder=1)


def _front(axes: Axes, xs: Sequence[float], points: Sequence[tuple[float, float]]) -> None:
    """Draw a line through the settings that no other beats in both, by their means."""
    front = pareto(points)
    if len(front) > 1:
        ys = [points[j][1] for j in front]
        axes.plot(
            [xs[j] for j in front], ys, color=INK, linewidth=1.1, linestyle="--", zorder=1, drawstyle="steps-post"
        )


def _apart(xs: Sequence[float], step: float = 0.09) -> list[float]:
    """Equal places moved a little, so that marks stand beside each other and not behind."""
    moved = []
    for i, x in enumerate(xs):
        same = [j for j, other in enumerate(xs) if abs(other - x) < step / 2]
        apart = min(step, 0.6 / len(same))  # many at one place stay near it
        moved.append(x + apart * (same.index(i) - (len(same) - 1) / 2))
    return moved


def _point(axes: Axes, at: float, x: ReportCell | None, y: ReportCell, look: Look) -> None:
    def around(cell: ReportCell | None, value: float) -> list[list[float]] | None:
        if cell is None or cell.low is None or cell.high is None:
            return None
        return [[max(0.0, value - cell.low)], [max(0.0, cell.high - value)]]

    assert y.value is not None
    bars = axes.errorbar(
        at, y.value, xerr=around(x, at), yerr=around(y, y.value), fmt=look.marker, color=look.colour, markersize=7.5,
        elinewidth=1.1, markeredgecolor=PAPER, markeredgewidth=0.8, zorder=3,
    )  # fmt: skip
    for line in bars[2]:
        line.set_alpha(0.45)
        line.set_zorder(2)


def _broken(axes: Axes, values: Sequence[float], show: Callable[[float], str] | None) -> Callable[[Any], float]:
    """Make a logarithmic axis with a place for 0 at its left and for infinity at its right."""
    show = show or (lambda v: f"{v:g}")  # labels of powers of ten
    finite = [v for v in values if 0 < v < math.inf]
    low = math.floor(math.log10(min(finite))) if finite else 0
    high = max(math.ceil(math.log10(max(finite))) if finite else 1, low + 1)
    ticks = {float(p): show(10.0**p) for p in range(low, high + 1, max(1, (high - low) // 4))}
    if any(v == 0 for v in values):
        ticks[low - 0.8] = show(0)
        axes.axvline(low - 0.4, color=FAINT, linewidth=1.5, linestyle=":")
    if any(math.isinf(v) for v in values):
        ticks[high + 0.8] = "∞"
        axes.axvline(high + 0.4, color=FAINT, linewidth=1.5, linestyle=":")
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: ticks.get(v, "")))
    axes.set_xlim(min(ticks) - 0.3, max(ticks) + 0.3)

    def place(value: float) -> float:
        if value == 0:
            return low - 0.8
        return high + 0.8 if math.isinf(value) else math.log10(value)

    return place


def _legend(figure: Figure, rows: Sequence[SummaryRow], lines: bool = False) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=look.colour,
            marker=None if lines else look.marker,
            linestyle=look.dash if lines else "",
            linewidth=2,
            markersize=7.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.8,
            label=row.label,
        )
        for row, look in zip(rows, looks(rows), strict=True)
        if row.cells["accuracy"].value is not None  # it has a mark in the figure
    ]
    if not lines:
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.1, label="Pareto front of the means"))
    columns = 1 if max(len(row.label) for row in rows) > 60 else 2 if len(rows) < 9 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1.8, columnspacing=2.2)


# --- curves ------------------------------------------------------------------------------------------------------


def per_round(rows: Sequence[SummaryRow]) -> Figure:
    """Draw accuracy after each round, mean over seeds. The band runs from the worst seed to the best."""
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for row, look in zip(rows, looks(rows), strict=True):
        runs = [curve(run) for run in row.group.runs]
        rounds = sorted(set.intersection(*(set(ts) for ts, _ in runs))) if runs else []
        each = [[scores[ts.index(t)] for t in rounds] for ts, scores in runs]
        if not rounds:
            continue
        columns = list(zip(*each, strict=True))
        style_: dict[str, Any] = {"marker": "o", "markersize": 4} if len(rounds) == 1 else {}
        middle = [mean_std(c)[0] for c in columns]
        axes.plot(rounds, middle, color=look.colour, linewidth=2, linestyle=look.dash, **style_)
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(rounds, low, high, color=look.colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    _legend(figure, rows, lines=True)
    return figure


def inside(row: SummaryRow) -> Figure | None:
    """Draw what a method measured in its own rounds, mean over seeds: the global model at its points of a round on the
    left, its diagnostics on the right. Return None for a method that has neither."""
    models, numbers = dict[str, Series](), dict[str, Series]()
    for run in row.group.runs:
        for at in run.record.rounds:
            scores = dict(at.utility.global_points) if at.utility else {}
            if scores and at.utility and at.utility.global_:
                scores["after the round"] = at.utility.global_
            for name, score in scores.items():
                models.setdefault(name, {}).setdefault(at.round, []).append(score.test.accuracy)
            for name, value in at.diagnostics.items():
                numbers.setdefault(name, {}).setdefault(at.round, []).append(value)
    panels = [(of, title) for of, title in ((models, "global model, accuracy"), (numbers, "diagnostics")) if of]
    if not panels:
        return None
    figure = Figure(figsize=(5.8 * len(panels), 3.4), layout="constrained")
    for axes, (of, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for i, (name, values) in enumerate(of.items()):
            rounds = sorted(values)
            marker = {"marker": "o", "markersize": 4} if len(rounds) == 1 else {}
            means = [mean_std(values[t])[0] for t in rounds]
            axes.plot(
                rounds, means, color=SERIES[i % len(SERIES)], linewidth=1.8, label=name.replace("_", " "), **marker
            )
        axes.set(xlabel="round", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def roc(row: SummaryRow, most: int = 3) -> Figure | None:
    """Draw ROC curves of the best membership attacks and the best baseline, on logarithmic axes: the left counts."""
    able = [f for f in attacks_of(row.group) if f.claims == "membership" and f.estimates("auc")]
    able = sorted(able, key=lambda f: -(f.cell("auc").value or 0.0))
    able = [f for f in able if not f.blind][:most] + [f for f in able if f.blind][:1]
    results = [(f, [r for r in f.results.values() if isinstance(r, MembershipResult)]) for f in able]
    curves = [(f, [r.pooled.roc for r in of if r.pooled.roc]) for f, of in results]
    curves = [(f, of) for f, of in curves if of]
    if not curves:
        return None
    figure = Figure(figsize=(4.6, 5.2))
    axes = figure.add_axes((0.155, 0.28, 0.8, 0.708))
    floor = min([v for _, of in curves for c in of for v in (*c.fpr, *c.tpr) if v > 0], default=1e-3)
    floor = 10.0 ** math.floor(math.log10(floor))
    axes.plot([floor, 1], [floor, 1], color=INK, linewidth=0.9, linestyle=":", label="guessing")
    for i, (found, of) in enumerate(curves):
        for j, points in enumerate(of):
            x, y = (np.maximum(rates, floor) for rates in (points.fpr, points.tpr))
            label = _attack_label(found) if j == 0 else None
            dash = "--" if found.blind else "-"
            axes.step(x, y, where="post", color=SERIES[i], linewidth=1.4, alpha=0.85, linestyle=dash, label=label)
    axes.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(floor, 1))
    axes.set(xlabel="others wrongly named (FPR)", ylabel="training records named (TPR)")
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: "" if v <= floor else f"{100 * v:g} %"))
    figure.legend(loc="lower left", bbox_to_anchor=(0.1, 0.0), fontsize=8.5)
    return figure


def _attack_label(found: Found) -> str:
    blind = " (looks at nothing)" if found.blind else ""
    return f"{found.name}: AUC {found.cell('auc').value:.2f}{blind}"


def partition(row: SummaryRow) -> Figure | None:
    counts = row.first.data.counts
    if not counts:
        return None
    names = row.first.data.class_names
    return bubbles(np.array(counts), None, title="", class_names=names if names else None)


# --- output ------------------------------------------------------------------------------------------------------


def svg_text(figure: Figure, name: str) -> str:
    """Return the figure as SVG text. The same figure gives the same text."""
    _laid_out(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _laid_out(figure: Figure) -> None:
    """Lay out the figure once, as `savefig` would do each time, with a drawing of everything in vain."""
    if (layout := figure.get_layout_engine()) is not None:
        FigureCanvasSVG(figure)
        figure.set_dpi(72)
        layout.execute(figure)
        figure.set_layout_engine(None)


def inline(figure: Figure, name: str) -> str:
    """Return SVG to put into a page, with the page's colours and font, and with ids of its own."""
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", svg_text(figure, name), flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]+; ", "", text)
    for colour_, variable in NAMES.items():
        text = text.replace(colour_, f"var({variable})")
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r"(url\(#|href=\"#)([\w-]+)", lambda m: f"{m[1]}{name}-{m[2]}", text)
    text = re.sub(r"(\d+\.\d\d)\d+", r"\1", text)  # a hundredth of a point is finer than a screen
    return re.sub(r"\s*\n\s*", "\n", text).replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def figures_of(rows: Sequence[SummaryRow]) -> dict[str, Figure]:
    """Return all figures of a report by file name."""
    made: dict[str, Figure | None] = {}
    with style():
        made = {"tradeoff": tradeoff(rows), "bytes": against_bytes(rows), "rounds": per_round(rows)}
        for i, row in enumerate(rows):
            made[f"roc-{i + 1}"] = roc(row)
        methods = {row.group.method: i for i, row in reversed(list(enumerate(rows)))}
        for i in sorted(methods.values()):
            made[f"partition-{i + 1}"] = partition(rows[i])
    return {name: figure for name, figure in made.items() if figure is not None}


def write_figures(rows: Sequence[SummaryRow], folder: Path) -> list[Path]:
    """Write each figure as SVG and PNG into a folder of the report's own. Other files are never replaced."""
    figures = figures_of(rows)
    names = [f"{name}.{suffix}" for name in figures for suffix in ("svg", "png")]
    links = [path for path in (folder, *(folder / name for name in (*names, MARKER))) if path.is_symlink()]
    there = [name for name in names if (folder / name).exists()]
    if links or (there and not (folder / MARKER).is_file()):
        what = f"{links[0]} is a symbolic link" if links else f"{folder} holds {there[0]}, which is not from a report"
        raise RunError(f"{what} (there is no {MARKER}). Nothing was changed. Choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / MARKER, b"fedaudit figures 1\n")
    written = []
    for name, figure in figures.items():
        for suffix in ("svg", "png"):
            path = folder / f"{name}.{suffix}"
            with style(name):
                _laid_out(figure)
                figure.savefig(path, dpi=200, metadata={"Date": None} if suffix == "svg" else None)
            written.append(path)
    return written
