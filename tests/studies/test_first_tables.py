"""The table under the verdict of each paper's page."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from pages import RESULTS, of_study, script_in_place

PAPERS = ["dffke", "dfrd", "fedaf", "fedfree", "fedzge"]


@pytest.fixture(scope="module")
def first() -> Iterator[ModuleType]:
    with script_in_place("first_tables") as module:
        yield module


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_has_its_table_right_under_the_verdict(first: ModuleType, paper: str) -> None:
    """As the kept records make it: no other paragraph stands between the verdict and the table."""
    text = (RESULTS / f"{paper}.md").read_text()
    made = first.tables()[paper]
    assert first.placed(text, made) == text, "run benchmarks/studies/shared/first_tables.py --write"
    verdict, _, _ = text.partition("**In three sentences.**")[2].partition(made)
    assert verdict.strip()
    assert "\n\n" not in verdict.strip()


def test_every_paper_has_a_figure_and_a_control(first: ModuleType) -> None:
    """FedAF's control is averaging, which it is compared with in the paper too."""
    assert sorted(first.tables()) == PAPERS
    for paper, made in first.tables().items():
        rows = [line.split(" | ") for line in made.splitlines() if line.startswith("| ")][2:]
        assert any(row[1] != "-" for row in rows), paper
        assert any(row[1] == "-" or "FedAvg" in row[0] for row in rows), paper


def test_a_difference_by_hand(first: ModuleType) -> None:
    """1, 2 and 6 above 10: a mean of 3, a standard error of 1.5275, and 4.3027 of it on each side."""
    assert first.difference([11.0, 12.0, 16.0], [10.0] * 3) == "+3.00 [-3.57, 9.57]"
    assert first.difference([21.0, 12.0, 6.0], [20.0, 10.0, 0.0]) == "+3.00 [-3.57, 9.57]", "seed by seed"
    assert first.difference([8.5], [10.0]) == "-1.50, one seed"


def a_record(seed: int, accuracies: list[float], rounds: int = 20) -> dict[str, Any]:
    scores = [{"round": t + 1, "global": {"accuracy": a}, "clients": {"mean": a / 2}} for t, a in enumerate(accuracies)]
    return {"setting": {"seed": seed, "method": "m", "set": {}}, "rounds": scores, "rounds_done": rounds}


def test_a_row_by_hand(first: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best round of each seed, in the order of the seeds; the round is the last where the row asks for that one."""
    kept = {"a": a_record(1, [0.5, 0.7, 0.6]), "b": a_record(0, [0.4, 0.3, 0.2]), "c": a_record(2, [0.1, 0.2, 0.3], 9)}
    monkeypatch.setattr(first.table, "read", kept.__getitem__)
    cells = {"x": {"asked": {"method": "m"}, "records": ["a", "b", "c"], "mean": 50.0, "spread": 1.5, "rounds": 20}}
    assert first.row({"label": "X", "cell": "x"}, cells) == [
        "X (seed 2: 9 of 20 rounds)", "50.00 ± 1.50", "40.00, 70.00, 30.00", "-3.33 [-55.04, 48.38]", "-",
    ]  # fmt: skip
    cells["x"] |= {"records": ["a", "b"], "spread": -1}
    two = first.row({"label": "X", "cell": "x", "length": "some epochs"}, cells)
    assert two[:3] == ["X (some epochs)", "50.00", "40.00, 70.00 (seeds 0 and 1)"]
    whole = first.row({"label": "X", "cell": "x", "printed": {"2": 55.0}}, cells)
    assert whole[:4] == ["X (20 rounds)", "50.00", "40.00, 70.00, 55.00", "+5.00 [-32.26, 42.26]"]
    cells["x"]["rounds"] = 30
    assert first.row({"label": "X", "cell": "x"}, cells)[0] == "X (20 of 30 rounds)"
    cells["x"]["asked"] = {"method": "another"}
    monkeypatch.setattr(first.table, "record_at", lambda name: name)
    with pytest.raises(SystemExit, match=r"a is not the run that published\.toml asks for"):
        first.row({"label": "X", "cell": "x"}, cells)


def test_a_control_by_hand(first: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no published figure. A row is compared with it over the seeds that both have."""
    kept = {"a": a_record(1, [0.5, 0.7, 0.6]), "b": a_record(0, [0.4, 0.3, 0.2]), "c": a_record(1, [0.4, 0.8, 0.5])}
    monkeypatch.setattr(first.table, "read", kept.__getitem__)
    control = {"name": "c", "label": "C", "asked": {}, "records": ["c"], "whose": "clients"}
    assert first.row(control, {}) == ["C (20 rounds)", "-", "40.00 (seed 1)", "-", "-"]
    assert first.row({**control, "statistic": "last"}, {})[2] == "25.00 (seed 1)"
    cells = {"x": {"asked": {}, "records": ["a", "b"], "mean": 50.0, "spread": 1.5, "rounds": 20}}
    assert first.row({"label": "X", "cell": "x"}, cells, control)[4] == "+30.00, one seed"
    page = {"page": "p", "when": "then", "rows": [{"label": "X", "cell": "x", "minus": "c"}, control]}
    assert "minus C" not in first.made(page, cells)
    made = first.made({**page, "control": "minus C"}, cells).splitlines()
    assert [line.rsplit(" | ", 1)[1] for line in made[2:]] == ["minus C |", "--- |", "+30.00, one seed |", "- |"]


def test_what_was_printed_is_kept() -> None:
    """The one figure of these tables that no record has."""
    told = tomllib.loads(of_study("published.toml").read_text())["first_table"]
    printed = [row["printed"] for page in told for row in page["rows"] if "printed" in row]
    assert len(printed) == 1
    ((seed, value),) = printed[0].items()
    lines = json.loads(of_study("dffke_printed.json").read_text())[f"dffke-{seed}"]["printed"]
    assert any(line.startswith("  best test round") and line.endswith(f": {value} %") for line in lines)
