"""Wrong edits that nobody picked by hand, tried against the tests that cover their line: `make mutants-random`.

    python tests/helpers/tools/random_mutants.py --cover --jobs 2          # once: which test runs through which line
    python tests/helpers/tools/random_mutants.py --number 200 --seed 1     # draw, try, list the survivors
    python tests/helpers/tools/random_mutants.py --number 50 --rooms fedaudit/privacy,fedaudit/epsilon
    python tests/helpers/tools/random_mutants.py --number 5 --seed 1 --list

An edit turns a comparison, takes `max` for `min` or `any` for `all`, drops a term or a factor, shifts an index, changes
a default, exchanges "up" and "down", or skips a branch. Lines that raise an error are left out: wording is not drawn.
Each edit is tried in a copy of the tree (see `mutants`). The tests that cover its line run, those of its own room
first, then the fastest, until one fails. In the end every test that failed is run on the code as it is: what fails
there too has killed nothing. A survivor that changes nothing that can be seen is marked once, with its reason, in
equivalent_edits.toml beside this file; it does not count.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mutants import ROOT, attempt, copied, verdict, waited, warm_up

ROOMS = ("fedaudit", "methods", "attacks", "reports")
LEFT_OUT = ("fedaudit/cli", "reports")  # their wording is held by golden files; name them in --rooms to try them
FOLDER = ROOT / ".mutants"  # which test covers which line, and how long it takes; git does not know it
EQUIVALENT = Path(__file__).with_name("equivalent_edits.toml")
SETTINGS = "tests/test_docs.py::test_the_reference_is_made_from_the_code"
ATTACKS = "tests/attacks/test_stated_settings.py"  # reads the attacks' classes, and runs through none of their lines
# These read classes, and run through none of their lines.
STATED, CHANGING = "tests/methods/test_stated_settings.py", "tests/test_house.py::test_which_classes_may_change"
MOST = 60  # covering tests that are run for an edit, the nearest and fastest ones
SECONDS = 300  # for them all: an edit that makes them hang is found out
TURNED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
          ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}  # fmt: skip
SWAPPED = {"max": "min", "min": "max", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "argmax": "argmin",
           "argmin": "argmax", "floor": "ceil", "ceil": "floor"}  # fmt: skip
WORDS = {"up": "down", "down": "up", "member": "nonmember", "first": "last", "last": "first"}
FIRST_OF = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)


@dataclass(frozen=True)
class Edit:
    """One wrong edit: the text from `start` to `end` of a file becomes `text`."""

    file: str
    line: int
    start: int
    end: int
    text: str
    kind: str
    where: str  # the function or class that holds it
    around: tuple[int, int] = (0, 0)  # its first and last line: defaults are computed before any test runs

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def shown(self, source: str) -> str:
        return (
            f"{self.file}:{self.line} ({self.where}), {self.kind}: {source[self.start : self.end]!r} -> {self.text!r}"
        )

    @property
    def room(self) -> str:
        parts = Path(self.file).parts
        return "/".join(parts[:2]) if parts[0] == "fedaudit" and len(parts) > 2 else parts[0]


# --- which edits there are ------------------------------------------------------------------------------------------


class _Finder(ast.NodeVisitor):
    """Collects the edits of one file."""

    def __init__(self, file: str, source: str):
        self.file, self.source, self.found = file, source, list[Edit]()
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines(keepends=True)
        self._within: list[str] = []
        self._around: list[tuple[int, int]] = []

    def at(self, line: int, column: int) -> int:
        """Return the place in the text of a line and a column in UTF-8 bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def add(self, node: ast.expr, text: str, kind: str) -> None:
        start, end = self.span(node)
        around = self._around[-1] if self._around else (1, len(self._lines))
        self.found.append(
            Edit(self.file, node.lineno, start, end, text, kind, ".".join(self._within) or "module", around)
        )

    def _inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._within.append(node.name)
        self._around.append((node.lineno, node.end_lineno or node.lineno))
        for part in [*node.body, *node.decorator_list]:
            self.visit(part)
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    self._constant(default, "another default")
        self._within.pop()
        self._around.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not node.name.startswith("__repr"):
            self._inside(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._constant(node.value, "another default")
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_If(self, node: ast.If) -> None:
        # `if TYPE_CHECKING` and guards that only raise are not drawn: the second are about wording.
        if not all(isinstance(part, ast.Raise) for part in node.body) and "TYPE_CHECKING" not in self.text(node.test):
            self.add(node.test, "False", "a skipped branch")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and (turned := TURNED.get(type(node.ops[0]))):
            left, right = self.text(node.left), self.text(node.comparators[0])
            self.add(node, f"{left} {turned} {right}", "a turned comparison")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func
        if isinstance(name, ast.Name) and name.id in SWAPPED:
            self.add(name, SWAPPED[name.id], "the opposite function")
        elif isinstance(name, ast.Attribute) and name.attr in SWAPPED:
            self.add(name, f"{self.text(name.value)}.{SWAPPED[name.attr]}", "the opposite function")
        for keyword in node.keywords:
            self._constant(keyword.value, "another argument")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = any(
            isinstance(side, ast.Constant | ast.JoinedStr) and not _is_number(side) for side in (node.left, node.right)
        )
        if isinstance(node.op, FIRST_OF) and not words:
            kind = "a dropped term" if isinstance(node.op, ast.Add | ast.Sub) else "a dropped factor"
            self.add(node, f"({self.text(node.left)})", kind)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = node.slice
        if isinstance(index, ast.Constant) and type(index.value) is int:
            self.add(index, str(index.value + 1), "a shifted index")
        elif (
            isinstance(index, ast.UnaryOp)
            and isinstance(index.op, ast.USub)
            and isinstance(index.operand, ast.Constant)
        ):
            self.add(index, "0", "a shifted index")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value in WORDS:
            self.add(node, repr(WORDS[node.value]), "the opposite word")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert) and not isinstance(node.operand, ast.Constant):
            self.add(node, f"({self.text(node.operand)})", "a dropped sign")
        self.generic_visit(node)

    def _constant(self, node: ast.expr, kind: str) -> None:
        if not isinstance(node, ast.Constant):
            return
        if isinstance(node.value, bool):
            self.add(node, str(not node.value), kind)
        elif _is_number(node) and isinstance(node.value, int | float):
            self.add(node, repr(node.value * 2 if node.value else 1), kind)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def edits_of(file: str, source: str) -> list[Edit]:
    """Return the edits of a file. Some of them may not leave it Python: see `valid`."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


def valid(edit: Edit, source: str) -> bool:
    """Return whether the file is still Python after an edit, and another program."""
    try:
        return ast.dump(ast.parse(edit.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def sources(rooms: Sequence[str], root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the files of some rooms, with their text. Without rooms: all but those whose wording golden files hold."""
    for path in sorted(p for room in ROOMS for p in (root / room).rglob("*.py") if not p.is_symlink()):
        name = path.relative_to(root).as_posix()
        if (
            any(f"{name}/".startswith(f"{room}/") or name == room for room in rooms)
            if rooms
            else not name.startswith(LEFT_OUT)
        ):
            yield name, path.read_text()


def drawn(texts: Mapping[str, str], number: int, seed: int) -> tuple[list[Edit], int]:
    """Return so many edits of these files, at most one of a line, each as likely as any, and how many there are."""
    every = [edit for file, source in texts.items() for edit in edits_of(file, source)]
    found: list[Edit] = []
    lines: set[tuple[str, int]] = set()
    for edit in random.Random(seed).sample(every, len(every)):
        if len(found) == number:
            break
        if (edit.file, edit.line) not in lines and valid(edit, texts[edit.file]):
            lines.add((edit.file, edit.line))
            found.append(edit)
    return found, len(every)


# --- which tests cover a line ---------------------------------------------------------------------------------------

PLUGIN = """
import coverage, json, os, time
SECONDS, OTHERS = {}, set()
def pytest_runtest_logstart(nodeid, location):
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(nodeid)
def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0) + report.duration
    if not report.passed:
        OTHERS.add(report.nodeid)
def pytest_sessionfinish(session):
    with open(os.environ["TEST_SECONDS"], "w") as file:
        json.dump({test: seconds for test, seconds in SECONDS.items() if test not in OTHERS}, file)
"""


def cover(jobs: int, targets: Sequence[str]) -> int:
    """Run the suite under coverage, a share of its files in each process, and keep which test runs which line."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*"):
        old.unlink()
    (FOLDER / "test_contexts.py").write_text(PLUGIN)
    (FOLDER / "rc").write_text("[run]\nsource = fedaudit,methods,attacks,reports\nrelative_files = true\n")
    files = (
        sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")) if not targets else list(targets)
    )
    files.sort(key=lambda name: -(ROOT / name.partition("::")[0]).stat().st_size)
    running = []
    for i in range(jobs):
        here = {"COVERAGE_FILE": str(FOLDER / f"data.{i}"), "TEST_SECONDS": str(FOLDER / f"seconds.{i}.json")}
        here |= {"PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "coverage", "run", f"--rcfile={FOLDER / 'rc'}", "-m", "pytest", "-q", "-n0",
                 "-p", "test_contexts", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "not slow",
                 "--continue-on-collection-errors", *files[i::jobs]]  # fmt: skip
        running.append(subprocess.Popen(words, cwd=ROOT, env={**os.environ, **here}))
    codes = [one.wait() for one in running]
    seconds: dict[str, float] = {}
    for path in FOLDER.glob("seconds.*.json"):
        seconds |= json.loads(path.read_text())
    (FOLDER / "seconds.json").write_text(json.dumps(seconds))
    print(f"{len(seconds)} tests, exit codes {codes}; kept in {FOLDER.name}/")
    return 0 if seconds else 1


def own_room(test: str, file: str) -> int:
    """Return how near a test is to a source file: 0 in the file named after it, 1 in its folder, 2 elsewhere."""
    source, place = Path(file), Path(test.partition("::")[0])
    if place.stem == f"test_{source.stem.lstrip('_')}":
        return 0
    return 1 if place.parent.name in source.parent.parts else 2


def in_room(test: str, file: str) -> bool:
    """Return whether a test stands in a folder that is named after the folder of a source file, or beside it."""
    place = Path(test.partition("::")[0]).parent
    return place.name == "tests" or place.name in Path(file).parent.parts


class Covered:
    """Tells which tests run through a line: those of its own room first, then the fastest."""

    def __init__(self) -> None:
        import coverage

        self._seconds = json.loads((FOLDER / "seconds.json").read_text())
        self._data = []
        for path in sorted(FOLDER.glob("data.*")):
            data = coverage.CoverageData(str(path))
            data.read()
            self._data.append(data)

    def tests(self, edit: Edit) -> list[str]:
        """Return the tests that run through an edit's line, else through what is around it, else through its file.

        A default in a class is read when the file is imported, before any test: the page of all settings has it too. A
        class without any function is run through by no test that uses it: those of its file are tried. So are all tests
        in the file that is named after it, some of which only read the default: after those that run through the line.
        """
        found = self._of(edit.file, (edit.line, edit.line))
        if edit.where == "module":  # run by whichever test imports the file first, and used by all of them
            found += [test for test in self._of(edit.file, (1, sys.maxsize)) if test not in found]
        if not found or edit.kind in ("another default", "another argument"):
            found += [test for test in self._of(edit.file, edit.around) if test not in found]
            found = found or self._of(edit.file, (1, sys.maxsize))
            mine = self._named_after(edit.file)
            mine = [*(test for test in found if test in mine), *(test for test in mine if test not in found)]
            found = [*mine, *(test for test in found if test not in mine)]
            found = [ATTACKS, *found] if edit.file.startswith("attacks/") else found
            found += [SETTINGS] if found and SETTINGS not in found else []
            found = [CHANGING, *found] if edit.text in ("True", "False") else found
            found = [STATED, *found] if edit.file.startswith("methods/") else found
        return found

    def _named_after(self, file: str) -> list[str]:
        mine = [test for test in self._seconds if own_room(test, file) == 0 and in_room(test, file)]
        return sorted(mine, key=lambda test: (self._seconds[test], test))

    def _of(self, file: str, lines: tuple[int, int]) -> list[str]:
        found: set[str] = set()
        for data in self._data:
            for name in {file, f"fedaudit/{file}"} & data.measured_files():
                by_line = data.contexts_by_lineno(name)
                found.update(test for line, tests in by_line.items() if lines[0] <= line <= lines[1] for test in tests)
        known = [test for test in found if test in self._seconds]
        return sorted(known, key=lambda test: (own_room(test, file), self._seconds[test], test))


# --- trying them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    edit: Edit
    fate: str  # killed, survived, uncovered, equivalent, untried
    seconds: float
    tests: int
    killer: str = ""  # the test that failed; empty where the tests could not even be collected


def marks(path: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Return the reasons of edits that change nothing that can be seen, by file, the line's text and the new text."""
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text()).get("edit", [])
    return {(entry["file"], entry["line"], entry["text"]): entry["why"] for entry in entries}


def line_of(source: str, edit: Edit) -> str:
    return source.splitlines()[edit.line - 1].strip()


def tried(edits: Sequence[Edit], covered: Covered, jobs: int, folder: Path) -> Iterator[Tried]:
    free = [copied(ROOT, folder / f"tree-{i}") for i in range(jobs)]
    running: dict[int, tuple[tuple[Edit, Path, str, Path, list[str]], float]] = {}
    waiting = list(edits)
    while waiting or running:
        while waiting and free:
            edit = waiting.pop(0)
            tests = covered.tests(edit)
            tests = tests[:MOST] + [test for test in tests[MOST:] if test == SETTINGS]
            if not tests:
                yield Tried(edit, "uncovered", 0.0, 0)
                continue
            tree = free.pop()
            path = tree / edit.file
            kept = path.read_text()
            path.write_text(edit.applied(kept))
            output = folder / f"{len(waiting)}.txt"
            pid = attempt(tree, tests, output)
            running[pid] = ((edit, tree, kept, output, tests), time.perf_counter())
        if not running:
            break
        (edit, tree, kept, output, tests), code, took = waited(running, SECONDS)
        (tree / edit.file).write_text(kept)
        free.append(tree)
        said = output.read_text() if output.exists() else ""
        yield Tried(edit, verdict(code, said), took, len(tests), next(iter(failed_in(said, tests)), ""))


def failed_in(said: str, tests: Sequence[str]) -> list[str]:
    """Return which of these tests pytest says failed, in its order. A name may hold what looks like a message."""
    lines = [line.partition(" ")[2] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    found = [max((test for test in tests if line.startswith(test)), key=len, default="") for line in lines]
    return [test for test in found if test]


def doubted(found: Sequence[Tried], folder: Path) -> list[Tried]:
    """Return what was tried, with each kill taken back whose test fails on the code as it is."""
    killers = sorted({one.killer for one in found if one.fate == "killed" and one.killer})
    tree, failing = copied(ROOT, folder / "as-it-is"), set[str]()
    for i in range(0, len(killers), 50):
        output = folder / f"as-it-is-{i}.txt"
        os.waitpid(attempt(tree, killers[i : i + 50], output, stop=False), 0)
        failing |= set(failed_in(output.read_text(), killers))
    return [replace(one, fate="untried") if one.fate == "killed" and one.killer in failing else one for one in found]


def without_line(shown: str) -> str:
    """Return what is shown of an edit without its line number, which changes with every edit above it."""
    return re.sub(r"^(\S+?):\d+ ", r"\1 ", shown)


def unnoticed(text: str) -> set[str]:
    """Return the edits that an earlier trial, kept as JSON or as what it printed, did not see killed."""
    if text.startswith("{"):
        rows = [(row["fate"], row["edit"]) for row in json.loads(text)["edits"]]
    else:
        rows = [
            (found[1], found[2]) for line in text.splitlines() if (found := re.match(r"(\w+) +[\d.]+ s  (.*)", line))
        ]
    return {without_line(shown) for fate, shown in rows if fate in ("survived", "uncovered", "untried")}


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share."""
    if not n:
        return 0.0, 1.0
    p = k / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def table(found: Sequence[Tried]) -> list[str]:
    """Return a line for each room: how many of the edits that count were killed, with the interval."""
    rooms: dict[str, Counter[str]] = {}
    for one in found:
        for room in (one.edit.room, "all"):
            rooms.setdefault(room, Counter())[one.fate] += 1
    lines = ["| room | killed | of | share | 95 % interval |", "| --- | --- | --- | --- | --- |"]
    for room in sorted(rooms, key=lambda name: (name == "all", name)):
        counts = rooms[room]
        n = counts["killed"] + counts["survived"] + counts["uncovered"]
        low, high = wilson(counts["killed"], n)
        share = counts["killed"] / n if n else 0.0
        lines.append(f"| {room} | {counts['killed']} | {n} | {share:.0%} | {low:.0%} to {high:.0%} |")
    return lines


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants-random", description="Draw wrong edits, and try them.")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default="", help="folders or files, with commas; none: all but cli and reports")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cover", action="store_true", help="first see which test covers which line; needs coverage")
    parser.add_argument("--tests", nargs="*", default=[], help="with --cover: only these test files")
    parser.add_argument("--list", action="store_true", help="show what would be tried")
    parser.add_argument("--out", type=Path, default=None, help="keep what became of each as JSON")
    parser.add_argument("--again", type=Path, default=None, help="of the draw only what this earlier trial left alive")
    parser.add_argument("--least", type=float, default=0.0, help="share that must be killed")
    given = parser.parse_args(words)
    if given.cover:
        return cover(given.jobs, given.tests)
    rooms = [room for room in given.rooms.split(",") if room]
    texts = dict(sources(rooms))
    edits, there = drawn(texts, given.number, given.seed)
    if given.again is not None:
        alive = unnoticed(given.again.read_text())
        every = [edit for file, source in texts.items() for edit in edits_of(file, source)]
        edits = [edit for edit in every if without_line(edit.shown(texts[edit.file])) in alive]
    if given.list or not edits:
        print("\n".join(edit.shown(texts[edit.file]) for edit in edits) or "There is nothing to edit there.")
        return 0
    if not (FOLDER / "seconds.json").exists():
        print("No coverage is kept. Run `python tests/helpers/tools/random_mutants.py --cover` first.")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known, found = marks(), list[Tried]()
    unseen = [edit for edit in edits if (edit.file, line_of(texts[edit.file], edit), edit.text) not in known]
    found += [Tried(edit, "equivalent", 0.0, 0) for edit in edits if edit not in unseen]
    covered = Covered()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        for one in tried(unseen, covered, max(1, given.jobs), Path(name)):
            found.append(one)
            print(f"{one.fate:10} {one.seconds:6.1f} s  {one.edit.shown(texts[one.edit.file])}", flush=True)
        found = doubted(found, Path(name))
    print("\n".join(["", *table(found)]))
    if given.out is not None:
        rows = [
            {
                "edit": one.edit.shown(texts[one.edit.file]),
                "line": line_of(texts[one.edit.file], one.edit),
                "room": one.edit.room,
                "fate": one.fate,
                "tests": one.tests,
                "killer": one.killer,
            }
            for one in found
        ]
        given.out.write_text(json.dumps({"seed": given.seed, "drawn_from": there, "edits": rows}, indent=1) + "\n")
    counted = [one for one in found if one.fate in ("killed", "survived", "uncovered")]
    share = sum(one.fate == "killed" for one in counted) / max(1, len(counted))
    return 0 if share >= given.least else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
