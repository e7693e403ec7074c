"""A method beside the kept records of all others: what is run for it, and which records other code made."""

from __future__ import annotations

import functools

import pytest

from fedaudit.errors import SettingError
from fedaudit.runtime.code_digest import code_of_setting, harness
from fedaudit.suite import beside as beside_module
from fedaudit.suite.beside import beside, records_folder, without_kept
from fedaudit.suite.kept_records import CellFigures, MethodRecords, code_digest, key_of, write_records
from fedaudit.suite.suite_file import read_suite, shipped


@functools.cache
def settings():
    return read_suite(shipped("all")).cells()


def cell_of(method, **other):
    setting = next(cell for cell in settings() if cell.method == method)
    values = {"key": key_of(setting), "code": code_digest(code_of_setting(setting)), "harness": harness(), **other}
    return CellFigures(partition=setting.partition, seed=0, protection="none", status="done", **values)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(beside_module, "SUITES", tmp_path)

    def keep(method, **other):
        write_records(tmp_path / "all_records", [MethodRecords(method=method, cells=(cell_of(method, **other),))])

    return keep


def test_a_method_gets_the_cells_of_the_suite(kept):
    """FedAvg sends nothing that takes noise: there are unprotected cells, DP-SGD, and noise, which is refused."""
    kept("fedprox")
    found = beside("all", "fedavg", {"E": 2})
    assert list(found.kept) == ["fedprox"]
    assert len(found.suite.cells()) == 6 * (1 + 2 + 2)
    assert {cell.method for cell in found.suite.cells()} == {"fedavg"}
    (quick,) = beside("all", "fedavg", {"E": 2}, quick=True).suite.cells()
    assert (quick.seed, quick.partition, quick.privacy, quick.set) == (2, "dirichlet:0.3", {}, {"E": 2})


def test_records_of_other_code_are_named_and_run_again_if_asked(kept):
    kept("fedprox")
    kept("feddyn", code="other")
    kept("moon", key="other")  # the suite has another setting for it today
    found = beside("all", "fedavg", {})
    assert found.changed == ("feddyn", "moon")
    assert not found.other_harness
    fresh = beside("all", "fedavg", {}, quick=True, fresh=True).suite
    assert [cell.method for cell in fresh.cells()] == ["fedavg", "feddyn", "moon"]


def test_another_harness_is_told(kept):
    kept("fedprox", harness=f"{harness().partition(':')[0]}:{'0' * 32}")
    assert beside("all", "fedavg", {}).other_harness


def test_only_suites_with_kept_records_can_be_compared_with():
    with pytest.raises(SettingError, match="all"):
        records_folder("quickstart")


def test_cells_with_a_record_by_todays_code_are_left_out(kept):
    """FedProx's first cell is kept; feddyn's was made by other code, and runs again."""
    kept("fedprox")
    kept("feddyn", code="other")
    left = without_kept("all").cells()
    assert len(left) == len(settings()) - 1
    assert key_of(next(cell for cell in settings() if cell.method == "fedprox")) not in map(key_of, left)
