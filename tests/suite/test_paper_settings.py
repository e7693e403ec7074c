"""Every published suite against the typed table of the paper's own settings: what differs is known, with a reason."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedaudit.cli.main import app
from fedaudit.errors import SettingError
from fedaudit.setting import Setting
from fedaudit.suite import paper_settings
from fedaudit.suite.paper_settings import Stated, by_column, differences, differs_text, stated
from fedaudit.suite.published import Column, Table, Wanted, tables, wanted

TABLES = {table.name: table for table in tables()}
CELLS = {name: wanted(table, "gpu", seeds=1) for name, table in TABLES.items()}


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_what_differs_from_the_paper_has_a_reason(table):
    """Each difference of each cell has a reason, and each reason is of a difference that some suite has."""
    assert stated(table) is not None, "the paper says nothing of this table's runs: add it to papers.toml"
    found = [d for cell in CELLS[table.name] for d in differences(table, cell)]
    assert not [d.text() for d in found if not d.why]


def test_every_reason_is_of_a_difference():
    for said in {id(s): s for s in paper_settings._read().values()}.values():
        names = [f"{said.paper} {number}" for number in said.tables]
        found = {d.key for name in names for cell in CELLS[name] for d in differences(TABLES[name], cell)}
        known = found | {key.partition(" ")[2] for key in found}
        assert said.because.keys() <= known, f"{said.paper}: {sorted(said.because.keys() - known)}"


def test_no_verdict_comes_without_what_differs():
    for name, table in TABLES.items():
        for cell in CELLS[name]:
            if differences(table, cell):
                assert differs_text(table, [cell])
    for name in ("fedzge 2", "fedfree 1", "dfrd 1", "dffke 2", "fedaf 1"):
        assert TABLES[name].differs


@pytest.mark.parametrize("name", ["dffke 2", "fedzge 2", "dfrd 1", "fedaf 1", "fedaf 6"])
def test_papers_train_on_all_and_test_every_round(name):
    """Where the best round counts, every round is tested; nothing is held out where the paper trains on everything."""
    for cell in CELLS[name]:
        s = cell.settings[0]
        assert (s.holdout, s.validation, s.aux, s.eval_every) == (0.0, 0.0, 0.0, 1), cell


def test_five_hundred_synthetic_images_a_round():
    """FedZGE, Appendix C, in its rows of DFRD, FedFTG and FedZKT: ten steps of 50."""
    said = stated(TABLES["fedzge 2"])
    assert {m: v for m in ("dfrd", "fedftg", "fedzkt") for k, v in said.methods[m].items() if "*" in k} == {
        "dfrd": 500, "fedftg": 500, "fedzkt": 500,
    }  # fmt: skip


# --- by hand --------------------------------------------------------------------------------------------------------


def made(monkeypatch, said, **setting):
    column = Column(name="mine", gpu={}, figures={"fedavg": (1.0, 1.0)})
    keys = {"paper": "mine", "own": "fedavg", "table": "1", "title": "", "score": "test", "round": "best", "rounds": 2}
    table = Table(**keys, seeds=1, gpu="", cpu="", small="", differs="TF32", reading="", column=[column])
    monkeypatch.setattr(paper_settings, "_read", lambda: {"mine 1": Stated(paper="mine", tables=["1"], **said)})
    return table, Wanted(column, "fedavg", (Setting.make(method="fedavg", **setting),))


def test_differences_by_hand(monkeypatch):
    """Ten clients, and five here; B = 64 in both; E x B = 640 in the paper, and 128 here."""
    said = {"setting": {"clients": 10}, "all": {"B": 64, "none": 3}, "methods": {"fedavg": {"E*B": 640}}}
    said["because"] = {"clients": "few"}
    table, cell = made(monkeypatch, said, clients=5, set={"E": 2})
    found = differences(table, cell)
    assert [(d.key, d.paper, d.ours, d.why) for d in found] == [("clients", 10, 5, "few"), ("fedavg E*B", 640, 128, "")]
    assert differs_text(table, [cell]) == (
        "TF32; clients is 5 here and 10 in the paper (few); fedavg E*B is 128 here and 640 in the paper (no reason is "
        "given)"
    )
    assert [row.column for row in by_column(table, [cell])] == ["mine"]


def test_a_column_of_its_own_and_a_name_that_nobody_has(monkeypatch):
    said = {"setting": {"clients": 10}, "columns": {"mine": {"clients": 5}}}
    assert not differences(*made(monkeypatch, said, clients=5))
    table, cell = made(monkeypatch, {"methods": {"fedavg": {"eat": 1}}})
    with pytest.raises(SettingError, match="fedavg has no hyper-parameter 'eat'"):
        differences(table, cell)


@pytest.mark.slow
def test_a_dry_run_prints_for_each_column_what_differs():
    shown = CliRunner().invoke(app, ["reproduce", "dffke", "2", "--scale", "gpu", "--dry-run", "--column", "CIFAR-10,"])
    assert shown.exit_code == 0
    for name in ("CIFAR-10, alpha 0.1", "CIFAR-10, alpha 1"):
        line = next(line for line in shown.stdout.splitlines() if line.startswith(f"{name}: differs from the paper"))
        assert "rounds is 50 here and 300 in the paper" in line
        assert "dffke kl is teacher-first here and student-first in the paper" in line
