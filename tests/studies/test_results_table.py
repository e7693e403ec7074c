"""docs/results/README.md is what its command makes of the kept records, and the gate's table is what they say."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
import re
import statistics
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reported
from pages import RESULTS, STUDIES, of_study, script

from fedaudit.runtime.attack_result import MembershipResult, NotRun, ReconstructionResult
from fedaudit.runtime.run_record import Absence
from fedaudit.stats import Estimate
from fedaudit.suite import published
from fedaudit.suite.paper_settings import stated
from fedaudit.suite.suite_file import read_suite

TABLE = script("results_table")


def test_the_table_is_made_from_the_records() -> None:
    made, kept = TABLE.markdown(), (RESULTS / "README.md").read_text()
    assert made == kept, "python benchmarks/studies/shared/results_table.py --write"


def test_the_page_begins_with_the_coverage_of_the_papers() -> None:
    first = next(line for line in (RESULTS / "README.md").read_text().splitlines() if line.startswith("## "))
    assert first == "## What of the papers is here"


def test_every_suite_and_study_of_a_paper_is_covered() -> None:
    """By a table or figure that it belongs to, or as a study of ours; two of one name stand with their topics."""
    told = tomllib.loads(of_study("coverage.toml").read_text())
    named = {
        kind: {n for part in (*told["item"], told["ours"]) for n in part.get(kind, [])}
        for kind in ("suites", "records")
    }
    there = [path for topic in TABLE.PAPERS for path in (STUDIES / topic).glob("*.toml")]
    lost = [
        f"{path.parent.name}/{path.stem}"
        for path in there
        if not {path.stem, f"{path.parent.name}/{path.stem}"} & named["suites"]
    ]
    assert not lost, f"name them in coverage.toml: {lost}"
    kept = {path.name for topic in TABLE.PAPERS for path in (STUDIES / topic / "records").glob("*") if path.is_dir()}
    assert kept <= named["records"], f"name them in coverage.toml: {kept - named['records']}"


def a_run(method: str, seed: int, rounds: int, **setting: Any) -> dict[str, Any]:
    return {"rounds_done": rounds, "setting": {"method": method, "seed": seed, "dataset": "digits", **setting}}


def test_a_row_of_the_coverage_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods, seeds 0 and 2, and 1; the shortest run has 7 of the paper's 9 rounds."""
    runs = {"s": [a_run("b", 2, 9), a_run("b", 0, 7), a_run("a", 1, 9), a_run("a", 3, 9, dataset="cifar10")]}
    monkeypatch.setattr(TABLE, "kept", lambda study: runs[study])
    monkeypatch.setattr(TABLE, "cells_of", lambda suite: {"digits": 3})
    monkeypatch.setattr(TABLE.published, "tables", list)
    item = {"paper": "P", "item": "Table 1", "about": "x", "data": ["svhn", "digits"], "rounds": 9}
    rows = TABLE.covered({**item, "suites": ["q"], "records": ["s"]})
    assert [row[2:] for row in rows] == [
        ["SVHN", "no", "no", "-"],
        ["digits", "`q`", "a: 1; b: 0, 2", "part, 7 to 9 of 9"],
        ["(CIFAR-10)", "no", "a: 3", "whole, 9"],
    ]
    assert TABLE.rounds_of(runs["s"][:1], 0) == "part, 9 of ?"


def test_a_run_that_trains_the_clients_of_others_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "topic" / "records" / "study"
    folder.mkdir(parents=True)
    found = {"first": a_run("local", 0, 1), "second": a_run("b", 0, 9, start={"method": "local", "rounds": 1})}
    for name, run in found.items():
        (folder / f"{name}.json").write_text(json.dumps(run))
    monkeypatch.setattr(TABLE, "STUDIES", tmp_path)
    assert TABLE.kept.__wrapped__("study") == [found["second"]]


def record(accuracy: float, rounds: int, seed: int = 0) -> dict[str, Any]:
    test = {"accuracy": accuracy, "low": accuracy - 0.01, "high": accuracy + 0.01}
    low = {"accuracy": 0.1, "low": 0.0, "high": 0.2}
    made = {"device": "one", "commit": "abc", "minutes": 1.0}
    setting = {"seed": seed, "precision": "float32"}
    tested = [{"round": 1, "global": low}, {"round": rounds, "global": test}]
    return {"rounds": tested, "rounds_done": rounds, "setting": setting, **made}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "bf16"}, "bf16"),
        ({"commit": "fedcba9"}, "fedcba9"),
        ({"rounds_done": 17}, "17"),
        ({"device": "another"}, "another"),
        ({"seed": 7}, "7"),
    ],
)
@pytest.mark.parametrize("key", ["fedaf", "fedaf-fedavg"])
def test_the_page_no_longer_holds_when_a_record_was_made_otherwise(key, change, said, monkeypatch) -> None:
    """One record of a row with another precision, commit, number of rounds, device or seed: the page is made otherwise,
    in this row, and names it."""
    told = tomllib.loads(of_study("published.toml").read_text())
    cell = next(cell for cell in told["cell"] if cell["key"] == key)
    read = TABLE.read

    def changed(name: str) -> dict[str, Any]:
        found = copy.deepcopy(read(name))
        if name == cell["records"][0]:
            found["setting"] |= {k: v for k, v in change.items() if k in ("precision", "seed")}
            found |= {k: v for k, v in change.items() if k not in ("precision", "seed")}
        return found

    before = TABLE.row(cell)
    monkeypatch.setattr(TABLE, "read", changed)
    after = TABLE.row(cell)
    assert after[5] != before[5]
    assert said in after[5]
    page = (RESULTS / "README.md").read_text()
    assert before[5] in page
    assert after[5] not in page


def test_a_row_that_mixes_says_so_and_is_another_setting() -> None:
    """Three seeds, one in TF32 at another commit: both are told seed by seed, and nothing is reproduced."""
    mixed = [record(0.805, 20, seed) for seed in range(3)]
    assert TABLE.verdict(CELL, mixed) == "reproduced"
    mixed[1]["commit"], mixed[1]["setting"]["precision"] = "def", "tf32"
    made = TABLE.Made.of(mixed)
    assert made.text(20) == (
        "0, 1, 2 / 20 of 20 / float32 (seed 0), TF32 (seed 1), float32 (seed 2) on one, 3.0 min / abc (seed 0), def "
        "(seed 1), abc (seed 2)"
    )
    assert TABLE.off(CELL, mixed) == (
        "precision float32 (seed 0), TF32 (seed 1), float32 (seed 2); the seeds differ in precision, commit"
    )
    assert TABLE.verdict(CELL, mixed) == "within the spread, in another setting"


CELL = {"mean": 80.0, "spread": 1.0, "rounds": 20, "seeds": 3, "differs": "", "why": "no reason"}


@pytest.mark.parametrize(
    ("accuracy", "rounds", "seeds", "differs", "begins"),
    [
        (0.805, 20, 3, "", "reproduced"),
        (0.805, 20, 3, "TF32", "within the spread"),
        (0.805, 19, 3, "", "within the spread"),
        (0.805, 20, 1, "", "within the spread"),
        (0.78, 19, 3, "", "undecided: 2.0 below after 19 of 20"),
        (0.82, 19, 3, "", "not reproduced: 2.0 above; no reason"),  # a best round does not fall any more
        (0.78, 20, 3, "", "not reproduced: 2.0 below; no reason"),
        (0.78, 20, 3, "TF32", "outside the spread, in another setting: 2.0 below; no reason"),
    ],
)
def test_verdicts(accuracy: float, rounds: int, seeds: int, differs: str, begins: str) -> None:
    assert TABLE.verdict({**CELL, "differs": differs}, [record(accuracy, rounds)] * seeds).startswith(begins)


def test_a_cut_off_run_that_no_longer_rises_is_decided() -> None:
    """Its best round is an early one, and no more than half as many rounds are missing."""
    flat = record(0.5, 19)
    flat["rounds"].insert(0, {"round": 1, "global": flat["rounds"][-1]["global"]})
    assert TABLE.verdict(CELL, [flat] * 3) == "not reproduced: 30.0 below after 19 of 20 rounds; no reason"
    assert TABLE.verdict(CELL, [flat, flat, record(0.5, 19)]).startswith("undecided"), "one of them may still rise"


@pytest.mark.parametrize(
    ("first", "second", "done", "differs", "said"),
    [
        (0.84, 0.80, 20, "", "above (two models of one seed)"),
        (0.81, 0.80, 20, "", "level (two models of one seed)"),
        (0.80, 0.84, 20, "", "below (two models of one seed)"),
        (0.84, 0.80, 4, "", "above (two models of one seed; 4 and 4 of 20 rounds)"),
        (0.80, 0.84, 4, "", "undecided: below so far (4 and 4 of 20 rounds)"),
        (0.81, 0.80, 4, "TF32", "undecided: level so far (4 and 4 of 20 rounds)"),
        (0.84, 0.80, 20, "TF32", "above in another setting (two models of one seed)"),
        (0.81, 0.80, 20, "TF32", "level in another setting (two models of one seed)"),
        (0.80, 0.84, 20, "TF32", "below in another setting (two models of one seed)"),
    ],
)
def test_orders(
    first: float, second: float, done: int, differs: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"a": record(first, done), "b": record(second, done)}
    monkeypatch.setattr(TABLE, "read", kept.__getitem__)
    cells = {key: {"records": [key], "mean": 1.0, "rounds": 20} for key in kept}
    cells["b"]["differs"] = differs
    order = {"paper": "", "table": "", "claim": "", "cells": ["a", "b"]}
    assert TABLE.ordered(order, cells)[-1] == said


def test_orders_over_seeds_compare_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {f"a{s}": record(0.5 + 0.1 * s, 20, s) for s in range(3)} | {
        f"b{s}": record(0.48 + 0.1 * s, 20, s) for s in (2, 0, 1)
    }
    monkeypatch.setattr(TABLE, "read", kept.__getitem__)
    cells = {key: {"records": [n for n in kept if n[0] == key], "mean": mean} for key, mean in (("a", 2.0), ("b", 1.0))}
    said = TABLE.ordered({"paper": "", "table": "", "claim": "", "cells": ["a", "b"]}, cells)[-1]
    assert said == "order reproduced: above, +2.0 [+2.0, +2.0] (3 seeds)"  # although the spread over seeds is 10 points


def test_an_order_may_say_how_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the last two of four tests the first is 1 point below on average: by the point that its cell asks for, while
    the second's is that of the end. An order that does not ask says nothing of it."""

    def curve(*accuracies: float, seed: int, point: str = "") -> dict[str, Any]:
        run, tests = record(0.5, 4, seed), [{"accuracy": a, "low": a - 0.01, "high": a + 0.01} for a in accuracies]
        low = {"accuracy": 0.1, "low": 0.0, "high": 0.2}
        run["rounds"] = [
            {"round": 2 * i, "global": low, "global_points": {point: test}}
            if point
            else {"round": 2 * i, "global": test}
            for i, test in enumerate(tests, start=1)
        ]
        return run

    kept = {f"a{s}": curve(0.1, 0.2, 0.75, 0.53 + 0.1 * s, seed=s, point="early") for s in range(3)}
    kept |= {f"b{s}": curve(0.7, 0.6, 0.65, 0.65 + 0.1 * s, seed=s) for s in range(3)}
    monkeypatch.setattr(TABLE, "read", kept.__getitem__)
    cells = {key: {"records": [n for n in kept if n[0] == key], "mean": mean} for key, mean in (("a", 2.0), ("b", 1.0))}
    cells["a"]["point"] = "early"
    order = {"paper": "", "table": "", "claim": "", "cells": ["a", "b"]}
    usual = TABLE.ordered(order, cells)[-1]
    assert "in the last" not in usual
    ended = TABLE.ordered({**order, "last": 2}, cells)[-1]
    assert ended == usual.removesuffix(" (3 seeds)") + "; in the last 2 tests below, -1.0 [-1.0, -1.0] (3 seeds)"
    with pytest.raises(AssertionError, match="fewer tested rounds"):
        TABLE.ordered({**order, "last": 5}, cells)


def test_fedftgs_order_ends_level_on_the_page() -> None:
    """Best rounds are above the host's; the last 40 rounds, of which every second is tested, cannot be told apart."""
    told = tomllib.loads(of_study("published.toml").read_text())
    (order,) = [order for order in told["order"] if "last" in order]
    assert order["cells"] == ["fedftg-authors", "dfrd-authors-fedavg"]
    runs = [TABLE.read(f"dfrd_table1_fmnist/fedavg+fedftg-{seed}") for seed in range(3)]
    late = [[r for r in run["rounds"] if r["round"] > 160] for run in runs]
    assert {len(of) for of in late} == {order["last"]}
    ours = [[100 * r["global"]["accuracy"] for r in of] for of in late]
    hosts = [[100 * r["global_points"]["before distillation"]["accuracy"] for r in of] for of in late]
    end = published.order(*([statistics.mean(of) for of in curves] for curves in (ours, hosts)))
    assert end.startswith("cannot be told")
    (line,) = [line for line in (RESULTS / "README.md").read_text().splitlines() if order["claim"] in line]
    assert "order reproduced in another setting: above, " in line
    assert line.endswith(f"; in the last {order['last']} tests {end} (3 seeds) |")


def test_an_order_of_runs_that_were_cut_off_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has 9 and 10 of 20 rounds, the second all: above so far; with all rounds the order is reproduced."""
    kept = {f"a{s}": record(0.55, 10 - s // 2, s) for s in range(3)} | {f"b{s}": record(0.5, 20, s) for s in range(3)}
    monkeypatch.setattr(TABLE, "read", kept.__getitem__)
    cells = {
        key: {"records": [n for n in kept if n[0] == key], "mean": mean, "rounds": 20}
        for key, mean in (("a", 2.0), ("b", 1.0))
    }
    order = {"paper": "", "table": "", "claim": "", "cells": ["a", "b"]}
    said = TABLE.ordered(order, cells)[-1]
    assert said == "undecided: above so far, +5.0 [+5.0, +5.0] (3 seeds; 9 to 10 and 20 of 20 rounds)"
    for name in ("a0", "a1", "a2"):
        kept[name]["rounds_done"] = 20
    assert TABLE.ordered(order, cells)[-1] == "order reproduced: above, +5.0 [+5.0, +5.0] (3 seeds)"
    kept["b1"]["rounds_done"] = 3
    assert TABLE.ordered(order, cells)[-1].endswith("(3 seeds; 20 and 3 to 20 of 20 rounds)")


def test_a_figure_within_the_spread_names_the_rounds_of_runs_that_were_cut_off() -> None:
    runs = [record(0.805, rounds) for rounds in (19, 20, 17)]
    assert TABLE.verdict(CELL, runs).endswith(", in another setting, after 17 to 20 of 20 rounds")
    assert TABLE.verdict(CELL, [record(0.805, 20)] * 2) == "within the spread, in another setting"  # two seeds


def test_the_published_figures_are_those_that_reproduce_has() -> None:
    cells = tomllib.loads(of_study("published.toml").read_text())["cell"]
    tables = {table.name: table for table in published.tables()}
    checked = 0
    for cell in (cell for cell in cells if "mean" in cell):
        table = tables.get(f"{cell['paper'].lower()} {cell['table']}")
        row = cell["asked"]["method"]
        row = row.partition("+")[0] if "point" in cell else row  # before the distillation it is the host's
        figures = [c.figures[row] for c in table.column if row in c.figures] if table else []
        if table:
            assert (cell["mean"], cell["spread"]) in figures, cell["key"]
            checked += 1
    assert checked >= 8


def test_a_cell_does_not_get_another_run() -> None:
    kept = TABLE.read("dfrd_fmnist/fedavg+dfrd-3d0bda95b56d")
    asked = {"method": "fedavg+dfrd", "set": {"weighting": "uniform"}}
    assert TABLE.checked("dfrd_fmnist/fedavg+dfrd-3d0bda95b56d", asked) == kept
    with pytest.raises(SystemExit, match="Name another record"):
        TABLE.checked("dfrd_fmnist/fedavg+dfrd-3d0bda95b56d", {**asked, "set": {}})
    by_value = {"method": "fedavg+dfrd", "values": {"weighting": "uniform", "eta_d": 0.001}}
    assert TABLE.checked("dfrd_fmnist/fedavg+dfrd-3d0bda95b56d", by_value) == kept
    with pytest.raises(SystemExit, match=r"'eta_d': 0\.001"):
        TABLE.checked("dfrd_fmnist/fedavg+dfrd-3d0bda95b56d", {**by_value, "values": {"eta_d": 0.01}})


def test_the_gate_on_the_page() -> None:
    """Every reading of FedAF with its best and last test round, best first."""
    text = (RESULTS / "fedaf.md").read_text()
    records = [json.loads(path.read_text()) for path in of_study("records/fedaf_gate").glob("*.json")]
    assert len(records) == 8
    records.sort(key=lambda kept: -TABLE.best(kept)["accuracy"])
    rows = []
    for kept in records:
        told = " | ".join(str(kept["hyper_parameters"][key]).lower() for key in ("norm", "clamp", "restart"))
        last = copy.deepcopy(kept["rounds"][-1]["global"])
        rows.append(f"| {told} | {TABLE.percent(TABLE.best(kept))} | {TABLE.percent(last)} |")
    assert "\n".join(rows) in text
    method = importlib.import_module("fedaudit.methods.condensation.fedaf").FedAF()
    assert {key: getattr(method, key) for key in ("norm", "clamp", "restart")} == {
        key: records[0]["hyper_parameters"][key] for key in ("norm", "clamp", "restart")
    }


@pytest.mark.parametrize("study", ["fedaf_best", "fedaf_one_seed"])
def test_the_runs_that_were_cut_off_on_the_page(study: str) -> None:
    text = (RESULTS / "fedaf.md").read_text()
    found = {}
    for path in of_study(f"records/{study}").glob("*.json"):
        kept = json.loads(path.read_text())
        found[kept["setting"]["method"]] = kept
    assert set(found) == {"fedaf", "feddm", "fedavg"}
    for name, method in (("FedAF", "fedaf"), ("FedDM", "feddm"), ("FedAvg", "fedavg")):
        kept = found[method]
        assert kept["status"] == ("done" if kept["rounds_done"] == 20 else "running")
        last = f"{100 * kept['rounds'][-1]['global']['accuracy']:.2f}"
        assert f"| {name} | {kept['rounds_done']} | {TABLE.percent(TABLE.best(kept))} | {last} |" in text


def test_what_else_was_changed_in_the_gate_on_the_page() -> None:
    """The control, and one thing changed in each of the others; one of them is above it in all rounds."""
    text = (RESULTS / "fedaf.md").read_text()
    records = [json.loads(path.read_text()) for path in of_study("records/fedaf_more").glob("*.json")]
    assert len(records) == 6
    curves = {}
    for kept in records:
        last = kept["rounds"][-1]["global"]
        assert f"| {TABLE.percent(TABLE.best(kept))} | {TABLE.percent(last)} |" in text
        curves[kept["hyper_parameters"]["lgkm_scale"], TABLE.best(kept)["accuracy"]] = [
            100 * row["global"]["accuracy"] for row in kept["rounds"]
        ]
    control = next(curve for curve in curves.values() if f"| nothing | {max(curve):.2f} " in text)
    nearest = next(curve for (scale, _), curve in curves.items() if scale == "mean")
    gains = [mine - theirs for mine, theirs in zip(nearest, control, strict=True)]
    assert (f"{min(gains):.1f}", f"{max(gains):.1f}", f"{gains[-1]:.1f}") == ("0.8", "3.4", "1.0")


def test_what_was_changed_beside_lgkm_on_the_page() -> None:
    """A row for each run, the control first and then the best first."""
    text = (RESULTS / "fedaf.md").read_text()
    records = [json.loads(path.read_text()) for path in of_study("records/fedaf_readings").glob("*.json")]
    assert len(records) == 10
    assert {kept["hyper_parameters"]["lgkm_scale"] for kept in records} == {"mean"}
    records.sort(key=lambda kept: (len(kept["setting"]["set"]) > 3, -TABLE.best(kept)["accuracy"]))
    cells = [f" | {TABLE.percent(TABLE.best(r))} | {TABLE.percent(r['rounds'][-1]['global'])} |" for r in records]
    at = [text.index(cell) for cell in cells]
    assert at == sorted(at)
    for kept, place in zip(records, at, strict=True):
        row = text[text.rindex("\n", 0, place) : place]
        changed = set(kept["setting"]["set"]) - {"steps", "T_over", "lgkm_scale"}
        assert all(f"`{name}" in row for name in changed), row


@pytest.mark.parametrize(
    "study", ["fedaf_gate", "fedaf_gate_cifar10", "fedaf_more", "fedaf_readings", "fedaf_lgkm", "fedaf_digits"]
)
def test_runs_that_differ_are_not_one_row(study: str) -> None:
    """A row's name has what was set, so that two readings are not averaged as two seeds."""
    settings = [json.loads(path.read_text())["setting"] for path in of_study(f"records/{study}").glob("*.json")]
    name = script("fedaf_table").name
    rows = [(s["seed"], s["model"], name(SimpleNamespace(setting=SimpleNamespace(**s)))) for s in settings]
    assert len(set(rows)) == len(rows)


def test_fedafs_table_of_three_seeds_on_the_page() -> None:
    """Table 1 at alpha 0.02: every row from the records, one commit, all rounds; what the verdict says of them."""
    text = (RESULTS / "fedaf.md").read_text()
    flat = " ".join(text.split())
    figures = next(
        column.figures
        for table in published.tables()
        if table.name == "fedaf 1"
        for column in table.column
        if column.name == "Fashion-MNIST, alpha 0.02"
    )
    curves: dict[str, list[list[float]]] = {}
    for method in ("fedaf", "feddm", "fedavg", "fedprox", "moon", "fedbn"):
        for seed in range(3):
            run = json.loads(of_study(f"records/fedaf_table1_fmnist/{method}-{seed}.json").read_text())
            setting = run["setting"]
            assert (setting["method"], setting["seed"], setting["partition"]) == (method, seed, "dirichlet-capped:0.02")
            assert (run["rounds_done"], run["status"], run["commit"]) == (20, "done", "2575f31")
            curve = [r["clients"]["mean"] if method == "fedbn" else r["global"]["accuracy"] for r in run["rounds"]]
            curves.setdefault(method, []).append([100 * value for value in curve])
    names = {
        "fedaf": "FedAF",
        "feddm": "FedDM",
        "fedavg": "FedAvg",
        "fedprox": "FedProx",
        "moon": "MOON",
        "fedbn": "FedBN",
    }
    tops = {method: [max(curve) for curve in of] for method, of in curves.items()}

    def listed(values: list[float]) -> str:
        return ", ".join(f"{value:.2f}" for value in values)

    def late(curve: list[float]) -> float:
        return statistics.mean(curve[-5:])

    for method, of in curves.items():
        mean, spread = figures[method]
        ours = f"{listed(tops[method])} | {statistics.mean(tops[method]):.2f} ± {statistics.stdev(tops[method]):.2f}"
        ends = f"{listed([curve[-1] for curve in of])} | {listed([late(curve) for curve in of])}"
        assert f"| {names[method]} | {mean:.2f} ± {spread:.2f} | {ours} | {ends} |" in text

    def apart(pairs: list[float], digits: int = 2) -> tuple[str, str]:
        mean, half = statistics.mean(pairs), 4.302653 * statistics.stdev(pairs) / 3**0.5  # two degrees of freedom
        return f"{mean:+.{digits}f}", f"[{mean - half:.{digits}f}, {mean + half:.{digits}f}]"

    mean, interval = apart([a - b for a, b in zip(tops["fedaf"], tops["feddm"], strict=True)])
    assert f"FedAF above FedDM is not shown. On Fashion-MNIST it is {mean} points {interval}, and" in flat
    both = zip(curves["fedaf"], curves["feddm"], strict=True)
    mean, interval = apart([late(a) - late(b) for a, b in both])
    assert f"in the best round, and {mean} {interval} in the mean of the last five" in flat
    ours = [f"{statistics.mean(tops[m]):.2f} ± {statistics.stdev(tops[m]):.2f}" for m in ("fedaf", "feddm")]
    theirs = ["{:.2f} ± {:.2f}".format(*figures[m]) for m in ("fedaf", "feddm")]
    said = f"FedAF {ours[0]} (published {theirs[0]}), FedDM {ours[1]} ({theirs[1]})."
    assert f"Fashion-MNIST, 20 rounds: {said}" in flat
    mean, interval = apart([a - b for a, b in zip(tops["feddm"], tops["fedavg"], strict=True)], 1)
    assert f"FedDM by {mean.removeprefix('+')} points {interval} over FedAvg" in flat
    fallen = [top - curve[-1] for top, curve in zip(tops["fedaf"], curves["fedaf"], strict=True)]
    assert f"falls by {fallen[1]:.1f} and {fallen[2]:.1f} points after its best round in seeds 1 and 2" in flat
    above = [statistics.mean(tops[m]) - figures[m][0] for m in ("fedavg", "fedprox", "moon")]
    assert f"stand {min(above):.0f} to {max(above):.0f} points above their published figures" in flat
    assert f"FedBN is {figures['fedbn'][0] - statistics.mean(tops['fedbn']):.0f} points below its own" in flat
    jumps = [max(abs(b - a) for a, b in itertools.pairwise(curve[10:])) for curve in curves["fedavg"]]
    assert f"have largest jumps of {min(jumps):.0f} to {max(jumps):.0f} points from one round" in flat
    averaged = max(statistics.mean(at) for at in zip(*curves["fedavg"], strict=True))
    assert f"The best round of the averaged curve is {averaged:.2f}" in flat
    cells = (RESULTS / "README.md").read_text()
    assert f"of the averaged curve of the three seeds the best round is {averaged:.1f}" in cells


def test_a_cell_is_whole_with_three_seeds_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {str(seed): a_run("a", seed, 20) for seed in range(3)} | {"short": a_run("a", 2, 19)}
    monkeypatch.setattr(TABLE, "read", runs.__getitem__)
    assert TABLE.whole({"records": ["0", "1", "2"], "rounds": 20})
    assert not TABLE.whole({"records": ["0", "1", "short"], "rounds": 20})
    assert not TABLE.whole({"records": ["0", "1", "1"], "rounds": 20})
    assert not TABLE.whole({"records": ["0", "1", "2"]})  # the paper's rounds are not known
    assert not TABLE.whole({"cost": "much"})


def test_who_states_the_rounds_is_said_and_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's first sentence counts what the paper states, and what its authors' code states, of whole rows."""
    text, page = TABLE.Made.of([record(0.8, 20)]).text(20, "the README"), (RESULTS / "README.md").read_text()
    assert "20 of 20 (the README) / " in text
    cells = [c for c in tomllib.loads(of_study("published.toml").read_text())["cell"] if TABLE.whole(c)]
    paper = [c for c in cells if "stated" not in c]
    assert {c["paper"] for c in paper} == {"FedAF", "FedZGE", "FedFree"}
    assert f"{len(paper)} of the" in page
    assert f"{len(cells) - len(paper)} more have three seeds at the length" in " ".join(page.split())
    assert len(cells) >= 25
    assert len({c["paper"] for c in cells}) == 5


def test_figures_with_three_seeds_at_full_length_are_counted_once() -> None:
    """A published figure that several readings stand beside is one; the page has 25 or more, over all five papers."""
    cells = [
        {"paper": paper, "table": table, "asked": {"dataset": data}, "mean": mean, "spread": 1.0}
        for paper, table, data, mean in (
            ("A", "1", "cifar10", 50.0),
            ("A", "1", "cifar10", 50.0),  # another reading of it
            ("A", "2", "cifar10", 50.0),
            ("A", "1", "svhn", 50.0),
            ("A", "1", "cifar10", 60.0),
            ("B", "1", "cifar10", 50.0),
        )
    ]
    assert TABLE.figures(cells) == "5 published figures (A 4, B 1)"
    page = " ".join((RESULTS / "README.md").read_text().split())
    found = re.search(r"stand beside (\d+) published figures \(([^)]*)\)", page)
    assert found
    by_paper = dict(one.rsplit(" ", 1) for one in found[2].split(", "))
    assert sum(map(int, by_paper.values())) == int(found[1]) >= 25
    assert set(by_paper) == {"FedAF", "DFFKE", "DFRD", "FedZGE", "FedFree"}


def test_no_text_points_to_a_row_by_its_place() -> None:
    """Rows move, and the pointer then names another row."""
    told = tomllib.loads(of_study("published.toml").read_text())["cell"]
    said = [(c["key"], c.get(field, "")) for c in told for field in ("differs", "why", "cell")]
    places = r"\bas above\b|\brow above\b|\babove row\b|\bnext row\b|\brow below\b|\(below\)|\bas below\b"
    assert [key for key, text in said if re.search(places, text)] == []


def test_the_last_round_is_the_last_that_was_evaluated() -> None:
    rounds = [{"round": t, "clients_on_own": {"mean": mean}} for t, mean in ((20, 0.9), (40, 0.7))]
    run = {"rounds": rounds, "rounds_done": 40}
    cell = {"whose": "clients_on_own"}
    assert TABLE.values({**cell, "statistic": "last"}, [run]) == (70.0,)
    assert TABLE.values(cell, [run]) == (90.0,)


@pytest.mark.parametrize(
    ("accuracies", "rise"), [([0.5, 0.6, 0.7, 0.65], 10.0), ([0.7, 0.6, 0.5, 0.4], 0.0), ([None, None, 0.5, 0.6], None)]
)
def test_the_rise_is_what_the_second_half_added_to_the_best(accuracies: list[Any], rise: float | None) -> None:
    """Rounds 10 to 40 of 40. Without a test in the first half nobody knows."""
    rounds = [
        {"round": 10 * (i + 1), "global": {"accuracy": a}} for i, a in enumerate(accuracies) if a is not None
    ]  # fmt: skip
    found = TABLE.rise({}, {"rounds": rounds, "rounds_done": 40})
    assert found == (math.inf if rise is None else pytest.approx(rise))


def test_the_best_round_of_clients_models_is_that_of_their_mean() -> None:
    rounds = [
        {"global": {"accuracy": 0.9}, "clients": {"mean": 0.2}, "clients_on_own": {"mean": 0.5}},
        {"global": {"accuracy": 0.8}, "clients": {"mean": 0.4}, "clients_on_own": {"mean": 0.3}},
    ]
    found = [TABLE.best({"rounds": rounds}, whose=of)["accuracy"] for of in ("global", "clients", "clients_on_own")]
    assert found == [0.9, 0.4, 0.5]


def test_fedafs_whole_runs_on_the_page() -> None:
    text = (RESULTS / "fedaf.md").read_text()
    records = [json.loads(path.read_text()) for path in of_study("records/fedaf_lgkm").glob("*.json")]
    assert len(records) == 3
    for kept in records:
        assert (kept["status"], kept["rounds_done"]) == ("done", 20)
        ends = [100 * row["global"]["accuracy"] for row in kept["rounds"][-5:]]
        last = TABLE.percent(kept["rounds"][-1]["global"])
        row = next(row for row in text.splitlines() if f" | {TABLE.percent(TABLE.best(kept))} | {last} |" in row)
        assert row.endswith(f"| {statistics.mean(ends):.2f} |")
        assert all(f"`{name}" in row for name in set(kept["setting"]["set"]) - {"T_over", "lgkm_scale"})


def test_feddm_with_fedafs_start_on_the_page() -> None:
    """Its row, and how far FedAF in the same start and augmentation is above it."""
    text = (RESULTS / "fedaf.md").read_text()
    (feddm,) = (json.loads(path.read_text()) for path in of_study("records/fedaf_feddm").glob("*.json"))
    fedaf = TABLE.read("fedaf_lgkm/fedaf-9a32fe96b256")
    both = ("aug_w", "start", "norm", "clamp", "restart", "steps", "E", "IPC", "averaged", "least")
    assert [feddm["hyper_parameters"][key] for key in both] == [fedaf["hyper_parameters"][key] for key in both]
    assert feddm["setting"]["seed"] == fedaf["setting"]["seed"]

    def three(kept: dict[str, Any]) -> list[float]:
        curve = [100 * row["global"]["accuracy"] for row in kept["rounds"]]
        assert (kept["status"], len(curve)) == ("done", 20)
        return [max(curve), curve[-1], statistics.mean(curve[-5:])]

    best, last, five = three(feddm)
    row = f"{TABLE.percent(TABLE.best(feddm))} | {TABLE.percent(feddm['rounds'][-1]['global'])} | {five:.2f} |"
    assert row in text
    above = [mine - theirs for mine, theirs in zip(three(fedaf), (best, last, five), strict=True)]
    words = (
        f"by {above[0]:.1f} points in the best round, with intervals that are just apart, by {above[1]:.1f} in the last"
    )
    assert f"{words} and by {above[2]:.1f} in the mean of the last five" in " ".join(text.split())
    assert TABLE.best(fedaf)["low"] > TABLE.best(feddm)["high"]


def test_fedavgs_controls_on_the_page() -> None:
    text = (RESULTS / "fedaf.md").read_text()
    kept = [json.loads(path.read_text()) for path in of_study("records/fedaf_fedavg").glob("*.json")]
    control = TABLE.read("fedaf_one_seed/fedavg-80579c44c6a3")
    whole = [run for run in (control, *kept) if run["setting"]["seed"] == 0]
    assert sorted((run["setting"]["partition"], str(run["setting"]["set"])) for run in whole) == [
        ("dirichlet-capped:0.02", "{'momentum': 0.0}"), ("dirichlet-capped:0.02", "{}"), ("dirichlet:0.02", "{}"),
    ]  # fmt: skip
    for run in whole:
        half = statistics.mean(100 * row["global"]["accuracy"] for row in run["rounds"][10:])
        ends = f"{TABLE.percent(TABLE.best(run))} | {TABLE.percent(run['rounds'][-1]['global'])} | {half:.1f} |"
        assert ends in text
        assert TABLE.best(run)["low"] > (56.50 + 5.55) / 100
        if run is not control:
            assert f"{100 * TABLE.best(run)['accuracy']:.2f}" in (RESULTS / "README.md").read_text()


def test_what_differs_between_fedavgs_controls_on_the_page() -> None:
    """Commits, steps and held out records of both controls, and what momentum does by the one and by the other."""
    text = (RESULTS / "fedaf.md").read_text()
    flat = " ".join(text.split())
    first = TABLE.read("fedaf_one_seed/fedavg-80579c44c6a3")
    second = TABLE.read("fedaf_table1_fmnist/fedavg-0")
    still, plain = (TABLE.read(f"fedaf_fedavg/fedavg-{name}") for name in ("898c2058bf4d", "f82b48de6836"))
    runs = (first, second, plain, still)
    kinds = [(r["commit"], r["setting"]["step"], r["setting"]["validation"]) for r in runs]
    assert kinds == [("0e5c067", "auto", 0.02), ("2575f31", "compiled", 0.0), *[("81f07d0", "compiled", 0.02)] * 2]
    assert {r["setting"]["seed"] for r in runs} == {0}
    told = (
        'the first row is of commit 0e5c067 with steps that the engine chose (`step = "auto"`), the changed ones are '
        "of 81f07d0 in compiled steps. The second row is compiled too, but of 2575f31 and without the 2 % of "
        "validation records that the others hold out:"
    )
    assert told in flat

    def half(run: dict[str, Any]) -> float:
        return statistics.mean(100 * row["global"]["accuracy"] for row in run["rounds"][10:])

    ends = f"{TABLE.percent(TABLE.best(second))} | {TABLE.percent(second['rounds'][-1]['global'])}"
    assert f"| nothing, compiled steps, no records held out | {ends} | {half(second):.1f} |" in text
    tops = [100 * TABLE.best(run)["accuracy"] for run in runs]
    lower = sorted(f"{top - tops[3]:.0f}" for top in tops[:2])
    halves = sorted(f"{half(run) - half(still):.0f}" for run in (first, second))
    said = f"Its best round is {lower[0]} to {lower[1]} points lower and its second half {halves[0]} to {halves[1]}"
    assert f"{said}, by the one control or the other; that best round is still {tops[3] - 56.50:.0f} above" in flat
    assert tops[2] > max(tops[:2]), "better still with a plain Dirichlet"


def test_what_the_older_runs_of_one_seed_held_out_on_the_page() -> None:
    flat = " ".join((RESULTS / "fedaf.md").read_text().split())
    older = ("fedaf_one_seed", "fedaf_lgkm", "fedaf_feddm")
    above = ("fedaf_table1_fmnist", "fedaf_authors_fmnist")
    held = [
        {
            json.loads(path.read_text())["setting"]["validation"]
            for study in studies
            for path in of_study(f"records/{study}").glob("*.json")
        }
        for studies in (older, above)
    ]
    assert held == [{0.02}, {0.0}]
    told = "They held out 2 % of the records for validation, the runs of Fashion-MNIST in the tables above none."
    assert told in flat


def test_fedafs_table_on_digits_on_the_page() -> None:
    text = (RESULTS / "fedaf.md").read_text()
    last: dict[str, list[float]] = {}
    for path in of_study("records/fedaf_digits").glob("*.json"):
        kept = json.loads(path.read_text())
        values = kept["hyper_parameters"]
        name = {"fedaf": "FedAF", "feddm": "FedDM", "fedavg": "FedAvg"}.get(kept["setting"]["method"])
        if name == "FedAF":
            name += "" if values["lambda_loc"] else " without CDC"
            name += "" if values["lambda_glob"] else " without LGKM"
        if name:
            last.setdefault(name, []).append(100 * kept["rounds"][-1]["global"]["accuracy"])
    assert len(last) == 5
    for name, values in last.items():
        assert f"| {name} | 3 | {statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} |" in text, name


def test_a_run_that_was_cut_off_is_no_row_of_fedfrees_table(tmp_path: Path) -> None:
    for name, status in (("a", "done"), ("b", "running")):
        record = reported._record("fedavg", 0, 0.9, releases=True)
        reported._save(tmp_path, name, record.model_copy(update={"status": status}), [])
    (row,) = script("fedfree_table").collect(tmp_path)
    assert row["own"] == reported._record("fedavg", 0, 0.9, releases=True).result.last.clients.local_test.mean


def test_fedfrees_table_on_the_page() -> None:
    module, text = script("fedfree_table"), (RESULTS / "fedfree.md").read_text()
    assert module.tables(json.loads(of_study("fedfree_fmnist.json").read_text())).strip() in text
    digits = json.loads(of_study("fedfree_digits.json").read_text())
    assert module.wide(digits) in text

    def own(name: str, where: str) -> str:
        found = [row["own"] for row in digits if (row["method"], row["partition"]) == (name, where)]
        return f"{100 * statistics.mean(found):.1f}"

    local, fedfree = (f"{own(name, 'ratio:6:2:2')} and {own(name, 'dirichlet:0.3')}" for name in ("local", "fedfree"))
    assert f"local training {local};\nFedFree {fedfree};" in text


def test_fedfrees_whole_runs_on_the_page() -> None:
    """CIFAR-10 at the paper's length: every row, and what the page and the list of cells say of it."""
    text = (RESULTS / "fedfree.md").read_text()
    flat = " ".join(text.split())
    runs = {
        (method, seed): json.loads(of_study(f"records/fedfree_cifar10/{method}-{seed}.json").read_text())
        for method in ("local", "fedfree")
        for seed in range(3)
    }
    for (method, seed), run in runs.items():
        setting = run["setting"]
        assert (setting["method"], setting["seed"], run["rounds_done"], run["status"]) == (method, seed, 200, "done")
        assert [run["hyper_parameters"][name] for name in ("E", "B", "eta")] == [5, 10, 0.01]
        assert (setting["partition"], setting["model"], setting["clients"]) == ("classes:2", "fedfree_cnn", 10)
    own = {key: [100 * r["clients_on_own"]["mean"] for r in run["rounds"]] for key, run in runs.items()}
    aligned = [
        [100 * r["points"]["aligned"]["local_test"]["mean"] for r in runs["fedfree", s]["rounds"]] for s in (0, 1, 2)
    ]
    for i, r in enumerate(runs["fedfree", 0]["rounds"]):
        cells = [f"{own['local', s][i]:.2f} | {own['fedfree', s][i]:.2f} | {aligned[s][i]:.2f}" for s in range(3)]
        assert f"| {r['round']} | {' | '.join(cells)} |" in text

    def listed(values: list[float], digits: int = 2) -> str:
        *first, last = [f"{value:.{digits}f}" for value in values]
        return f"{', '.join(first)} and {last}"

    best = {method: [max(own[method, s]) for s in range(3)] for method in ("local", "fedfree")}
    last = {method: [own[method, s][-1] for s in range(3)] for method in ("local", "fedfree")}
    assert f"in the best of ten evaluated rounds: {listed(best['fedfree'])}" in flat
    assert f"the same clients has {listed(best['local'])}." in flat
    below = 91.45 - statistics.mean(last["fedfree"])
    assert f"it ends at {listed(last['fedfree'])}, in the mean {below:.1f} points below the published one" in flat
    assert f"local training end at {listed(last['local'])}." in flat
    for of in (best, last):
        apart = [a - b for a, b in zip(of["fedfree"], of["local"], strict=True)]
        half = 4.302653 * statistics.stdev(apart) / 3**0.5  # Student's t, two degrees of freedom
        mean = statistics.mean(apart)
        assert f"{mean:+.2f} points [{mean - half:.2f}, {mean + half:.2f}]" in flat
    cells = (RESULTS / "README.md").read_text()
    mean, spread = statistics.mean(last["fedfree"]), statistics.stdev(last["fedfree"])
    assert f"| 91.45 | {mean:.2f} ± {spread:.2f} in the last round |" in cells
    assert f"{below:.1f} below a figure without a spread, in another setting" in cells
    assert f"{listed(last['fedfree'])}; the best of ten evaluated rounds has {listed(best['fedfree'])}" in cells
    assert f"local training has {listed(last['local'])} in the last round" in cells
    lost = {method: [b - e for b, e in zip(best[method], last[method], strict=True)] for method in best}
    assert (
        f"FedFree loses {listed(lost['fedfree'], 1)} points; local training loses {listed(lost['local'], 1)}." in flat
    )
    most = max((own["fedfree", s][i] - aligned[s][i], s, 20 * (i + 1)) for s in range(3) for i in range(10))
    assert f"costs up to {most[0]:.1f} points before local training mends it (seed {most[1]}, round {most[2]})" in text
    ends = [own["fedfree", s][-1] - aligned[s][-1] for s in range(3)]
    assert f"In round 200 it costs {listed(ends, 1)} points" in flat
    assert max(abs(value - own["local", s][0]) for s in range(3) for value in own["local", s]) <= 0.1


def test_fedavg_beside_fedfree_on_the_page() -> None:
    """The last round of what Table 1 compares: seeds, deviations, Student's intervals of differences seed by seed."""
    text = (RESULTS / "fedfree.md").read_text()
    flat, top = " ".join(text.split()), " ".join(text.partition("\n## ")[0].split())
    runs = {
        (method, seed): json.loads(of_study(f"records/fedfree_cifar10/{method}-{seed}.json").read_text())
        for method in ("local", "fedfree", "fedavg")
        for seed in range(3)
    }

    def own(method: str, at: int, whose: str = "clients_on_own") -> list[float]:
        assert {runs[method, seed]["rounds"][at]["round"] for seed in range(3)} == {20 * (at % 10 + 1)}
        return [100 * runs[method, seed]["rounds"][at][whose]["mean"] for seed in range(3)]

    def apart(first: list[float], second: list[float]) -> str:
        pairs = [a - b for a, b in zip(first, second, strict=True)]
        mean, half = statistics.mean(pairs), 4.302653 * statistics.stdev(pairs) / 3**0.5  # two degrees of freedom
        return f"{mean:+.2f} [{mean - half:.2f}, {mean + half:.2f}]"

    def listed(values: list[float]) -> str:
        return "{:.2f}, {:.2f} and {:.2f}".format(*values)

    told = {row: published.find_table("fedfree", "1").column[0].figures[row][0] for row in ("fedavg", "fedfree")}
    local, fedfree, fedavg = (own(method, -1) for method in ("local", "fedfree", "fedavg"))
    shared = own("fedavg", -1, "global_on_own")
    for name, printed, found, *minus in (
        ("FedFree, clients after local training", "fedfree", fedfree, apart(fedfree, local), "-"),
        ("local training", "", local, "-", "-"),
        ("FedAvg, clients after local training", "", fedavg, apart(fedavg, local), apart(fedavg, fedfree)),
        ("FedAvg, the global model", "fedavg", shared, "-", "-"),
    ):
        seeds = ", ".join(f"{value:.2f}" for value in found)
        spread = f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}"
        off = apart(found, [told[printed]] * 3) if printed else "-"
        figure = f"{told[printed]:.2f}" if printed else "-"
        assert f"| {name} | {figure} | {seeds} | {spread} | {off} | {' | '.join(minus)} |" in text

    assert f"FedAvg's clients end at {listed(fedavg)}." in top
    words = f"That is {apart(fedavg, fedfree)} from FedFree and {apart(fedavg, local)} from local training"
    assert words in top.replace(" points [", " [")
    assert f"We read {told['fedavg']} as FedAvg's global model" in flat
    assert f"**{told['fedavg']} does not confirm two classes a client.**" in flat
    assert f"FedAvg's published {told['fedavg']} was to confirm the choice, and does not." in top
    ends = f"ends at {listed(shared)} on the clients' own tests, {apart(shared, [told['fedavg']] * 3)} from it"
    assert ends in top.replace(" points [", " [")
    best = [[max(own(method, at)[seed] for at in range(10)) for seed in range(3)] for method in ("fedavg", "fedfree")]
    assert f"in the last round and in the best one ({apart(*best)})" in flat
    assert all(a > b for a, b in zip(fedavg, fedfree, strict=True)), "above FedFree in each seed"
    assert all(a > b for a, b in zip(*best, strict=True))
    lift = [a - b for a, b in zip(fedavg, shared, strict=True)]
    assert f"Five local epochs lift FedAvg by {min(lift):.0f} to {max(lift):.0f} points" in flat
    for at in range(10):
        assert all(a > b for a, b in zip(own("fedavg", at), own("local", at), strict=True)), "in each evaluated round"
    sent = {m: sorted(runs[m, seed]["up_bytes"] / 2000 / 1e6 for seed in range(3)) for m in ("fedavg", "fedfree")}
    got = {m: sorted(runs[m, seed]["down_bytes"] / 2000 / 1e6 for seed in range(3)) for m in ("fedavg", "fedfree")}
    assert f"{got['fedavg'][0]:.1f}" == f"{got['fedavg'][-1]:.1f}" == f"{sent['fedavg'][0]:.1f}"
    words = f"They send {sent['fedavg'][0]:.1f} MB a client and round and get as much; FedFree's send "
    ours = [f"{of['fedfree'][0]:.1f} to {of['fedfree'][-1]:.1f}" for of in (sent, got)]
    assert f"{words}{ours[0]} and get {ours[1]}." in flat
    early, half = (listed(own("fedavg", at, "global_on_own")) for at in (0, 4))
    assert f"FedAvg's global model has {early} in round 20 and {half} in round 100" in flat
    spread = f"{statistics.mean(shared):.2f} ± {statistics.stdev(shared):.2f}"
    above = statistics.mean(shared) - told["fedavg"]
    assert f"At `classes:2` it reads {spread}, three seeds, {above:.1f} points too much" in flat
    (minutes,) = {round(runs["fedavg", seed]["minutes"]) for seed in range(3)}
    assert f"FedAvg's three with up to nine runs at a time, {minutes} minutes a run" in flat
    for kept, commit in (("fedavg", "d71ced80"), ("local", "4b3c3fa"), ("fedfree", "731a4e9")):
        assert {runs[kept, seed]["commit"] for seed in (0, 1)} == {commit}
        assert runs[kept, 2]["commit"] == ("d71ced80" if kept == "fedavg" else "8c636f1")
    assert "both seeds 2 of 8c636f1, FedAvg's three of d71ced80" in flat
    cells = (RESULTS / "README.md").read_text()
    assert f"| {told['fedavg']} | {spread} in the last round |" in cells
    assert f"| {above:.1f} above a figure without a spread, in another setting |" in cells
    assert f"FedAvg's clients after local training {listed(fedavg)} |" in cells
    assert f"The clients' models after local training have {listed(fedavg)}, above FedFree's in each seed" in cells
    reason = stated(published.find_table("fedfree", "1")).because["partition"]
    assert reason.endswith(f"FedAvg's global model has {spread}, {above:.1f} above its published figure")


def test_the_thermometer_makes_the_kept_runs_of_fedavg() -> None:
    """Setting by setting, at two classes a client; on a GPU the engine `auto` is `stacked`."""
    path = of_study("fedfree_thermometer.toml")
    cells = [cell.model_dump(mode="json") | {"engine": "stacked"} for cell in read_suite(path).cells()]
    runs = [json.loads(of_study(f"records/fedfree_cifar10/fedavg-{seed}.json").read_text()) for seed in range(3)]
    made = [{key: cell[key] for key in runs[0]["setting"]} for cell in cells]
    assert [made.count(run["setting"]) for run in runs] == [1, 1, 1]
    assert all((run["rounds_done"], run["status"]) == (200, "done") for run in runs)
    mean = statistics.mean(100 * run["rounds"][-1]["global_on_own"]["mean"] for run in runs)
    assert f"at classes:2, three seeds, and has {mean:.2f} there" in path.read_text()
    assert f"T = 200, {len(cells)} runs |" in (RESULTS / "fedfree.md").read_text()


def test_fedzges_curves_on_the_page() -> None:
    loops = json.loads(of_study("fedzge_shared.json").read_text())["loops"]
    text = (RESULTS / "fedzge.md").read_text()
    shown = [loop for loop in loops if loop["accuracy"] > 0.2]
    assert len(shown) == 6
    for loop in shown:
        assert "| " + " | ".join(f"{100 * accuracy:.1f}" for _, accuracy in loop["curve"]) + " |" in text


def test_the_files_of_the_pages_are_of_the_kept_records() -> None:
    """What the pages' tables are made from has the figures of the records, run by run."""

    def last(study: str, what: str, value: str, methods: tuple[str, ...]) -> list[float]:
        found = [json.loads(path.read_text()) for path in of_study(f"records/{study}").glob("*.json")]
        return sorted(run["rounds"][-1][what][value] for run in found if run["setting"]["method"].startswith(methods))

    for study in ("dfrd_fmnist", "dfrd_scratch_fmnist", "dfrd_dense"):
        runs = json.loads(of_study(f"{study}.json").read_text())
        ends = sorted(run["rounds"][-1]["test"]["accuracy"] for run in runs)
        assert ends == pytest.approx(last(study, "global", "accuracy", ("fedavg", "dfrd", "fedftg", "dense")), abs=1e-6)
    for study in ("fedzge_shared", "fedzge_kept"):
        loops = json.loads(of_study(f"{study}.json").read_text())["loops"]
        ends = sorted(loop["accuracy"] for loop in loops)
        assert ends == pytest.approx(last(study, "global", "accuracy", ("fedzge",)), abs=1e-6)
    rows = json.loads(of_study("fedfree_fmnist.json").read_text())
    ends = sorted(row["own"] for row in rows)
    kept = last("fedfree_fmnist", "clients_on_own", "mean", ("fedfree", "fedavg", "local"))
    assert ends == pytest.approx(kept, abs=1e-6)


def a_timed_run(**other: Any) -> dict[str, Any]:
    run = {"paper": "P", "item": "Table 7", "row": "a method", "rounds": 21, "rounds_s": [40.0, 10.0, 14.0]}
    return {**run, "beside": 3, "commit": "c0ffee", **other}


def test_a_forecast_by_hand() -> None:
    """40 s and 20 rounds of 12 s are 280 s, or 4.67 minutes: not 21 rounds of 12, nor 21 of the mean of all."""
    assert TABLE.timed(a_timed_run()) == ["P", "Table 7", "a method", "40", "12", "21", "5", "3", "c0ffee", ""]
    assert TABLE.forecast(a_timed_run(rounds=101)) == "21", "1,240 s; 101 rounds of 12 s would be 20 minutes"
    assert TABLE.forecast(a_timed_run(rounds_s=[40.0, 10.0])) == "4"


def test_a_first_round_stands_for_later_ones_that_were_not_timed() -> None:
    one = TABLE.timed(a_timed_run(rounds_s=[40.4], beside=0, note="it ended"))
    assert one[3:] == ["40", "-", "21", "14", "alone", "c0ffee", "it ended"], "21 rounds of 40.4 s"
    none = TABLE.timed(a_timed_run(rounds_s=[], waited_s=219))
    assert none[3:7] == ["not ended after 219", "-", "21", "-"]


def test_rows_that_were_not_run_are_timed() -> None:
    """Each cell that says so has a row of its paper and table below, and every row names rounds and a commit."""
    told = tomllib.loads(of_study("published.toml").read_text())["cell"]
    runs = json.loads((STUDIES / "shared" / "records" / "not_run.json").read_text())["runs"]
    asked = {(cell["paper"], cell["table"]) for cell in told if "timed below" in cell.get("cost", "")}
    assert len(asked) == 3
    for paper, table in asked:
        assert any(run["paper"] == paper and table in run["item"] for run in runs), f"{paper}, Table {table}"
    assert all(run["rounds"] and run["commit"] and run["setting"]["method"] for run in runs)
    assert not [run["row"] for run in runs if not TABLE.forecast(run).isdigit()], "every row has a forecast"
    assert len({(run["paper"], run["item"], run["row"]) for run in runs}) == len(runs)


def test_a_kept_record_has_each_score_under_its_own_name():
    """Six scores of one round, all different: none may be told as another."""

    def over_clients(mean):
        return {"mean": mean, "std": 0.01, "each": [mean], "sampled": None}

    sets = ("global_test", "local_test", "matched_test")
    told = {
        "clients": {name: over_clients((10 + i) / 100) for i, name in enumerate(sets)},
        "points": {"classifier": {name: over_clients((20 + i) / 100) for i, name in enumerate(sets)}},
    }
    found = script("keep_records").evaluated(told)
    names = {"clients": "global_test", "clients_on_own": "local_test", "clients_on_own_mix": "matched_test"}
    for kept, name in names.items():
        assert found.pop(kept) == {"mean": told["clients"][name]["mean"], "std": 0.01}
    assert {name: row["mean"] for name, row in found.pop("points")["classifier"].items()} == {
        name: told["points"]["classifier"][name]["mean"] for name in sets
    }
    assert not found


def test_a_kept_record_says_that_clients_failed():
    record, keep = reported._record("fedavg", 0, 0.8), script("keep_records")
    assert "failures" not in keep.compact(record, "hash", "note")
    record.rounds[0].absent = [Absence(client=1, ask=0, reason="no images")]
    assert keep.compact(record, "hash", "note")["failures"] == record.failures != ""


def test_no_row_of_the_table_has_runs_whose_clients_failed():
    """Such a row would have to say so among its differences from the paper."""
    cells = tomllib.loads(of_study("published.toml").read_text())["cell"]
    named = {name for cell in cells for name in cell.get("records", [])}
    kept = [path for path in STUDIES.glob("*/records/**/*.json") if f"{path.parent.name}/{path.stem}" in named]
    assert len(kept) > 100
    assert [path.stem for path in kept if "failures" in json.loads(path.read_text())] == []


def test_a_kept_record_has_what_attacks_found_and_the_largest_epsilon():
    """Members by their AUC, images by their error beside that of each guess; blind baselines are no attack."""
    near, far = (Estimate(value=v, low=v - 0.1, high=v + 0.1) for v in (0.3, 0.7))
    told = MembershipResult.model_construct
    images = {"pooled": SimpleNamespace(mse=near), "baselines": {"guess": SimpleNamespace(mse=far)}}
    attacks = [
        told(attack="a", leak=True, pooled=SimpleNamespace(auc=far)),
        told(attack="blind", leak=None, pooled=SimpleNamespace(auc=near)),
        ReconstructionResult.model_construct(attack="b", beats_baselines=False, **images),
        NotRun.model_construct(attack="c", reason="why"),
    ]
    billed = [{"logits": 2.0, "weights": math.inf}, {"logits": 3.0, "weights": 1.0}]
    ledger = [SimpleNamespace(by_kind=of_client) for of_client in billed]
    setting = SimpleNamespace(privacy={"logits": {}})
    keep, record = script("keep_records"), SimpleNamespace(attacks=attacks, ledger=ledger, setting=setting)
    assert keep.attacked(record) == {
        "a": {"auc": [0.7, 0.6, 0.8], "leak": True},
        "b": {"mse": [0.3, 0.2, 0.4], "baselines": {"guess": [0.7, 0.6, 0.8]}, "beats_baselines": False},
    }
    assert keep.by_kind(record) == {"logits": 3.0, "weights": "Infinity"}
    record.setting.privacy = {}
    assert keep.by_kind(record) == {}
