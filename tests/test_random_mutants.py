"""Edits drawn at random: which there are, that they are wrong, and how survivors are counted."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import pytest
import random_mutants as r

SOURCE = '''
"""Words."""
LIMIT: int = 3

def f(a, b, keep=True):
    """More words."""
    if a < b:
        return max(a, b) - 1
    if keep:
        raise ValueError(f"{a} < {b}: max of all")
    rows = [a, b]
    return rows[0] * 2 + rows[-1], "up"
'''


def said(source=SOURCE):
    return {(e.kind, source[e.start : e.end], e.text) for e in r.edits_of("f.py", source)}


def test_each_kind_of_edit_is_found():
    assert said() == {
        ("another default", "3", "6"),
        ("another default", "True", "False"),
        ("a skipped branch", "a < b", "False"),
        ("a turned comparison", "a < b", "a <= b"),
        ("the opposite function", "max", "min"),
        ("a dropped term", "max(a, b) - 1", "(max(a, b))"),
        ("a dropped term", "rows[0] * 2 + rows[-1]", "(rows[0] * 2)"),
        ("a dropped factor", "rows[0] * 2", "(rows[0])"),
        ("a shifted index", "0", "1"),
        ("a shifted index", "-1", "0"),
        ("the opposite word", '"up"', "'down'"),
    }


def test_wording_is_not_drawn():
    """Neither docstrings nor errors, nor guards that do nothing but raise."""
    assert not [edit for edit in r.edits_of("f.py", SOURCE) if edit.line in (2, 6, 9, 10)]


class Runs(r.Covered):
    """Knows which tests run through lines 4 to 6 of a file, and no others."""

    def __init__(self):
        self._seconds = {}

    def _of(self, file, lines):
        return ["t.py::test_a"] if lines[0] <= 6 and lines[1] >= 4 else []


def test_a_class_that_no_test_runs_through_has_those_of_its_file():
    default = r.Edit("f.py", 2, 0, 1, "2", "another default", "A", (1, 2))
    assert Runs().tests(default) == ["t.py::test_a", r.SETTINGS]
    attack = r.Edit("attacks/f.py", 2, 0, 1, "2", "another default", "A", (1, 2))
    assert Runs().tests(attack)[0] == r.ATTACKS
    inside = r.Edit("f.py", 3, 0, 1, "2", "a shifted index", "f", (3, 5))
    assert Runs().tests(inside) == ["t.py::test_a", r.SETTINGS]


def test_marked_edits_are_edits_that_there_are():
    """A mark that fits no line any more, or no edit of it, hides nothing and is removed."""
    lost = []
    edits = functools.cache(r.edits_of)
    for (file, line, text), why in r.marks().items():
        source = (r.ROOT / file).read_text() if (r.ROOT / file).is_file() else ""
        found = [edit for edit in edits(file, source) if r.line_of(source, edit) == line and edit.text == text]
        if not found or not why:
            lost.append((file, line, text))
    assert not lost


def test_an_edit_is_of_its_place_and_another_program():
    for edit in r.edits_of("f.py", SOURCE):
        assert r.valid(edit, SOURCE)
        changed = edit.applied(SOURCE)
        assert changed != SOURCE
        assert len(changed) == len(SOURCE) - (edit.end - edit.start) + len(edit.text)
    umlaut = 's = "ü" if a < b else c[0]\n'
    assert ("a turned comparison", "a < b", "a <= b") in said(umlaut), "columns count bytes"
    same = r.Edit("f.py", 1, 0, 1, "s ", "", "")
    assert not r.valid(same, umlaut)


def test_a_draw_is_repeated_by_its_seed_and_takes_a_line_once():
    texts = {"f.py": SOURCE}
    first, there = r.drawn(texts, 5, 1)
    assert there == len(r.edits_of("f.py", SOURCE))
    assert r.drawn(texts, 5, 1)[0] == first
    assert r.drawn(texts, 5, 2)[0] != first
    every, _ = r.drawn(texts, 1000, 1)
    assert len({edit.line for edit in every}) == len(every) == 5


def test_the_project_has_many_and_leaves_commands_out():
    texts = dict(r.sources(["fedaudit/privacy"]))
    assert texts
    assert all(name.startswith("fedaudit/privacy/") for name in texts)
    assert not [name for name, _ in r.sources([]) if name.startswith(("fedaudit/cli", "reports"))]
    edits, there = r.drawn(texts, 20, 0)
    assert there > 500
    assert {edit.room for edit in edits} == {"fedaudit/privacy"}


def test_shares_are_of_what_counts():
    """Equivalent edits and those whose tests lack a library count in neither number; uncovered ones are not killed."""
    edit = r.edits_of("fedaudit/wire/x.py", SOURCE)[0]
    fates = ["killed"] * 8 + ["survived", "uncovered", "equivalent", "untried"]
    lines = r.table([r.Tried(edit, fate, 1.0, 1) for fate in fates])
    assert lines[2] == "| fedaudit/wire | 8 | 10 | 80% | 49% to 94% |"
    assert lines[-1].startswith("| all | 8 | 10 |")


def test_a_marked_edit_has_a_reason(tmp_path):
    path = tmp_path / "equivalent.toml"
    path.write_text(
        '[[edit]]\nfile = "f.py"\nline = "if a < b:"\ntext = "a <= b"\nwhy = "equal values give the same"\n'
    )
    assert r.marks(path) == {("f.py", "if a < b:", "a <= b"): "equal values give the same"}
    assert r.marks(tmp_path / "none") == {}


def test_what_failed_is_read_from_pytests_words():
    """One test's name holds what stands before a message, and is the beginning of nobody else's."""
    tests = ["t.py::test_c", "t.py::test_c[x - y]", "t.py::test_d"]
    said = "F\n== short test summary info ==\nFAILED t.py::test_c[x - y] - assert 1 - 2\nERROR t.py::test_d\n1 failed"
    assert r.failed_in(said, tests) == ["t.py::test_c[x - y]", "t.py::test_d"]
    assert r.failed_in("12 passed", tests) == []


@pytest.mark.long
def test_a_test_that_fails_anyway_kills_nothing(tmp_path, monkeypatch):
    """Two edits were killed, one by a test that fails on the code as it is. That kill is taken back."""
    tree = tmp_path / "tree"
    (tree / "tests").mkdir(parents=True)
    (tree / "tests" / "test_two.py").write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert 0\n")
    monkeypatch.setattr(r, "copied", lambda root, to: tree)
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115 (the fork writes to the file itself)
    edit = r.Edit("f.py", 1, 0, 1, "s", "", "")
    found = [
        r.Tried(edit, "killed", 1.0, 1, "tests/test_two.py::test_good"),
        r.Tried(edit, "killed", 1.0, 1, "tests/test_two.py::test_bad"),
        r.Tried(edit, "killed", 1.0, 1, ""),
        r.Tried(edit, "survived", 1.0, 1),
    ]
    assert [one.fate for one in r.doubted(found, tmp_path)] == ["killed", "untried", "killed", "survived"]


def test_tests_of_the_own_room_come_first():
    file = "fedaudit/privacy/_ledger.py"
    tests = ["tests/wire/test_wire.py::a", "tests/privacy/test_other.py::a", "tests/privacy/test_ledger.py::b"]
    assert [r.own_room(test, file) for test in tests] == [2, 1, 0]


def test_what_an_earlier_trial_left_alive_is_found_again_on_another_line():
    """Both what it printed and what it kept are read; what it killed is not tried again."""
    printed = (
        "killed        1.0 s  f.py:8 (f), k: '1' -> '2'\nsurvived     10.0 s  f.py:9 (f), k: 'a < b' -> 'a <= b'\n"
    )
    kept = """{"edits": [{"fate": "killed", "edit": "f.py:8 (f), k: '1' -> '2'"},
                         {"fate": "uncovered", "edit": "f.py:90 (f), k: 'a < b' -> 'a <= b'"}]}"""
    assert r.unnoticed(printed) == r.unnoticed(kept) == {"f.py (f), k: 'a < b' -> 'a <= b'"}


def test_classes_are_tried_against_the_tests_that_read_them(monkeypatch):
    covered = r.Covered.__new__(r.Covered)
    covered._seconds = {}
    covered._seconds = {}
    monkeypatch.setattr(covered, "_of", lambda file, lines: ["tests/a.py::test"])
    for file, text, wanted in (
        ("methods/x.py", "2", [r.STATED, "tests/a.py::test", r.SETTINGS]),
        ("fedaudit/x.py", "False", [r.CHANGING, "tests/a.py::test", r.SETTINGS]),
        ("fedaudit/x.py", "2", ["tests/a.py::test", r.SETTINGS]),
    ):
        assert covered.tests(r.Edit(file, 1, 0, 1, text, "another argument", "C")) == wanted


def test_a_line_outside_of_functions_is_tried_against_all_tests_of_its_file(monkeypatch):
    """It is run by the test that happened to import the file first, and what it computes is used by the others."""
    covered = r.Covered.__new__(r.Covered)
    by_lines = {(3, 3): ["tests/b.py::imports"], (1, sys.maxsize): ["tests/a.py::uses", "tests/b.py::imports"]}
    monkeypatch.setattr(covered, "_of", lambda file, lines: list(by_lines[lines]))
    edit = r.Edit("fedaudit/x.py", 3, 0, 1, "(0.5)", "a dropped factor", "module")
    assert covered.tests(edit) == ["tests/b.py::imports", "tests/a.py::uses"]
    assert covered.tests(replace(edit, where="f")) == ["tests/b.py::imports"]


def test_a_default_is_tried_against_the_tests_that_are_named_after_its_file(monkeypatch):
    """One that only reads it runs through no line. Tests of another room with the same file name do not count."""
    covered = r.Covered.__new__(r.Covered)
    covered._seconds = {
        "tests/runtime/test_x.py::reads": 0.2,
        "tests/runtime/test_x.py::quick": 0.1,
        "tests/suite/test_x.py::other": 0.1,
        "tests/runtime/test_y.py::uses": 0.3,
    }
    monkeypatch.setattr(covered, "_of", lambda file, lines: ["tests/runtime/test_y.py::uses"])
    edit = r.Edit("fedaudit/runtime/x.py", 3, 0, 1, "1", "another default", "C")
    mine = ["tests/runtime/test_x.py::quick", "tests/runtime/test_x.py::reads"]
    assert covered.tests(edit) == [*mine, "tests/runtime/test_y.py::uses", r.SETTINGS]
    turned = replace(edit, kind="a turned comparison")
    assert covered.tests(turned) == ["tests/runtime/test_y.py::uses"]
    both = ["tests/runtime/test_x.py::reads", "tests/runtime/test_y.py::uses"]
    monkeypatch.setattr(covered, "_of", lambda file, lines: list(both))
    ordered = [*reversed(mine), "tests/runtime/test_y.py::uses", r.SETTINGS]
    assert covered.tests(edit) == ordered, "those that run through it come first: only so many are run"
