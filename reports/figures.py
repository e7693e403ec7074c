"""Figures: SVG for the page, which takes the page's colours, and SVG and PNG files for a paper."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fedaudit.data.plot import bubbles
from fedaudit.errors import RunError
from fedaudit.reports.attack_rows import Found, attacks_of
from fedaudit.reports.cell import ReportCell
from fedaudit.reports.figure_labels import LINE, Label, label_beside
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

WIDE = 34  # characters of a label's line


def relied_on(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the rows without those that are not to be relied on. Figures that compare rows leave these out."""
    return [row for row in rows if not row.doubts]


def privacy_utility(rows: Sequence[SummaryRow]) -> Figure:
    """Draw accuracy against the ledger's epsilon: the picture of the first screen."""
    kept = _guaranteeing(rows)
    figure = Figure(figsize=(5.2, _height(len(_curves(kept)), 3.5)))
    _over_epsilon(figure.add_axes((0.125, 0.14, 0.51, 0.83)), kept, rows, 26)
    return figure


def tradeoff(rows: Sequence[SummaryRow]) -> Figure:
    """Draw accuracy against the ledger's epsilon, and against what the best membership attack found."""
    kept = _guaranteeing(rows)
    figure, (left, right) = _panels(len(rows))
    _over_epsilon(left, kept, rows)
    _scatter(right, relied_on(rows), "auc", "AUC of the best membership attack (0.5: a coin flip)", of=rows)
    right.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    right.axvline(0.5, color=INK, linewidth=0.8, linestyle=":")
    left.set_title("What is guaranteed")
    right.set_title("What was found")
    return figure


def _guaranteeing(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the rows without those that send nothing: that guarantees nothing about the models."""
    return [row for row in relied_on(rows) if row.cells["epsilon"].value != 0]


def _over_epsilon(axes: Axes, kept: Sequence[SummaryRow], of: Sequence[SummaryRow], width: int = WIDE) -> None:
    words = "ε by the ledger, worst client (∞: no guarantee)"
    _scatter(axes, kept, "epsilon", words, broken=True, of=of, width=width)


def against_bytes(rows: Sequence[SummaryRow]) -> Figure:
    """Draw accuracy against the bytes that a client sends in a round, and against all bytes as a run goes on."""
    figure, (left, right) = _panels(len(rows))
    words = "bytes that one client sends in one round"
    _scatter(left, relied_on(rows), "up", words, broken=True, show=_round_bytes, of=rows)
    left.set_title("What a round costs")
    ends: list[Label] = []
    scores: list[float] = []
    for row, look in zip(rows, looks(rows), strict=True):
        if row.doubts:
            continue
        for j, run in enumerate(row.group.runs):
            points = [(total, score) for total, score in _spent(run) if total > 0]
            if points:
                xs, ys = zip(*points, strict=True)
                mark = {"marker": look.marker, "markersize": 4, "markevery": [-1]}
                right.plot(
                    xs, ys, color=look.colour, linestyle=look.dash, linewidth=1.6, alpha=1 if j == 0 else 0.5, **mark
                )
                scores += ys
                ends += [Label(xs[-1], ys[-1], row.label, look.colour)] if j == 0 else []
    right.set(xscale="log", xlabel="all bytes so far, both ways, all clients", ylabel="accuracy")
    right.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _round_bytes(v)))
    right.margins(x=0.08)
    low, high = (math.log10(end) for end in right.get_xlim())
    right.xaxis.set_major_locator(FixedLocator(_round_values(low, high)))
    right.xaxis.set_minor_locator(NullLocator())
    _fit_accuracy(right, scores)
    right.set_title("As a run goes on, one line per seed")
    label_beside(right, ends, WIDE)
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


def _height(labels: int, least: float = 4.0) -> float:
    """Return inches that leave room for so many labels of two lines."""
    return max(least, 1.0 + labels * 2 * LINE / 72)


def _panels(labels: int) -> tuple[Figure, Any]:
    """Return a figure with two panels, each with room for labels at its right."""
    figure = Figure(figsize=(12.4, _height(labels)))
    return figure, [figure.add_axes((x, 0.13, 0.265, 0.79)) for x in (0.055, 0.565)]


def _scatter(
    axes: Axes,
    rows: Sequence[SummaryRow],
    key: str,
    label: str,
    broken: bool = False,
    show: Callable[[float], str] | None = None,
    of: Sequence[SummaryRow] = (),
    width: int = WIDE,
) -> None:
    """Draw each row's accuracy against one of its figures, at its true place, with its label beside the axes."""
    numbered = {row.label: (i, look) for i, (row, look) in enumerate(zip(of or rows, looks(of or rows), strict=True))}
    points = [(row, row.cells[key], row.cells["accuracy"]) for row in rows]
    points = [(row, x, y) for row, x, y in points if x.value is not None and y.value is not None]
    place = _broken(axes, [x.value for _, x, _ in points if x.value is not None], show) if broken else lambda v: v
    xs = [place(x.value) for _, x, _ in points]
    for at, (row, x, y) in zip(xs, points, strict=True):
        number, look = numbered[row.label]
        _point(axes, at, None if broken else x, y, look, f"point-{number}")
    axes.set(xlabel=label, ylabel="accuracy")
    _fit_accuracy(axes, [end for _, _, y in points for end in (y.value, y.low, y.high) if end is not None])
    if not points:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
    if key == "epsilon":
        labels = _join(axes, xs, [(row, y.value or 0.0) for row, _, y in points], numbered)
    else:
        if not broken:
            ends = [end for _, x, _ in points for end in (x.value, x.low, x.high) if end is not None]
            _fit(axes.set_xlim, [*ends, 0.5], 0.01)
        _front(axes, xs, [(x.value or 0.0, y.value or 0.0) for _, x, y in points])
        labels = [
            Label(at, y.value or 0.0, _name(row), numbered[row.label][1].colour)
            for at, (row, _, y) in zip(xs, points, strict=True)
        ]
    label_beside(axes, labels, width)


def _fit(set_limits: Callable[[float, float], Any], values: Sequence[float], least: float) -> None:
    """Set the limits of an axis so that these values fill it, apart from a little room at both ends."""
    if values:
        room = max(least, 0.06 * (max(values) - min(values)))
        set_limits(min(values) - room, max(values) + room)


def _fit_accuracy(axes: Axes, values: Sequence[float]) -> None:
    _fit(axes.set_ylim, values, 0.01)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %" if 0 <= v <= 1 else ""))


def _name(row: SummaryRow) -> str:
    return f"{row.label} (refuted)" if row.refuted else row.label


def _curve_of(row: SummaryRow) -> tuple[Any, ...]:
    """Return what the rows of one curve over epsilon share: everything but their privacy settings."""
    other = tuple((key, str(value)) for key, value in row.group.differs.items() if not key.startswith("privacy."))
    return (row.group.method, row.group.arena, other)


def _curves(rows: Sequence[SummaryRow]) -> dict[tuple[Any, ...], list[SummaryRow]]:
    found: dict[tuple[Any, ...], list[SummaryRow]] = {}
    for row in rows:
        found.setdefault(_curve_of(row), []).append(row)
    return found


def _join(
    axes: Axes, xs: Sequence[float], points: Sequence[tuple[SummaryRow, float]], numbered: dict[str, tuple[int, Look]]
) -> list[Label]:
    """Draw a curve for each method over epsilon, through its settings from strict to open; return a label for each."""
    places = {row.label: (at, y) for at, (row, y) in zip(xs, points, strict=True)}
    labels = []
    for (method, _, other), rows in _curves([row for row, _ in points]).items():
        of = sorted(places[row.label] for row in rows)
        colour = numbered[rows[0].label][1].colour
        if len(of) > 1:
            axes.plot([p[0] for p in of], [p[1] for p in of], color=colour, linewidth=1.4, zorder=1)
        named = " · ".join([method, *(f"{key}={value}" for key, value in other)])
        name = _name(rows[0]) if len(rows) == 1 else common_label([row.label for row in rows]) or named
        labels.append(Label(*of[-1], name, colour))
    return labels


def common_label(labels: Sequence[str]) -> str:
    """Return the words that all labels begin with, without what joins them to the next; empty if there are none."""
    beside = zip(*(label.split() for label in labels), strict=False)  # the first words, the second words, ...
    shared = takewhile(lambda words: len({word.rstrip(",") for word in words}) == 1, beside)
    return " ".join(words[0] for words in shared).strip(" ,·:(")


def _front(axes: Axes, xs: Sequence[float], points: Sequence[tuple[float, float]]) -> None:
    """Draw a line through the settings that no other beats in both, by their means."""
    front = pareto(points)
    if len(front) > 1:
        ys = [points[j][1] for j in front]
        axes.plot(
            [xs[j] for j in front], ys, color=INK, linewidth=1.1, linestyle="--", zorder=1, drawstyle="steps-post"
        )


def _point(axes: Axes, at: float, x: ReportCell | None, y: ReportCell, look: Look, name: str) -> None:
    def around(cell: ReportCell | None, value: float) -> list[list[float]] | None:
        if cell is None or cell.low is None or cell.high is None:
            return None
        return [[max(0.0, value - cell.low)], [max(0.0, cell.high - value)]]

    assert y.value is not None
    bars = axes.errorbar(
        at, y.value, xerr=around(x, at), yerr=around(y, y.value), fmt=look.marker, color=look.colour, markersize=7.5,
        elinewidth=1.1, markeredgecolor=PAPER, markeredgewidth=0.8, zorder=3,
    )  # fmt: skip
    bars[0].set_gid(name)
    for line in bars[2]:
        line.set_alpha(0.45)
        line.set_zorder(2)


def _broken(axes: Axes, values: Sequence[float], show: Callable[[float], str] | None) -> Callable[[Any], float]:
    """Make a logarithmic axis that fits the values, with a place for 0 at its left and for infinity at its right."""
    show = show or (lambda v: f"{v:g}")
    finite = [math.log10(v) for v in values if 0 < v < math.inf]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    aside = max(0.3, 0.2 * (high - low))  # from the last finite value to the place of 0 or of infinity
    ticks = {math.log10(v): show(v) for v in _round_values(low, high)} if finite else {}
    ends = [low, high] if finite else []
    if any(v == 0 for v in values):
        ticks[low - aside] = show(0)
        ends.append(low - aside)
        axes.axvline(low - aside / 2, color=FAINT, linewidth=1.5, linestyle=":")
    if any(math.isinf(v) for v in values):
        ticks[high + aside] = "∞"
        ends.append(high + aside)
        axes.axvline(high + aside / 2, color=FAINT, linewidth=1.5, linestyle=":")
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: ticks.get(v, "")))
    if ends:
        axes.set_xlim(min(ends) - aside / 3, max(ends) + aside / 3)

    def place(value: float) -> float:
        if value == 0:
            return low - aside
        return high + aside if math.isinf(value) else math.log10(value)

    return place


def _round_values(low: float, high: float) -> list[float]:
    """Return round numbers from 10**low to 10**high, a little beyond both ends: at least one, and at most six."""
    for steps, edge in (((1, 2, 3, 4, 5, 6, 8), 0.02), ((1, 2, 5), 0.04), ((1, 3), 0.08), ((1,), 0.1)):
        all_ = [s * 10.0**p for p in range(math.floor(low) - 1, math.ceil(high) + 1) for s in steps]
        found = [v for v in all_ if low - edge <= math.log10(v) <= high + edge]
        if 2 <= len(found) <= 6:
            return found
    powers = [10.0**p for p in range(math.ceil(low), math.floor(high) + 1)]
    return powers[:: max(1, math.ceil(len(powers) / 6))] or [float(f"{10 ** ((low + high) / 2):.2g}")]


# --- curves ------------------------------------------------------------------------------------------------------


def per_round(rows: Sequence[SummaryRow]) -> Figure:
    """Draw accuracy after each round, mean over seeds. The band runs from the worst seed to the best."""
    figure = Figure(figsize=(12.4, _height(len(rows))))
    axes = figure.add_axes((0.055, 0.13, 0.72, 0.84))
    ends: list[Label] = []
    scores_: list[float] = []
    for row, look in zip(rows, looks(rows), strict=True):
        runs = [] if row.doubts else [curve(run) for run in row.group.runs]
        runs = [(ts, scores) for ts, scores in runs if ts]
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
        ends.append(Label(rounds[-1], middle[-1], row.label, look.colour))
        scores_ += [*low, *high]
    axes.set(xlabel="round", ylabel="accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    _fit_accuracy(axes, scores_)
    label_beside(axes, ends, WIDE)
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
    text = re.sub(
        r' id="(point-\d+|[xy]tick_\d+)"', r' data-mark="\1"', text
    )  # whoever checks a place finds marks and ticks
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r"(url\(#|href=\"#)([\w-]+)", lambda m: f"{m[1]}{name}-{m[2]}", text)
    text = re.sub(r"(\d+\.\d\d)\d+", r"\1", text)  # a hundredth of a point is finer than a screen
    return re.sub(r"\s*\n\s*", "\n", text).replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def figures_of(rows: Sequence[SummaryRow]) -> dict[str, Figure]:
    """Return all figures of a report by file name."""
    made: dict[str, Figure | None] = {}
    with style():
        made = {
            "privacy": privacy_utility(rows),
            "tradeoff": tradeoff(rows),
            "bytes": against_bytes(rows),
            "rounds": per_round(rows),
        }
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
