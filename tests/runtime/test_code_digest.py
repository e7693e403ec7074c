"""Digests of code: prose does not count, code does, and only the code that computes a run or an attack."""

from __future__ import annotations

import ast
import csv
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedaudit
from fedaudit import read_record, run
from fedaudit.runtime import code_digest
from fedaudit.runtime.code_digest import LEFT_OUT, NOT_COMPARED, SCHEME, _imported, comparable, differences, is_same

HOUSE = Path(code_digest.__file__).parents[1]
CODE = '''"""A module."""

import functools


@functools.cache
def scaled(x, by=2):
    """A function."""
    return x * by  # a remark


class Thing:
    """A class."""

    async def later(self):
        """A coroutine."""


def empty():
    """Nothing but this."""
'''


def digest(text: str) -> str:
    return code_digest._digest(code_digest._text(ast.parse(text)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""A module, said otherwise."""'),
        ('"""A module."""\n', ""),
        ('"""A function."""', '"""A function.\n\n    With more.\n    """'),
        ('    """A function."""\n', ""),
        ('    """A class."""\n', ""),
        ('"""A coroutine."""', '"""Another."""'),
        ("  # a remark", ""),
        ("import functools\n", "import functools\n\n\n\n"),
        ('    """Nothing but this."""', "    pass"),
        ('        """A coroutine."""', "        pass"),
    ],
)
def test_prose_and_layout_do_not_count(old, new):
    assert CODE.count(old) == 1
    assert digest(CODE.replace(old, new)) == digest(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("by=2", "by=3"),
        ("by=2", "by=2.0"),
        ("x * by", "x + by"),
        ("@functools.cache\n", ""),
        ("@functools.cache", "@functools.lru_cache"),
        ("return x * by", 'return x * by + len("text")'),
        ("return x * by", '"no docstring"\n    return x * by'),
        ('    """A function."""\n', '    f"""{x}"""\n'),
        ('    """A function."""\n', "    x = 1\n"),
        ('    """A function."""\n', "    1\n"),
        ("class Thing", "class Other"),
        ("async def", "def"),
        ('    """Nothing but this."""', "    return 1"),
    ],
)
def test_code_counts(old, new):
    """A string that is not the first statement, or is no constant, is no docstring."""
    assert CODE.count(old) == 1
    assert digest(CODE.replace(old, new)) != digest(CODE)


def test_reading_a_tree_leaves_it_as_it_is():
    tree = ast.parse(CODE)
    before = ast.dump(tree)
    code_digest._text(tree)
    assert ast.dump(tree) == before


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return tmp_path_factory.mktemp("copies")


@pytest.fixture
def copied(copies, monkeypatch):
    """A copy of the package, whose digests a function gives: of what computes a run, and of what scores attacks. Each
    test has a new one, always in the same place: files that are as they were before are not read again."""
    shutil.copytree(HOUSE, copies / "fedaudit", ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(code_digest, "__file__", str(copies / "fedaudit" / "runtime" / "source.py"))

    def digests():
        code_digest.harness.cache_clear()
        return code_digest.harness(), code_digest.harness(("attack",))

    yield copies / "fedaudit", digests
    code_digest.harness.cache_clear()
    shutil.rmtree(copies / "fedaudit")


def test_an_edit_of_what_only_judges_or_prints_makes_no_run_stale(copied):
    top, digests = copied
    before = digests()
    for name in LEFT_OUT:
        path = top / f"{name.replace('.', '/')}.py"
        path.write_text(path.read_text() + "\nMORE = 1\n")  # no such file: the list names a module that is gone
    assert digests() == before


def test_a_remark_in_the_harness_makes_no_run_stale_and_a_number_does(copied):
    top, digests = copied
    before = digests()
    path = top / "training" / "fit.py"
    text = path.read_text()
    path.write_text('"""Other words."""\n# and a remark\n\n' + text[text.index("\nfrom __future__") :])
    assert digests() == before
    path.write_text(text + "\nMORE = 1\n")
    assert digests()[0] != before[0]


def test_a_renamed_file_is_another_harness(copied):
    top, digests = copied
    (top / "wire" / "more.py").write_text("MORE = 1\n")
    before = digests()
    (top / "wire" / "more.py").rename(top / "wire" / "most.py")
    assert digests()[0] != before[0]


# --- digests that are kept for the next process ----------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A package of three modules, one of them the module of digests, and a function that gives the harness's digest as
    a new process would, with the sources that it read."""
    top = tmp_path / "fedaudit"
    (top / "runtime").mkdir(parents=True)
    (top / "wire").mkdir()
    (top / "rng.py").write_text("x = 1\n")
    (top / "wire" / "codec.py").write_text("y = 2\n")
    (top / "runtime" / "code_digest.py").write_text("z = 3\n")
    monkeypatch.setattr(code_digest, "__file__", str(top / "runtime" / "code_digest.py"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    read = []
    of_code = code_digest._digest_of_code.__wrapped__
    monkeypatch.setattr(code_digest, "_digest_of_code", lambda source: read.append(source.decode()) or of_code(source))

    def digests(*rooms):
        code_digest.harness.cache_clear()
        read.clear()
        return code_digest.harness(rooms or code_digest.ROOMS), sorted(read)

    yield top, digests
    code_digest.harness.cache_clear()


def test_a_later_process_reads_only_the_modules_that_changed(small):
    top, digests = small
    first, read = digests()
    assert read == ["x = 1\n", "y = 2\n", "z = 3\n"]
    assert digests() == (first, [])
    assert digests("wire")[1] == [], "another choice of rooms finds its modules, too"
    (top / "wire" / "codec.py").write_text("y = 4\n")
    other, read = digests()
    assert read == ["y = 4\n"]
    assert digests() == (other, [])
    (top / "wire" / "codec.py").write_text("y = 2  # as before\n")
    assert digests() == (first, ["y = 2  # as before\n"])
    (top / "wire" / "more.py").write_text("more = 1\n")
    assert digests()[0] not in (first, other)
    kept = list((top / "runtime" / "__pycache__").iterdir())
    assert [path.name for path in kept] == [f"code_digest.{sys.implementation.cache_tag}.digests"], "nothing half done"


def test_digests_of_fewer_rooms_leave_those_of_the_others_there(small):
    top, digests = small
    assert digests("wire")[1] == ["x = 1\n", "y = 2\n"]
    assert digests("runtime")[1] == ["z = 3\n"]
    (top / "rng.py").write_text("x = 5\n")
    assert digests("runtime")[1] == ["x = 5\n"]
    assert digests()[1] == []


def test_another_version_of_this_module_reads_everything_anew(small):
    """It may make other digests of the same code."""
    top, digests = small
    before = digests()[0]
    (top / "runtime" / "code_digest.py").write_text("z = 3  # another version\n")
    assert digests() == (before, ["x = 1\n", "y = 2\n", "z = 3  # another version\n"])
    assert digests() == (before, [])


@pytest.mark.parametrize("damage", ["", "{", "[]", "3", "null", '{"by": 1}', "by", "modules", "pair", "null in it"])
def test_kept_digests_that_are_damaged_are_made_again(small, damage):
    top, digests = small
    before = digests()[0]
    (place,) = (top / "runtime" / "__pycache__").iterdir()
    found = json.loads(place.read_text())
    changed = {
        "by": found | {"by": "another"}, "modules": found | {"modules": [1, 2]},
        "pair": found | {"modules": {"rng": "x"}}, "null in it": found | {"modules": {"rng": None}},
    }  # fmt: skip
    place.write_text(json.dumps(changed[damage]) if damage in changed else damage)
    assert digests() == (before, ["x = 1\n", "y = 2\n", "z = 3\n"])
    assert digests() == (before, [])


def test_nothing_is_kept_where_python_keeps_nothing(small, monkeypatch, tmp_path):
    top, digests = small
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, read = digests()
    assert digests() == (before, read)
    assert not (top / "runtime" / "__pycache__").exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (top / "runtime" / "__pycache__").write_text("a file in the place of the folder")
    assert digests() == (before, read), "a folder that cannot be written is no error"
    assert digests() == (before, read)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "elsewhere"))
    assert digests() == (before, read)
    assert digests() == (before, [])


def _reached(starts: list[str]) -> set[str]:
    """The modules of the package that these import, also inside functions, and what those import in turn."""
    lazy = {name: module for module, names in fedaudit._NAMES.items() for name in names.split()}
    seen: set[str] = set()
    waiting = [f"fedaudit.{name}" for name in starts]
    while waiting:
        name = waiting.pop()
        inner = name.removeprefix("fedaudit.")
        if name.startswith("fedaudit.") and inner in lazy:  # `from fedaudit import run`
            waiting.append(f"fedaudit.{lazy[inner]}")
        base = HOUSE.parent / name.replace(".", "/")
        path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
        if name in seen or name == "fedaudit" or path is None or not name.startswith("fedaudit."):
            continue
        seen.add(name)
        waiting += [name.rpartition(".")[0], *_imported(name, ast.parse(path.read_text()), path.name == "__init__.py")]
    return {name.removeprefix("fedaudit.") for name in seen}


@pytest.mark.long
def test_nothing_that_computes_a_run_or_an_attack_imports_what_is_left_out():
    own = [
        f"{room}.{path.parent.name}.{path.stem}"
        for room in ("methods", "attacks")
        for path in sorted((HOUSE / room).glob("*/*.py"))
    ]
    engines = [f"runtime.engines.{path.stem}" for path in sorted((HOUSE / "runtime" / "engines").glob("*.py"))]
    reached = _reached(["runtime.runner", "attack.attack_run", *engines, *own])
    assert {"training.losses", "privacy.accounting", "attack.membership", "methods.averaging.fedavg"} <= reached
    assert not reached & LEFT_OUT.keys(), "these count: take them off the list"


WHOLE_RUN = """
import sys
from fedaudit import run
from fedaudit.attack.attack_run import attack_run
from fedaudit.runtime.code_digest import LEFT_OUT
out = sys.argv[1]
run(method="fedavg", rounds=1, clients=2, model="mlp", set={"E": 1}, privacy={"training": {"epsilon": 8}}, out=out)
attack_run(out, attacks=["loss"])
print(sorted(name for name in LEFT_OUT if f"fedaudit.{name}" in sys.modules))
"""


@pytest.mark.slow
def test_a_run_and_an_attack_load_nothing_that_is_left_out(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_RUN, tmp_path / "run"], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


# --- records of another scheme ---------------------------------------------------------------------------------------


def test_digests_of_two_schemes_are_not_compared():
    now, other = digest("x = 1"), digest("x = 2")
    old = now.partition(":")[2]
    assert now.startswith(f"{SCHEME}:")
    assert (comparable(old, now), comparable(other, now), comparable(None, now)) == (False, True, True)
    assert (is_same(old, now), is_same(now, now), is_same(other, now), is_same(None, now)) == (True, True, False, False)
    assert differences({"modules": {"a": old}}, {"modules": {"a": now}}) == []
    assert differences({"modules": {"a": other}}, {"modules": {"a": now}}) == ["a changed"]
    assert differences({"modules": {"a": old, "b": old}}, {"modules": {"a": now}}) == ["b is gone"]


def test_a_run_of_another_scheme_goes_on_with_one_note_and_fresh_noise(tmp_path):
    run(method="fedavg", rounds=1, clients=2, model="mlp", set={"E": 1}, out=tmp_path)
    head = json.loads((tmp_path / "checkpoint" / "HEAD.json").read_text())
    record, attempt = head["record"], head["attempt"]
    record["harness"] = record["harness"].partition(":")[2]
    record["code"]["modules"] = {name: old.partition(":")[2] for name, old in record["code"]["modules"].items()}
    (tmp_path / "checkpoint" / "HEAD.json").write_text(json.dumps(head))
    for rounds in (2, 3):
        run(method="fedavg", rounds=rounds, clients=2, model="mlp", set={"E": 1}, out=tmp_path, resume=True)
    notes = read_record(tmp_path).notes
    assert [NOT_COMPARED in note for note in notes] == [True], notes
    assert json.loads((tmp_path / "checkpoint" / "HEAD.json").read_text())["attempt"] == attempt + 2


def test_empty_texts_in_formats_do_not_count():
    """The first versions of Python 3.12 put one behind a format that ends with a value; others do not."""
    source = 'f"a{x!r:>{w}}b" + f"{x:{w}.{p}}{y}"'
    plain, other = ast.parse(source), ast.parse(source)
    for node in ast.walk(other):
        if isinstance(node, ast.JoinedStr):
            node.values.append(ast.Constant(""))
    assert ast.dump(plain) != ast.dump(other)
    assert code_digest._text(plain) == code_digest._text(other)
    assert code_digest._text(plain) != code_digest._text(ast.parse(source.replace("b", "c")))
    assert code_digest._text(ast.parse('f"{x} {y}"')) != code_digest._text(ast.parse('f"{x}{y}"')), "a blank counts"
    assert code_digest._text(ast.parse('x = ""')) != code_digest._text(ast.parse('x = "b"')), "other empty texts count"
    assert code_digest._text(ast.parse('f(x, "")')) != code_digest._text(ast.parse("f(x)"))


# --- which modules are the code of a result --------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A method in two modules of a folder, which import a library and each other; a third is imported by nobody."""
    (tmp_path / "made_up_method.py").write_text(
        "import json\nimport made_up_beside\nimport numpy\n\nclass M(made_up_beside.Base): pass\n"
    )
    (tmp_path / "made_up_beside.py").write_text("import made_up_method\n\nclass Base: pass\n")
    (tmp_path / "made_up_other.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("made_up_method")
    yield module.M
    for name in ("made_up_method", "made_up_beside"):
        sys.modules.pop(name, None)


def test_the_code_of_a_result_is_its_own_and_what_lies_beside_it(project):
    found = code_digest.sources([project])
    assert list(found) == ["made_up_beside", "made_up_method"]
    assert found["made_up_beside"] != found["made_up_method"]
    assert list(code_digest.sources([], [project])) == ["made_up_beside", "made_up_method"], "behind other objects"
    assert code_digest.sources([], [3]) == {}, "it has no module"


def test_libraries_and_the_harness_are_not_the_code_of_a_result(project):
    library = Path(pytest.__file__)
    assert code_digest._is_library(library)
    assert code_digest._is_library(Path(json.__file__)), "Python's own"
    assert not code_digest._is_library(Path(sys.modules["made_up_method"].__file__))
    assert code_digest._counts("fedaudit.methods.x", False)
    assert not code_digest._counts("fedaudit.runtime.world", True)
    assert code_digest._counts("made_up_method", False)
    assert code_digest._counts("pytest", True), "somebody's method may lie there"
    assert not code_digest._counts("pytest", False)
    assert not code_digest._counts("no_such_module", True)


@pytest.fixture
def installed_beside(tmp_path, monkeypatch):
    """A folder into which pip put a package, with somebody's method and a helper of it."""
    (tmp_path / "made_up_package").mkdir()
    (tmp_path / "made_up_package" / "__init__.py").write_text("from made_up_package import base\n")
    (tmp_path / "made_up_package" / "base.py").write_text("class Base: pass\n")
    (tmp_path / "made_up_package-1.dist-info").mkdir()
    (tmp_path / "made_up_package-1.dist-info" / "RECORD").write_text(
        "made_up_package/__init__.py,sha256=x,1\nmade_up_package/base.py,sha256=x,1\n\n"
    )
    (tmp_path / "made_up_mine.py").write_text(
        "import made_up_helper\nfrom made_up_package.base import Base\n\nclass M(Base): pass\n"
    )
    (tmp_path / "made_up_helper.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code_digest._installed_in.cache_clear()
    yield importlib.import_module("made_up_mine").M
    for name in [name for name in sys.modules if name.startswith("made_up_")]:
        del sys.modules[name]


def test_what_pip_put_into_a_folder_is_a_library_and_what_lies_beside_it_is_not(installed_beside, tmp_path):
    assert list(code_digest.sources([installed_beside])) == ["made_up_helper", "made_up_mine"]
    assert code_digest._is_library(tmp_path / "made_up_package" / "base.py")
    assert not code_digest._is_library(tmp_path / "made_up_package" / "added.py"), "pip did not put it there"


def test_a_folder_from_which_nothing_is_imported_has_no_libraries(installed_beside, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    assert not code_digest._is_library(tmp_path / "made_up_package" / "base.py")


def test_a_list_of_files_that_cannot_be_read_names_none(tmp_path, monkeypatch):
    for number, content in enumerate([b"\xff\xfe\n", b"a.py,,\n"]):
        (tmp_path / f"p{number}.dist-info").mkdir()
        (tmp_path / f"p{number}.dist-info" / "RECORD").write_bytes(content)
    assert code_digest._installed_in(tmp_path, 0) == {tmp_path / "a.py"}


def put_by_pip(folder, name, *more):
    """Put a module into a folder as pip does, with a list of files."""
    (folder / f"{name}-1.dist-info").mkdir(parents=True)
    (folder / f"{name}-1.dist-info" / "RECORD").write_text("".join(f"{row},,\n" for row in (f"{name}.py", *more)))
    (folder / f"{name}.py").write_text("")
    return folder / f"{name}.py"


def test_folders_on_the_path_may_be_relative_or_links_or_no_text(tmp_path, monkeypatch):
    """What is no text is passed over, as an import does."""
    monkeypatch.chdir(tmp_path)
    found = put_by_pip(tmp_path / "lib", "made_up_a", "made_up_b/c/d.py", "made_up_b/data.txt")
    monkeypatch.setattr(sys, "path", [None, "lib", 7, *sys.path])
    assert code_digest._is_library(found)
    assert code_digest._is_library(tmp_path / "lib" / "made_up_b" / "c" / "d.py"), "in a package of a package"
    here = put_by_pip(tmp_path, "made_up_here")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert not code_digest._is_library(here)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert code_digest._is_library(here), "an empty text is the folder in which a notebook runs"
    (tmp_path / "link").symlink_to(tmp_path / "lib")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "link"), str(tmp_path / "gone")])
    assert code_digest._is_library(tmp_path / "link" / "made_up_a.py")
    assert not code_digest._is_library(tmp_path / "gone" / "made_up_a.py")


def test_every_package_of_a_folder_is_a_library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = [put_by_pip(tmp_path, f"made_up_{i}") for i in range(3)]
    assert all(map(code_digest._is_library, paths))


def test_what_pip_put_there_meanwhile_is_a_library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert code_digest._is_library(put_by_pip(tmp_path, "made_up_first"))
    later = put_by_pip(tmp_path, "made_up_later")
    os.utime(tmp_path, ns=(1, 1))  # clocks of file systems are coarse
    assert code_digest._is_library(later)


def test_only_lists_of_pip_count(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "RECORD").write_text("mine.py,,\n")
    assert code_digest._installed_in(tmp_path, 0) == frozenset()


def test_a_list_that_is_no_file_or_no_table_names_none(tmp_path):
    (tmp_path / "p0.dist-info" / "RECORD").mkdir(parents=True)
    (tmp_path / "p1.dist-info").mkdir()
    (tmp_path / "p1.dist-info" / "RECORD").write_text("x" * (csv.field_size_limit() + 1))
    assert code_digest._installed_in(tmp_path, 0) == frozenset()


def test_a_module_of_one_file_that_pip_put_beside_a_method_is_a_library(installed_beside, tmp_path):
    (tmp_path / "made_up_package-1.dist-info" / "RECORD").write_text("made_up_helper.py,,\n")
    code_digest._installed_in.cache_clear()
    assert "made_up_helper" not in code_digest.sources([installed_beside])


def test_empty_texts_elsewhere_count():
    assert digest('{"a": "", "b": c}') != digest('{"a": c, "b": ""}')
    assert digest('x or y or ""') != digest("x or y")


def test_folders_of_packages_hold_libraries_whatever_their_lists_say():
    for name in ("site-packages", "dist-packages"):
        assert code_digest._is_library(Path("/usr/lib/python3") / name / "pydantic" / "main.py")
        assert code_digest._is_library(Path("/usr/lib/python3") / name / "torch" / "nn" / "modules" / "conv.py")
    assert not code_digest._is_library(Path("/home/somebody/packages/mine.py"))


def test_what_lies_beside_a_module():
    beside = code_digest._beside
    assert beside("fedaudit.attacks.x", "fedaudit.methods.y")
    assert not beside("fedaudit.runtime.x", "fedaudit.methods.y")
    assert not beside("fedaudit.runtime.x", "mine"), "the harness is not somebody's own code"
    assert beside("package.one", "package.two.three")
    assert not beside("json", "pytest")


def test_a_module_without_a_source_is_none():
    assert code_digest._file("json").name == "__init__.py"
    assert code_digest._file("sys") is None
    assert code_digest._file("no_such_module") is None
    assert code_digest._file("no_such_package.module") is None
    assert code_digest._file("wave").name == "wave.py", "found without being imported"


@pytest.mark.parametrize(
    ("text", "name", "package", "found"),
    [
        ("import a.b, c", "m", False, ["a.b", "c"]),
        ("from a import b, c", "m", False, ["a", "a.b", "a.c"]),
        ("from . import b", "p.q.m", False, ["p.q", "p.q.b"]),
        ("from .x import b", "p.q.m", False, ["p.q.x", "p.q.x.b"]),
        ("from ..x import b", "p.q.m", False, ["p.x", "p.x.b"]),
        ("from .x import b", "p.q", True, ["p.q.x", "p.q.x.b"]),
    ],
)
def test_imports_of_a_module(text, name, package, found):
    assert list(_imported(name, ast.parse(text), package)) == found


@pytest.mark.parametrize(
    ("values", "but", "found"),
    [
        ({"method": "fedavg"}, (), []),
        ({"method": "mine:M"}, (), ["mine:M"]),
        ({"method": "mine:M"}, ("method",), []),
        ({"method": "fedavg", "start": {"method": "other:N"}}, (), ["other:N"]),
        ({"method": "mine:M", "start": {"method": "local"}}, (), ["mine:M"]),
        ({"method": 3, "start": "x"}, (), []),
    ],
)
def test_code_that_a_setting_names(values, but, found):
    assert code_digest.outside_code(values, but) == found
