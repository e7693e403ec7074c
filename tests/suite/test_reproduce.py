"""A published table: its figures, which runs stand for a cell, and the verdict on them."""

from __future__ import annotations

import json
import statistics
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedaudit import registry
from fedaudit.cli.main import app
from fedaudit.errors import SettingError
from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.runtime.scores import Utility
from fedaudit.suite import published, reproduce
from fedaudit.suite.forecast import Forecast
from fedaudit.suite.published import Ours, find_table, order, order_verdict, scored, tables, verdict, wanted

SMALL = """
[[table]]
paper = "mine"
own = "fedavg"
table = "7"
title = "Mine, Table 7"
score = "test"
round = "best"
rounds = 2
seeds = 2
gpu = "mine.toml"
cpu = "mine.toml"
small = "It shows that the command works."
differs = ""
reading = "so"
[[table.column]]
name = "even"
gpu = { partition = "iid" }
cpu = { partition = "iid" }
rows.fedavg = { set = { E = 2, eta = 0.2 } }
figures.fedavg = [90.0, 60.0]
figures.constant = [99.0, 1.0]
[[table.column]]
name = "skewed"
gpu = { partition = "dirichlet:0.3", dataset = "cifar10" }
figures.fedavg = [90.0, 1.0]
"""
SUITE = """
attacks = []
[base]
dataset = "digits"
device = "cpu"
model = "mlp"
clients = 2
rounds = 2
[grid]
partition = ["iid"]
seed = [0, 1]
[[methods]]
method = "fedavg"
set = { E = 1, eta = 0.2 }
[[methods]]
method = "fedavg"
set = { E = 5 }
[[methods]]
method = "constant"
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "tables.toml").write_text(SMALL)
    (tmp_path / "mine.toml").write_text(SUITE)
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    return tmp_path


def called(*words):
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def test_the_tables_of_the_five_papers_are_there_with_their_figures():
    by_name = {table.name: table for table in tables()}
    numbers = {"fedaf": "1 2 6", "dfrd": "1 2 3 4 5", "fedzge": "2 3 4 5 9 10", "dffke": "2 3 5", "fedfree": "1"}
    assert set(by_name) == {f"{paper} {number}" for paper, of in numbers.items() for number in of.split()}
    cells = {(t.name, c.name, m): f for t in by_name.values() for c in t.column for m, f in c.figures.items()}
    assert cells["fedaf 1", "Fashion-MNIST, alpha 0.02", "fedaf"] == (87.53, 0.32)
    assert cells["fedaf 1", "CIFAR-10, alpha 0.05", "feddyn"] == (57.68, 1.84)
    assert cells["fedaf 1", "CIFAR-100, alpha 0.1", "moon"] == (40.24, 0.68)
    assert cells["dfrd 1", "Fashion-MNIST, omega 0.1", "fedavg+dfrd"] == (85.66, 1.21)
    assert cells["dfrd 1", "SVHN, omega 0.01", "fedftg"] == (15.44, 1.12)
    assert cells["fedzge 2", "ResNet-34, alpha 0.1", "fedzkt"] == (71.78, 0.24)
    assert cells["dffke 2", "CIFAR-10, alpha 0.1", "dffke"] == (43.21, 4.82)
    assert cells["dffke 2", "CIFAR-100, alpha 1", "fedproto"] == (35.93, 1.15)
    assert cells["fedfree 1", "HtFL, CIFAR-10", "fedfree"] == (95.81, -1)


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.name)
@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_every_cell_of_every_table_has_runs(table, scale):
    cells = wanted(table, scale)
    for column in table.columns(scale):
        assert {cell.method for cell in cells if cell.column == column} == set(column.figures)
    for cell in cells:
        assert registry.find(cell.method)
        assert len({setting.seed for setting in cell.settings}) == len(cell.settings)
        assert {setting.method for setting in cell.settings} == {cell.method}
        assert (scale == "gpu") == (cell.settings[0].dataset != "digits")


TABLE_2 = {  # FedZGE, GB of ResNet-18
    "fedavg": 83.31, "mhat": 5.76, "dsfl": 5.76, "fedgen": 90.92, "fedftg": 83.31, "dfrd": 83.31, "fedzkt": 83.31,
    "fedzge": 63.17,
}  # fmt: skip


def test_the_suite_of_fedzges_table_2_sends_what_the_table_prints():
    """So its network, its rounds and its clients are the paper's, and FedFTG and DFRD send the global model down."""
    table = find_table("fedzge", "2")
    cells = {cell.method: cell.settings[0] for cell in wanted(table, "gpu", ["ResNet-18, alpha 1"], seeds=1)}
    assert {m: round(plan_traffic(s)["total"]["GiB"], 2) for m, s in cells.items()} == TABLE_2
    for column, printed in (("ResNet-34, alpha 1", 158.62), ("ResNet-50, alpha 1", 175.30)):
        (fedavg,) = wanted(table, "gpu", [column], ["fedavg"], seeds=1)
        assert round(plan_traffic(fedavg.settings[0])["total"]["GiB"], 2) == printed


def test_fedzges_rivals_train_as_its_appendix_c_says():
    """Adam 0.01, ten epochs, batches of 256; the auxiliary set is all of CIFAR-100; nobody else gives up records."""
    adam = []
    for cell in wanted(find_table("fedzge", "2"), "gpu"):
        setting = cell.settings[0]
        values = registry.find(cell.method).make(setting.set, setting.preset).model_dump()
        values = values.get("host", values)
        local = ("E_k", "B_k", "eta_k") if "E_k" in values else ("E", "B", "eta")
        assert tuple(values[name] for name in local) == (10, 256, 0.01), cell.method
        adam += [cell.method] if "E_k" in values or values["opt"] == "adam" else []
        aux = "cifar100" if cell.method in ("mhat", "dsfl") else None
        assert (setting.public_dataset, setting.public, setting.aux, setting.holdout) == (aux, 0, 0, 0), cell.method
    assert set(adam) == set(TABLE_2)


def test_clients_of_the_small_suite_learn_from_their_records_first():
    """The paper has a tenth as many steps of distillation on a client as of local training."""
    for cell in wanted(find_table("fedzge", "2"), "cpu"):
        setting = cell.settings[0]
        values = registry.find(cell.method).make(setting.set, setting.preset).model_dump()
        if "E_prime" in values:
            assert 0 < values["E_prime"] * 5 <= values["E_k"], cell.method


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.name)
def test_what_no_paper_does_is_said(table):
    """TF32 rounds otherwise than float32. Records that choose a round would not be trained on: there are none."""
    settings = [setting for cell in wanted(table, "gpu") for setting in cell.settings]
    assert {setting.validation for setting in settings} == {0.0}
    assert {setting.aux for setting in settings} == {0.0}
    assert table.score == "own" or {setting.holdout for setting in settings} == {0.0}
    assert ("tf32" in {setting.precision for setting in settings}) == ("TF32" in table.differs)


def test_a_cell_has_the_columns_setting_and_the_first_row_of_its_method(mine):
    table = find_table("Mine", "Table 7")
    fedavg, constant, skewed = wanted(table, "gpu")
    assert [s.seed for s in fedavg.settings] == [0, 1]
    assert fedavg.settings[0].set == {"E": 2, "eta": 0.2}
    assert wanted(table, "cpu")[0].settings[0].set == {"E": 1, "eta": 0.2}  # `rows` is of the published scale
    assert constant.settings[0].partition == "iid"
    assert (skewed.settings[0].partition, skewed.settings[0].dataset) == ("dirichlet:0.3", "cifar10")
    assert [cell.column.name for cell in wanted(table, "cpu")] == ["even", "even"]
    assert [len(cell.settings) for cell in wanted(table, "gpu", ["skew"], seeds=5)] == [5]


def utility(test, own=None, own_global=None):
    accuracy = {"accuracy": test, "low": 0.0, "high": 1.0, "n": 10}
    spread = {"mean": own, "std": 0.0, "each": [own]}
    of_global = {"test": accuracy} | ({"local_test": {**spread, "mean": own_global}} if own_global else {})
    return Utility(**{"global": of_global}, clients={"local_test": spread if own else None})


def test_the_best_and_the_last_round_of_the_right_model():
    rounds = [utility(0.5, 0.9, 0.3), None, utility(0.8, 0.7, 0.4), utility(0.6, 0.8, 0.2)]
    assert scored(rounds, "test", "best") == pytest.approx(80)
    assert scored(rounds, "test", "last") == pytest.approx(60)
    assert scored(rounds, "own", "last") == pytest.approx(80)
    assert scored(rounds, "own", "best") == pytest.approx(90)
    assert scored(rounds, "own", "last", of_global=True) == pytest.approx(20)
    assert scored([None], "test", "best") is None


def test_verdicts():
    paper = (80.0, 1.0)
    assert verdict(paper, Ours((79.5, 80.5, 80.9), 20), 20, 3) == "reproduced"
    for short in (Ours((79.5, 80.5), 20), Ours((79.5, 80.5, 80.9), 19)):
        assert verdict(paper, short, 20, 3) == "within the spread, in another setting"
    assert verdict(paper, Ours((80.0,) * 3, 20), 20, 3, "another network") == "within the spread, in another setting"
    assert verdict(paper, Ours((78.0,), 5), 20).startswith("undecided: 2.0 below after 5 of 20")
    assert verdict(paper, Ours((82.0,), 5), 20) == "not reproduced: 2.0 above"  # more rounds cannot lower the best
    assert verdict(paper, Ours((78.0,), 20), 20, why="steps") == "not reproduced: 2.0 below; steps"
    away = verdict(paper, Ours((78.0,) * 3, 20), 20, 3, "another network", "steps")
    assert away == "outside the spread, in another setting: 2.0 below; steps"  # of the paper nothing is said
    assert verdict((80.0, -1), Ours((78.0,), 20)) == "2.0 below a figure without a spread"
    assert verdict(paper, Ours(why_not="5 h")) == "not run: 5 h"


def test_an_order_needs_seeds_that_agree():
    assert order([80, 81, 82], [70, 71, 73]).startswith("above, +9.7 [")
    assert order([70, 71, 73], [80, 81, 82]).startswith("below")
    assert order([80, 62, 72], [70, 71, 69]).startswith("cannot be told")
    assert order([80], [70]) == "cannot be told from one seed"
    assert order([], [70]) == "not run"
    assert order_verdict(90, 80, "above, x") == "order reproduced: above, x"
    assert order_verdict(90, 80, "below, x") == "order turned round: below, x"
    assert order_verdict(80, 90, "below, x") == "order reproduced: below, x"
    assert order_verdict(80, 90, "cannot be told, x") == "cannot be told, x"
    assert order_verdict(90, 80, "below, x", "TF32") == "order turned round in another setting: below, x"


def test_the_command_runs_what_fits_and_goes_on(mine, quick, tmp_path):
    out = tmp_path / "out"
    done = called("mine", 7, "--scale", "cpu", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    fedavg, constant = json.loads(done.stdout)
    figures = [json.loads(path.read_text()) for path in sorted(out.glob("runs/fedavg*/record.json"))]
    best = [100 * record["result"]["best_test_round"]["accuracy"] for record in figures]
    assert len(best) == 2
    assert fedavg["ours"] == f"{statistics.mean(best):.2f} ± {statistics.stdev(best):.2f} (2 seeds)"
    assert fedavg["verdict"] == "another data set: only the order is judged"
    assert "order turned round in another setting" in constant["order"]  # published: constant above fedavg
    again = called("mine", 7, "--scale", "gpu", "--out", out, "--column", "even", "--method", "constant", "--dry-run")
    assert "2 done" in again.output
    missing = called("mine", 7, "--scale", "gpu", "--out", tmp_path / "gpu", "--column", "skewed", "--json")
    assert json.loads(missing.stdout)[0]["verdict"].startswith("not run: the data set cifar10 is not here")


def test_a_budget_takes_first_seeds_first_and_adds_up(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "forecast", lambda cells, measure: [Forecast(c, "new", 1, 40.0) for c in cells])
    table = find_table("mine", "7")
    planned = reproduce.plan(table, "cpu", tmp_path / "out", budget=1.5)
    assert [(p.cell.method, p.run.setting.seed) for p in planned if p.fits] == [("fedavg", 0), ("constant", 0)]
    assert planned[2].why_not == "about 40 s, over the budget of 1.5 min"
    assert sum(p.fits for p in reproduce.plan(table, "cpu", tmp_path / "out", budget=1.5, jobs=2)) == 4
    assert all(p.fits for p in reproduce.plan(table, "cpu", tmp_path / "out"))


def test_what_cannot_be_timed_does_not_fit_a_budget(mine, tmp_path, monkeypatch):
    """Two runs of either method. One will fail, one is done, one does not apply, and one takes a minute and a half."""
    states = [("will fail", None), ("done", 0.0), ("does not apply", None), ("new", 90.0)]
    monkeypatch.setattr(
        reproduce,
        "forecast",
        lambda cells, measure: [Forecast(c, state, 1, s, "why") for c, (state, s) in zip(cells, states, strict=True)],
    )
    table = find_table("mine", "7")
    planned = reproduce.plan(table, "cpu", tmp_path / "out", budget=1.5)
    assert [one.fits for one in planned] == [False, True, True, True], "a budget is kept up to its end"
    assert planned[0].why_not == "will fail: why"


def test_of_a_run_that_starts_from_another_the_later_one_is_planned(mine, tmp_path, monkeypatch):
    """The suite lists the run that it takes its clients from before it."""
    made, asked = reproduce.make_cells, []

    def with_first(suite, out, seeds_together):
        asked.append((out, seeds_together))
        (cell,) = made(suite, out)
        return [SimpleNamespace(setting=SimpleNamespace(dataset="digits"), folder=out / "first"), cell]

    monkeypatch.setattr(reproduce, "make_cells", with_first)
    monkeypatch.setattr(reproduce, "forecast", lambda cells, measure: [Forecast(c, "new", 1, 1.0) for c in cells])
    planned = reproduce.plan(find_table("mine", "7"), "cpu", tmp_path / "out", seeds=1, seeds_together=True)
    assert [one.run.setting.method for one in planned] == ["fedavg", "constant"]
    assert asked == [(tmp_path / "out", True)] * 2


def test_a_forecast_is_measured_where_that_is_asked_for(mine, tmp_path):
    asked = ("mine", 7, "--scale", "cpu", "--out", tmp_path / "out", "--method", "constant", "--dry-run")
    assert "Time: not known" in called(*asked).output
    measured = called(*asked, "--measure")
    assert "Time: about" in measured.output, measured.output
    assert not (tmp_path / "out").exists()


def test_forecasts_as_json_add_up_the_seeds_of_a_cell(mine, tmp_path, monkeypatch):
    took = {0: 40.0, 1: 50.0}
    monkeypatch.setattr(
        reproduce,
        "forecast",
        lambda cells, measure: [
            Forecast(c, "new", 3, None if c.setting.method == "constant" and c.setting.seed else took[c.setting.seed])
            for c in cells
        ],
    )
    said = called("mine", 7, "--scale", "gpu", "--out", tmp_path / "out", "--dry-run", "--json")
    fedavg, constant, skewed = json.loads(said.stdout)
    assert (fedavg["column"], fedavg["method"], fedavg["runs"]) == ("even", "fedavg", 2)
    assert (fedavg["seconds"], fedavg["bytes"]) == (90.0, 6)
    assert constant["seconds"] is None, "one of its seeds is not known"
    assert skewed["seconds"] is None
    assert "cifar10 is not here" in skewed["note"]


def test_a_seed_that_failed_on_one_side_is_no_pair(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "forecast", lambda cells, measure: [Forecast(c, "new", 1, 1.0) for c in cells])
    monkeypatch.setattr(reproduce, "_record", lambda one: SimpleNamespace(rounds=[1, 2], seed=one.run.setting.seed))
    values = {
        ("fedavg", 0): 10.0,
        ("fedavg", 1): 50.0,
        ("fedavg", 2): 90.0,
        ("constant", 1): 48.0,
        ("constant", 2): 88.0,
    }
    monkeypatch.setattr(reproduce, "figure", lambda table, cell, record: values.get((cell.method, record.seed)))
    table = find_table("mine", "7")
    _, constant = reproduce.results(table, "cpu", reproduce.plan(table, "cpu", tmp_path / "out", seeds=3))
    assert "above, +2.0 [+2.0, +2.0]" in constant.order


def test_unknown_names_are_said_clearly(mine):
    with pytest.raises(SettingError, match=r"no table 'mine 8'.*Did you mean 'mine 7'"):
        find_table("mine", "8")
    with pytest.raises(SettingError, match=r"no column 'x' at --scale cpu. Choose from: even"):
        wanted(find_table("mine", "7"), "cpu", ["x"])
    with pytest.raises(SettingError, match="no row 'fedaf'"):
        wanted(find_table("mine", "7"), "cpu", methods=["fedaf"])
    assert "write cpu or gpu" in str(called("mine", 7, "--scale", "tpu").exception)
    assert "Mine, Table 7" in called().output
    assert "Mine, Table 7" in called("mine").output
    assert "Unknown paper 'yours'" in str(called("yours").exception)
