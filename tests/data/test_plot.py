"""The picture of a partition, whose lengths in inches are computed here by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedaudit.data.plot import _legend_sizes, _step, bubbles


@pytest.mark.parametrize(
    ("items", "room", "step"),
    [(10, 10.0, 1), (10, 9.9, 2), (10, 5.0, 2), (10, 4.9, 5), (10, 1.0, 10), (10, 0.2, 10),
     (1000, 7.0, 200), (1, 0.0, 1)],
)  # fmt: skip
def test_as_many_labels_as_there_is_room(items, room, step):
    assert _step(items, room) == step


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (2, [2, 1]), (7, [7, 2, 1]), (100, [100, 50, 10, 2]), (999, [999, 200, 100, 20]),
     (12345, [12345, 5000, 1000, 200])],
)  # fmt: skip
def test_round_numbers_below_the_largest_count(largest, sizes):
    assert _legend_sizes(largest) == sizes


def drawn(clients, classes, **more):
    counts = np.ones((clients, classes), dtype=int)
    counts[0, 0], counts[-1, -1] = 100, 25
    figure = bubbles(counts, None, title="t", **more)
    return figure, figure.axes[0]


@pytest.mark.parametrize(
    ("clients", "classes", "wide", "high", "digits"),
    [
        (10, 20, 6.2, 7.2, 2),  # cells of 0.62 x 0.36
        (40, 50, 10.0, 11.0, 2),  # as large as the page
        (2, 3, 2.4, 2.0, 1),  # as small as it gets
        (11, 11, 6.82, 3.96, 2),
    ],
)
def test_a_cell_is_as_large_as_the_page_allows(clients, classes, wide, high, digits):
    figure, axes = drawn(clients, classes)
    left = 0.62 + 0.075 * digits
    width, height = left + wide + 1.25, 0.62 + high + 0.45
    assert tuple(figure.get_size_inches()) == pytest.approx((width, height))
    box = axes.get_position()
    assert (box.x0, box.width) == (pytest.approx(left / width), pytest.approx(wide / width))
    assert (box.y0, box.height) == (pytest.approx(0.62 / height), pytest.approx(high / height))
    assert axes.get_xlim() == (-0.5, clients - 0.5)
    assert axes.get_ylim() == (classes - 0.5, -0.5), "class 0 on top"
    (title,) = figure.texts
    assert title.get_position() == (pytest.approx(left / width), pytest.approx(1 - 0.12 / height))
    assert len(axes.get_xticks()) <= wide / (0.1 * len(str(clients - 1)) + 0.14)
    assert len(axes.get_yticks()) <= high / 0.17


@pytest.mark.parametrize(("clients", "classes", "side"), [(10, 20, 0.36), (40, 50, 0.22), (2, 3, 0.5)])
def test_bubbles_fill_their_cells(clients, classes, side):
    """0.92 of the shorter side of a cell, in points of which an inch has 72, and at most 26. Areas are as the counts,
    and thinner than 1.3 points nothing is."""
    _, axes = drawn(clients, classes)
    diameter = min(0.92 * 72 * side, 26.0)
    sizes = axes.collections[0].get_sizes()
    assert sizes[0] == pytest.approx(diameter**2)
    assert sizes[-1] == pytest.approx(diameter**2 / 4)
    assert sizes[1] == pytest.approx(max(diameter**2 / 100, 1.3**2))
    edges = axes.collections[0].get_linewidths()
    assert [round(float(edge), 3) for edge in edges] == [0.3 if size > 9 else 0.0 for size in sizes]
    handles = axes.get_legend().legend_handles
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["100", "50", "10", "2"]
    expected = [max(diameter * math.sqrt(n / 100), 1.3) for n in (100, 50, 10, 2)]
    assert [handle.get_markersize() for handle in handles] == pytest.approx(expected)


def test_tiny_cells_may_have_bubbles_of_a_tenth_of_an_inch():
    """500 clients: cells of 0.02 x 0.36, and the geometric mean of both is 0.085."""
    _, axes = drawn(500, 20)
    assert axes.collections[0].get_sizes()[0] == pytest.approx((0.92 * 72 * math.sqrt(0.02 * 0.36)) ** 2)


def test_a_long_title_is_wrapped_and_a_dollar_is_a_dollar():
    figure = bubbles(np.ones((3, 2), dtype=int), None, title="word " * 20, class_names=["$a$", "b"])
    (title,) = figure.texts
    lines = title.get_text().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= int((2.4 + 1.2) / 0.085)
    assert figure.get_size_inches()[1] == pytest.approx(0.62 + 2.0 + 0.25 + 0.2 * len(lines))
    assert not figure.axes[0].get_yticklabels()[0].get_parse_math()


def test_numbers_of_clients_have_as_many_digits_as_the_last_one():
    """A thousand clients have numbers up to 999: on ten inches 10 / 0.44 = 22 of them have room, so every 50th."""
    _, axes = drawn(1000, 1)
    assert axes.get_xticks().tolist() == list(range(0, 1000, 50))


def test_how_a_picture_is_drawn(tmp_path):
    """Colours and lines by hand: bubbles lie above the grid, ticks have no length, and the folder of a file is made."""
    path = tmp_path / "new" / "folder" / "a.svg"
    figure = bubbles(np.array([[4, 0], [1, 9], [0, 2]]), path, title="a title")
    axes = figure.axes[0]
    assert path.read_text().startswith("<?xml")
    assert bubbles(np.ones((1, 1), dtype=int), path, title="again") is not None, "a folder that is there is no error"
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[0, 0], [1, 0], [1, 1], [2, 1]]
    assert (dots.get_zorder(), dots.get_alpha()) == (3, 0.85)
    assert all(line.get_zorder() == 0 for line in axes.get_xgridlines())
    assert {
        tick.tick1line.get_markersize() for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()
    } == {0}
    assert {label.get_fontsize() for label in axes.get_xticklabels()} == {8}
    assert (axes.xaxis.label.get_fontsize(), axes.yaxis.label.get_fontsize()) == (9, 9)
    (title,) = figure.texts
    assert (title.get_fontsize(), title.get_va()) == (11, "top")
    legend = axes.get_legend()
    assert {text.get_fontsize() for text in (legend.get_title(), *legend.get_texts())} == {8}
    assert not legend.get_frame_on()
    assert (legend.borderaxespad, legend.borderpad, legend.handletextpad) == (0.0, 0.0, 0.7)
    assert figure.dpi == 150


def test_as_many_classes_are_named_as_have_room():
    """A hundred classes on eleven inches: 11 / 0.17 = 64 have room, so every second one."""
    _, axes = drawn(2, 100)
    assert axes.get_yticks().tolist() == list(range(0, 100, 2))
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(c) for c in range(0, 100, 2)]
