"""The project's own budgets: whom they are about, that they are tight, and that a fattened method does not get past."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedaudit import run
from fedaudit.runtime.run_record import read_record
from fedaudit.suite.budgets import check_runs, read_budgets
from fedaudit.suite.suite_file import read_suite

HERE = Path(__file__).parent
BUDGETS = HERE / "budgets.toml"
CELLS = {cell.method: cell for cell in read_suite(HERE / "budget_runs.toml").cells()}
# In larger batches: neither messages nor FLOPs are others, and counting those takes its time for each step.
FEDAVG = CELLS["fedavg"].model_copy(update={"set": {**CELLS["fedavg"].set, "B": 32, "eta": 0.2}})


def only(method: str, folder: Path, counted: bool = True) -> Path:
    """The budgets of one method: the others would match no run, which is an error. So would one of FLOPs, if they were
    not counted."""
    tables = [table for table in BUDGETS.read_text().split("[[budget]]")[1:] if f'method = "{method}"' in table]
    path = folder / "budgets.toml"
    path.write_text("".join(f"[[budget]]{table}" for table in tables if counted or '"flops"' not in table))
    return path


def under_its_name(folder: Path, name: str, as_method: str) -> Path:
    """The run as if the registered method had been written so: what a change of its file would leave."""
    record = read_record(folder)
    record.setting = record.setting.model_copy(update={"method": as_method})
    (folder.parent / name).mkdir()
    record.save(folder.parent / name)
    return folder.parent / name


def test_every_method_of_the_papers_has_a_run_and_ceilings_in_both_directions():
    assert set(CELLS) == {"fedavg", "dffke", "fke", "fedaf", "fedzge", "dfrd", "fedfree"}
    budgets = read_budgets(BUDGETS)
    for method in CELLS:
        whole = {b.direction for b in budgets if b.method == method and b.field is None and b.convention == "payload"}
        assert {"up", "down"} <= whole


def test_ci_gates_them():
    assert "make budgets" in (HERE.parent / ".ci" / "run").read_text()
    recipe = (HERE.parent / "Makefile").read_text()
    assert "fedaudit audit tests/budget_runs.toml" in recipe
    assert "fedaudit check $$out/runs/* --budget tests/budgets.toml" in recipe


@pytest.mark.parametrize("cell", [FEDAVG, CELLS["fedzge"]], ids=lambda cell: cell.method)
def test_they_are_kept_and_have_no_slack(cell, tmp_path):
    """Every ceiling on payload is what is sent, to the byte: one more would break it."""
    method = cell.method
    run(cell, out=tmp_path / "run")
    outcomes = check_runs([tmp_path / "run"], only(method, tmp_path))
    assert all(outcome.kept for outcome in outcomes)
    payload = [o for o in outcomes if o.budget.metric == "bytes" and o.budget.convention == "payload"]
    assert len(payload) >= 5
    assert all(outcome.value == outcome.limit for outcome in payload)


def test_a_field_that_is_new_is_caught_and_named(tmp_path):
    """FedAvg whose clients also send a second tree of weights, declared like the rest: 54,824 bytes more."""
    fat = FEDAVG.model_copy(update={"method": "fattened:FedAvg", "flops": False})
    run(fat, out=tmp_path / "run")
    changed = under_its_name(tmp_path / "run", "changed", "fedavg")
    broken = [o for o in check_runs([changed], only("fedavg", tmp_path, counted=False)) if not o.kept]
    assert [o.budget.title() for o in broken] == ["fedavg up traffic", "fedavg traffic"]
    assert "(100.0% over); up Local.m grew most, by 54.82 kB" in broken[0].message()


def test_a_field_that_grew_is_caught_and_named(tmp_path):
    """FedZGE with one direction more: 12,800 bytes of images down, 2,000 of answers up."""
    cell = CELLS["fedzge"]
    run(cell.model_copy(update={"set": {**cell.set, "q": 6}}), out=tmp_path / "run")
    broken = {o.budget.title(): o for o in check_runs([tmp_path / "run"], only("fedzge", tmp_path)) if not o.kept}
    assert set(broken) == {
        *("fedzge down Query.x_u", "fedzge up Answer.f", "fedzge up traffic", "fedzge down traffic", "fedzge traffic"),
    }
    assert "down Query.x_u grew most, by 12.80 kB" in broken["fedzge down traffic"].message()
    assert "up Answer.f grew most, by 2.00 kB" in broken["fedzge up traffic"].message()
