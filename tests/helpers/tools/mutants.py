"""Wrong edits of the code, kept, each with the tests that must fail on it: `make mutants`.

Every source file has a list of its own: tests/mutants/fedaudit/privacy/ledger.toml has those of
fedaudit/privacy/ledger.py. An entry names the file, a text that occurs in it exactly once, what stands there instead,
and pytest targets. Each is tried in a copy of the tree, never in the tree itself. What passes its tests survives: a
test is missing. `equivalent = "why"` marks an edit that changes nothing that can be seen.

Exit code 0: all were noticed, or are marked. 1: one survived, or its entry no longer applies. 3: the environment is at
fault: the tests fail on the code as it is, a package is missing, a process was ended from outside.

    python tests/helpers/tools/mutants.py                     # all, two at a time
    python tests/helpers/tools/mutants.py --only ledger       # whose name or file holds "ledger"
    python tests/helpers/tools/mutants.py --tests by_hand     # those that a test of that name has to kill
    python tests/helpers/tools/mutants.py --slice 3/20        # every 20th, from the third on
    python tests/helpers/tools/mutants.py --slice 3/200 --seconds 60   # what a CI run takes, see below
    python tests/helpers/tools/mutants.py --sort              # each entry to the list of its file, tests where they are
    python tests/helpers/tools/mutants.py --list

With --seconds the entries are taken a few at a time, each time first their tests on the code as it is. After that time
none is begun, but for the first FEWEST, so that a slow machine tries some too. What still runs GRACE seconds later is
stopped, and counts as one that was not tried.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import compileall
import contextlib
import functools
import importlib
import itertools
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LISTS = ROOT / "tests" / "mutants"
ROOMS = ("fedaudit", "methods", "attacks", "reports")
KEYS = {"name", "file", "find", "replace", "tests", "why"}
WARM = (
    "numpy", "pydantic", "pytest", "hypothesis", "safetensors.torch", "scipy.stats", "scipy.optimize", "scipy.special",
    "sklearn.datasets", "torch", "torch.func", "xxhash", "rich", "typer", "jinja2", "PIL.Image", "matplotlib.figure",
    "opacus.accountants", "opacus.optimizers", "opacus.validators",
)  # fmt: skip
ABSENT = re.compile(r"No module named '(?!(fedaudit|methods|attacks|reports)\b)\w+")
UNREADABLE = re.compile(r"(?m)^ERROR tests/\S+\.py - ")
ENVIRONMENT = 3  # the exit code where nothing can be said of the tests
LIMIT = 300  # seconds for one mutant's tests: what hangs is found out too
FEWEST = 4  # entries that are begun even after --seconds
GRACE = 90  # seconds after --seconds at which everything ends
NEVER = float("inf")


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    why: str
    equivalent: str = ""
    listed: str = field(default="", compare=False)  # the file that lists it

    def where(self, root: Path = ROOT) -> tuple[Path | None, str]:
        """The file that it is about: the named one, or the only other with its text, after a move; else why."""
        path = root / self.file
        times = text_of(path).count(self.find) if path.is_file() else 0
        if times == 1:
            return path, ""
        if times > 1:
            return None, f"its text occurs {times} times in {self.file}: {self.find!r}"
        found = [other for other in sources(root) if text_of(other).count(self.find) == 1]
        if len(found) == 1:
            return found[0], ""
        return None, f"its text occurs neither in {self.file} nor in one other file alone: {self.find!r}"

    def fault(self, root: Path = ROOT) -> str | None:
        """Why this entry no longer says anything; None where it does."""
        path, reason = self.where(root)
        if path is None:
            return reason
        text = text_of(path)
        if self.find == self.replace:
            return "it replaces its text by the same"
        toml = path.suffix == ".toml"
        try:
            if toml:
                tomllib.loads(self.applied(text))
            else:
                compile(self.applied(around(text, self.find)), str(path), "exec", dont_inherit=True)
        except (SyntaxError, tomllib.TOMLDecodeError) as e:
            return f"{path.name} would not be {'TOML' if toml else 'Python'} any more: {e}"
        for target in self.tests:
            test, _, name = target.partition("::")
            if not (root / test).is_file():
                return f"there is no test file {test}"
            if name and name.split("[")[0].split("::")[-1] not in functions(text_of(root / test)):
                return f"{test} has no {name}"
        return None if self.tests else "it names no tests"

    def applied(self, text: str) -> str:
        return text.replace(self.find, self.replace)


@functools.lru_cache(maxsize=64)
def starts(text: str) -> list[int]:
    """Return where in a module's text each of its outermost statements begins, decorators included, and the end."""
    lines = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    first = [min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", ()))]) for s in ast.parse(text).body]
    return [*(lines[line - 1] for line in first), len(text)]


def around(text: str, part: str) -> str:
    """Return the outermost statements of a module that a part of its text is in: enough to see whether they parse."""
    at = starts(text)
    begin = text.index(part)
    before = bisect.bisect_right(at, begin) - 1
    return text[at[before] if before >= 0 else 0 : at[bisect.bisect_left(at, begin + len(part), lo=max(before, 0) + 1)]]


def text_of(path: Path) -> str:
    return _text(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _text(path: Path, changed: int) -> str:
    return path.read_text()


@functools.lru_cache(maxsize=1024)
def functions(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\bdef (\w+)\(", text))


def sources(root: Path) -> list[Path]:
    return [path for room in ROOMS for path in sorted((root / room).rglob("*.py")) if not path.is_symlink()]


def listed(folder: Path = LISTS) -> list[Mutant]:
    """Return all entries, in the order of their lists."""
    found: list[Mutant] = []
    for path in sorted(folder.rglob("*.toml")):
        name = path.relative_to(folder).as_posix()
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            if entry.keys() - {"equivalent"} != KEYS:
                raise SystemExit(f"{name}, {entry.get('name')}: an entry has {', '.join(sorted(KEYS))}.")
            found.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}, listed=name))
    names = [mutant.name for mutant in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"Two mutants have the name {twice[0]}.")
    return found


def list_of(file: str) -> str:
    """Return the list that a source file's entries belong to, below tests/mutants."""
    return f"{file.removesuffix('.py')}.toml"


def home_of(test: str, root: Path = ROOT) -> str:
    """Return a pytest target with the file that has its test now; as it is if that cannot be told."""
    file, colons, name = test.partition("::")
    defines = f"def {name.split('[')[0].split('::')[-1]}("
    if not colons or ((root / file).is_file() and defines in (root / file).read_text()):
        return test
    found = [path for path in (root / "tests").rglob("test_*.py") if defines in path.read_text()]
    return f"{found[0].relative_to(root).as_posix()}::{name}" if len(found) == 1 else test


def sort_lists(folder: Path = LISTS, root: Path = ROOT) -> int:
    """Write every entry into the list of its file, with files and tests where they are now. Returns how many moved."""
    lists: dict[str, list[str]] = {}
    moved = 0
    for path in sorted(folder.rglob("*.toml")):
        name = path.relative_to(folder).as_posix()
        _, *texts = re.split(r"(?m)^(?=\[\[mutant\]\]$)", path.read_text())
        for text in texts:
            (entry,) = tomllib.loads(text)["mutant"]
            mutant = Mutant(**{key: entry[key] for key in KEYS - {"tests"}}, tests=tuple(entry["tests"]))
            at, _ = mutant.where(root)
            file = at.relative_to(root).as_posix() if at is not None else mutant.file
            text = text.replace(f'file = "{mutant.file}"', f'file = "{file}"', 1)
            text = re.sub(r"(?m)^survives = ", "equivalent = ", text)
            for test in mutant.tests:
                text = text.replace(f'"{test}"', f'"{home_of(test, root)}"')
            lists.setdefault(list_of(file), []).append(text.strip("\n") + "\n")
            moved += list_of(file) != name
    for path in folder.rglob("*.toml"):
        path.unlink()
    for name, texts in lists.items():
        source = name.removesuffix(".toml")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        head = f"# Wrong edits of {source if source.endswith('.toml') else source + '.py'}.\n\n"
        path.write_text(head + "\n".join(texts))
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    return moved


def slice_of(mutants: Sequence[Mutant], text: str) -> list[Mutant]:
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit() and int(n) > 0):
        raise SystemExit(f"--slice {text!r}: write 3/20, the third of twenty.")
    return list(mutants[int(i) % int(n) :: int(n)])


# --- trying them ----------------------------------------------------------------------------------------------------


def copied(root: Path, to: Path) -> Path:
    """What git knows or would add, links as links, the package compiled: a file that is edited then is read anew."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if (root / name).is_symlink() or (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)
    for room in filter(Path.is_dir, (to / name for name in ROOMS)):
        compileall.compile_dir(room, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return to


def ours(path: Path) -> bool:
    """Return whether a folder of sys.path is the tree itself or one of its helpers, which a copy has of its own."""
    return path == ROOT or path.is_relative_to(ROOT / "tests" / "helpers")


def elsewhere(path: str) -> list[str]:
    """Return the folders of a PYTHONPATH that are not the tree's own: packages that processes of a test need too."""
    return [part for part in path.split(os.pathsep) if part and not ours(Path(part).resolve())]


def attempt(tree: Path, targets: Sequence[str], output: Path, stop: bool = True) -> int:
    """Run pytest on these targets in `tree`, in a fork of this process, which has the heavy imports behind it.

    Returns the child's id; its exit status is pytest's. It stops at the first test that fails, if `stop`.
    """
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(tree)
        sys.path[:] = [
            str(tree),
            *(p for p in sys.path if p and not ours(Path(p).resolve())),
        ]
        sys.dont_write_bytecode = True
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), *elsewhere(os.environ.get("PYTHONPATH", ""))])
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        import pytest

        without = [word for name in ("cacheprovider", "xdist", "benchmark") for word in ("-p", f"no:{name}")]
        code = pytest.main([*(["-x"] if stop else []), "-q", "-m", "", *without, *targets])
        sys.stdout.flush()
        os._exit(int(code))
    except BaseException as e:  # noqa: BLE001 (nothing of the parent's may run on in the child)
        os.write(2, repr(e).encode())
        os._exit(9)


def verdict(code: int | None, said: str = "") -> str:
    if code in (2, 4) and ABSENT.search(said):
        return "untried"  # its tests need what is not installed here
    if code == 4 and UNREADABLE.search(said):
        return "killed"  # the file that holds the named test cannot even be imported
    match code:
        case None:
            return "killed"  # its tests do not come to an end
        case 0:
            return "survived"
        case 1 | 2 | 3:
            return "killed"  # a test fails; it cannot even be imported; the run breaks off
        case _:
            return "untried"  # no such tests


class OutOfTime(Exception):
    """The hard end has come, and children still run."""


def waited(
    running: dict[int, tuple[Any, float]], limit: float = LIMIT, end: float = NEVER
) -> tuple[Any, int | None, float]:
    """The next child to end, or to overstay: its entry, pytest's exit code (None: stopped), and the seconds it took.

    Raises OutOfTime if none has done so at `end`.
    """
    while True:
        for pid, (entry, begun) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            took = time.perf_counter() - begun
            if done:
                del running[pid]
                return entry, os.waitstatus_to_exitcode(status), took
            if took > limit:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del running[pid]
                return entry, None, took
        if time.perf_counter() > end:
            raise OutOfTime
        time.sleep(0.05)


@contextlib.contextmanager
def stopped_at_the_end(running: dict[int, tuple[Any, float]]) -> Iterator[None]:
    """Leave no child behind, also when told to stop: nobody goes on alone."""
    try:
        yield
    finally:
        for pid in running:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def tried(
    mutants: Iterable[Mutant], trees: Sequence[Path], folder: Path, end: float = NEVER
) -> Iterator[tuple[Mutant, str, float, str]]:
    """Each mutant with what became of it, the seconds, and the end of its tests' output. One at a time in each tree."""
    free = list(trees)
    running: dict[int, tuple[Any, float]] = {}
    waiting = list(mutants)
    with stopped_at_the_end(running):
        while running or waiting:
            while waiting and free:
                mutant, tree = waiting.pop(0), free.pop()
                path = found if (found := mutant.where(tree)[0]) is not None else tree / mutant.file
                kept = path.read_text()
                times = path.stat()
                path.write_text(mutant.applied(kept))
                output = folder / f"{mutant.name}.txt"
                pid = attempt(tree, mutant.tests, output)
                running[pid] = ((mutant, tree, path, kept, times, output), time.perf_counter())
            (mutant, tree, path, kept, times, output), code, took = waited(running, end=end)
            path.write_text(kept)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            free.append(tree)
            said = output.read_text() if output.exists() else ""
            yield mutant, verdict(code, said), took, said[-2000:]


def passes_without(mutants: Iterable[Mutant], tree: Path, folder: Path, passed: set[str], end: float = NEVER) -> str:
    """Empty if all their tests pass on the code as it is; else the end of pytest's output. Without this, a test that
    fails anyway would kill every mutant. `passed` has the targets that need not run again, and gets the new ones."""
    targets = list(dict.fromkeys(target for mutant in mutants for target in mutant.tests))
    whole = {target for target in (*targets, *passed) if "::" not in target}
    targets = [target for target in targets if target in whole or target.partition("::")[0] not in whole]
    targets = [target for target in targets if target not in passed]
    if not targets:
        return ""
    output = folder / "as-it-is.txt"
    running: dict[int, tuple[Any, float]] = {}
    with stopped_at_the_end(running):
        running[attempt(tree, targets, output)] = (None, time.perf_counter())
        _, code, _ = waited(running, NEVER, end)
    passed.update(targets)
    return "" if code == 0 else output.read_text()[-3000:]


class FailsAsItIs(Exception):
    """A test fails without any mutant. The argument is the end of pytest's output."""


def in_time(
    mutants: Sequence[Mutant], jobs: int, folder: Path, seconds: float, trust: bool, fewest: int = FEWEST
) -> Iterator[tuple[Mutant, str, float, str]]:
    """Yield what `tried` yields, for as many mutants as are begun within so many seconds, and for `fewest` in any case.

    Without a limit all tests have to pass on the code as it is before anything is tried. With one, each few entries
    wait for their own tests alone, so that those of entries that are not begun cost nothing.
    """
    trees = [copied(ROOT, folder / f"tree-{i}") for i in range(max(1, jobs))]
    until = time.perf_counter() + seconds
    size = len(mutants) if seconds == NEVER else len(trees)
    passed: set[str] = set()
    for i in range(0, len(mutants), max(1, size)):
        if i >= fewest and time.perf_counter() > until:
            return
        part = mutants[i : i + size]
        try:
            if not trust and (said := passes_without(part, trees[0], folder, passed, until + GRACE)):
                raise FailsAsItIs(said)
            yield from tried(part, trees, folder, until + GRACE)
        except OutOfTime:
            return


def warm_up() -> None:
    """Import once what every child needs, and nothing of the project. No thread may be running when it forks."""
    for name in WARM:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description="Try the kept wrong edits against their tests.")
    parser.add_argument("--only", default="", help="whose name, file or list holds this text")
    parser.add_argument("--tests", default="", help="whose tests hold this text: after a test was made shorter")
    parser.add_argument("--slice", default="", help="i/n: every n-th, from the i-th on")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    parser.add_argument("--list", action="store_true", help="name them, try nothing")
    parser.add_argument("--trust", action="store_true", help="do not first see the tests pass without any mutant")
    parser.add_argument("--cold", action="store_true", help="import nothing beforehand")
    parser.add_argument("--seconds", type=float, default=NEVER, help="after that time, begin none but the first few")
    parser.add_argument("--sort", action="store_true", help="put each entry into the list of its file, try nothing")
    given = parser.parse_args(words)

    if given.sort:
        print(f"{sort_lists()} entries went to the list of their file.")
        return 0
    begun = time.perf_counter()
    mutants = [m for m in listed() if any(given.only in text for text in (m.name, m.file, m.listed))]
    mutants = [m for m in mutants if any(given.tests in target for target in m.tests)]
    if given.slice:
        mutants = slice_of(mutants, given.slice)
    if given.list:
        print("\n".join(f"{m.name:50} {m.file:40} {m.why}" for m in mutants))
        return 0
    if not mutants:
        print("No mutant is called for.")
        return 2
    faults = {m.name: f"no longer applies: {m.name} ({m.listed}): {said}" for m in mutants if (said := m.fault())}
    called, mutants = len(mutants), [m for m in mutants if m.name not in faults]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not given.cold:
        warm_up()
    counts = {"killed": 0, "survived": 0, "untried": 0, "expected": 0}
    lines = list(faults.values())
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        try:
            for mutant, fate, took, said in in_time(mutants, given.jobs, Path(name), given.seconds, given.trust):
                if mutant.equivalent and fate == "survived":
                    fate = "expected"
                counts[fate] += 1
                print(f"{fate:9} {took:6.1f} s  {mutant.name}", flush=True)
                lines += remarks(mutant, fate, took, said)
        except FailsAsItIs as e:
            print(e)
            print("The environment is at fault, or the tests: they fail on the code as it is. Mend that first.")
            if not counts["survived"]:
                return ENVIRONMENT
    late = len(mutants) - sum(counts.values())
    print("\n".join(["", *lines]))
    print(
        f"{counts['killed']} of {called} killed, {counts['survived']} survived, {counts['expected']} cannot be seen, "
        f"{counts['untried']} untried, {len(faults)} no longer apply, {late} not tried in time, "
        f"in {time.perf_counter() - begun:.0f} s"
    )
    return result(counts["survived"] + len(faults), counts["untried"])


def remarks(mutant: Mutant, fate: str, took: float, said: str) -> list[str]:
    """Return the lines that the end of the output has about a mutant; none if all is as it should be."""
    if fate in ("survived", "untried"):
        more = [f"    {line}" for line in said.strip().splitlines()[-3:]] if fate == "untried" else []
        return [f"{fate}: {mutant.name} ({mutant.file}): {mutant.why}", *more]
    if fate == "expected":
        return [f"survives, as told: {mutant.name}: {mutant.equivalent}"]
    if took > LIMIT:
        return [f"killed by the clock, after {LIMIT} s: {mutant.name}. See whether it hangs, or the tests are slow."]
    if mutant.equivalent:
        return [f"killed, though said to survive: {mutant.name}. Remove its `equivalent`."]
    return []


def result(missed: int, untried: int) -> int:
    """Return the exit code, and say in a line what it means. A survivor counts before what could not be tried."""
    if missed:
        print("A wrong edit went unnoticed: write the test, mend the entry, or mark it with `equivalent`.")
        return 1
    if untried:
        print("The environment is at fault, not a test: what is untried says why.")
        return ENVIRONMENT
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
