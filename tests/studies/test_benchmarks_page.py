"""The page of benchmarks: its table is what the kept seconds give, and its verdicts follow from the intervals."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location(
    "benchmarks_page", ROOT / "benchmarks" / "studies" / "benchmarks" / "page.py"
)
page = sys.modules["benchmarks_page"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)


def release(name: str, **seconds: list[float]) -> dict:
    return {"release": name, "seconds": {method: [turn, turn, turn] for method, turn in seconds.items()}}


def test_rows_by_hand():
    """`slow` takes 0.3 s instead of 0.2 s in every round: 5 and 3.33 rounds a second, 1.5 times as long. `noisy` is
    twice as fast in one round of three and half as fast in another."""
    last = release("0.1.0", slow=[0.2, 0.2, 0.2], noisy=[0.1, 0.2, 0.1], gone=[1.0, 1.0, 1.0])
    this = release("0.2.0", slow=[0.3, 0.3, 0.3], noisy=[0.2, 0.1, 0.1], new=[0.5, 0.5, 0.5])
    found = {row.method: row for row in page.rows(last, this)}
    assert found["slow"].cells() == ["slow", "5", "3.33", "1.50 [1.50, 1.50]", "slower"]
    assert found["noisy"].verdict() == "the same, within noise"
    assert (found["new"].cells()[1:3], found["new"].verdict()) == (["-", "2"], "new")
    assert found["gone"].verdict() == "gone"
    turned = {row.method: row.verdict() for row in page.rows(this, last)}
    assert turned["slow"] == "faster"


def test_the_page_says_how_it_was_measured(tmp_path):
    """From made-up seconds: the page holds the table, and the picture is drawn."""
    extra = {"machine": "x86_64, 2 cores", "load": 0.3}
    last, this = (
        release(name, a=[0.2, 0.2, s], b=[0.1, 0.1, 0.1]) | extra for name, s in (("0.1.0", 0.2), ("0.2.0", 0.3))
    )
    text = page.page(last, this)
    assert page.table(last, this) in text
    assert "(x86_64, 2 cores, load 0.3)" in text
    page.draw(last, this, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


@pytest.mark.skipif(not page.PAGE.exists(), reason="docs/results/benchmarks.md is written when a release is measured")
def test_the_page_is_what_the_kept_seconds_give():
    assert page.PAGE.read_text() == page.page(*page.kept())
    assert page.PAGE.with_suffix(".png").stat().st_size > 5_000
