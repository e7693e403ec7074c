"""Marks in the page's figures stand where their data are: measured in a real browser, against the axes' own ticks."""

from __future__ import annotations

import math
import re

import known_conclusions
import pytest
from browser import needed as needs_browser
from browser import screen

from fedaudit.reports.figure_labels import spread
from fedaudit.reports.figures import SERIES, _round_values, common_label
from fedaudit.reports.report import rows_below, write_report

SIZES = {"kB": 1e3, "MB": 1e6, "B": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return known_conclusions.write(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def rows(folder):
    return rows_below(folder)[0]


@pytest.fixture(scope="module")
def browser(chromium, tmp_path_factory, folder):
    (path,) = write_report(folder, ["html"], out=tmp_path_factory.mktemp("page"))
    screen(chromium, 1400, 900)
    chromium.get(path.as_uri())
    return chromium


PLACES = """
const svg = document.querySelectorAll(arguments[0])[arguments[1]];
const box = (e) => { const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; };
const ticks = (axis) => [...svg.querySelectorAll(`[data-mark^=${axis}tick]`)].map(
    t => [t.querySelector('text')?.textContent.trim() ?? '', box(t.querySelector('path'))]);
const points = [...svg.querySelectorAll('[data-mark^=point]')].map(
    p => [Number(p.dataset.mark.slice(6)), box(p.querySelector('use'))]);
return {x: ticks('x'), y: ticks('y'), points};
"""


def _value(text, log):
    if text == "∞":
        return math.inf
    number, _, unit = text.partition(" ")
    value = float(number) / 100 if unit == "%" else float(number) * SIZES.get(unit, 1.0)
    return math.log10(value) if log and value > 0 else value


def _scale(ticks, of, log):
    """Return what turns a place on the screen into a value, from the two outermost ticks with finite values."""
    known = [(_value(text, log), at[of]) for text, at in ticks if text and text != "∞"]
    (a, u), (b, v) = min(known), max(known)
    assert b > a
    return lambda at: a + (at - u) * (b - a) / (v - u)


def _halves(found):
    """Return the panels of a figure: ticks and marks left and right of the widest gap between ticks of y."""
    middle = (min(at[0] for _, at in found["y"]) + max(at[0] for _, at in found["y"])) / 2
    sides = []
    for left in (True, False):
        sides.append({
            key: [one for one in of if (one[1][0] < middle) == left] for key, of in found.items()
        })  # fmt: skip
    return sides


def _check(found, rows, key, log, places):
    x, y = _scale(found["x"], 0, log), _scale(found["y"], 1, False)
    seen = {}
    infinite = [at[0] for text, at in found["x"] if text == "∞"]
    for number, (left, top) in found["points"]:
        row = rows[number]
        accuracy, value = row.cells["accuracy"].value, row.cells[key].value
        assert y(top) == pytest.approx(accuracy, abs=0.002), row.label
        if math.isinf(value):
            assert left == pytest.approx(infinite[0], abs=0.6), row.label
        else:
            assert x(left) == pytest.approx(math.log10(value) if log else value, abs=places), row.label
        seen[number] = (left, top)
    wanted = [i for i, row in enumerate(rows) if row.cells[key].value is not None]
    assert sorted(seen) == wanted
    return seen


@needs_browser
@pytest.mark.parametrize("width", [1400, 390])
def test_points_of_the_first_picture_are_at_their_data(browser, rows, width):
    screen(browser, width, 900)
    found = browser.execute_script(PLACES, "#picture svg", 0)
    _check(found, rows, "epsilon", True, 0.01)
    screen(browser, 1400, 900)


@needs_browser
@pytest.mark.parametrize(("figure", "side", "key", "log", "places"), [
    (0, 0, "epsilon", True, 0.01), (0, 1, "auc", False, 0.002), (1, 0, "up", True, 0.02),
])  # fmt: skip
def test_points_of_the_tradeoffs_are_at_their_data(browser, rows, figure, side, key, log, places):
    """Eleven marks, of which some coincide: 38.45 kB that eight rows share is one place."""
    found = browser.execute_script(PLACES, "#plots svg", figure)
    panel = _halves(found)[side] if figure == 0 or side else _halves(found)[0]
    if key == "up":  # all rows send 1 kB: one tick of x, and one place
        ((text, at),) = [(text, at) for text, at in panel["x"] if text]
        assert _value(text, False) == 1000
        assert {round(left) for _, (left, _) in panel["points"]} == {round(at[0])}
        return
    _check(panel, rows, key, log, places)


@needs_browser
def test_the_axes_fit_the_data(browser, rows):
    """The lowest accuracy is 26 % and the highest 90 %, so no axis begins at 0 and all of its ticks are near data."""
    found = browser.execute_script(PLACES, "#picture svg", 0)
    ticks = [_value(text, False) for text, _ in found["y"] if text]
    assert min(ticks) >= 0.15
    assert max(ticks) <= 1.0
    ys = [top for _, (_, top) in found["points"]]
    height = browser.execute_script("return document.querySelector('#picture svg').getBoundingClientRect().height")
    assert max(ys) - min(ys) > 0.55 * height


@needs_browser
def test_every_mark_has_its_label_and_no_label_covers_another(browser, rows):
    text, boxes = browser.execute_script(
        "const svg = document.querySelectorAll('#plots svg')[0];"
        "const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim());"
        "return [svg.textContent, texts.map(t => { const r = t.getBoundingClientRect();"
        "return [r.left, r.top, r.right, r.bottom, t.textContent]; })];"
    )
    words = re.sub(r"\s+", " ", text)
    for row in rows:
        if row.cells["auc"].value is not None:
            for word in row.label.split():
                assert word.strip(",") in words
    for i, (left, top, right, bottom, one) in enumerate(boxes):
        for u, v, w, z, other in boxes[i + 1 :]:
            wide, high = min(right, w) - max(left, u), min(bottom, z) - max(top, v)
            assert wide <= 1 or high <= 4, (one, other)


@needs_browser
@pytest.mark.parametrize(("width", "height", "beside"), [(1400, 900, True), (390, 844, False)])
def test_the_picture_is_beside_the_answers_or_under_them(browser, width, height, beside):
    screen(browser, width, height)
    answers, picture = (
        browser.execute_script(f"return document.querySelector('{name}').getBoundingClientRect().toJSON()")
        for name in ("#answers", "#picture svg")
    )
    if beside:
        assert picture["left"] >= answers["right"]
        assert picture["bottom"] <= height
        assert answers["bottom"] <= height
    else:
        assert picture["top"] >= answers["bottom"]
        assert picture["right"] <= width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    screen(browser, 1400, 900)


def test_boxes_are_moved_apart_by_as_little_as_they_must():
    """Two boxes of 0.2 that both want 0.5 stand at 0.4 and 0.6; one that wants 0.95 is moved in to 0.9."""
    assert spread([0.5, 0.5], [0.2, 0.2]) == pytest.approx([0.4, 0.6])
    assert spread([0.95, 0.3], [0.2, 0.2]) == pytest.approx([0.9, 0.3])
    assert spread([0.3, 0.7], [0.2, 0.2]) == pytest.approx([0.3, 0.7])
    crowded = spread([0.9] * 8, [0.1] * 8)
    assert max(crowded) <= 0.95 + 1e-9
    assert min(b - a for a, b in zip(sorted(crowded), sorted(crowded)[1:], strict=False)) >= 0.1 - 1e-9
    assert spread([], []) == []


def test_ticks_are_round_and_few():
    assert _round_values(math.log10(2), math.log10(32)) == [2, 5, 10, 20]
    assert _round_values(0.0, 6.0) == [1.0, 10.0**2, 10.0**4, 10.0**6]
    assert len(_round_values(math.log10(38_450), math.log10(38_450))) == 1
    assert len(SERIES) == 8


@pytest.mark.parametrize(
    ("labels", "shared"),
    [
        (["FedAvg, epsilon 32", "FedAvg, epsilon 8"], "FedAvg, epsilon"),
        (["FedZGE", "FedZGE, epsilon 8"], "FedZGE"),
        (["dffke", "dffke · noise 1x"], "dffke"),
        (["FedAvg, iid", "FedAF"], ""),
        (["DFFKE, a b", "DFFKE, c b"], "DFFKE"),
    ],
)
def test_a_curve_is_labelled_by_what_its_rows_share(labels, shared):
    assert common_label(labels) == shared
    assert common_label(labels[::-1]) == shared
