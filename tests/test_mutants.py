"""The list of wrong edits is about the code as it is now, and the runner tells a survivor from a victim."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

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
    done = subprocess.run([*done.args, "--seconds", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 3 killed, 1 survived, 0 cannot be seen, 0 untried, 1 no longer apply, 0 not tried" in done.stdout


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """Begin nine entries with a clock that nobody waits for.

    Returns the parts whose own tests ran, who was tried, and the seconds. The tests of a part take `each` seconds on
    the code as it is, and 10 with a mutant.
    """

    def call(each: float, seconds: float = 60.0) -> tuple[list[str], str, float]:
        now, parts = [0.0], []

        def spend(took, end):
            late, now[0] = now[0] + took > end, max(now[0], min(now[0] + took, end))
            if late:
                raise mutants.OutOfTime

        def passes(part, tree, folder, passed, end):
            parts.append("".join(m.name for m in part))
            spend(each, end)
            return ""

        def tried(part, trees, folder, end=mutants.NEVER):
            spend(10, end)
            yield from ((m, "killed", 10.0, "") for m in part)

        monkeypatch.setattr(mutants, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        monkeypatch.setattr(mutants, "copied", lambda root, to: to)
        monkeypatch.setattr(mutants, "passes_without", passes)
        monkeypatch.setattr(mutants, "tried", tried)
        nine = [mutants.Mutant(name, "f.py", "", "", ("t.py",), "") for name in "abcdefghi"]
        done = "".join(m.name for m, *_ in mutants.in_time(nine, 2, tmp_path, seconds, trust=False))
        return parts, done, now[0]

    return call


@pytest.mark.parametrize(
    ("each", "parts", "done", "took"),
    [
        (1, "ab cd ef gh i", "abcdefghi", 55),
        (15, "ab cd ef", "abcdef", 75),  # the third part begins after 50 seconds
        (60, "ab cd", "abcd", 140),  # the second part begins after 70 seconds: fewer than four were begun
        (69, "ab cd", "ab", 150),  # it is stopped after 60 + 90 seconds
        (130, "ab cd", "ab", 150),  # and so are its tests on the code as it is
        (151, "ab", "", 150),
    ],
)
def test_what_a_slow_machine_begins_in_a_minute(begun, each, parts, done, took):
    assert begun(each) == (parts.split(), done, took)


def test_without_a_limit_all_tests_pass_before_anything_is_tried(begun):
    assert begun(1000, mutants.NEVER) == (["abcdefghi"], "abcdefghi", 1010)


def test_tests_that_passed_do_not_run_again(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(mutants, "attempt", lambda tree, targets, output: asked.append(targets) or 1)
    monkeypatch.setattr(mutants, "waited", lambda running, *_: running.clear() or (None, 0, 0.0))
    a, b = (
        mutants.Mutant("m", "f.py", "", "", tests, "")
        for tests in (("t.py", "u.py::test_x"), ("t.py::test_y", "u.py::test_x", "u.py::test_z"))
    )
    passed: set[str] = set()
    assert [mutants.passes_without([m], tmp_path, tmp_path, passed) for m in (a, b, b)] == ["", "", ""]
    assert asked == [["t.py", "u.py::test_x"], ["u.py::test_z"]], "nothing was left for the third"


def test_what_runs_at_the_hard_end_is_stopped():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"], start_new_session=True)
    running = {child.pid: (None, time.perf_counter())}
    with pytest.raises(mutants.OutOfTime), mutants.stopped_at_the_end(running):
        mutants.waited(running, end=time.perf_counter() + 0.1)
    child.returncode = -9  # it was waited for already
    with pytest.raises(ProcessLookupError):
        mutants.os.kill(child.pid, 0)


@pytest.mark.parametrize(("before", "code"), [([], 3), (["killed"], 3), (["killed", "survived"], 1)])
def test_tests_that_fail_as_they_are_stop_everything(monkeypatch, capsys, before, code):
    """The environment is at fault, unless an edit went unnoticed before."""

    def in_time(chosen, *_):
        yield from ((chosen[0], fate, 0.0, "") for fate in before)
        raise mutants.FailsAsItIs("FAILED t.py::test_x")

    monkeypatch.setattr(mutants, "in_time", in_time)
    monkeypatch.setattr(mutants.signal, "signal", lambda *_: None)  # it is this process's own
    assert mutants.main(["--cold", "--only", entries()[0].name]) == code
    assert "FAILED t.py::test_x\nThe environment is at fault, or the tests" in capsys.readouterr().out
