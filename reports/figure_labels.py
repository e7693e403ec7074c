"""Labels beside a figure: each has a thin line to the true place of its mark, and no mark is moved for a label.

Marks at one place share a label that names them all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes

SIZE = 8.0  # points
LINE = 1.18 * SIZE  # points from one line of text to the next
NEAR = 0.012  # marks within this share of both axes count as one place


@dataclass(frozen=True)
class Label:
    """A text and the place of its mark, in the units of the data."""

    x: float
    y: float
    text: str
    colour: str
    bold: bool = False


def label_beside(axes: Axes, labels: Sequence[Label], width: int, size: float = SIZE) -> None:
    """Write the labels to the right of the axes, at most `width` characters a line, none over another.

    Call it when the limits of the axes are final."""
    places = [_share(axes, label) for label in labels]
    shared, at = _merged(labels, places)
    lines = [textwrap.wrap(label.text, width, break_long_words=True, max_lines=4, placeholder=" …") for label in shared]
    height = axes.get_position().height * axes.figure.get_size_inches()[1] * 72  # type: ignore[union-attr]
    sizes = [LINE * size / SIZE * len(of) / height for of in lines]
    heights = spread([y for _, y in at], sizes)
    for label, text, y in zip(shared, lines, heights, strict=True):
        axes.annotate(
            "\n".join(text), xy=(label.x, label.y), xycoords="data", xytext=(1.03, y), textcoords="axes fraction",
            va="center", ha="left", fontsize=size, fontweight="bold" if label.bold else "normal", linespacing=1.05,
            annotation_clip=False, zorder=1,
            arrowprops={
                "arrowstyle": "-", "linewidth": 0.7, "color": label.colour, "alpha": 0.6, "shrinkA": 1, "shrinkB": 4,
                "relpos": (0.0, 0.5),
            },
        )  # fmt: skip


def _share(axes: Axes, label: Label) -> tuple[float, float]:
    x, y = (axes.transData + axes.transAxes.inverted()).transform((label.x, label.y))
    return float(x), float(y)


def _merged(
    labels: Sequence[Label], places: Sequence[tuple[float, float]]
) -> tuple[list[Label], list[tuple[float, float]]]:
    """Return one label for each place, with the texts of all marks there, and the places."""
    kept: list[Label] = []
    at: list[tuple[float, float]] = []
    for label, (x, y) in zip(labels, places, strict=True):
        same = next((i for i, (u, v) in enumerate(at) if abs(u - x) < NEAR and abs(v - y) < NEAR), None)
        if same is None:
            kept.append(label)
            at.append((x, y))
        elif label.text not in kept[same].text.split(", "):
            bold = kept[same].bold or label.bold
            kept[same] = replace(kept[same], text=f"{kept[same].text}, {label.text}", bold=bold)
    return kept, at


def spread(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Return the middles of boxes of these sizes, as near to the wanted ones as they can be without overlapping.

    Boxes that would overlap form a block, whose middle is the mean of what its boxes want; blocks that touch become
    one. The whole is then moved into 0 to 1 as far as it fits."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[list[int], float, float]] = []  # members from below, lower end, size
    for i in order:
        block = ([i], wanted[i] - sizes[i] / 2, sizes[i])
        while blocks and blocks[-1][1] + blocks[-1][2] > block[1]:
            members = [*blocks.pop()[0], *block[0]]
            below, shifts = 0.0, []
            for j in members:
                shifts.append(wanted[j] - sizes[j] / 2 - below)
                below += sizes[j]
            block = (members, sum(shifts) / len(shifts), below)
        blocks.append(block)
    found = [0.0] * len(wanted)
    for members, low, _ in blocks:
        for j in members:
            found[j] = low + sizes[j] / 2
            low += sizes[j]
    return _packed(found, sizes, order)


def _packed(found: Sequence[float], sizes: Sequence[float], order: Sequence[int]) -> list[float]:
    """Return the boxes moved into 0 to 1: from below as far up as they must, then from above as far down."""
    moved = list(found)
    end = 0.0
    for i in order:
        moved[i] = max(moved[i], end + sizes[i] / 2)
        end = moved[i] + sizes[i] / 2
    end = 1.0
    for i in reversed(order):
        moved[i] = min(moved[i], end - sizes[i] / 2)
        end = moved[i] - sizes[i] / 2
    return moved
