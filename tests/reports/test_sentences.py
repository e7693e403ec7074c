"""Figures in the sentences and small tables of a row, of runs in which everything differs: helpers/runs/unequal."""

from __future__ import annotations

import pytest
import unequal

from fedaudit.reports.runs import grouped, read_runs
from fedaudit.reports.sentences import phases
from fedaudit.reports.summary_rows import rows_of


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    folder = unequal.write(tmp_path_factory.mktemp("unequal"))
    found = rows_of(grouped(read_runs(folder)[0]))
    return next(row for row in found if row.group.method == "uneven" and row.group.setting.dataset == "digits")


def test_seconds_by_party_and_phase(row):
    """Clients' tasks take 3.5 + 0.75 + 8 = 12.25 s; a fit is inside its task; the longest is the evaluation, 20 s."""
    found = {(line["party"], line["phase"]): line for line in phases(row)}
    assert {key: line["seconds"] for key, line in found.items()} == {
        ("clients", "task"): 12.25, ("clients", "protect"): 0.5, ("clients", "encode"): 0.125,
        ("clients", "decode"): 0.0625, ("clients", "fit"): 3.0, ("server", "round"): 1.75,
        ("evaluation", "evaluate"): 20.0,
    }  # fmt: skip
    assert {key: line["share"] for key, line in found.items()} == {
        key: pytest.approx(line["seconds"] / 20) for key, line in found.items()
    }
    assert [key for key, line in found.items() if line["inside"]] == [("clients", "fit")]
    assert [line["party"] for line in phases(row)] == [*["clients"] * 5, "server", "evaluation"]
    assert [line["phase"] for line in phases(row)[:5]] == ["task", "protect", "encode", "decode", "fit"]


def test_a_phase_of_nothing_is_left_out(row):
    """Below a thousandth of the longest."""
    timings = row.first.timings
    for seconds, kept in ((0.019, False), (0.021, True)):
        timings[-2].wall_s, before = seconds, timings[-2].wall_s
        try:
            assert any(line["party"] == "server" for line in phases(row)) == kept
        finally:
            timings[-2].wall_s = before
