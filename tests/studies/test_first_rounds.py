"""What times the first rounds of rows that nobody has run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import STUDIES, script

import fedaudit

FIRST = script("first_rounds")


def a_row(**other: Any) -> dict[str, Any]:
    setting = {"method": "fedavg", "dataset": "digits", "model": "mlp", "clients": 2, "set": {"E": 1}}
    return {"paper": "P", "item": "Table 1", "row": "FedAvg, digits", "rounds": 20, "setting": setting, **other}


@pytest.mark.long
def test_rounds_are_timed_in_processes_of_their_own(tmp_path: Path) -> None:
    """Each row has as many rounds as asked for; one that fails is said to have ended none, after so many seconds."""
    broken = a_row(row="broken")
    broken["setting"] = {**broken["setting"], "model": "nothing of this name"}
    FIRST.timed([a_row(), broken], 2, 120, ["--device", "cpu"], tmp_path / "out.json")
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert (first["paper"], first["row"], first["beside"], first["device"]) == ("P", "FedAvg, digits", 1, "CPU")
    assert len(first["rounds_s"]) == 2
    assert all(0 <= seconds < 60 for seconds in first["rounds_s"])
    assert "waited_s" not in first
    assert (second["row"], second["rounds_s"]) == ("broken", [])
    assert 0 < second["waited_s"] < 60, "the seconds until it failed"
    assert second["note"].startswith("ended in round 1: Unknown model 'nothing of this name'")
    assert "note" not in first


def test_a_limit_leaves_what_is_known(tmp_path: Path) -> None:
    begun = time.perf_counter()
    FIRST.timed([a_row()], 10**6, 2, ["--device", "cpu"], tmp_path / "out.json")
    assert 2 <= time.perf_counter() - begun < 20
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["rounds_s"] or row["waited_s"] == 2


def test_a_round_has_its_own_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning to its end, without the rounds before it and what lies between them."""
    told = [(0, "round 1"), (0, "note: of something"), (0, "round 1, evaluating"), (1, "round 1")]
    told += [(1, "round 2"), (2, "round 2"), (2, "round 3"), (3, "round 3")]
    clock = iter([100.0, 107.0, 110.0, 113.5, 120.0, 122.0])
    monkeypatch.syspath_prepend(STUDIES.parent)
    monkeypatch.setattr("round_seconds.time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def run(out: Path, watch: Any, **setting: Any) -> None:
        assert (setting["rounds"], setting["eval_every"], setting["method"]) == (3, 3, "fedavg")
        for done, what in told:
            watch(done, 3, what)

    monkeypatch.setattr(fedaudit, "run", run)
    FIRST.one(a_row(), 3, None, "cpu", tmp_path / "one.json")
    assert json.loads((tmp_path / "one.json").read_text()) == {"rounds_s": [7.0, 3.5, 2.0], "device": "CPU"}


def test_only_rows_whose_rounds_ended_are_kept() -> None:
    """With the new seconds, load, device and commit; notes on the old seconds are gone."""
    old = {"rounds_s": [], "waited_s": 200, "note": "not ended", "beside": 13, "commit": "a", "device": "D"}
    runs = [a_row(**old), a_row(**old, paper="Q"), a_row(**old, row="other")]
    new = {"rounds_s": [3.0, 2.0], "device": "E", "beside": 1}
    told = [{"paper": "P", "row": "FedAvg, digits", **new}, {"paper": "P", "row": "other", **new, "rounds_s": []}]
    kept = FIRST.kept(runs, told, "b")
    assert kept == [a_row(**new, commit="b"), *runs[1:]]
    with pytest.raises(SystemExit, match="no row P: unheard of"):
        FIRST.kept(runs, [{"paper": "P", "row": "unheard of", **new}], "b")


def test_rows_are_chosen_by_a_part_of_their_name() -> None:
    rows = [a_row(), a_row(row="FedFree, eight networks"), a_row(paper="FedFree")]
    assert FIRST.chosen(rows, ["eight", "P: FedAvg"]) == rows[:2]
    with pytest.raises(SystemExit, match=r"No row has 'nine' in its name\. Choose from: P: FedAvg, digits; "):
        FIRST.chosen(rows, ["eight", "nine"])


def test_every_kept_row_is_a_setting_that_can_be_timed() -> None:
    from fedaudit.setting import Setting

    rows = json.loads(FIRST.KEPT.read_text())["runs"]
    for row in rows:
        Setting.make(**{**row["setting"], "rounds": 3, "eval_every": 3})
    assert len({FIRST.name(row) for row in rows}) == len(rows)
