"""Seals and checks behind a report: a run whose files were changed is named, and recommended nowhere."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import reported
from typer.testing import CliRunner

from fedaudit.cli.main import app
from fedaudit.reports.answers import DOUBTS, NEITHER, answers, protected
from fedaudit.reports.brief import brief
from fedaudit.reports.checked import checked, checked_runs
from fedaudit.reports.compare import compare
from fedaudit.reports.export import export
from fedaudit.reports.figures import against_bytes, per_round, privacy_utility, style, svg_text, tradeoff
from fedaudit.reports.formats import as_csv, as_json, latex, markdown
from fedaudit.reports.html import page
from fedaudit.reports.report import rows_below
from fedaudit.reports.row_comparisons import best_row
from fedaudit.reports.terminal import table
from fedaudit.reports.vocabulary import BY_KEY
from fedaudit.runtime.seal import Seal, write_seal
from fedaudit.verify.check import NOTE, Note

DP = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}
LABEL = "fedavg · DP-SGD, noise 1x"
BROKEN = "seed 1: the seal is broken (not as it was sealed: record.json)"


def sealed(folder):
    """FedAvg without protection at 70 %, with epsilon 8 at 80 %: three sealed seeds each."""
    for seed in range(3):
        reported._save(folder, f"plain-{seed}", reported._record("fedavg", seed, 0.7 + 0.01 * seed, releases=True), [])
        record = reported._record("fedavg", seed, 0.8 + 0.01 * seed, releases=True, privacy=DP, epsilon=8.0)
        ledger = [client.model_copy(update={"delta": 0.001}) for client in record.ledger]
        reported._save(folder, f"dp-{seed}", record.model_copy(update={"ledger": ledger}), [])
    for run in (folder / "runs").iterdir():
        write_seal(run, Seal.of(run))
    return folder


def edited(folder, name="dp-1"):
    """Type epsilon 0.5 into one record."""
    path = folder / "runs" / name / "record.json"
    record = json.loads(path.read_text())
    for client in record["ledger"]:
        client["epsilon"] = 0.5
    path.write_text(json.dumps(record))
    return folder


def noted(folder, name, **facts):
    """Leave the note of a check of the run's files as they are."""
    run = folder / "runs" / name
    base = {"fedaudit": "1.0", "when": "2026-02-03T04:05:06", "seal": Seal.of(run).digest, "recomputed": 7,
            "contradicted": 0, "word": 3, "tasks": 8, "rerun": 2}  # fmt: skip
    (run / NOTE).write_text(Note(**(base | facts)).model_dump_json())


def said(rows):
    return {answer.question: answer for answer in answers(rows)}


def test_whole_seals_are_one_digest_and_no_doubt(tmp_path):
    rows, _ = rows_below(sealed(tmp_path))
    found = checked_runs(rows)
    assert (found.runs, found.broken, found.checked, found.changed) == (6, 0, 0, 0)
    assert checked(rows) == f"{found.seal} · not checked"
    assert found.seal.startswith("seal ")
    assert found.seal.endswith(" over 6 runs")
    assert DOUBTS not in said(rows)
    assert "ε = 8" in said(rows)["Which to use"].lines[0]


def test_a_broken_seal_is_told_before_all_else(tmp_path):
    rows, _ = rows_below(edited(sealed(tmp_path)))
    assert checked_runs(rows).broken == 1
    assert checked(rows) == "SEAL BROKEN in 1 of 6 runs · not checked"
    first = answers(rows)[0]
    assert (first.question, first.tone) == (DOUBTS, "bad")
    assert first.lines[0] == f"{LABEL}: {BROKEN}."
    assert first.parts[0].lines == first.lines


def test_a_setting_with_a_broken_seal_is_recommended_nowhere(tmp_path):
    """It is the most accurate, and has the only guarantee: neither is told."""
    rows, _ = rows_below(edited(sealed(tmp_path)))
    found = said(rows)
    for question in ("Which to use", "What is guaranteed", "What it costs"):
        assert LABEL not in " ".join(found[question].lines)
        assert "ε = 0.5" not in " ".join(found[question].lines)
    assert found["Which to use"].lines[0].startswith(f"{NEITHER} fedavg is the most accurate")
    assert [protected(row) for row in rows] == [False, False]
    assert best_row(rows, BY_KEY["accuracy"]) == {rows[0].group.arena: 0}


def test_a_check_that_contradicted_these_files_counts_like_a_broken_seal(tmp_path):
    folder = sealed(tmp_path)
    noted(folder, "dp-2", contradicted=1)
    rows, _ = rows_below(folder)
    assert rows[1].doubts == ["seed 2: a check on 2026-02-03 contradicted 1 figure"]
    assert checked_runs(rows).broken == 0
    assert LABEL not in " ".join(said(rows)["Which to use"].lines)
    noted(folder, "dp-2", contradicted=4)
    assert rows_below(folder)[0][1].doubts == ["seed 2: a check on 2026-02-03 contradicted 4 figures"]


def test_a_check_that_found_nothing_or_is_about_other_files_raises_no_doubt(tmp_path):
    folder = sealed(tmp_path)
    noted(folder, "dp-0")
    noted(folder, "dp-1", contradicted=3, seal="of other files")
    rows, _ = rows_below(folder)
    assert [row.doubts for row in rows] == [[], []]
    found = checked_runs(rows)
    assert (found.checked, found.changed, found.contradicted, found.tasks, found.rerun) == (1, 1, 0, 8, 2)


@pytest.mark.parametrize("name", ["dp-1", "plain-0"])
def test_figures_that_compare_rows_leave_out_one_with_a_broken_seal(name, tmp_path):
    """The other keeps its number and look, the caption names what is missing."""
    whole, _ = rows_below(sealed(tmp_path / "whole"))
    rows, _ = rows_below(edited(sealed(tmp_path / "broken"), name))
    number = rows.index(next(row for row in rows if row.doubts))
    for draw in (privacy_utility, tradeoff, against_bytes, per_round):
        with style():
            before, after = (svg_text(draw(of), "x") for of in (whole, rows))
        words = 'id="point-{}"' if draw is not per_round else ">{}</text>"
        marks = [words.format(i if draw is not per_round else row.label) for i, row in enumerate(rows)]
        assert [mark in before for mark in marks] == [True, True], draw.__name__
        assert [mark in after for mark in marks] == [number == 1, number == 0], draw.__name__
    html = page(rows, {}, "Audit of 2 settings")
    said = f"Left out, because they are not to be relied on: {rows[number].label}."
    assert html.count(f"{said}</figcaption>") == 4
    described = re.findall(r'aria-label="[^"]*Accuracy in the last round: ([^"]*)"', html)
    shown = f"{rows[1 - number].label} "
    assert len(described) == 4
    assert all(text.startswith(shown) and f"{rows[number].label} " not in text[len(shown) :] for text in described)
    assert "Left out" not in page(whole, {}, "Audit of 2 settings")
    nothing, _ = rows_below(edited(edited(sealed(tmp_path / "nothing")), "plain-0"))
    for draw in (privacy_utility, tradeoff, against_bytes, per_round):
        with style():
            assert "point-" not in svg_text(draw(nothing), "x")


def test_where_nothing_can_be_relied_on_each_answer_says_so(tmp_path):
    folder = sealed(tmp_path)
    rows, _ = rows_below(edited(edited(folder), "plain-0"))
    found = said(rows)
    assert len(found.pop(DOUBTS).lines) == 3
    assert {line for answer in found.values() for line in answer.lines} == {"No run here can be relied on."}
    assert {answer.tone for answer in found.values()} == {"bad"}


def test_every_format_names_the_broken_seal(tmp_path):
    folder = edited(sealed(tmp_path))
    rows, _ = rows_below(folder)
    html = page(rows, {}, "Audit of 2 settings")
    assert f'<h2 class="open">{DOUBTS}</h2>' in html
    assert html.count('<span class="pill doubted">not to be relied on</span>') == 1
    text = markdown(rows, {}, "Audit of 2 settings", checked(rows))
    assert f"**{DOUBTS}.** {LABEL}: {BROKEN}." in text
    assert "SEAL BROKEN in 1 of 6 runs" in text
    note = f"Do not rely on these figures. S{BROKEN[1:]}."
    assert f"- **{LABEL}**: {note}" in text
    assert note in as_csv(rows)
    document = json.loads(as_json(rows, {}))
    assert document["checked"]["broken"] == 1
    assert document["rows"][1]["notes"][0] == note
    told = "Not to be relied on, as files were changed or a check contradicted them: fedavg $\\cdot$ DP-SGD, noise 1x."
    assert latex(rows).count(told) == 2
    assert "!! do not rely on fedavg · DP-SGD, noise 1x: seed 1: the seal is broken" in table(folder)
    assert all(len(line) <= 80 for line in table(folder).splitlines())
    two_pages = brief(rows, {}, "Audit of 2 settings", checked(rows))
    assert "not to be relied on: the run&#39;s files were changed, or a check contradicted them</td>" in two_pages
    assert f"nothing here may be relied on for: {LABEL}." in two_pages
    assert "Nothing: no setting that learnt anything has a guarantee that holds" in two_pages


def test_an_export_warns_of_a_broken_seal(tmp_path):
    folder, told = edited(sealed(tmp_path / "in")), []
    export(folder, "csv", tmp_path / "csv", warn=told.append)
    run = folder / "runs" / "dp-1"
    assert told == [
        f"Do not rely on {run}: the seal is broken (not as it was sealed: record.json). `fedaudit verify {run}` names "
        "each file and figure. It is exported as it is"
    ]
    with pytest.warns(UserWarning, match="the seal is broken"):
        export(folder, "csv", tmp_path / "csv")
    export(folder, "junit", tmp_path / "verdicts.xml", warn=told.append)
    assert f"not to be relied on: {BROKEN}" in (tmp_path / "verdicts.xml").read_text()


def test_the_command_warns_on_stderr_and_exports_all_the_same(tmp_path):
    folder = edited(sealed(tmp_path / "in"))
    result = CliRunner().invoke(app, ["export", str(folder), "--to", "csv", "--out", str(tmp_path / "csv")])
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: Do not rely on {folder / 'runs' / 'dp-1'}: the seal is broken")
    assert "6 runs in runs.csv" in result.stdout
    assert "warning" not in result.stdout


def test_a_whole_export_warns_of_nothing(tmp_path, recwarn):
    export(sealed(tmp_path / "in"), "csv", tmp_path / "csv")
    assert not recwarn.list


def beside(folder):
    """Return a copy of a folder of runs, in which everything is the same."""
    return shutil.copytree(folder, folder.with_name("after"))


def told_of(run, why):
    return f"do not rely on {run}: {why}. `fedaudit verify {run}` names each file and figure"


def test_compare_raises_an_alarm_on_a_broken_seal_of_either_side(tmp_path):
    before = sealed(tmp_path / "before")
    after = beside(before)
    assert compare(before, after).alarms == []
    (after / "runs" / "dp-1" / "attacks.json").unlink()  # no figure that is compared changes
    run, why = after / "runs" / "dp-1", "the seal is broken (not as it was sealed: attacks.json)"
    assert compare(before, after).alarms == compare(after, before).alarms == [told_of(run, why)]
    assert compare(after, after).alarms == [told_of(run, why)], "once, if both sides are the same folder"
    noted(before, "plain-2", contradicted=2)
    other = told_of(before / "runs" / "plain-2", "a check on 2026-02-03 contradicted 2 figures")
    assert compare(before, after).alarms == [other, told_of(run, why)]


def test_compare_looks_at_the_seals_of_what_it_compares_alone(tmp_path):
    before = sealed(tmp_path / "before")
    after = beside(before)
    for seed in range(3):
        shutil.rmtree(before / "runs" / f"dp-{seed}")
    assert compare(before, edited(after)).alarms == []


@pytest.mark.parametrize("gate", [[], ["--max-drop", "accuracy=90"]])
def test_compare_fails_on_a_broken_seal_under_any_gate(fedaudit, tmp_path, gate):
    before = sealed(tmp_path / "before")
    after = beside(before)
    assert fedaudit("compare", before, after, *gate)[0] == 0
    (after / "runs" / "dp-1" / "attacks.json").unlink()
    code, out, _ = fedaudit("compare", before, after, *gate)
    assert code == 1
    assert "ALARM: do not rely on" in out
    assert "not as it was sealed: attacks.json" in " ".join(out.split())
    code, out, _ = fedaudit("compare", before, after, "--json", *gate)
    assert (code, len(json.loads(out)["alarms"])) == (1, 1)
