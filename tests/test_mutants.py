"""The list of wrong edits is about the code as it is now, and the runner tells a survivor from a victim."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tomllib

import mutants
import pytest


@functools.cache
def entries() -> list[mutants.Mutant]:
    return mutants.listed()


def test_every_entry_still_applies():
    faults = [f"{m.listed}, {m.name}: {fault}" for m in entries() if (fault := m.fault())]
    assert not faults, "\n".join(faults)


def test_every_list_is_of_one_source_file():
    """An entry stands in the list that is named after its file."""
    wrong = [f"{m.name} in {m.listed}" for m in entries() if m.listed != mutants.list_of(m.file)]
    assert not wrong, "make mutants ARGS=--sort: " + ", ".join(wrong)


def test_lists_are_sorted_by_source_file(tmp_path):
    """Two files, three entries in one list: two lists of the files' names, entries as they were but for a test that
    has moved and the key's old name."""
    (tmp_path / "fedaudit").mkdir()
    (tmp_path / "tests" / "old").mkdir(parents=True)
    (tmp_path / "fedaudit" / "a.py").write_text("one = 1\nthree = 3\n")
    (tmp_path / "fedaudit" / "b.toml").write_text("two = 2\n")
    (tmp_path / "tests" / "test_here.py").write_text("def test_x():\n    pass\n")
    entry = "[[mutant]]\nname = '{}'\nfile = \"{}\"\nfind = '{}'\nreplace = '0'\ntests = [\"{}\"]\nwhy = 'w'\n"
    gone, kept = "tests/gone.py::test_x[1]", "tests/test_here.py"
    first = entry.format("m", "fedaudit/a.py", "one = 1", gone) + "survives = 's'\n"
    text = first + "\n" + entry.format("n", "fedaudit/b.toml", "two = 2", kept)
    (tmp_path / "tests" / "old" / "all.toml").write_text(text + entry.format("o", "gone.py", "three = 3", kept))
    assert mutants.sort_lists(tmp_path / "tests" / "old", tmp_path) == 3
    made = {path.name: path.read_text() for path in (tmp_path / "tests" / "old").rglob("*.toml")}
    assert made.keys() == {"a.toml", "b.toml.toml"}
    assert made["a.toml"].startswith("# Wrong edits of fedaudit/a.py.\n")
    read = tomllib.loads(made["a.toml"])["mutant"]
    assert [(m["name"], m["file"], m["tests"]) for m in read] == [
        ("m", "fedaudit/a.py", ["tests/test_here.py::test_x[1]"]),
        ("o", "fedaudit/a.py", [kept]),
    ]
    assert read[0]["equivalent"] == "s"
    assert mutants.sort_lists(tmp_path / "tests" / "old", tmp_path) == 0


@pytest.mark.parametrize(("missed", "untried", "code"), [(0, 0, 0), (1, 0, 1), (1, 1, 1), (0, 1, 3)])
def test_a_survivor_is_told_from_an_environment(missed, untried, code, capsys):
    assert mutants.result(missed, untried) == code
    assert ("unnoticed" in capsys.readouterr().out) == (code == 1)


def test_ci_gates_a_slice():
    told = (mutants.ROOT / ".ci" / "run").read_text()
    assert re.search(r'^make mutants ARGS="--slice .*/200 --seconds 60"$', told, re.MULTILINE), (
        "nothing swallows its end"
    )


def test_there_are_enough_of_them():
    assert len(entries()) >= 120


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"find": "nowhere to be found"}, "occurs neither in .* nor in one other file alone"),
        ({"find": "import"}, "occurs .* times"),
        ({"replace": "class"}, "would not be Python"),
        ({"file": "fedaudit/gone.py", "find": "import"}, "nor in one other file alone"),
        ({"tests": ("tests/gone.py",)}, "there is no test file"),
        ({"tests": ("tests/test_mutants.py::test_gone",)}, "has no test_gone"),
        ({"tests": ()}, "names no tests"),
    ],
)
def test_an_entry_that_says_nothing_is_named(change, fault):
    values = {"name": "m", "file": "fedaudit/units.py", "find": '"""', "replace": "", "tests": (), "why": ""}
    text = (mutants.ROOT / "fedaudit/units.py").read_text()
    values |= {"find": text.splitlines()[-1], "tests": ("tests/test_mutants.py",), **change}
    found = mutants.Mutant(**values).fault()
    assert found
    assert re.search(fault, found), found


def test_an_entry_may_be_of_a_suite():
    suite = "fedaudit/suites/published/fedzge_2.toml"
    values = {"name": "m", "file": suite, "find": "rounds = 100", "tests": ("tests/test_mutants.py",), "why": ""}
    assert mutants.Mutant(**values, replace="rounds = 10").fault() is None
    assert "would not be TOML" in (mutants.Mutant(**values, replace="rounds = ").fault() or "")


def test_an_entry_is_found_again_after_a_move():
    text = (mutants.ROOT / "fedaudit/units.py").read_text()
    only = next(line for line in text.splitlines() if line.startswith("def "))
    moved = mutants.Mutant("m", "fedaudit/elsewhere.py", only, only + "  #", ("tests/test_mutants.py",), "")
    assert moved.where()[0] == mutants.ROOT / "fedaudit/units.py"
    assert moved.fault() is None


def test_slices_share_out_all():
    every = mutants.listed()
    parts = [mutants.slice_of(every, f"{i}/7") for i in range(1, 8)]
    assert sorted(m.name for part in parts for m in part) == sorted(m.name for m in every)


def test_exit_codes():
    assert [mutants.verdict(code) for code in (0, 1, 2, None, 4, 5)] == [
        "survived", "killed", "killed", "killed", "untried", "untried",
    ]  # fmt: skip


def test_tests_that_cannot_be_imported_kill_only_where_that_is_the_edits_doing():
    said = "ImportError while importing test module\nE   ModuleNotFoundError: No module named '{}'"
    assert mutants.verdict(2, said.format("fedaudit.runtime.gone")) == "killed"
    assert mutants.verdict(2, "E   NameError: name 'x' is not defined") == "killed"
    assert mutants.verdict(2, said.format("flwr")) == "untried"
    assert mutants.verdict(1, said.format("flwr")) == "killed"
    named = "ERROR tests/wire/test_codec.py - NameError: name 'x'\nERROR: found no collectors for tests/wire/..."
    assert mutants.verdict(4, named) == "killed", "a named test's file cannot be imported"
    assert mutants.verdict(4, f"{named}\n{said.format('flwr')}") == "untried"
    assert mutants.verdict(4, "ERROR: not found: tests/wire/test_codec.py::test_gone") == "untried"


def test_a_survivor_and_a_victim(tmp_path):
    """The runner itself, on a tree of two files: the edit that a test sees dies, the other lives, one that has no place
    any more is named and stops nobody, and the tree is whole."""
    (tmp_path / "tests" / "helpers" / "tools").mkdir(parents=True)
    (tmp_path / "tests" / "mutants").mkdir()
    shutil.copy(mutants.ROOT / "tests/helpers/tools/mutants.py", tmp_path / "tests/helpers/tools/mutants.py")
    (tmp_path / "coded.py").write_text("def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n")
    (tmp_path / "tests" / "test_coded.py").write_text(
        "from coded import double, half\n\n\ndef test_double():\n    assert double(3) == 6\n    assert half(0) == 0\n"
    )
    entry = (
        '[[mutant]]\nname = "{}"\nfile = "coded.py"\nfind = "{}"\nreplace = "{}"\ntests = ["tests/test_coded.py"]\n'
        'why = ""\n'
    )
    (tmp_path / "tests" / "mutants" / "m.toml").write_text(
        entry.format("seen", "2 * x", "3 * x")
        + entry.format("unseen", "x / 2", "x / 3")
        + entry.format("gone", "x ** 2", "x ** 3")
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "tests/helpers/tools/mutants.py", "--cold"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "survived: unseen (coded.py)" in done.stdout
    assert "no longer applies: gone (m.toml)" in done.stdout
    assert "1 of 3 killed, 1 survived, 0 cannot be seen, 0 untried, 1 no longer apply" in done.stdout
    assert "went unnoticed" in done.stdout
    assert (tmp_path / "coded.py").read_text().count("2") == 2
