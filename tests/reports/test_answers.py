"""The four answers of the first screen, and the rules by which a figure is qualified where it stands."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess

import pytest
import reported

from fedaudit.reports.answers import NEITHER, _places, answers, cheapest_equal, protected
from fedaudit.reports.compare import compare
from fedaudit.reports.formats import as_csv, latex, markdown
from fedaudit.reports.leak_tests import above_chance
from fedaudit.reports.report import rows_below, write_report
from fedaudit.reports.row_comparisons import best_row
from fedaudit.reports.sentences import ledger_rows, verdict
from fedaudit.reports.summary_rows import SummaryRow
from fedaudit.reports.terminal import table
from fedaudit.reports.vocabulary import BY_KEY
from fedaudit.runtime.run_record import Absence

DP = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}


def strict(record, delta):
    """The record with another delta for its first client; the second keeps 1/n = 0.04, or has the same."""
    ledger = [client.model_copy(update={"delta": delta}) for client in record.ledger]
    return record.model_copy(update={"ledger": ledger})


def rows(folder, *, delta=0.001, auc=0.5, private_accuracy=0.8, verdict="not refuted"):
    """FedAvg without protection at 90 %, with epsilon 8 at 80 %: three seeds each, attacked by the server."""
    for seed in range(3):
        plain = reported._record("fedavg", seed, 0.89 + 0.01 * seed, releases=True)
        attacks = [reported._membership("loss", "server", 0.62, leak=True)]
        reported._save(folder, f"plain-{seed}", plain, attacks)
        noisy = reported._record("fedavg", seed, private_accuracy + 0.01 * seed, releases=True, privacy=DP, epsilon=8.0)
        attacks = [reported._membership("loss", "server", auc, leak=auc > 0.55)]
        reported._save(folder, f"dp-{seed}", strict(noisy, delta), attacks, [reported._audit(verdict, 8.0, 1.0)])
    return rows_below(folder)[0]


def said(of):
    return {answer.question: " ".join(answer.lines) for answer in answers(of)}


def test_each_answer_has_its_figures(tmp_path):
    found = said(rows(tmp_path))
    assert found["Which to use"] == (
        "With a guarantee: fedavg · DP-SGD, noise 1x, accuracy 81.0 % [78.5, 83.5] at ε = 8, δ = 0.001. "
        "It costs 1.00 kB up and 500 B down a client and round, 3.4 s of CPU a run. "
        "Without: fedavg, 90.0 % [87.5, 92.5], 9.0 points more; it guarantees nothing."
    )
    assert "in 1 of 2 settings: most on fedavg, AUC 0.620 [0.597, 0.643] (guessing gives 0.5)" in found["What leaks"]
    assert "by the server (loss); its accuracy is 90.0 %" in found["What leaks"]
    assert found["What is guaranteed"].startswith(
        "At best ε = 8, δ = 0.001, for one record of any client (add-or-remove), all rounds together: fedavg · "
    )
    assert "No guarantee at all in 1 (ε = ∞)" in found["What is guaranteed"]
    assert "1.00 kB up and 500 B down a client and round" in found["What it costs"]
    assert NEITHER not in " ".join(found.values())


@pytest.mark.parametrize(("count", "listed"), [(1, "fedavg"), (5, "fedavg; fedprox; fedzge; moon and 1 more")])
def test_settings_whose_clients_failed_are_named_and_not_called_cheaper(tmp_path, count, listed):
    """A client that failed computed and sent nothing. Of equal settings one where nobody failed is the one to use."""
    names = ["fedavg", "fedprox", "fedzge", "moon", "scaffold"]
    for name in names:
        for seed in range(3):
            record = reported._record(name, seed, 0.89 + 0.01 * seed, releases=True)
            if name in names[:count]:
                record.rounds[0].absent = [Absence(client=1, ask=0, reason="no images")]
            reported._save(tmp_path, f"{name}-{seed}", record, [])
    found = said(rows_below(tmp_path)[0])["Which to use"]
    told = f"Clients failed in {listed}: the figures there are of those left. The notes say why."
    assert found.endswith(told)
    whole = [row for row in rows_below(tmp_path)[0] if not row.clients_failed]
    assert "Clients failed" not in " ".join(said(whole).values())


def test_of_equal_settings_one_where_nobody_failed_comes_first(tmp_path):
    for name, fails in (("fedavg", True), ("fedprox", False)):
        for seed in range(3):
            record = reported._record(name, seed, 0.89 + 0.01 * seed, releases=True)
            if fails:
                record.rounds[0].absent = [Absence(client=1, ask=0, reason="no images")]
                for timing in record.timings:
                    timing.wall_s /= 10
            reported._save(tmp_path, f"{name}-{seed}", record, [])
    fell, whole = rows_below(tmp_path)[0]
    assert (fell.clients_failed, whole.clients_failed) == (True, False)
    assert cheapest_equal([fell, whole], fell) is whole
    assert cheapest_equal([whole, fell], whole) is whole


def test_records_that_differ_are_named_once_in_each_answer(tmp_path):
    """Two partitions of one data set: each has its own sentences, and its first one says which it is."""
    for partition, accuracy in (("iid", 0.9), ("dirichlet:0.3", 0.8)):
        for seed in range(3):
            record = reported._record("fedavg", seed, accuracy + 0.01 * seed, releases=True)
            setting = record.setting.model_copy(update={"partition": partition})
            reported._save(tmp_path, f"{partition[:3]}-{seed}", record.model_copy(update={"setting": setting}), [])
    found = {answer.question: answer for answer in answers(rows_below(tmp_path)[0])}
    for answer in found.values():
        assert [part.where for part in answer.parts] == ["records split by dirichlet:0.3", "records split by iid"]
        starts = [line for line in answer.lines if line.startswith("On records split by ")]
        assert len(starts) == 2
        assert sum(len(part.lines) for part in answer.parts) == len(answer.lines)
    assert "81.0 %" in found["Which to use"].parts[0].lines[0]
    assert "91.0 %" in found["Which to use"].parts[1].lines[0]


def test_places_say_what_differs():
    setting = reported._record("fedavg", 0, 0.9).setting
    other, fewer = setting.model_copy(update={"dataset": "x"}), setting.model_copy(update={"clients": 77})
    assert _places([setting]) == [""]
    assert _places([setting, other]) == [setting.dataset, "x"]
    assert _places([setting, fewer]) == [f"{setting.clients} clients", "77 clients"]
    assert _places([setting, other, fewer])[1] == f"x, {setting.clients} clients"
    whole = f"{setting.dataset}, records split by {setting.partition}, {setting.clients} clients"
    assert _places([setting, setting]) == [whole, whole]


def test_of_nearly_equal_settings_the_strictest_is_named(tmp_path):
    """Epsilon 32, 8, 2 at 85.0, 83.5 and 70 %: 1.5 points are given for a quarter of the epsilon, 13.5 are not."""
    for epsilon, accuracy in ((32.0, 0.85), (8.0, 0.835), (2.0, 0.70)):
        policy = {"training": {"epsilon": epsilon, "sensitivity": "clip:1"}}
        for seed in range(3):
            record = reported._record(
                "fedavg", seed, accuracy + 0.01 * (seed - 1), releases=True, privacy=policy, epsilon=epsilon
            )
            reported._save(tmp_path, f"{epsilon}-{seed}", strict(record, 0.001), [])
    found = said(rows_below(tmp_path)[0])["Which to use"]
    assert found.startswith("With a guarantee: fedavg · DP-SGD, ε = 8, accuracy 83.5 %")
    assert "ε = 32 would give 1.5 points more. Stricter: fedavg · DP-SGD, ε = 2, 70.0 %" in found


@pytest.mark.parametrize(
    "change", [{"delta": 0.04}, {"private_accuracy": 0.26}, {"verdict": "refuted"}], ids=["delta", "chance", "refuted"]
)
def test_trained_and_protected_is_said_only_where_it_is_so(tmp_path, change):
    """A delta of 1/n, an accuracy near the chance of 25 %, a refuted claim: none of them is a setting to use."""
    of = rows(tmp_path, **change)
    assert said(of)["Which to use"].startswith(NEITHER)
    assert ("private_accuracy" in change) == any(map(protected, of))


def test_a_leak_is_never_mere_noise(tmp_path):
    """AUC 0.60 beside 0.62 over three seeds without spread: no difference can be told, and both are leaks."""
    of = rows(tmp_path, auc=0.6)
    assert [above_chance(row, "auc") for row in of] == [True, True]
    table = [line for line in markdown(of, {}, "t", "f").splitlines() if line.startswith("| fedavg")]
    assert not any("≈ 0.6" in line for line in table)


def test_an_epsilon_of_nothing_is_not_the_best(tmp_path):
    """Local training sends nothing: 0, of the wire alone. Its models are published."""
    for seed in range(3):
        reported._save(tmp_path, f"local-{seed}", reported._record("local", seed, 0.5), [])
    of = rows(tmp_path)
    best = best_row(of, BY_KEY["epsilon"])
    assert [of[i].label for i in best.values()] == ["fedavg · DP-SGD, noise 1x"]
    [local] = [row for row in of if row.label == "local"]
    assert local.cells["epsilon"].flag.startswith("covers the messages alone")


def test_delta_stands_beside_epsilon_in_every_format(tmp_path):
    of = rows(tmp_path)
    lines = list(csv.DictReader(io.StringIO(as_csv(of))))
    assert [line["delta"] for line in lines] == ["", "0.001"]
    assert " & 8 & 0.001 &" in latex(of)
    assert "8 (3) at δ = 0.001" in markdown(of, {}, "t", "f")


def test_rows_and_columns_of_a_latex_table_can_be_chosen(tmp_path):
    rows(tmp_path)
    [path] = write_report(tmp_path, ["latex"], like="DP-SGD", columns=["accuracy", "epsilon"])
    text = path.read_text()
    assert text.count("fedavg &") == 1
    assert "81.0 \\% {\\scriptsize $\\pm$ 1.0} & 8 & 0.001 \\\\" in text
    assert "Attack AUC" not in text


def test_every_line_of_a_latex_table_has_as_many_cells_as_columns(tmp_path):
    """Epsilon has a column more, for its delta. A column too many shifts nothing and leaves a gap at the right."""
    tables = latex(rows(tmp_path)).split("\\begin{tabular}")[1:]
    assert len(tables) == 2
    for part in tables:
        columns = len(re.match(r"\{([lr]+)\}", part)[1])
        lines = [line for line in part.splitlines() if line.endswith(r" \\")]
        assert len(lines) == 3
        assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {columns}


def has_latex() -> bool:
    """Return whether TeX is here with the two packages that the tables need: TeX Live's smallest has no booktabs."""
    if shutil.which("pdflatex") is None or shutil.which("kpsewhich") is None:
        return False
    return all(subprocess.run(["kpsewhich", f"{name}.sty"], capture_output=True, check=False).returncode == 0
               for name in ("booktabs", "xcolor"))  # fmt: skip


@pytest.mark.skipif(not has_latex(), reason="needs TeX: apt-get install texlive-latex-recommended")
def test_the_latex_tables_compile(tmp_path):
    head = "\\documentclass{article}\n\\usepackage{booktabs,xcolor}\n\\begin{document}\n"
    (tmp_path / "paper.tex").write_text(f"{head}{latex(rows(tmp_path))}\n\\end{{document}}\n")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"], cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]


def test_rows_are_in_the_order_of_their_numbers(tmp_path):
    """Epsilon = 2, 8, 32: letter by letter 32 would stand between them."""
    for epsilon in (32.0, 8.0, 2.0):
        policy = {"training": {"epsilon": epsilon, "sensitivity": "clip:1", "delta": 1e-4}}
        reported._save(tmp_path, str(epsilon), reported._record("fedavg", 0, 0.9, privacy=policy), [])
    reported._save(tmp_path, "plain", reported._record("fedavg", 0, 0.9), [])
    labels = [row.group.label for row in rows_below(tmp_path)[0]]
    assert [re.findall(r"ε = (\d+)", label) for label in labels] == [[], ["2"], ["8"], ["32"]]


def test_a_guarantee_of_messages_does_not_cover_published_models(tmp_path):
    """Logits under noise, and clients' models that were trained without it are published: epsilon 1 of the wire alone,
    so that infinity is guaranteed."""
    policy = {"logits": {"epsilon": 1.0, "sensitivity": "clip:1"}}
    for seed in range(3):
        record = reported._record("fke", seed, 0.8 + 0.01 * seed, releases=True, privacy=policy, epsilon=1.0)
        models = ["client-000000.safetensors", "client-000001.safetensors"]
        reported._save(tmp_path, f"fke-{seed}", strict(record, 0.001).model_copy(update={"published": models}), [])
    of = rows_below(tmp_path)[0]
    assert [protected(row) for row in of] == [False]
    assert of[0].cells["epsilon"].value == math.inf
    assert of[0].cells["epsilon"].flag == "the messages alone: ε = 1, δ = 0.001"
    found = said(of)
    assert found["Which to use"].startswith(NEITHER)
    assert "guarantees nothing, as its clients' models are published" in found["Which to use"]
    assert "(the messages alone: ε = 1, δ = 0.001)" in found["Which to use"]
    assert "For the messages alone in 1 (ε = ∞)" in found["What is guaranteed"]
    assert "something is sent without noise" not in found["What is guaranteed"]
    assert "Nothing is guaranteed: clients' models, trained without noise, are published." in verdict(of[0])
    assert "* ∞ in 1 row: clients' models, trained without noise, are published.\n" in table(tmp_path)
    assert "  The report says what the messages alone have, in 1 of them." in table(tmp_path)
    assert ledger_rows(of[0])[-1]["epsilon"] == "∞"
    assert ledger_rows(of[0])[-2]["what"] == "published models"


def test_models_of_private_training_and_global_ones_are_covered(tmp_path):
    of = rows(tmp_path)
    record = of[1].first
    clients = ["client-000000.safetensors"]
    assert record.model_copy(update={"published": clients}).models_covered  # training was private
    plain = of[0].first
    assert not plain.model_copy(update={"published": clients}).models_covered
    assert plain.model_copy(update={"published": ["global.safetensors"]}).models_covered


def test_of_two_runs_with_other_results_the_last_is_shown_and_the_other_named(tmp_path):
    """The method was edited in between: which of two results stands there is not left to their folders' names."""
    old = reported._record("fedavg", 0, 0.9, releases=True)
    new = reported._record("fedavg", 0, 0.6, releases=True)
    new = new.model_copy(update={"finished": "2026-01-02T00:00:00+00:00", "transcript_digest": "other"})
    reported._save(tmp_path, "a-old", old, [])
    reported._save(tmp_path, "b-new", new, [])
    (row,) = rows_below(tmp_path)[0]
    assert row.cells["accuracy"].value == pytest.approx(0.6)
    assert "Run more than once, with different results: the last to finish is shown, not a-old (seed 0)." in row.notes
    reported._save(tmp_path, "c-again", new, [])  # the same to the bit
    (row,) = rows_below(tmp_path)[0]
    assert "not a-old (seed 0)." in " ".join(row.notes)
    assert "c-again" not in " ".join(row.notes)
    running = reported._record("fedavg", 0, 0.3, releases=True)
    running = running.model_copy(update={"status": "running", "finished": None, "transcript_digest": "half"})
    reported._save(tmp_path, "d-running", running, [])
    (row,) = rows_below(tmp_path)[0]
    assert row.cells["accuracy"].value == pytest.approx(0.6)
    assert "d-running" not in " ".join(row.notes)


# --- names of rows -----------------------------------------------------------------------------------------------


def labelled(folder, **labels):
    """Two settings of FedAvg with the names of the suite; the audit's own note wins over the record's."""
    for name, (epsilon, label) in {"plain": (None, labels.get("plain")), "dp": (8.0, labels.get("dp"))}.items():
        policy = {"training": {"epsilon": 8.0, "sensitivity": "clip:1", "delta": 1e-4}} if epsilon else None
        for seed in range(3):
            record = reported._record("fedavg", seed, 0.9, releases=True, privacy=policy, epsilon=epsilon)
            record.setting = record.setting.model_copy(update={"label": label})
            reported._save(folder, f"{name}-{seed}", record, [])
    return rows_below(folder)[0]


def test_a_rows_own_name_is_in_every_format(tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr("fedaudit.reports.brief.printed", lambda path: None)  # a browser prints, for a second
    of = labelled(tmp_path, plain="Ours", dp="Ours, private")
    assert [row.label for row in of] == ["Ours", "Ours, private"]
    assert "| Ours, private | DP-SGD, ε = 8 |" in markdown(of, {}, "t", "f")
    assert "Ours, private & DP-SGD" in latex(of)
    assert [line["label"] for line in csv.DictReader(io.StringIO(as_csv(of)))] == ["Ours", "Ours, private"]
    assert "Ours, private  " in table(tmp_path)
    html, brief = (write_report(tmp_path, [kind], out=tmp_path / kind)[0].read_text() for kind in ("html", "brief"))
    assert "<b>Ours, private</b>" in html
    assert "Ours, private" in brief
    found = compare(tmp_path, tmp_path)
    assert found.same_bits == ["Ours", "Ours, private"]


def test_rows_that_share_a_name_are_still_told_apart(tmp_path):
    of = labelled(tmp_path, plain="Ours", dp="Ours")
    assert [row.label for row in of] == ["Ours", "Ours · DP-SGD, ε = 8"]


def test_the_name_of_the_last_audit_counts(tmp_path):
    """A suite whose names were edited does not run anything again: audit.json has the names of today."""
    labelled(tmp_path, plain="Old", dp="Old, private")
    cells = [{"folder": f"runs/plain-{seed}", "status": "done", "reason": None, "label": "New"} for seed in range(3)]
    cells += [{"folder": f"runs/dp-{seed}", "status": "done", "reason": None} for seed in range(3)]
    (tmp_path / "audit.json").write_text(json.dumps({"cells": cells}))
    assert [row.label for row in rows_below(tmp_path)[0]] == ["New", "fedavg · DP-SGD, ε = 8"]


def test_a_spread_is_explained_only_where_one_is_printed(tmp_path):
    for folder, seeds in (("one", 1), ("two", 2)):
        for seed in range(seeds):
            reported._save(tmp_path / folder, f"a-{seed}", reported._record("fedavg", seed, 0.8, releases=True), [])
    one, two = tmp_path / "one", tmp_path / "two"
    assert "Accuracy in %; 1 seed." in table(one)
    assert "±" not in table(one)
    assert "Accuracy in %, ± half its 95 % interval; 2 seeds." in table(two)
    assert "\\caption{One seed; bold" in latex(rows_below(one)[0])
    assert "run. One seed.}" in latex(rows_below(one)[0])
    assert "pm" not in latex(rows_below(one)[0])
    assert "Mean $\\pm$ standard deviation over 2 seeds; bold" in latex(rows_below(two)[0])


def test_a_method_that_sends_nothing_has_no_words_about_its_messages(tmp_path, monkeypatch):
    """Its epsilon is infinite by the models that it publishes alone."""
    reported._save(tmp_path, "local-0", reported._record("local", 0, 0.5), [])
    monkeypatch.setattr(SummaryRow, "open_models", True)
    monkeypatch.setattr(SummaryRow, "messages", "nothing computed from records is sent")
    assert "* ∞ in 1 row: clients' models, trained without noise, are published." in table(tmp_path)
    assert "messages" not in table(tmp_path)


def test_where_nothing_was_run_no_answer_is_bad():
    found = answers([])
    assert [answer.lines for answer in found] == [["Nothing was run."]] * 4
    assert {answer.tone for answer in found} == {"plain"}
