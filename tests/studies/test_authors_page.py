"""The page on the authors' readings: its table is made from kept records, and a row that mixes runs is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pages import script_in_place

from fedaudit import registry, run
from fedaudit.errors import DataError
from fedaudit.suite.suite_file import read_suite

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "benchmarks" / "studies" / "authors"
PAGE = ROOT / "docs" / "results" / "authors.md"
CHECKOUT = os.environ.get("FEDAUDIT_FEDZGE")


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("authors_table", STUDY / "table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["authors_table"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def runs(made):
    values = {
        "reading": "printed",
        "init": "common",
        "rounds": 10,
        "precision": "float32",
        "commit": "abc",
        "torch": "2",
    }
    return [made.Kept(method="fedaf", seed=s, last=0.5 + s / 10, best=0.7, **values) for s in (0, 1, 2)]


def test_the_table_by_hand(made):
    """0.5, 0.6, 0.7: the mean 60.0, and 4.303 standard errors of 0.1 / sqrt(3) to either side: 24.8."""
    lines = made.table(runs(made)).splitlines()
    assert lines[2] == "| `fedaf` | printed | common | 60.0 [35.2, 84.8] | 70.0 [70.0, 70.0] | - | - | 10; 0, 1, 2 |"
    assert lines[-1].startswith("Commit abc in float32 with torch 2.")


@pytest.mark.parametrize(("name", "other"), [("rounds", 9), ("commit", "def"), ("precision", "tf32"), ("torch", "1")])
def test_a_row_that_mixes_is_refused(name, other, made):
    """Rounds within a row; commit, precision and version over the whole table."""
    mixed = runs(made)
    mixed[1] = replace(mixed[1], **{name: other})
    with pytest.raises(DataError, match="mixes runs of different"):
        made.table(mixed)


def test_a_run_is_kept_as_it_was(made, tiny, tmp_path):
    """From a run's own record: reading, rounds and both ways of testing."""
    record = run(tiny("fedzge", rounds=2, eval_every=1, preset="authors", set={
        "E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 16, "q": 2, "d_z": 8, "tested": "inner",
    }), out=tmp_path / "a")  # fmt: skip
    (tmp_path / "a").rename(tmp_path / "audit")
    made.keep(tmp_path / "audit", "abc", tmp_path / "kept.json")
    (row,) = made.read(tmp_path / "kept.json")
    points = [p.test.accuracy for n, p in record.rounds[-1].utility.global_points.items()]
    assert (row.method, row.reading, row.rounds, row.commit) == ("fedzge", "authors' code", 2, "abc")
    assert row.last == record.rounds[-1].utility.global_.test.accuracy
    assert row.batch == points[0]
    assert row.inner >= max(points[1:])


def test_the_suite_has_both_readings_of_all_five():
    suite = read_suite(STUDY / "digits.toml")
    named = {(cell.method, cell.preset) for cell in suite.cells()}
    for name in ("fedaf", "feddm", "dffke", "dfrd", "fedavg+dfrd", "fedzge"):
        assert {(name, None), (name, "authors")} <= named


def test_the_table_is_written_between_its_marks(made):
    page = f"before {made.MARK} old {made.MARK} after"
    assert made.written(page, "new") == f"before {made.MARK}\n\nnew\n\n{made.MARK} after"
    with pytest.raises(DataError, match="lacks the two marks"):
        made.written(f"once {made.MARK}", "new")


def test_the_page_has_the_table(made):
    if not made.KEPT.exists():
        pytest.skip("the runs of benchmarks/studies/authors/digits.toml are not kept yet")
    assert made.table(made.read()) in (ROOT / "docs" / "results" / "authors.md").read_text()


def test_dffkes_whole_preset_on_digits(made):
    """The last round of three seeds; the settings that decide are the table's own, and those that came later differ."""
    folder = ROOT / "benchmarks" / "studies" / "dffke" / "records" / "dffke_authors_digits"
    runs = [json.loads((folder / f"authors-{seed}.json").read_text()) for seed in (0, 1, 2)]
    last = [run["rounds"][-1]["clients"]["mean"] for run in runs]
    before = [row.last for row in made.read() if (row.method, row.reading) == ("dffke", "authors' code")]
    assert f"{100 * sum(before) / 3:.1f}" == f"{100 * sum(last) / 3:.1f}", "no change in the mean"
    text = " ".join((ROOT / "docs" / "results" / "authors.md").read_text().split())
    assert f"it has {made.figure(last)} in the last round: the same mean" in text
    best = [max(r["clients"]["mean"] for r in run["rounds"] if "clients" in r) for run in runs]

    def below(reading, name, values):
        """Return the mean difference to a reading of the table, seed by seed, with Student's interval."""
        others = sorted((r for r in made.read() if (r.method, r.reading) == ("dffke", reading)), key=lambda r: r.seed)
        pairs = [100 * (a - getattr(b, name)) for a, b in zip(values, others, strict=True)]
        half = 4.302653 * statistics.stdev(pairs) / 3**0.5
        mean = statistics.mean(pairs)
        return f"{mean:+.2f} [{mean - half:.2f}, {mean + half:.2f}]"

    printed = f"{below('printed', 'last', last)} in the last round and {below('printed', 'best', best)} in the best"
    assert f"below the printed reading, {printed}" in text
    assert f"below the default by {below('default', 'best', best)} in the best" in text
    assert {run["commit"] for run in runs} == {"bf0a7c1c"}
    assert "commit bf0a7c1c" in text


# --- FedZGE beside its authors' code ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parity():
    with script_in_place("parity_fedzge") as module:
        yield module


@pytest.fixture(scope="module")
def beside():
    return json.loads((STUDY / "parity_fedzge.json").read_text())


def test_the_page_shows_fedzge_beside_its_authors_code(parity, beside):
    page = PAGE.read_text()
    assert parity.table(beside) in page
    assert parity.table_of_shares(beside) in page
    assert beside["checkout"] in page


def test_with_every_point_mended_nothing_but_rounding_is_left(parity, beside):
    """At a long epsilon over three rounds, and at the published one over the first."""
    assert beside["limit"] == parity.LIMIT == 1e-10
    equal = [row for row in beside["rows"] if row["equal"]]
    assert [(row["epsilon"], row["rounds"]) for row in equal] == [(0.5, 3), (0.001, 1)]
    assert all(row["difference"].keys() == parity.STAGES.keys() for row in beside["rows"])
    assert all(value <= parity.LIMIT for row in equal for value in row["difference"].values())


def test_each_point_has_a_row_of_its_own(parity, beside):
    """Every point tells somewhere, but for the bias, which a batch norm takes out again."""
    alone = {
        row["reference"]: row["difference"] for row in beside["rows"] if row["epsilon"] == 0.5 and not row["equal"]
    }
    assert alone.keys() == {parity.WITH + said for said in parity.MENDS.values()}
    for name, said in parity.MENDS.items():
        told = max(alone[parity.WITH + said].values())
        assert told <= parity.LIMIT if name == "bias" else told > 1e-4, name
    unread = alone[parity.WITH + parity.MENDS["statistics"]]
    assert {name for name, value in unread.items() if value > parity.LIMIT} == {"trained", "distilled"}
    counted = alone[parity.WITH + parity.MENDS["accuracy"]]
    assert {name for name, value in counted.items() if value > parity.LIMIT} == {"accuracy"}


def test_every_setting_of_the_preset_would_be_noticed(parity, beside):
    """But for sizes, which both sides are given, and `tested`, which teaches nothing."""
    preset = registry.find("fedzge").presets["authors"]
    assert beside["noticed"].keys() == parity.OTHER.keys() == preset.keys() - {"B", "q", "E_k", "E_prime", "tested"}
    assert all(parity.OTHER[name] != preset[name] for name in parity.OTHER)
    assert all(value > 1e-2 for value in beside["noticed"].values())


def test_what_the_page_says_of_the_network_and_of_an_empty_class(beside):
    assert beside["resnet18"]["outputs"] == 0
    assert 0.97 < beside["resnet18"]["least"] <= beside["resnet18"]["most"] < 1.03
    assert beside["nan"] > 0.999


def test_a_difference_is_found_wherever_it_is(parity):
    zero, one = torch.zeros(2), torch.tensor([0.0, 1.0])
    assert parity.gap({"a": [zero, zero]}, {"a": [zero, one]}) == 1.0
    assert parity.gap({"a": zero, "conv3.bias": zero}, {"a": zero}) == 0.0, "a batch norm takes this bias out"
    assert math.isnan(parity.gap([zero, zero], [one, zero * math.nan])), "and is not passed over"
    with pytest.raises(AssertionError, match="of one side only: \\['b'\\]"):
        parity.gap({"a": zero, "b": zero}, {"a": zero})


def test_what_is_not_a_number_is_not_called_equal(parity):
    assert parity.shown(math.nan, math.nan <= parity.LIMIT) == "nan"
    assert parity.shown(3e-14, True) == "**3e-14**"


def test_a_folder_that_is_no_checkout_of_fedzge_is_refused(parity, tmp_path):
    with pytest.raises(SystemExit, match="is not a checkout of maxinge8698/FedZGE"):
        parity.Program(tmp_path, None)


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="no checkout: set FEDAUDIT_FEDZGE to one of maxinge8698/FedZGE")
def test_fedzge_and_its_authors_code_still_agree(parity, beside, tmp_path):
    assert parity.main(["--checkout", CHECKOUT, "--json", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert [row["reference"] for row in again["rows"]] == [row["reference"] for row in beside["rows"]]


# --- DFFKE beside its author's code ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def beside_dffke():
    with script_in_place("parity_dffke") as module:
        yield module


@pytest.fixture(scope="module")
def kept_dffke():
    return json.loads((STUDY / "parity_dffke.json").read_text())


def test_the_page_has_the_table_of_dffkes_code(beside_dffke, kept_dffke):
    page = (ROOT / "docs" / "results" / "authors.md").read_text()
    assert beside_dffke.table(kept_dffke) in page
    assert kept_dffke["checkout"] in page


def test_what_is_called_equal_to_dffkes_code_is_rounding(beside_dffke, kept_dffke):
    """Each step ends in a row that is equal but for rounding, and each point that was mended matters."""
    rows = kept_dffke["rows"]
    assert kept_dffke["limit"] == beside_dffke.LIMIT == 1e-9
    assert {row["step"].replace(" ", "_") for row in rows if row["equal"]} == {c.__name__ for c in beside_dffke.CASES}
    assert all(row["difference"] <= beside_dffke.LIMIT for row in rows if row["equal"])
    assert all(row["difference"] > 1e-3 for row in rows if not row["equal"])


def test_a_folder_that_is_not_dffkes_code_is_refused(beside_dffke, tmp_path):
    with pytest.raises(SystemExit, match=r"is not a checkout of HaowenGuan/DFFKE"):
        beside_dffke.Code(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    "FEDAUDIT_DFFKE" not in os.environ, reason="no checkout: set FEDAUDIT_DFFKE to one of HaowenGuan/DFFKE"
)
def test_dffkes_code_still_agrees(beside_dffke, kept_dffke, tmp_path):
    words = ["--checkout", os.environ["FEDAUDIT_DFFKE"], "--json", str(tmp_path / "again.json")]
    assert beside_dffke.main(words) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert [(r["step"], r["reference"]) for r in again["rows"]] == [
        (r["step"], r["reference"]) for r in kept_dffke["rows"]
    ]
