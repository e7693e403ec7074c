"""The code that makes a result: the modules behind a method or an attack, by digest, and the values that it runs with.

Somebody's own model or data function counts as code of the result, and so do the arrays that such a function gives.

A class's code is its own module, those of the classes it derives from, and what these import from the project: methods
and attacks from `fedaudit.methods` and `fedaudit.attacks`, modules of the same package or folder for somebody's own.
A digest is of the syntax tree without docstrings, the same for every version of Python: prose and layout do not count.
The harness is one digest of the modules of the rooms that compute a run: an edit of their code makes results stale
without a new version, and a run that goes on under another harness takes fresh noise. What only starts, shows or
schedules runs (cli, suite, reports) does not count, nor does what judges a claimed epsilon (epsilon), nor do the
modules in `LEFT_OUT`; what scores attacks counts for their results.

A digest begins with the number of its scheme, as in `3:7dc8b2`. Digests of two schemes cannot be compared: where a
record has another scheme than ours, its result is kept and a note says so.

To parse all of the harness took a fifth of the time of a small run. So its modules' digests are kept beside what Python
compiles of this module (`__pycache__`), with the digest of the bytes that they are of: other bytes are read anew.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedaudit.data import datasets
from fedaudit.data.readers import own_function as own_data
from fedaudit.registry import find, is_path, public_module
from fedaudit.runtime.method import Method, parts_of
from fedaudit.setting import Setting
from fedaudit.training import own_model as own_model

OURS = ("fedaudit.methods.", "fedaudit.attacks.")  # of this package, what a result's code is made of
VERSIONS = ("torch", "opacus")  # that matter, beside the digest of our own code: others give another result
ROOMS = ("aggregation", "data", "privacy", "runtime", "training", "wire")  # of this package, what computes a run
LEFT_OUT = {  # modules of these rooms and of the ground that change no number of a run or of an attack, and why
    "__main__": "starts the command line",
    "pytest_plugin": "checks budgets in somebody's tests",
    "significance": "judges a claim of epsilon, for the room epsilon, which audits finished runs",
    "runtime.declarations.contract": "judges what a method declares, in runs of its own",
    "runtime.planned_traffic": "forecasts traffic",
}
SCHEME = "3"  # of digests. 1, which had no number: docstrings counted. 2: before modules were put into their rooms
NOT_COMPARED = "code recorded by another scheme of digests than this version's cannot be compared with today's"
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_parsed: dict[tuple[str, str, int, int], tuple[str, list[str]]] = {}


def sources(classes: Iterable[type], others: Iterable[Any] = ()) -> dict[str, str]:
    """Digests by module of all the code that is behind these classes, and behind other objects such as functions."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [m for cls in classes for base in cls.__mro__ if _counts(m := base.__module__, base is cls)]
    waiting += [m for one in others if _counts(m := getattr(one, "__module__", None) or "", True)]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in seen or path is None:
            continue
        digest, imports = _read(name, path)
        found[public_module(name)] = digest
        seen.add(name)
        waiting += [other for other in imports if _beside(other, name)]
    return dict(sorted(found.items()))


def source_of(cls: type) -> str:
    """One digest of all the code behind an attack, with what carries it out and scores it."""
    return _digest(json.dumps([sources([cls]), harness(("attack",))]))


def source_of_method(method: Method) -> str:
    """One digest of all the code behind a method and the methods within it."""
    return _digest(json.dumps(sources([type(part) for _, part in parts_of(method, "")])))


@functools.cache
def harness(rooms: tuple[str, ...] = ROOMS) -> str:
    """Return one digest of the modules of some rooms and of the ground that all stand on, less those left out."""
    top = Path(__file__).parents[1]
    files = [*top.glob("*.py"), *(path for room in rooms for path in (top / room).rglob("*.py"))]
    named = {".".join(path.relative_to(top).with_suffix("").parts): path for path in files}
    counted = sorted(named.keys() - LEFT_OUT.keys())
    kept = _kept()
    now = {name: _of_source(named[name].read_bytes(), kept.get(name)) for name in counted}
    if now.items() - kept.items():
        _keep(kept | now)
    return _digest(json.dumps([[name, now[name][1]] for name in counted]))


def _of_source(source: bytes, before: tuple[str, str] | None) -> tuple[str, str]:
    """Return two digests of a module: of its bytes, and of its code, which is only read if other bytes were kept."""
    of_bytes = hashlib.blake2b(source, digest_size=16).hexdigest()
    return before if before is not None and before[0] == of_bytes else (of_bytes, _digest_of_code(source))


@functools.lru_cache(maxsize=1024)
def _digest_of_code(source: bytes) -> str:
    """Return the digest of a source. `_read` also looks for imports: a third longer, for 100 files."""
    return _digest(_text(ast.parse(source)))


def _kept() -> dict[str, tuple[str, str]]:
    """Return the digests of the harness's modules that an earlier process kept; nothing where that file is not ours.

    Whatever is wrong with the file (it is missing, cut off, or of another form) costs a second, and no run.
    """
    try:
        found = json.loads(_place().read_bytes())
        if found["by"] != _own_bytes():
            return {}
        return {str(name): (str(of_bytes), str(of_code)) for name, (of_bytes, of_code) in found["modules"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, NotImplementedError):
        return {}  # the last one: a Python that keeps no bytecode


def _keep(digests: Mapping[str, tuple[str, str]]) -> None:
    """Keep digests for later processes, where and when Python keeps what it compiles."""
    if sys.dont_write_bytecode:
        return
    with contextlib.suppress(OSError, NotImplementedError):  # not ours to write, or a Python without bytecode
        place = _place()
        place.parent.mkdir(exist_ok=True, parents=True)
        beside = place.with_name(f"{place.name}.{os.getpid()}")
        beside.write_text(json.dumps({"by": _own_bytes(), "modules": digests}))
        beside.replace(place)


def _place() -> Path:
    return Path(importlib.util.cache_from_source(__file__)).with_suffix(".digests")


def _own_bytes() -> str:
    """Return the digest of this module's bytes. Another version of it may read code in another way."""
    return hashlib.blake2b(Path(__file__).read_bytes(), digest_size=16).hexdigest()


def comparable(before: str | None, now: str | None) -> bool:
    """Tell whether two digests are of one scheme; a digest that was not recorded differs from any, and is no scheme."""
    return before is None or now is None or _scheme(before) == _scheme(now)


def is_same(before: str | None, now: str) -> bool:
    """Tell whether code counts as unchanged: its digest is equal, or is of another scheme and tells nothing."""
    return before == now or not comparable(before, now)


def not_compared(code: Mapping[str, Any] | None, harness_then: str | None) -> bool:
    """Tell whether some code behind a run was recorded by another scheme of digests than ours."""
    digests = [*((code or {}).get("modules", {}).values()), *([harness_then] if harness_then else [])]
    return any(_scheme(digest) != SCHEME for digest in digests)


def code_of(method: Method, setting: Setting) -> dict[str, Any]:
    """The code and the values that a run computes with: those of its method, and of the run that it starts from."""
    classes = [type(part) for _, part in parts_of(method, "")]
    if setting.start is not None and isinstance(setting.start.get("method"), str):
        classes.append(find(setting.start["method"]))
    own, others = _own(setting)
    values = method.model_dump() | own
    return {
        "modules": sources([*classes, *(one for one in others if isinstance(one, type))], others),
        "values": {key: json.dumps(value, default=str, sort_keys=True) for key, value in values.items()},
    }


def outside_code(values: Mapping[str, Any], but: Container[str] = ()) -> list[str]:
    """The paths of code outside fedaudit that settings name, those under the keys `but` left out."""
    start = values.get("start")
    named = {"method": values.get("method"), "start": start.get("method") if isinstance(start, dict) else None}
    found = [v for key, v in named.items() if key not in but and isinstance(v, str) and ":" in v]
    for key in ("model", "server_model"):
        if key not in but and isinstance(values.get(key), str):
            found += own_model.paths_in(values[key])
    for key in ("dataset", "public_dataset"):
        if key not in but and isinstance(values.get(key), str) and datasets.is_own(values[key]):
            found.append(values[key])
    return found


def _own(setting: Setting) -> tuple[dict[str, str], list[Any]]:
    """Somebody's own data and models in a setting: digests of the data, and what makes both."""
    paths = [path for spec in (setting.model, setting.server_model) for path in own_model.paths_in(spec)]
    others: list[Any] = [own_model.maker(path) for path in dict.fromkeys(paths)]
    digests = {}
    for key, name in (("dataset", setting.dataset), ("public_dataset", setting.public_dataset)):
        if name is None or not datasets.is_yours(name):
            continue
        others += [own_data.function(name)] if datasets.is_own(name) and is_path(name) else []
        if datasets.available(name, setting.data_dir):  # else it counts as gone, and its run will say so
            data = datasets.load(name, setting.data_dir, size=setting.image_size)
            digests[f"{key} (its arrays)"] = own_data.digest(data)
    return digests, others


def code_of_setting(setting: Setting) -> dict[str, Any]:
    method = find(setting.method).make(setting.set, setting.preset)  # type: ignore[attr-defined]
    return code_of(method, setting)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words what of the code changed. Digests of two schemes tell nothing of it: see `not_compared`."""
    told = []
    for what, old, new in ((w, before.get(w, {}), now.get(w, {})) for w in ("modules", "values")):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) == new.get(key):
                continue
            if what == "modules" and not comparable(old.get(key), new.get(key)):
                continue
            if what == "modules":
                word = "is new" if key not in old else "is gone" if key not in new else "changed"
                told.append(f"{key} {word}")
            else:
                told.append(f"{key} was {old.get(key, 'not there')}, is {new.get(key, 'not there')}")
    return told


# --- modules -----------------------------------------------------------------------------------------------------


def _counts(name: str, own: bool) -> bool:
    """Return if a module of a class or of its bases is code of the result, and not of the harness or a library."""
    if name.startswith("fedaudit."):
        return name.startswith(OURS)
    path = _file(name)
    return path is not None and (own or not _is_library(path))


def _is_library(path: Path) -> bool:
    """Return whether a module was installed, and is nobody's work on this run: Python's own, one in a usual folder of
    packages, or one that pip put into any other folder from which modules are imported (`pip install --target`).
    """
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or Path(ast.__file__).parent in path.parents:
        return True
    folders = {Path(entry).absolute() for entry in sys.path if isinstance(entry, str)}
    return any(path in _installed_in(folder, _changed(folder)) for folder in path.parents if folder in folders)


def _changed(folder: Path) -> int:
    """Return when anything was last put into a folder or taken away, in nanoseconds; 0 if there is no such folder."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=64)
def _installed_in(folder: Path, changed: int) -> frozenset[Path]:
    """Return the modules that pip noted when it put packages into a folder, which was last changed then. What lies
    beside them is somebody's own.
    """
    found = set()
    for noted in folder.glob("*.dist-info/RECORD"):
        with (
            contextlib.suppress(OSError, UnicodeDecodeError, csv.Error),
            noted.open(newline="", encoding="utf-8") as rows,
        ):
            found |= {folder / row[0] for row in csv.reader(rows) if row and row[0].endswith(".py")}
    return frozenset(found)


def _beside(other: str, name: str) -> bool:
    """Return if what a module imports belongs to the same project."""
    if other.startswith("fedaudit.") or name.startswith("fedaudit."):
        return other.startswith(OURS)
    if other.partition(".")[0] == name.partition(".")[0]:
        return True
    mine, theirs = _file(name), _file(other)
    return mine is not None and theirs is not None and mine.parent == theirs.parent and not _is_library(theirs)


def _imported(name: str, tree: ast.Module, is_package: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _file(name: str) -> Path | None:
    """The source of a module, which is not imported for it; None where there is no such module or no source."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if module is None:
        parent = name.rpartition(".")[0]
        try:
            spec = importlib.util.find_spec(name) if not parent or parent in sys.modules else None
        except (ImportError, ValueError, AttributeError):
            spec = None
        origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None


def _read(name: str, path: Path) -> tuple[str, list[str]]:
    """The digest of a module, and what it imports."""
    stat = path.stat()
    key = (name, str(path), stat.st_mtime_ns, stat.st_size)
    if key not in _parsed:
        tree = ast.parse(path.read_bytes())
        _parsed[key] = _digest(_text(tree)), list(_imported(name, tree, path.name == "__init__.py"))
    return _parsed[key]


def _text(node: Any) -> str:
    """Return a syntax tree as text. What is empty is left out: later versions of Python have fields that earlier ones
    lack, and the first ones of 3.12 end a format such as `:>{width}` with an empty text.
    """
    if isinstance(node, ast.AST):
        parts = []
        for name in node._fields:
            value = getattr(node, name, None) if name != "ctx" else None  # it follows from the place
            if name == "body" and value and isinstance(node, _WITH_DOCSTRING):
                value = _without_docstring(value)
            if name == "values" and isinstance(node, ast.JoinedStr):
                value = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
            if value is not None and value != []:
                parts.append(f"{name}={_text(value)}")
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    return repr(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements less a docstring at the beginning; `pass` where a docstring is all there is."""
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:] or [ast.Pass()]
    return body


def _digest(text: str) -> str:
    return f"{SCHEME}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _scheme(digest: str) -> str:
    number, colon, _ = digest.partition(":")
    return number if colon else "1"
