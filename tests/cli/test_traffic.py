"""`fedaudit check` on runs in which everything differs: helpers/runs/unequal."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import unequal

BUDGETS = """
[[budget]]
method = "uneven"
dataset = "digits"
direction = "up"
per = "client-round"
max = "{up}"

[[budget]]
method = "uneven"
dataset = "{of}"
metric = "epsilon"
max = {epsilon}
"""


@pytest.fixture
def checked(fedaudit, uneven, tmp_path):
    """A function that checks all runs against a limit on bytes up of a client's answer and one on epsilon."""

    def check(up, epsilon, *words, of="digits"):
        (tmp_path / "budgets.toml").write_text(BUDGETS.format(up=up, epsilon=epsilon, of=of))
        return fedaudit("check", uneven, "--budget", tmp_path / "budgets.toml", *words)

    return check


@pytest.mark.parametrize(
    ("up", "epsilon", "of", "code"),
    [
        ("216 B", 8.25, "digits", 0),  # the larger of both seeds: 1728 bytes in 8 answers, and 8.25
        ("215 B", 8.25, "digits", 1),
        ("216 B", 8.2, "digits", 1),
        ("216 B", 7.25, "digits", 1),  # seed 0 keeps it
        ("216 B", 7.25, "mnist", 0),
    ],
)
def test_the_exit_code_is_that_of_the_worst_run(checked, up, epsilon, of, code):
    assert checked(up, epsilon, of=of)[0] == code


def test_each_run_has_its_own_figures(checked, uneven, monkeypatch):
    """1700 and 1728 bytes in eight answers; epsilon of the client that spent most."""
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = checked("213 B", 7.5)
    told = {name: unequal.raw(uneven, name) for name in ("digits-0", "digits-1")}
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    found = {(row[0].rsplit("/", 1)[1], row[1]): row[2:] for row in rows}
    assert code == 1
    for name, one in told.items():
        up = unequal.sent(one, "up") / unequal.times_asked(one)
        assert found[name, "uneven up traffic"][0] == f"{up:.0f} B"
        assert found[name, "uneven epsilon"][0] == f"{unequal.most_spent(one):g}"
    assert [found[name, "uneven epsilon"][2] for name in told] == ["yes", "no, 10.0% off"]
    assert [found[name, "uneven up traffic"][2] for name in told] == ["yes", "no, 1.4% off"]
    assert {row[3] for row in rows} == {"213 B", "7.5"}
    said = [line for line in out.splitlines() if "the budget" in line]
    assert [line.partition(": ")[2] for line in said] == [
        "uneven up traffic is 216 B, the budget 213 B (1.4% over); the largest field is up Local.w with 208 B.",
        "uneven epsilon is 8.25, the budget 7.5 (10.0% over).",
    ]


def test_only_what_broke_is_told_to_github(checked):
    code, out, _ = checked("216 B", 7.5, "--format", "github")
    (line,) = out.splitlines()
    assert code == 1
    assert line.startswith("::error title=fedaudit budget::")
    assert "digits-1: uneven epsilon is 8.25" in line


def test_junit_has_a_case_for_each_run_and_budget(checked):
    code, out, _ = checked("213 B", 9.0, "--format", "junit")
    suite = ET.fromstring(out)
    assert (code, suite.get("tests"), suite.get("failures")) == (1, "4", "1")
    assert [case.get("name").rsplit("/", 1)[1] for case in suite if len(case)] == ["digits-1: uneven up traffic"]
    assert checked("217 B", 9.0, "--format", "junit")[0] == 0
