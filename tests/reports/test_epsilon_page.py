"""docs/results/epsilon.md is what its script makes of the kept figures, and they are what the page says of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table():
    return script("epsilon_table")


def test_the_page_is_made_from_the_kept_figures(table):
    assert table.PAGE.read_text() == table.page()


def test_no_bound_is_wrong_more_often_than_it_may_be(table):
    rows = [*table.kept("bounds"), *table.kept("one_run")]
    assert len(rows) == 60, "six bounds, two deltas, the null and four epsilons"
    assert all(row["of"] == 400 and row["low"] <= 0.05 for row in rows)


def test_gaussian_bounds_are_tighter_than_free_ones(table):
    by = {(r["bound"], r["delta"], r["epsilon"]): r["found_over_true"] for r in table.kept("bounds")}
    for delta in (1e-5, 1e-2):
        for epsilon in (1.0, 2.0, 8.0):
            shift, fixed, free = (
                by[name, delta, epsilon]
                for name in ("mu-GDP, mean shift", "mu-GDP, fixed threshold", "Clopper-Pearson, ranks")
            )
            assert shift > fixed > free


def test_intervals_of_the_tpr_cover(table):
    rows = table.kept("coverage")
    assert {row["n"] for row in rows} == {100, 500, 2000}
    for row in rows:
        assert row["of"] == 2000
        assert row["covered"] >= 0.93
        assert row["covered"] <= (0.97 if row["n"] * row["fpr"] > 1 else 1.0)


# A refutation by one audit that does not stand among three: the page says so.
KNOWN = [("DFRD, label counts", 0.9, 105)]


def spoke(row):
    return row["told"] != "not refuted"


def test_less_noise_is_silent_once_and_honest_noise_is_not_refuted(table):
    """Of both sets of seeds: the first, and the one that was made after the rule was set."""
    rows = table.kept("sabotage")
    for fresh in (False, True):
        some = [row for row in rows if (row["seed"] >= table.FRESH) is fresh]
        assert some
        silent = [(row["case"], row["noise"], row["seed"]) for row in some if row["noise"] < 1 and not spoke(row)]
        assert silent == (KNOWN if fresh else [])
        assert all(row["told"] == "refuted" for row in some if row["noise"] == 0)
        for case in {row["case"] for row in some}:
            honest = [row["told"] for row in some if row["case"] == case and row["noise"] == 1]
            assert honest.count("refuted") <= 4, "5 % of 20 are one: more than 4 have a probability of 0.3 %"
    one = [(row["case"], row["noise"], row["seed"]) for row in rows]
    assert len(one) == len(set(one)), "no run counts twice"


def test_tests_of_noise_keep_their_level(table):
    rows = table.kept("noise")
    honest = [row for row in rows if row["noise"] == 1]
    assert {(row["release"], row["sigma"]) for row in honest} == {("float", 2.0), ("uint8", 0.5), ("uint8", 20.0)}
    assert all(row["of"] == 400 and row["low"] <= 0.05 for row in honest)
    assert all(row["rate"] > 0.95 for row in rows if row["noise"] < 1 and row["noise"] <= row["finds"])


def test_audits_on_whole_runs_keep_their_level(table):
    """400 runs of each: an interval that holds 5 % or lies below it; of baselines 1 % for the three together."""
    by = {(r["test"], r["regime"], r["case"]): r for r in table.kept("whole_runs")}
    assert len(by) == 16
    assert all(row["of"] == 400 for row in by.values())
    for (test, _, case), row in by.items():
        if case == "dithered":
            assert (row["rate"] > 0.99) is (test == "blind_pixels")
        else:
            assert row["low"] <= (0.01 / 3 if case == "honest" else 0.05)


def test_more_uploads_tell_more(table):
    """In the mean over seeds, for both attacks: as the page says."""
    rows = table.kept("rounds")
    assert {row["attack"] for row in rows} == {"lira", "rmia"}
    assert len({row["seed"] for row in rows}) >= 3
    for attack in ("lira", "rmia"):
        aucs = [[r["auc"] for r in rows if (r["attack"], r["rounds"]) == (attack, n)] for n in (1, 3, 5)]
        one, three, five = (sum(of) / len(of) for of in aucs)
        assert one < three < five


def test_the_scripts_run_in_small(tmp_path):
    calibration = script("epsilon_calibration")
    calibration.main([str(tmp_path / "a.json"), "--repetitions", "2", "--table", "bounds", "--table", "one_run"])
    assert (tmp_path / "a.json").exists()
