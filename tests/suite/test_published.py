"""The suites of the papers' main tables: they can be read, and each names all of its paper's rivals."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedaudit import registry
from fedaudit.suite.published import Ours, verdict
from fedaudit.suite.suite_file import read_suite

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "studies" / "baselines"
PUBLISHED = Path(__file__).resolve().parents[2] / "fedaudit" / "suites" / "published"
OF = {
    "DFFKE": ("dffke_2", "dffke_2_cpu"),
    "FedAF": ("fedaf_1", "fedaf_1_cpu"),
    "FedFree": ("fedfree_1", "fedfree_1_cpu"),
    "FedZGE": ("fedzge_2", "fedzge_2_cpu"),
}
OTHER = {"fke"}  # DFFKE's own form with a public set: in no row of its Table 2


@pytest.mark.parametrize(("paper", "name"), [(paper, name) for paper, names in OF.items() for name in names])
def test_a_tables_suite_has_all_its_rows(paper, name):
    suite = read_suite(PUBLISHED / f"{name}.toml")
    methods = {cell.method for cell in suite.cells()}
    compared = {m for m in registry.names("methods") if paper in registry.find(m).tables and "+" not in m} - OTHER
    assert compared <= methods, f"{name} lacks {sorted(compared - methods)}"


@pytest.mark.parametrize("name", ["baselines", "baselines_privacy"])
def test_the_others_can_be_read(name):
    assert read_suite(FOLDER / f"{name}.toml").cells()


def test_one_seed_is_enough_where_the_paper_says_nothing_of_more():
    one, two = Ours((50.2,), rounds=10), Ours((50.2, 49.9), rounds=10)
    assert verdict((50.0, 1.0), one) == "reproduced"
    assert verdict((50.0, 1.0), one, rounds=10, seeds=2) == "within the spread, in another setting"
    assert verdict((50.0, 1.0), two, rounds=10, seeds=2) == "reproduced"
    assert verdict((50.0, 1.0), two, rounds=11, seeds=2) == "within the spread, in another setting"
    assert verdict((50.0, 1.0), two, differs="TF32") == "within the spread, in another setting"
