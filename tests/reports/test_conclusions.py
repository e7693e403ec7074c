"""The page says the right conclusions of a made-up audit in which they are known: helpers/runs/known_conclusions."""

from __future__ import annotations

import re

import pytest
import reported
from known_conclusions import OTHER, dp, made, write

from fedaudit.reports.answers import answers, scope
from fedaudit.reports.formats import latex, markdown
from fedaudit.reports.leak_tests import leak
from fedaudit.reports.report import rows_below, write_report
from fedaudit.reports.row_comparisons import marks
from fedaudit.reports.sentences import verdict
from fedaudit.reports.terminal import table
from fedaudit.reports.vocabulary import BY_KEY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def rows(folder):
    return rows_below(folder)[0]


@pytest.fixture(scope="module")
def said(rows):
    return {answer.question: " ".join(answer.lines) for answer in answers(rows)}


def row_of(rows, method, epsilon=None):
    """The row of a method with this epsilon in its setting."""
    policy = dp(epsilon) if epsilon else {}
    [found] = [r for r in rows if r.group.method == method and r.group.setting.privacy == policy]
    return found


# --- which to use ------------------------------------------------------------------------------------------------


def test_the_cheaper_of_two_that_are_not_told_apart_is_recommended(rows, said):
    """At epsilon 8 FedAvg and FedAvg with an idle part: 85.0 and 85.1 %, at 1 and 10 seconds."""
    first = row_of(rows, "fedavg", 8.0)
    assert said["Which to use"].startswith(f"With a guarantee: {first.label}, accuracy 85.0 %")
    assert "fedavg+idle" not in said["Which to use"].split("Without")[0].split("cannot be told")[0].split(". ")[0]


def test_the_recommended_row_has_its_own_cost(said):
    assert "It costs 1.00 kB up and 500 B down a client and round, 1.0 s of CPU a run." in said["Which to use"]


def test_without_a_guarantee_the_simpler_one_is_named_too(said):
    """FedAvg with its idle part is 0.1 points better, which nothing tells, at ten times the compute."""
    without = said["Which to use"].split("Without: ")[1]
    assert without.startswith("fedavg, 90.0 %")
    assert "5.0 points more" in without
    assert "it guarantees nothing" in without


def test_who_is_equal_and_dearer_is_named_as_such(rows, said):
    other = row_of(rows, "fedavg+idle", 8.0)
    assert f"{other.label} cannot be told from it and takes 9.9 times the compute" in said["Which to use"]


def test_what_is_near_chance_or_refuted_is_not_recommended(said):
    for name in ("lost", "claims"):
        assert name not in said["Which to use"]


# --- what leaks --------------------------------------------------------------------------------------------------


def test_membership_is_ranked_by_what_a_blind_attacker_leaves(said):
    """0.62 over 0.50 is more than 0.66 over 0.58. Where the split is broken, nothing is told."""
    assert (
        "Membership, in 2 of 8 settings (not told in 1): most on fedavg, AUC 0.620 [0.597, 0.643]" in said["What leaks"]
    )
    assert "guessing gives 0.5, the best blind attacker 0.500" in said["What leaks"]
    assert "by the server (loss)" in said["What leaks"]


def test_reconstruction_is_ranked_by_what_guessing_leaves(said):
    """38.3 % over 0.4 % is more than 86.5 % over 72.2 %."""
    found = said["What leaks"].split("Records, ")[1]
    assert found.startswith("in 2 of 2 settings: most on embedded, 38.3 %")
    assert "guessing gives 0.4 %" in found


def test_the_count_of_leaks_is_the_number_of_marks_on_the_page(folder, rows, tmp_path, undrawn):
    (page,) = write_report(folder, ["html"], out=tmp_path)
    text = page.read_text()
    assert len(re.findall(r'<td data-key="auc"[^>]* data-leak ', text)) == sum(leak(row) is True for row in rows) == 2
    assert len(re.findall(r'<td data-key="identified"[^>]* data-leak ', text)) == 2


def test_one_auc_has_one_interval(folder, rows, tmp_path):
    """In the table, in the sentence, in the answer: of the same attack, over all candidates of all seeds."""
    cell = row_of(rows, "fedavg").cells["auc"]
    assert (cell.low, cell.high) == (pytest.approx(0.62 - 0.04 / 3**0.5), pytest.approx(0.62 + 0.04 / 3**0.5))
    (line,) = [line for line in verdict(row_of(rows, "fedavg")) if "AUC" in line]
    assert "AUC 0.620 [0.597, 0.643]" in line
    text = markdown(rows, {}, "Audit", "facts")
    assert set(re.findall(r"0\.620 \\?\[(.*?)\]", text)) == {"0.597, 0.643"}


def test_blind_baselines_are_no_attacks(rows):
    assert scope(rows)["Scope"].startswith("2 attacks and 1 blind baseline, 3 seeds")


# --- what is guaranteed ------------------------------------------------------------------------------------------


def test_guarantees_are_those_that_hold(rows, said):
    """The smallest of a trained setting that is not refuted is 2. Six settings have no guarantee, one is refuted."""
    found = said["What is guaranteed"]
    assert found.startswith("At best ε = 2, δ = 1e-05, for one record of any client")
    assert "3 of 11 have a finite epsilon that holds and beat chance" in found
    assert "No guarantee at all in 6 (ε = ∞)" in found
    assert f"Refuted by measurement: {row_of(rows, 'claims', 1.0).label}." in found


def test_a_noise_check_is_not_called_an_attack(rows, said):
    """31.6 is what the accounting gives for the noise that was found; attacks on planted records showed 2.25."""
    row = row_of(rows, "claims", 1.0)
    assert row.cells["lower"].value == 2.25
    assert row.cells["noise"].value == 31.6
    assert "refuted" in row.cells["noise"].flag
    assert row.refuted
    words = " ".join(verdict(row))
    assert "An attack on planted records showed ε ≥ 2.25" in words
    assert "The noise that was found amounts to ε ≥ 31.6" in words


# --- a row that does nothing -------------------------------------------------------------------------------------


def test_a_row_whose_mechanism_changes_nothing_says_so(rows, folder):
    for epsilon in (None, 8.0):
        notes = " ".join(row_of(rows, "fedavg+idle", epsilon).notes)
        assert "Distillation changed accuracy by 0.0 points in every evaluated round of 3 seeds" in notes
    notes = " ".join(row_of(rows, "skewed").notes)
    assert "Distillation changed accuracy by +3.1 points in the last round (3 seeds)." in notes
    assert "distillation" not in " ".join(row_of(rows, "fedavg").notes).lower()
    assert "2 rows: a part of the method changed nothing" in re.sub(r"\s+", " ", table(folder))


# --- marks -------------------------------------------------------------------------------------------------------


def test_marks_come_from_tests_alone(rows):
    """Accuracy: the two at 90 % are told from all others, not from each other: neither is the best. 85 % is worse."""
    found = dict(zip([row.label for row in rows], marks(rows, BY_KEY["accuracy"]), strict=True))
    assert found["fedavg"] == found["fedavg+idle"] == "tied"
    assert found[row_of(rows, "fedavg", 2.0).label] == "worse"
    assert "best" not in found.values()


def test_counted_values_have_no_marks(rows):
    for key in ("epsilon", "up", "down"):
        assert set(marks(rows, BY_KEY[key])) == {""}
    assert not re.search(r"\\textbf\{\d+\}", latex(rows, ["epsilon"]))


def test_whoever_is_told_from_all_others_is_the_best(tmp_path):
    for seed in range(3):
        reported._save(tmp_path, f"a-{seed}", made("a", seed, 0.90), [])
        reported._save(tmp_path, f"b-{seed}", made("b", seed, 0.80, jitter=OTHER), [])
        if seed < 2:
            reported._save(tmp_path, f"c-{seed}", made("c", seed, 0.85, jitter=OTHER), [])
    found = rows_below(tmp_path)[0]
    of = dict(zip([row.label for row in found], marks(found, BY_KEY["accuracy"]), strict=True))
    assert of["b"] == "worse"
    assert of["c"] == "", "two seeds: nothing was tested, so nothing is marked"
    assert of["a"] == "", "the best has to be told from everybody"
    few = [row for row in found if row.label != "c"]
    assert marks(few, BY_KEY["accuracy"]) == ["best", "worse"]
