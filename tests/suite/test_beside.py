"""A method beside the kept records of all others: what is run for it, and which records other code made."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from fedaudit.errors import SettingError
from fedaudit.runtime.code_digest import code_of_setting, harness
from fedaudit.suite import beside as beside_module
from fedaudit.suite.beside import beside, records_folder, without_kept
from fedaudit.suite.kept_records import CellFigures, MethodRecords, code_digest, key_of, write_records
from fedaudit.suite.protections import Protection
from fedaudit.suite.suite_file import Extra, Suite, read_suite, shipped


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


@pytest.mark.long
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


@pytest.mark.long
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


# --- with a suite and records that are made up -----------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Three methods in two partitions. FedAvg's record is of today, FedProx's of other code, and local has none."""
    suite = Suite(
        base={"rounds": 1},
        grid={"partition": ["iid", "classes:2"], "seed": [0, 1]},
        methods=[{"method": name} for name in ("fedavg", "fedprox", "local")],
        protections=[Protection(name="none"), Protection(name="DP-SGD", epsilon=8.0, policies={"training": {}})],
        extra=[Extra(attacks=["loss"])],
        attacks=[],
    )
    codes = {"fedavg": ["old", "today"], "fedprox": ["old", "older"]}

    def cell(setting, code, harness="3:now", status="done"):
        return CellFigures(
            key=key_of(setting), partition="iid", seed=0, protection="none", status=status, code=code, harness=harness
        )

    plain = {name: [s for s in suite.cells() if s.method == name and not s.privacy] for name in codes}
    kept = {
        name: MethodRecords(method=name, cells=tuple(map(cell, plain[name], of))) for name, of in codes.items()
    }  # fmt: skip
    monkeypatch.setattr(beside_module, "read_suite", lambda path: suite)
    monkeypatch.setattr(beside_module, "read_records", lambda folder: kept)
    monkeypatch.setattr(beside_module, "code_of_setting", lambda setting: "code")
    monkeypatch.setattr(beside_module, "code_digest", lambda code: "today")
    monkeypatch.setattr(beside_module, "harness", lambda: "3:now")
    checked = []
    monkeypatch.setattr(beside_module, "check_suite", checked.append)
    return SimpleNamespace(suite=suite, kept=kept, checked=checked, cell=cell, plain=plain)


def test_one_method_is_run_and_the_others_are_kept(small):
    found = beside("all", "fedavg", {})
    assert found.suite == small.suite.model_copy(update={"methods": [{"method": "fedavg"}]})
    assert (list(found.kept), found.changed, found.other_harness) == (["fedprox"], ("fedprox",), False)
    assert small.checked == [found.suite]
    own = beside("all", "my.module:Own", {"E": 2})
    assert own.suite.methods == [{"method": "my.module:Own", "set": {"E": 2}}]
    assert list(own.kept) == ["fedavg", "fedprox"]
    assert beside("all", "local", {}, fresh=True).suite.methods == [{"method": "local"}, {"method": "fedprox"}]
    assert beside("all", "fedprox", {}, fresh=True).suite.methods == [{"method": "fedprox"}]
    quick = beside("all", "local", {}, quick=True).suite
    assert quick.grid == {"partition": ["classes:2"], "seed": [1]}
    assert (quick.extra, [of.name for of in quick.protections]) == ([], ["none"])


def test_only_cells_by_todays_code_are_left_out(small):
    found = without_kept("all")
    assert found.left_out == [key_of(small.plain["fedavg"][1])]
    assert small.checked == [found]


def test_which_records_another_harness_made(small):
    """One of them is enough; a cell that failed does not count, nor does one by another scheme of digests."""
    (setting, *_) = small.plain["fedavg"]

    def other(*harnesses, status="done"):
        cells = tuple(small.cell(setting, "today", harness, status) for harness in harnesses)
        return beside_module._other_harness({"a": MethodRecords(method="a", cells=cells)})

    assert not other("3:now", "2:then")
    assert other("3:now", "3:then")
    assert other(None)
    assert not other("3:then", status="failed")
    assert not other()
