"""Cells of one row carried out side by side: how they are chosen, what each becomes, and what their process says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedaudit.errors import SettingError
from fedaudit.progress import unwatched
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.seeds_together import Ended
from fedaudit.setting import Setting
from fedaudit.suite import cell as cell_module
from fedaudit.suite import scheduler, worker
from fedaudit.suite.cell import Cell, carry_out_together
from fedaudit.suite.scheduler import MOST, _heed, _Queue, _rows, audit, make_cells
from fedaudit.suite.suite_file import Suite

BASE = {"clients": 2, "rounds": 1, "model": "mlp@0.25", "aux": 0.8, "set": {"E": 1, "B": 32}, "eval_clients": False}


def suite(seeds: int = 2, methods: tuple[str, ...] = ("fedavg", "local"), **base: Any) -> Suite:
    rows = [{"method": name} for name in methods]
    return Suite(base={**BASE, **base}, grid={"seed": list(range(seeds))}, methods=rows, attacks=[], threats=[])


def test_a_row_is_taken_at_once(tmp_path: Path) -> None:
    cells = make_cells(suite(seeds=3), tmp_path, seeds_together=True)
    assert {cell.setting.engine for cell in cells} == {"stacked"}
    queue = _Queue(cells)
    rows = []
    while queue.ready():
        rows.append([(cell.setting.method, cell.setting.seed) for cell in queue.take_row()])
    assert rows == [[(name, seed) for seed in range(3)] for name in ("fedavg", "local")]
    assert [len(row) for row in _rows(cells)] == [3, 3]


def test_no_more_than_so_many_are_taken(tmp_path: Path) -> None:
    cells = make_cells(suite(seeds=MOST + 1, methods=("local",)), tmp_path, seeds_together=True)
    queue = _Queue(cells)
    assert [len(queue.take_row()), len(queue.take_row())] == [MOST, 1] == [len(row) for row in _rows(cells)]


def test_a_cell_that_must_wait_is_not_taken_with_its_row(tmp_path: Path) -> None:
    """The clients of two cells come from runs of `local`, of which one is done."""
    start = {"start": {"method": "local", "rounds": 1}}
    cells = make_cells(suite(methods=("fedavg",), **start), tmp_path, seeds_together=True)
    firsts, rest = [c for c in cells if c.setting.method == "local"], [c for c in cells if c.setting.method != "local"]
    queue = _Queue(cells)
    assert queue.take_row() == firsts
    firsts[1].status = "done"
    assert queue.take_row() == [rest[1]]


def test_each_cell_has_its_own_end(tmp_path: Path) -> None:
    """The second cell's folder holds a damaged record; the first and the third are done, side by side."""
    cells = make_cells(suite(seeds=3, methods=("fedavg",)), tmp_path, seeds_together=True)
    cells[1].folder.mkdir(parents=True)
    (cells[1].folder / "record.json").write_text("{")
    ended = [cell.status for cell in carry_out_together(cells, [unwatched] * 3)]
    assert ended == ["done", "failed", "done"]
    assert cells[1].reason
    assert read_record(cells[0].folder).beside == [2]
    assert read_record(cells[2].folder).rounds[0].seeds == 2


def test_a_run_that_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two runs ends with an error of its own: that is its cell's reason, and nothing is run once more."""
    again: list[Any] = []
    monkeypatch.setattr(cell_module, "run", lambda *args, **how: again.append(how))
    ends = [Ended(error=RuntimeError(f"error {i}")) for i in range(2)]
    monkeypatch.setattr(cell_module, "run_together", lambda places, **how: ends)
    cells = make_cells(suite(methods=("fedavg",)), tmp_path, seeds_together=True)
    assert [cell.status for cell in carry_out_together(cells, [unwatched] * 2)] == ["failed", "failed"]
    assert [f"error {i}" in str(cell.reason) for i, cell in enumerate(cells)] == [True, True]
    assert not again


def test_an_error_of_all_is_said_of_each(tmp_path: Path) -> None:
    cells = make_cells(suite(methods=("fedavg",), dataset="npz:/nowhere.npz"), tmp_path, seeds_together=True)
    assert [cell.status for cell in carry_out_together(cells, [unwatched] * 2)] == ["failed", "failed"]
    assert all("/nowhere.npz" in str(cell.reason) for cell in cells)


def test_the_worker_names_the_cell_it_speaks_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_stop_with", lambda requests: None)  # it would end this process with the pipe
    cells = make_cells(suite(methods=("local",)), tmp_path, seeds_together=True)
    asked, answers = os.pipe(), os.pipe()
    giving = object.__new__(scheduler._Worker)
    giving.requests = asked[1]
    giving.give(cells)
    request = json.loads(os.read(asked[0], 1 << 20))
    worker._work(request, asked[0], answers[1])
    told = [json.loads(line) for line in os.read(answers[0], 1 << 20).splitlines()]
    for end in (*asked, *answers):
        os.close(end)
    assert {row["cell"] for row in told if "t" in row} == {0, 1}
    assert [(row["cell"], row["status"]) for row in told if "status" in row] == [(0, "done"), (1, "done")]


def test_a_process_that_dies_fails_the_cells_that_had_not_ended() -> None:
    cells = [Cell(Path(str(i)), Setting.make(seed=i), [], []) for i in range(2)]
    process: Any = SimpleNamespace(cells=cells, answered=set(), beside=0, last_words=lambda: "")
    progress: Any = SimpleNamespace(tell=lambda what: None)
    _heed(process, {"cell": 0, "status": "done", "reason": None, "crowded": None}, progress)
    _heed(process, {"over": -9}, progress)
    assert [cell.status for cell in cells] == ["done", "failed"]
    assert "signal 9" in str(cells[1].reason)
    assert "leave out --seeds-together" in str(cells[1].reason)
    assert process.cells == []


@pytest.mark.parametrize(
    ("how", "why"),
    [({"engine": "serial"}, "--engine serial does not"), ({"on": "ray"}, "Leave --seeds-together out")],
)
def test_what_does_not_go_with_it_is_refused(how: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=why):
        audit(suite(), tmp_path / "a", seeds_together=True, **how)


@pytest.mark.slow
def test_an_audit_runs_its_rows_side_by_side(tmp_path: Path) -> None:
    cells = audit(suite(seeds=2), tmp_path / "a", seeds_together=True)
    assert {cell.status for cell in cells} == {"done"}
    assert [read_record(cell.folder).beside for cell in cells] == [[1], [0]] * 2
    again = audit(suite(seeds=3), tmp_path / "a", seeds_together=True)
    assert [read_record(cell.folder).beside for cell in again] == [[1], [0], []] * 2
