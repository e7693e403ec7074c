"""The commands that compare and export, on runs in which everything differs: helpers/runs/unequal."""

from __future__ import annotations

import csv
import json
import math
import xml.etree.ElementTree as ET

import pytest
import reported
import unequal

DIGITS = ("digits-0", "digits-1")
EMPTY = ""


@pytest.fixture
def later(uneven, tmp_path):
    """A function that makes the folder of a later day: the two seeds on digits, of which each record is changed."""

    def make(change, digest="later"):
        for seed, name in enumerate(DIGITS):
            record = unequal.record(seed=seed)
            record.transcript_digest += digest
            change(record, seed)
            folder = tmp_path / "later"
            reported._save(folder, name, record, unequal.attacks("digits", seed), unequal.AUDITS["digits", seed])
        return tmp_path / "later"

    return make


def worse(record, seed):
    """20 points of accuracy less with seed 0 and 22 with seed 1."""
    test = record.result.last.global_.test
    test.accuracy, test.low = test.accuracy - 0.2 - 0.02 * seed, 0.1


def wordier(record, seed):
    record.traffic[0].payload += 800


def test_compare_says_means_and_what_two_seeds_can_tell(fedaudit, uneven, later):
    """Differences of -20 and -22 points: their mean lies 21 standard errors from 0, and with one degree of freedom
    P(|t| > 21) = 2 / pi arctan(1 / 21). One figure is estimated and differs: five are estimated in all. 12.706 standard
    errors of one point are the interval's half width. That cannot be told with two seeds; bytes can, which are
    counted: 800 more over 8 answers."""
    after = later(lambda *of: (worse(*of), wordier(*of)))
    code, out, _ = fedaudit("compare", uneven, after, "--json")
    told = json.loads(out)
    assert code == 1
    assert told["alarms"] == []
    found = {change["column"]: change for change in told["changes"]}
    reached = [unequal.raw(uneven, name)["rounds"][3]["utility"]["global"]["test"]["accuracy"] for name in DIGITS]
    accuracy, up = found["accuracy"], found["up"]
    assert accuracy["before"] == pytest.approx(sum(reached) / 2)
    assert accuracy["after"] == pytest.approx(sum(reached) / 2 - 0.21)
    assert (accuracy["low"], accuracy["high"]) == pytest.approx((-0.21 - 0.12706205, -0.21 + 0.12706205))
    p = 2 / math.pi * math.atan(1 / 21)
    assert accuracy["p_holm"] == pytest.approx(p * round(accuracy["p_holm"] / p))
    assert accuracy["p_holm"] >= 5 * p * (1 - 1e-9)
    assert (accuracy["cannot_be_told"], accuracy["more_than_noise"], accuracy["direction"]) == (True, False, "worse")
    sent = [unequal.sent(unequal.raw(uneven, name), "up") / 8 for name in DIGITS]
    assert (up["before"], up["after"]) == pytest.approx((sum(sent) / 2, sum(sent) / 2 + 100))
    assert (up["cannot_be_told"], up["more_than_noise"], up["direction"]) == (False, True, "worse")
    assert {key for key, change in found.items() if change["difference"]} == {"accuracy", "up", "per_byte"} & set(found)
    said = " ".join(fedaudit("compare", uneven, after)[1].split())
    assert "Only before: local · dataset=digits" in said
    assert "dataset=mnist" in said.partition("Only before: uneven")[2]
    assert "Only after" not in said


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        (lambda *of: None, (), 0),
        (worse, (), 3),  # two seeds cannot tell
        (wordier, (), 1),
        (worse, ("accuracy=21.1",), 0),
        (worse, ("accuracy=20.9",), 1),  # the mean of 20 and 22 counts, not the smaller one
        (wordier, ("accuracy=0.1",), 0),
        (wordier, ("accuracy=0.1", "up=46%"), 1),  # 100 of 214.25 bytes are 46.7 %
        (wordier, ("up=47%", "accuracy=0.1"), 0),
    ],
)
def test_the_exit_code_of_compare(fedaudit, uneven, later, change, words, code):
    gates = [word for one in words for word in ("--max-drop", one)]
    found, out, err = fedaudit("compare", uneven, later(change), *gates)
    assert found == code, out
    assert err.count("worse than allowed") == (1 if words and code else 0)


def test_the_other_way_round_it_is_better(fedaudit, uneven, later):
    """What fell rises when the folders change places, and no gate minds."""
    code, out, _ = fedaudit("compare", later(worse), uneven, "--json", "--max-drop", "accuracy=0.1")
    found = {change["column"]: change for change in json.loads(out)["changes"]}
    assert (code, found["accuracy"]["direction"]) == (0, "better")
    assert (found["accuracy"]["low"], found["accuracy"]["high"]) == pytest.approx((0.08293795, 0.33706205))


def test_equal_messages_with_other_results_are_an_alarm_under_any_gate(fedaudit, uneven, later):
    code, out, _ = fedaudit("compare", uneven, later(wordier, digest=""), "--max-drop", "accuracy=90")
    assert code == 1
    assert out.count("ALARM: ") == 2, "one for each seed"


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def tables(fedaudit, uneven, tmp_path):
    """What `fedaudit export --to csv` writes, by table."""
    code, said, _ = fedaudit("export", uneven, "--to", "csv", "--out", tmp_path / "csv")
    assert code == 0
    assert said.startswith("4 runs in runs.csv, rounds.csv, attacks.csv, releases.csv")
    return {path.stem: rows_of(path) for path in (tmp_path / "csv").glob("*.csv")}


@pytest.mark.parametrize("name", ["digits-0", "digits-1", "mnist-0", "local-0"])
def test_every_figure_of_an_exported_run(uneven, tables, name):
    told = unequal.raw(uneven, name)
    (row,) = (row for row in tables["runs"] if row["run"] == name)
    sends = name != "local-0"
    dataset, seed = name.split("-")
    last, chosen = (told["rounds"][t]["utility"] for t in (3, 1))
    test = last["global"]["test"]
    spent = [client for client in told["ledger"] if client["entries"]]
    wanted = {
        "accuracy": test["accuracy"], "low": test["low"], "high": test["high"], "chosen_round": 2, "rounds": 4,
        "clients": 4, "chosen_accuracy": chosen["global"]["test"]["accuracy"],
        "seconds": unequal.work(told), "peak_memory": told["peak_rss_bytes"], "flops": 5250 + int(seed),
        "own": sum(last["clients"]["local_test"]["each"]) / 3, "global_own": last["global"]["local_test"]["mean"],
        **{f"{way}_{kind}": unequal.sent(told, way, kind) for way in ("up", "down") for kind in ("payload", "wire")},
    }  # fmt: skip
    if sends:
        audits = unequal.AUDITS[dataset, int(seed)]
        strong, weak = unequal.AUCS[dataset, int(seed)]
        wanted |= {
            "epsilon": unequal.most_spent(told), "delta": sorted(client["delta"] for client in spent)[-1],
            "lower_bound": sorted(audit.lower_bound for audit in audits)[-1],
            "refuted": [audit.verdict for audit in audits].count("refuted"),
            "auc": sorted([strong, weak])[-1], "leaks": 1 if dataset == "digits" else 0, "claim": 5.0,
            "up": unequal.sent(told, "up") / 8, "down": unequal.sent(told, "down") / 8,
        }  # fmt: skip
    found = {key: row[key] for key in wanted}
    assert {key: float(value) for key, value in found.items()} == pytest.approx(wanted)
    assert (row["dataset"] or "digits", row["seed"], row["digest"]) == (
        "digits" if name == "local-0" else dataset, seed, told["transcript_digest"],
    )  # fmt: skip
    if not sends:
        assert (row["auc"], row["lower_bound"], row["claim"]) == (EMPTY, EMPTY, EMPTY)


def test_every_figure_of_an_exported_round(uneven, tables):
    assert len(tables["rounds"]) == 16
    for row in tables["rounds"]:
        told = unequal.raw(uneven, row["run"])["rounds"][int(row["round"]) - 1]
        assert int(row["participants"]) == len(told["participants"])
        assert int(row["absent"]) == len(told["absent"]) == (1 if row["round"] == "2" else 0)
        for key in ("up_payload", "up_wire", "down_payload", "down_wire", "wall_s"):
            assert float(row[key]) == told[key], key
        if told["utility"] is None:
            assert {row[key] for key in ("accuracy", "low", "high", "clients_mean", "clients_std")} == {EMPTY}
            continue
        test, each = told["utility"]["global"]["test"], told["utility"]["clients"]["global_test"]["each"]
        mean = sum(each) / 3
        spread = math.sqrt(sum((one - mean) ** 2 for one in each) / 3)
        assert [float(row[key]) for key in ("accuracy", "low", "high")] == [
            test[k] for k in ("accuracy", "low", "high")
        ]
        assert (float(row["clients_mean"]), float(row["clients_std"])) == pytest.approx((mean, spread))
        assert float(row["validation"]) == told["utility"]["global"]["validation"]


def test_every_figure_of_an_exported_release_and_attack(uneven, tables):
    """Three clients of three runs spent something. Of each attack that ran, the AUC; of the other one the reason."""
    assert [(row["run"], row["client"]) for row in tables["releases"]] == [
        (run, client) for run in ("digits-0", "digits-1", "mnist-0") for client in "012"
    ]
    for row in tables["releases"]:
        told = unequal.raw(uneven, row["run"])["ledger"][int(row["client"])]
        (entry,) = told["entries"]
        for key in ("noise_multiplier", "sigma", "sensitivity", "clip"):
            assert float(row[key]) == entry[key], key
        assert (int(row["records"]), float(row["delta"])) == (told["n"], told["delta"])
        assert float(row["epsilon_of_kind"]) == told["epsilon"]
        assert int(row["releases"]) == len(entry["rounds"])
    ran = [row for row in tables["attacks"] if row["measure"] == "auc"]
    assert len(ran) == 9
    for row in ran:
        aucs = dict(zip(("strong", "weak"), unequal.AUCS[row["run"].split("-")[0], int(row["seed"])], strict=True))
        value = aucs.get(row["attack"], 0.5)
        assert [float(row[key]) for key in ("value", "low", "high")] == pytest.approx(
            [value, value - 0.04, value + 0.04]
        )
        leaks = "True" if row["attack"] == "strong" and row["run"] in DIGITS else "False"
        assert row["leak"] == (leaks if row["blind"] == "False" else EMPTY)
    silent = [(row["run"], row["threat"], row["reason"]) for row in tables["attacks"] if row["ran"] == "False"]
    assert silent == [(run, "peer:1", "it sees nothing") for run in ("digits-0", "digits-1", "mnist-0")]


def test_exported_verdicts_with_budgets(fedaudit, uneven, tmp_path):
    """A refuted claim and a leak on digits; of three budgets the two of digits break, for one seed each."""
    (tmp_path / "budgets.toml").write_text(BUDGETS)
    words = ("--to", "junit", "--out", tmp_path / "v.xml", "--budget", tmp_path / "budgets.toml")
    code, out, _ = fedaudit("export", uneven, *words)
    suite = ET.parse(tmp_path / "v.xml").getroot()
    assert code == 0
    assert out.startswith(f"{suite.get('tests')} verdicts, 4 of them failed")
    failed = [(case.get("classname"), case[0].get("message")) for case in suite if len(case)]
    assert [kind for kind, _ in failed] == ["fedaudit.claim", "fedaudit.leak", "fedaudit.budget", "fedaudit.budget"]
    assert failed[0][1].startswith("refuted at a level of 0.001, p = 1e-09: at least 4.25")
    # Two seeds with a half width of 0.04 each: 0.04 / sqrt(2) around their mean.
    assert failed[1][1].startswith("a leak by strong, server: AUC 0.680 [0.652, 0.708]")
    assert failed[2][1].endswith("digits-1: uneven epsilon is 8.25, the budget 7.25 (13.8% over).")
    assert failed[3][1].endswith("digits-1: uneven accuracy is 0.727, the budget 0.73 (0.4% under).")


BUDGETS = """
[[budget]]
method = "uneven"
dataset = "mnist"
metric = "epsilon"
max = 7.25

[[budget]]
method = "uneven"
dataset = "digits"
metric = "epsilon"
max = 7.25

[[budget]]
method = "uneven"
dataset = "digits"
metric = "accuracy"
min = 0.73
"""


def test_one_run_is_exported_alone(fedaudit, uneven, tmp_path):
    code, out, _ = fedaudit("export", uneven / "runs" / "mnist-0", "--to", "csv", "--out", tmp_path / "one")
    assert (code, out.split()[0]) == (0, "1")
    (row,) = rows_of(tmp_path / "one" / "runs.csv")
    assert (row["method"], row["epsilon"]) == ("uneven", "7.25")


def test_show_of_a_page_names_the_folder_to_show(fedaudit, tmp_path):
    (tmp_path / "report.html").write_text("<!doctype html>")
    code, _, err = fedaudit("show", tmp_path / "report.html")
    assert code == 2
    assert err.startswith(f"error: {tmp_path / 'report.html'} is a file, not a run folder. Name the folder of a run")
    assert err.rstrip().endswith(f": {tmp_path}.")
    (tmp_path / "report.json").write_text("no JSON")
    _, _, err = fedaudit("show", tmp_path / "report.json")
    assert err.startswith(f"error: {tmp_path / 'report.json'} cannot be read: it is not JSON (Expecting value")


def test_a_command_for_one_run_names_one_of_an_audits_runs(fedaudit, tmp_path):
    for seed in range(2):
        reported._save(tmp_path, f"a-{seed}", reported._record("fedavg", seed, 0.5), [])
    code, _, err = fedaudit("transcript", tmp_path)
    assert code == 2
    first = tmp_path / "runs" / "a-0"
    assert err.startswith(
        f"error: {tmp_path} holds no run itself, but 2 runs below it, as an audit does. Name one, such as {first}."
    )
    _, _, err = fedaudit("transcript", first.parent)
    assert "but 2 runs below it" in err
    _, _, err = fedaudit("transcript", tmp_path / "nowhere")
    assert "`fedaudit run --out" in err
