"""The order of checks, notes of earlier ones, and what a record that cannot be read says."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedaudit import __version__
from fedaudit.errors import RunError
from fedaudit.runtime import run_record
from fedaudit.runtime.seal import Seal, write_seal
from fedaudit.verify import check
from fedaudit.verify.check import NOTE, Note
from fedaudit.verify.finding import Checked, Findings


def note(**facts):
    base = {"fedaudit": "1.0", "when": "today", "seal": "s", "recomputed": 7, "contradicted": 0, "word": 3, "tasks": 8,
            "rerun": 2}  # fmt: skip
    return Note(**(base | facts))


def test_a_note_in_a_line():
    said = "checked by fedaudit 1.0 on today: 7 figures recomputed, 0 contradicted, 3 the author's word"
    assert note().text("s") == f"{said}, 25.0% of the client tasks done again"
    assert note().text(None) == note().text("s")
    assert note().text("other") == note().text("s") + "; THE FOLDER WAS CHANGED SINCE"
    assert note(rerun=0).text("s") == f"{said}, nothing done again"
    with pytest.raises(ValueError, match="9 of 8 tasks"):
        note(rerun=9)
    assert note(rerun=8).rerun == 8


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("x is no run record: rounds.0.utility: too large", "rounds.0.utility"),
        ("attacks.json cannot be read: attacks.3: no such attack", "attacks.3"),
        ("something else: of another kind", ""),
    ],
)
def test_the_place_that_an_error_names(text, field):
    assert check._field(text) == field


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("record.json", "it is no run record: rounds: none"),
        ("attacks.json", "attacks.json cannot be read: attacks.3: x"),
        ("audits.json", "audits.json cannot be read: audits.1: x"),
    ],
)
def test_a_record_that_cannot_be_read_is_one_contradiction(file, text, tmp_path, monkeypatch):
    def read(folder):
        raise RunError(text)

    monkeypatch.setattr(check, "read_record", read)
    with pytest.raises(RunError, match="holds no run"):
        check._begun(tmp_path)
    (tmp_path / "record.json").touch()
    begun = check._begun(tmp_path)
    assert isinstance(begun, Checked)
    assert [(one.file, one.verdict) for one in begun.findings] == [(file, "contradicted")]


@pytest.mark.parametrize(
    ("error", "field", "recorded", "line"),
    [
        (
            "forged/record.json is not a valid run record: rounds.0.round: Input should be 1 or more. Name a folder of "
            "`fedaudit run`.",
            "rounds.0.round", "Input should be 1 or more",
            "record: contradicted. record.json is not valid: rounds.0.round: Input should be 1 or more; no run leaves "
            "such a file",
        ),
        (
            "forged/audits.json cannot be read: audits.3: a bound. of 4. Remove it, and audit again.",
            "audits.3", "a bound. of 4",
            "record: contradicted. audits.json is not valid: audits.3: a bound. of 4; no run leaves such a file",
        ),
        (
            "forged/record.json has schema version 9; this fedaudit reads version 1. Use the version that wrote it.",
            "", "forged/record.json has schema version 9; this fedaudit reads version 1",
            "record: contradicted. record.json is not valid: forged/record.json has schema version 9; this fedaudit "
            "reads version 1; no run leaves such a file",
        ),
        (
            "forged/record.json cannot be read: it is not JSON (Expecting value: line 1). Name a folder that it made.",
            "", "it is not JSON (Expecting value: line 1)",
            "record: contradicted. record.json is not valid: it is not JSON (Expecting value: line 1); no run leaves "
            "such a file",
        ),
    ],
    ids=["record", "audits", "version", "no JSON"],
)  # fmt: skip
def test_an_invalid_record_is_told_by_the_validators_words_alone(error, field, recorded, line, tmp_path, monkeypatch):
    def read(folder):
        raise RunError(error)

    monkeypatch.setattr(check, "read_record", read)
    (tmp_path / "record.json").touch()
    begun = check._begun(tmp_path)
    assert isinstance(begun, Checked)
    (finding,) = begun.findings
    assert (finding.field, finding.recorded) == (field, recorded)
    assert finding.recomputed == "no run leaves such a file"
    assert finding.text() == line


OLD = Path(run_record.__file__).parents[2] / "tests" / "runtime" / "version_0_1"


def texts_of_errors(function):
    """Return the texts of all RunErrors that a function raises, with X for what is filled in."""
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RunError":
            (text,) = node.args
            if isinstance(text, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in text.values)


def test_every_error_of_a_reader_ends_with_a_remedy_that_is_known():
    """A finding leaves the remedy out. A remedy of another word would stay in it, and a word of none is dead."""
    texts = [*texts_of_errors(run_record.read_record), *texts_of_errors(run_record._read_beside)]
    assert len(texts) == 7
    remedies = [check.REMEDY.search(text) for text in texts]
    assert all(remedies), [text for text, remedy in zip(texts, remedies, strict=True) if not remedy]
    assert {remedy.group().split()[1] for remedy in remedies} == {"Name", "Remove", "Use"}
    assert "(?:Name|Remove|Use)" in check.REMEDY.pattern


def put(name, *way_and_value):
    """Return a file of the old run with another value at a place."""
    whole = tree = json.loads((OLD / name).read_text())
    *way, last, value = way_and_value
    for part in way:
        tree = tree[part]
    tree[last] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("record.json", b"?", "it is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("record.json", b"\xff",
         "it is not JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"),
        ("record.json", b"[]", "Input should be a valid dictionary or instance of RunRecord"),
        ("record.json", put("record.json", "schema_version", 9),
         "RUN/record.json has schema version 9; this fedaudit reads version 1"),
        ("record.json", put("record.json", "curve", 0, "up_wire", 1),
         "Value error, the curve does not follow from the rounds"),
        ("record.json", put("record.json", "ledger", 0, "epsilon", -1),
         "ledger.0.epsilon: Input should be greater than or equal to 0 (it is -1)"),
        ("record.json", put("record.json", "status", "done. Use it"),
         "status: Input should be 'running', 'done' or 'refused' (it is done. Use it)"),
        ("attacks.json", b"{}", "'transcript_digest'"),
        ("attacks.json", put("attacks.json", "attacks", 0, "leek", 1),
         "attacks.0.membership.leek: Extra inputs are not permitted (it is 1)"),
        ("audits.json", b"null", "'NoneType' object is not subscriptable"),
        ("audits.json", put("audits.json", "audits", 0, "p_value", 2.0),
         "audits.0: Value error, p_value = 2 lies outside of its own interval [0, 1]"),
    ],
)  # fmt: skip
def test_what_a_file_that_cannot_be_read_says_of_itself(file, content, said, tmp_path):
    folder = Path(shutil.copytree(OLD, tmp_path / "run"))
    (folder / file).write_bytes(content)
    (finding,) = check._begun(folder).findings
    told = said.replace("RUN", str(folder))
    assert finding.text() == f"record: contradicted. {file} is not valid: {told}; no run leaves such a file"


@pytest.mark.parametrize(
    ("facts", "wrong", "whole", "told"),
    [
        ({}, 0, True, ("the author's word", None, None)),
        ({"seal": "other"}, 0, True, ("the author's word", None, None)),
        ({"seal": "other", "tasks": 9}, 2, True, ("the author's word", None, None)),
        ({"tasks": 9}, 0, True, ("contradicted", 9, 8)),
        ({"tasks": 9}, 0, False, ("the author's word", None, None)),  # nobody can count them
        ({"tasks": 0, "rerun": 0}, 0, True, ("the author's word", None, None)),  # it counted none
        ({}, 2, True, ("contradicted", 0, 2)),
        ({"contradicted": 1}, 2, True, ("the author's word", None, None)),
    ],
)
def test_a_note_of_an_earlier_check_of_the_same_files(facts, wrong, whole, told, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "number_of_tasks", lambda case: 8)
    (tmp_path / NOTE).write_text(note(**facts).model_dump_json())
    case = SimpleNamespace(found=Findings(), folder=tmp_path, whole=whole)
    for i in range(wrong):
        case.found.contradicted("f", "file", f"field {i}", 1, 2)
    case.found.word("g", "a word")
    check._check_note(case, "s")
    assert len(case.found.list) == wrong + 2
    last = case.found.list[-1]
    assert (last.verdict, last.recorded, last.recomputed) == told


def test_something_else_in_the_place_of_a_note(tmp_path):
    case = SimpleNamespace(found=Findings(), folder=tmp_path, whole=True)
    check._check_note(case, "s")
    assert case.found.list == []
    (tmp_path / NOTE).write_text("{}")
    check._check_note(case, "s")
    assert [one.verdict for one in case.found.list] == ["contradicted"]


STEPS = ("check_seal", "check_copies", "check_transcript", "check_traffic", "check_ledger", "check_twins",
         "check_noise_key", "check_sums", "check_data", "check_accuracy", "check_attacks", "check_epsilon_audits",
         "check_code", "check_rerun", "_check_note")  # fmt: skip


@pytest.fixture
def steps(monkeypatch):
    """The names of the checks that are made, instead of the checks."""
    done = []
    for name in STEPS:

        def step(case, *more, name=name, **named):
            done.append((name, *more, *named.values()) if name in ("check_ledger", "check_rerun") else name)
            return (8, 4) if name == "check_rerun" else SimpleNamespace(digest="s")

        monkeypatch.setattr(check, name, step)
    return done


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rerun", [0.0, 0.5])
@pytest.mark.parametrize("sums", [{}, {(1, 0): "a sum"}])
def test_which_checks_are_made(whole, rerun, sums, steps, tmp_path, monkeypatch):
    """Without a whole transcript nothing is computed from its messages."""
    told, made = [], []
    case = SimpleNamespace(found=Findings(), whole=whole, sums=sums, world=None, watch=lambda *of: told.append(of))
    monkeypatch.setattr(check, "_begun", lambda folder: SimpleNamespace(status="done"))
    monkeypatch.setattr(check, "Case", lambda *args, **named: made.append((args[0], named)) or case)
    checked = check.verify(tmp_path, rerun=rerun, seed=3, data_dir="there", watch="watch")
    parts = ["transcript", "ledger", "accuracy", "attacks", *(["rerun"] if whole and rerun else [])]
    assert told == [(i, 6, part) for i, part in enumerate(parts)]
    assert made == [(tmp_path, {"data_dir": "there", "watch": "watch"})]
    left_out = set() if whole else {"check_traffic", "check_twins", "check_rerun"}
    left_out |= set() if rerun else {"check_rerun"}
    expected = [name for name in STEPS if name not in left_out]
    assert [name if isinstance(name, str) else name[0] for name in steps] == expected
    if "check_rerun" in expected:
        assert ("check_rerun", 0.5, 3) in steps
    assert (checked.tasks, checked.rerun, checked.seal) == ((8, 4, "s") if whole and rerun else (0, 0, "s"))
    words = [one.figure for one in case.found.list]
    assert words == (["rerun"] if rerun and not whole else ["content of sums"] if whole and sums and not rerun else [])
    kept = check.read_note(tmp_path)
    assert (kept.tasks, kept.rerun, kept.word, kept.recomputed) == (checked.tasks, checked.rerun, len(words), 0)
    (tmp_path / NOTE).unlink()
    check.verify(tmp_path, note=False)
    assert check.read_note(tmp_path) is None


@pytest.mark.parametrize(("status", "words"), [("refused", "does not apply"), ("running", "is not finished")])
def test_a_run_without_a_result(status, words, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_begun", lambda folder: SimpleNamespace(status=status))
    checked = check.verify(tmp_path)
    assert steps == ["check_seal", "check_copies"]
    assert [one.verdict for one in checked.findings] == ["the author's word"]
    assert words in checked.findings[0].reason


@pytest.mark.parametrize("status", ["done", "running"])
def test_which_checks_gates_make(status, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_begun", lambda folder: SimpleNamespace(status=status))
    assert check.cheap_check(tmp_path) == [], "a record without its folder has nothing to be held against"
    assert steps == []
    (tmp_path / "setting.json").touch()
    assert check.cheap_check(tmp_path) == []
    more = ["check_transcript", ("check_ledger", True), "check_sums"] if status == "done" else []
    assert steps == ["check_seal", "check_copies", *more]


@pytest.mark.parametrize("name", ["transcript", "checkpoint", "setting.json", check.MARKER])
def test_gates_look_at_any_part_of_a_run_folder(name, steps, tmp_path, monkeypatch):
    """Of what they find, contradictions count, and not the author's word."""
    (tmp_path / name).touch()
    case = SimpleNamespace(found=Findings())
    case.found.word("f", "a word")
    case.found.contradicted("g", "file", "field", 1, 2)
    case.found.recomputed("h")
    monkeypatch.setattr(check, "_begun", lambda folder: SimpleNamespace(status="done"))
    monkeypatch.setattr(check, "Case", lambda *of: case)
    assert [one.figure for one in check.cheap_check(str(tmp_path))] == ["g"]
    begun = Checked(folder="f", findings=case.found.list[:2])
    monkeypatch.setattr(check, "_begun", lambda folder: begun)
    assert [one.figure for one in check.cheap_check(tmp_path)] == ["g"]
    assert check.verify(tmp_path) is begun


def test_a_note_counts_what_was_found(tmp_path):
    found = Findings()
    for i in range(3):
        found.recomputed(f"f {i}")
    found.word("g", "a word")
    found.word("g", "another")
    found.contradicted("h", "file", "field", 1, 2)
    check._leave_note(tmp_path, Checked(folder="f", findings=found.list, tasks=9, rerun=4, seal="s"))
    kept = check.read_note(tmp_path)
    assert (kept.recomputed, kept.contradicted, kept.word, kept.tasks, kept.rerun, kept.seal) == (3, 1, 2, 9, 4, "s")
    assert kept.fedaudit == __version__
    assert len(kept.when) == len("2026-01-01T00:00:00+00:00")
    assert (tmp_path / NOTE).read_text().startswith('{\n "fedaudit"'), "as the other files of a run: one blank a level"
    (tmp_path / "a file").touch()
    check._leave_note(tmp_path / "a file", Checked(folder="f"))
    assert check.read_note(tmp_path / "a file") is None, "a folder that cannot be written is no error"
    check._leave_note(tmp_path, Checked(folder="f"))
    assert check.read_note(tmp_path).seal == ""


@pytest.mark.parametrize("broken", [[], ["record.json"]])
@pytest.mark.parametrize("signature", [None, "a signature"])
def test_what_is_said_of_a_folders_seal_and_note(broken, signature, tmp_path, monkeypatch):
    seal = SimpleNamespace(digest="0123456789" * 4, signature=signature, broken_by=lambda now: broken)
    monkeypatch.setattr(check, "Seal", SimpleNamespace(of=lambda folder: SimpleNamespace(digest="s")))
    monkeypatch.setattr(check, "read_seal", lambda folder: None)
    assert check.checked_lines(tmp_path) == ["not sealed", "not checked (`fedaudit verify` does it)"]
    monkeypatch.setattr(check, "read_seal", lambda folder: seal)
    (tmp_path / NOTE).write_text(note().model_dump_json())
    told, checked = check.checked_lines(tmp_path)
    assert told == "seal 01234567890123456789012345678901" + (", signed" if signature else "") + (
        "; BROKEN: files were changed after it (`fedaudit verify` names them)" if broken else ""
    )
    assert checked == note().text("s")

    def read(folder):
        raise RunError("the seal is cut off")

    monkeypatch.setattr(check, "read_seal", read)
    assert check.checked_lines(tmp_path) == ["the seal is cut off"]


def test_how_a_folder_stands_by_its_seal_and_its_note(tmp_path):
    def stands():
        return check.standing(tmp_path)

    assert stands() == check.Standing()
    (tmp_path / "seal.json").write_text("no seal")
    assert stands() == check.Standing(broken="seal.json does not hold a seal")
    assert stands().doubts == ["the seal is broken (seal.json does not hold a seal)"]
    (tmp_path / "record.json").write_text("{}")
    seal = Seal.of(tmp_path)
    write_seal(tmp_path, seal)
    assert stands() == check.Standing(seal)
    assert stands().doubts == []
    of_these, of_others = note(seal=seal.digest, contradicted=2, when="2026-02-03T04"), note(seal="x", contradicted=2)
    (tmp_path / NOTE).write_text(of_others.model_dump_json())
    assert stands() == check.Standing(seal, changed=True)
    assert stands().doubts == []
    (tmp_path / NOTE).write_text(of_these.model_dump_json())
    assert stands() == check.Standing(seal, note=of_these)
    assert stands().doubts == ["a check on 2026-02-03 contradicted 2 figures"]
    (tmp_path / "record.json").write_text("{ }")
    assert stands() == check.Standing(seal, "not as it was sealed: record.json", changed=True)
    (tmp_path / "seal.json").unlink()
    (tmp_path / NOTE).write_text(note(seal=Seal.of(tmp_path).digest, contradicted=1, when="today").model_dump_json())
    assert stands().doubts == ["a check on today contradicted 1 figure"]
