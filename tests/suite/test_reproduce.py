"""A published table: its figures, which runs stand for a cell, and the verdict on them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedaudit import registry
from fedaudit.cli.main import app
from fedaudit.errors import RunError, SettingError
from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.runtime.scores import Utility
from fedaudit.setting import Setting
from fedaudit.suite import published, reproduce
from fedaudit.suite.cell import Cell
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


@pytest.mark.long
def test_the_command_runs_what_fits_and_goes_on(mine, quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where CIFAR-10 is not, even if it is on this machine
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
    monkeypatch.chdir(tmp_path)  # where CIFAR-10 is not, even if it is on this machine
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


# --- plans and rows by hand ------------------------------------------------------------------------------------------


def test_which_settings_stand_for_a_cell(mine):
    """The suite's base and the first values of its grid, then the column, the method's first row, and its own."""
    table = find_table("Mine", "Table 7")
    small = wanted(table, "cpu")
    assert [(cell.column.name, cell.method, cell.published) for cell in small] == [
        ("even", "fedavg", (90.0, 60.0)),
        ("even", "constant", (99.0, 1.0)),
    ]
    first = small[0].settings
    assert [(s.seed, s.partition, s.set, s.clients, s.dataset) for s in first] == [
        (seed, "iid", {"E": 1, "eta": 0.2}, 2, "digits") for seed in (0, 1)
    ]
    large = wanted(table, "gpu", seeds=3)
    assert [(cell.column.name, cell.method) for cell in large] == [
        ("even", "fedavg"), ("even", "constant"), ("skewed", "fedavg"),
    ]  # fmt: skip
    assert [cell.settings[2].set for cell in large] == [{"E": 2, "eta": 0.2}, {}, {"E": 1, "eta": 0.2}]
    assert (large[2].settings[0].partition, large[2].settings[0].dataset) == ("dirichlet:0.3", "cifar10")
    assert [len(cell.settings) for cell in large] == [3, 3, 3]
    assert [cell.method for cell in wanted(table, "gpu", ["SKEW"])] == ["fedavg"]
    assert [cell.column.name for cell in wanted(table, "gpu", ["skew", "even"])] == ["even", "even", "skewed"]
    assert [cell.method for cell in wanted(table, "gpu", ["even"], ["constant"])] == ["constant"]
    assert [column.name for column in table.columns("cpu")] == ["even"]
    assert (table.rival("constant"), table.name) == ("fedavg", "mine 7")
    other = table.model_copy(update={"compared": {"constant": "local"}})
    assert (other.rival("constant"), other.rival("x")) == ("local", "fedavg")


def test_rows_of_a_method_are_of_the_columns_models(mine):
    (mine / "mine.toml").write_text(SUITE.replace("set = { E = 5 }", 'set = { E = 5 }\nmodel = "cnn"'))
    table = find_table("mine", "7")
    column = table.column[0].model_copy(update={"models": ["cnn"]})
    (cell,) = wanted(table.model_copy(update={"column": [column]}), "cpu")
    assert (cell.settings[0].model, cell.settings[0].set) == ("cnn", {"E": 5})


def test_a_plan_has_the_first_seeds_first_and_measures_where_it_must(mine, tmp_path, monkeypatch):
    asked = []

    def forecast(cells, measure):
        asked.append(([(c.setting.method, c.setting.seed) for c in cells], measure))
        return [Forecast(c, "new", 1, 60.0) for c in cells]

    monkeypatch.setattr(reproduce, "forecast", forecast)
    monkeypatch.setattr(reproduce, "available", lambda name, folder: name == "digits")
    table = find_table("mine", "7")
    out = tmp_path / "out"
    planned = reproduce.plan(table, "gpu", out, seeds_together=True)
    assert [(p.cell.column.name, p.cell.method, p.run.setting.seed, p.fits) for p in planned] == [
        ("even", "fedavg", 0, True), ("even", "constant", 0, True), ("skewed", "fedavg", 0, False),
        ("even", "fedavg", 1, True), ("even", "constant", 1, True), ("skewed", "fedavg", 1, False),
    ]  # fmt: skip
    assert planned[2].why_not.startswith("the data set cifar10 is not here")
    assert (planned[2].forecast.state, planned[2].forecast.bytes, planned[2].forecast.seconds) == (
        "no data",
        None,
        None,
    )
    assert {p.run.setting.engine for p in planned} == {"stacked"}
    assert {(p.run.folder.parent, tuple(p.run.attacks), p.run.trials) for p in planned} == {(out / "runs", (), 0)}
    pairs = [("fedavg", 0), ("constant", 0), ("fedavg", 1), ("constant", 1)]
    for how, measured in (({}, False), ({"measure": True}, True), ({"budget": 9}, True), ({"jobs": 2}, False)):
        asked.clear()
        reproduce.plan(table, "gpu", out, **how)
        assert asked == [(pairs, measured)]
    assert [p.fits for p in reproduce.plan(table, "cpu", out, budget=1.5, jobs=0)] == [True, False, False, False]
    assert [p.fits for p in reproduce.plan(table, "cpu", out, budget=3.0)] == [True, True, True, False]
    monkeypatch.setattr(reproduce, "forecast", lambda cells, measure: [])
    with pytest.raises(ValueError, match="zip"):
        reproduce.plan(table, "cpu", out)
    with pytest.raises(RunError, match="has no cell to run with these choices"):
        reproduce.plan(table.model_copy(update={"column": []}), "cpu", out)


def test_a_run_that_starts_from_another_is_planned_as_itself(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "forecast", lambda cells, measure: [Forecast(c, "new", 1, 1.0) for c in cells])
    start = 'method = "constant"\nstart = { method = "local", rounds = 3 }'
    (mine / "mine.toml").write_text(SUITE.replace('method = "constant"', start))
    planned = reproduce.plan(find_table("mine", "7"), "cpu", tmp_path, seeds=1)
    assert [(p.run.setting.method, p.run.setting.rounds) for p in planned] == [("fedavg", 2), ("constant", 2)]


def made(name, method, seed=0, column="even", fits=True, seconds=1.0, size=1, note="", why=""):
    setting = Setting.make(method=method, seed=seed)
    run = Cell(Path("out") / name, setting, [], [])
    of = published.Column(name=column, gpu={}, figures={"fedavg": (50.0, 2.0), "constant": (40.0, -1.0)})
    cell = published.Wanted(of, method, (setting,))
    return reproduce.Planned(cell, run, Forecast(run, "new", size, seconds, note), fits, why)


def test_only_runs_that_fit_are_carried_out(monkeypatch, tmp_path):
    asked = []

    def audit(suite, out, watch, jobs, seeds_together):
        asked.append(([row["seed"] for row in suite.methods], suite.attacks, out, watch, jobs, seeds_together))
        done = [Cell(Path("out") / name, Setting.make(), [], []) for name in ("a", "b")]
        done[0].status, done[1].status, done[1].reason = "done", "failed", "it diverged"
        return done

    monkeypatch.setattr(reproduce, "audit", audit)
    planned = [made("a", "fedavg", 0), made("b", "fedavg", 1), made("b", "fedavg", 2, fits=False, why="too long")]
    before = planned[2].run
    reproduce.carry_out_plan(planned, tmp_path, "watch", 3, True)
    assert asked == [([0, 1], [], tmp_path, "watch", 3, True)]
    assert [(one.run.status, one.why_not) for one in planned] == [
        ("done", ""), ("failed", "it diverged"), ("to do", "too long"),
    ]  # fmt: skip
    assert planned[2].run is before
    reproduce.carry_out_plan(planned[2:], tmp_path)
    assert len(asked) == 1, "nothing fits"


def test_the_forecast_of_a_cell_adds_up_its_seeds():
    planned = [
        made("a", "fedavg", 0, seconds=3.0, size=10, note="one"), made("b", "constant", 0, seconds=None, size=5),
        made("c", "fedavg", 1, seconds=4.0, size=30, note="one", why="two"),
        made("d", "fedavg", 0, "skewed", size=None),
    ]  # fmt: skip
    assert [tuple(vars(row).values()) for row in reproduce.foreseen(planned)] == [
        ("even", "fedavg", 2, 7.0, 40, "one; two"),
        ("even", "constant", 1, None, 5, ""),
        ("skewed", "fedavg", 1, 1.0, None, ""),
    ]


def test_rows_of_a_result_by_hand(mine, monkeypatch):
    """Two seeds of FedAvg, at 51 and 53 after 5 and 4 rounds; constant has only its second seed; none is skewed."""
    figures = {"a": (51.0, 5), "b": (53.0, 4), "c": (None, 0), "d": (45.0, 9), "e": None}

    def record(one):
        found = figures[one.run.folder.name]
        return None if found is None else SimpleNamespace(rounds=[0] * found[1], value=found[0])

    monkeypatch.setattr(reproduce, "_record", record)
    monkeypatch.setattr(reproduce, "figure", lambda table, cell, record: record.value)
    monkeypatch.setattr(
        reproduce, "differs_text", lambda table, cells: "+".join(c.method for c in cells) if told else ""
    )
    table = find_table("mine", "7").model_copy(update={"rounds": 4, "seeds": 2})
    planned = [
        made("a", "fedavg", 0), made("b", "fedavg", 1), made("c", "constant", 0, why="not enough"),
        made("d", "constant", 1), made("e", "fedavg", 0, "skewed", why="no data"),
    ]  # fmt: skip
    told = False
    first, second, third = (tuple(vars(row).values()) for row in reproduce.results(table, "gpu", planned))
    assert first == ("even", "fedavg", "50.00 ± 2.00", "52.00 ± 1.41 (2 seeds)", "reproduced", "")
    assert second == (
        "even", "constant", "40.00", "45.00 (1 seed)", "5.0 above a figure without a spread",
        "fedavg cannot be told from one seed",
    )  # fmt: skip
    assert third == ("skewed", "fedavg", "50.00 ± 2.00", "-", "not run: no data", "")
    told = True
    first, *_ = reproduce.results(table, "gpu", planned)
    assert first.verdict == "within the spread, in another setting"
    late = table.model_copy(update={"rounds": 5})
    told = False
    assert reproduce.results(late, "gpu", planned)[0].verdict == "within the spread, in another setting"
    small = reproduce.results(table, "cpu", planned)
    assert [row.verdict for row in small] == [
        "another data set: only the order is judged", "another data set: only the order is judged", "not run: no data",
    ]  # fmt: skip
    figures |= {"c": (40.0, 5)}
    _, both, _ = reproduce.results(table, "gpu", planned)
    assert both.order.startswith("fedavg cannot be told, +9.5 [")
    figures |= {"c": (43.0, 5)}
    told = True
    _, both, _ = reproduce.results(table, "gpu", planned)
    assert both.order == "fedavg order reproduced in another setting: above, +8.0 [+8.0, +8.0]"


def test_a_damaged_record_is_told_in_its_row(monkeypatch):
    def look(cell):
        raise SettingError("damaged")

    monkeypatch.setattr(reproduce, "look", look)
    one = made("a", "fedavg")
    assert (reproduce._record(one), one.why_not) == (None, "damaged")


@pytest.mark.parametrize(
    ("published_as", "values", "rounds", "how", "said"),
    [
        ((50.0, 2.0), (51.0, 53.0), 4, {}, "reproduced"),
        ((50.0, 2.0), (51.0, 53.0), 4, {"seeds": 3}, "within the spread, in another setting"),
        ((50.0, 2.0), (48.0,), 3, {"seeds": 1}, "within the spread, in another setting"),
        ((50.0, 2.0), (47.5,), 3, {}, "undecided: 2.5 below after 3 of 4 rounds"),
        ((50.0, 2.0), (47.5,), 4, {}, "not reproduced: 2.5 below"),
        ((50.0, 2.0), (55.0,), 3, {"why": "a reason"}, "not reproduced: 5.0 above; a reason"),
        ((50.0, 2.0), (55.0,), 4, {"differs": "x"}, "outside the spread, in another setting: 5.0 above"),
        ((50.0, -1.0), (55.0,), 4, {}, "5.0 above a figure without a spread"),
        ((50.0, -1.0), (49.0,), 4, {}, "1.0 below a figure without a spread"),
        ((50.0, -1.0), (49.0,), 4, {"differs": "x"}, "1.0 below a figure without a spread, in another setting"),
        ((50.0, 0.0), (50.0,), 4, {"seeds": 1}, "reproduced"),
    ],
)
def test_each_verdict_at_its_edges(published_as, values, rounds, how, said):
    assert verdict(published_as, Ours(values, rounds), **{"rounds": 4, "seeds": 2, **how}) == said


@pytest.mark.parametrize(
    ("done", "rise", "said"),
    [
        (100, 3.9, "not reproduced: 6.0 below after 100 of 150 rounds; steps"),
        (100, 4.0, "undecided: 6.0 below after 100 of 150 rounds"),  # as much again would bring it to the spread
        (99, 0.0, "undecided: 6.0 below after 99 of 150 rounds"),  # more than half as many again are missing
        (100, None, "undecided: 6.0 below after 100 of 150 rounds"),
        (150, 9.0, "not reproduced: 6.0 below; steps"),
    ],
)
def test_a_run_that_is_cut_short_and_does_not_rise_is_not_undecided(done, rise, said):
    """The gap to the spread is four points."""
    assert verdict((50.0, 2.0), Ours((44.0,), done, rise=rise), 150, why="steps") == said


def test_the_figure_of_a_run_is_of_the_model_that_the_table_tests(uneven_rounds):
    """Own: of clients' models, or of the global one where the column says so. Rounds without a score do not count."""
    assert scored(uneven_rounds, "test", "best") == pytest.approx(80.0)
    assert scored(uneven_rounds, "test", "last") == pytest.approx(70.0)
    assert scored(uneven_rounds, "own", "best") == pytest.approx(65.0)
    assert scored(uneven_rounds, "own", "last") == pytest.approx(55.0)
    assert scored(uneven_rounds, "own", "best", of_global=True) == pytest.approx(75.0)
    assert scored([None], "own", "best") is None
    without = SimpleNamespace(global_=None, clients=SimpleNamespace(local_test=None))
    assert [scored([without], "own", "last", of_global) for of_global in (True, False)] == [None, None]


@pytest.fixture
def uneven_rounds():
    def utility(test, own, everywhere):
        return SimpleNamespace(
            test_score=lambda: test,
            clients=SimpleNamespace(local_test=SimpleNamespace(mean=own)),
            global_=SimpleNamespace(local_test=SimpleNamespace(mean=everywhere)),
        )

    return [utility(0.6, 0.5, 0.45), utility(0.8, 0.65, 0.75), None, utility(0.7, 0.55, 0.72)]


def test_orders_by_hand():
    assert (order([], []), order([1.0], [2.0])) == ("not run", "cannot be told from one seed")
    assert order([3.0, 3.5], [1.0, 1.5]) == "above, +2.0 [+2.0, +2.0]"
    assert order([1.0, 1.5], [3.0, 3.5]) == "below, -2.0 [-2.0, -2.0]"
    assert order([3.0, 9.0], [1.0, 1.5]).startswith("cannot be told, +4.8 [")
    assert order([2.0, 2.0], [2.0, 2.0]) == "cannot be told, +0.0 [+0.0, +0.0]"
    wide = order([10.0, 10.1, 10.2], [1.0, 1.2, 1.4])
    assert wide == "above, +8.9 [+8.7, +9.1]"
    assert order([1.0, 1.2, 1.4], [10.0, 10.1, 10.2]) == "below, -8.9 [-9.1, -8.7]"
    assert order_verdict(5.0, 4.0, wide) == f"order reproduced: {wide}"
    assert order_verdict(4.0, 5.0, wide, "x") == f"order turned round in another setting: {wide}"
    assert order_verdict(4.0, 4.0, "below, so") == "order reproduced: below, so"
    assert (order_verdict(1, 2, "cannot be told, so"), order_verdict(1, 2, "not run")) == (
        "cannot be told, so",
        "not run",
    )
