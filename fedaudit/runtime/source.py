"""Which code makes a result: the modules behind a method or an attack, by digest, and the values that it runs with.

Somebody's own model or data function counts as code of the result, and so do the arrays that such a function gives.

A class's code is its own module, those of the classes it derives from, and what these import from the project: methods
and attacks from `fedaudit.methods` and `fedaudit.attacks`, modules of the same package or folder for somebody's own.
A digest is of the syntax tree, the same for every version of Python: comments and layout do not count. The harness is
one digest of the files of the rooms that compute a run, whatever changed in them: an edit there makes results stale
without a new version, and a run that goes on under another harness takes fresh noise. What only starts, shows or
schedules runs (cli, suite, reports) does not count; what scores attacks counts for their results.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedaudit.data import datasets
from fedaudit.data import own as own_data
from fedaudit.registry import find, is_path
from fedaudit.runtime.method import Method, parts_of
from fedaudit.setting import Setting
from fedaudit.training import own as own_model

OURS = ("fedaudit.methods.", "fedaudit.attacks.")  # of this package, what a result's code is made of
VERSIONS = ("torch", "opacus")  # that matter, beside the digest of our own code: others give another result
ROOMS = ("data", "privacy", "runtime", "training", "wire")  # of this package, what computes a run
_parsed: dict[tuple[str, str, int, int], tuple[str, list[str]]] = {}


def sources(classes: Iterable[type], others: Iterable[Any] = ()) -> dict[str, str]:
    """Digests by module of all the code that is behind these classes, and behind other objects such as functions."""
    found: dict[str, str] = {}
    waiting = [m for cls in classes for base in cls.__mro__ if _counts(m := base.__module__, base is cls)]
    waiting += [m for one in others if _counts(m := getattr(one, "__module__", None) or "", True)]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in found or path is None:
            continue
        found[name], imports = _read(name, path)
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
    """One digest of the files of some rooms, and of the ground that all stand on."""
    top = Path(__file__).parents[1]
    files = [*top.glob("*.py"), *(path for room in rooms for path in (top / room).rglob("*.py"))]
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(files):
        content = path.read_bytes()
        found.update(f"{path.relative_to(top).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


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
    """What of the code changed, in words."""
    told = []
    for what, old, new in ((w, before.get(w, {}), now.get(w, {})) for w in ("modules", "values")):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) == new.get(key):
                continue
            if what == "modules":
                word = "is new" if key not in old else "is gone" if key not in new else "changed"
                told.append(f"{key} {word}")
            else:
                told.append(f"{key} was {old.get(key, 'not there')}, is {new.get(key, 'not there')}")
    return told


# --- modules -----------------------------------------------------------------------------------------------------


def _counts(name: str, own: bool) -> bool:
    """Whether a module of a class or of its bases is code of the result, and not of the harness or a library."""
    if name.startswith("fedaudit."):
        return name.startswith(OURS)
    path = _file(name)
    return path is not None and (own or not _is_library(path))


def _is_library(path: Path) -> bool:
    return "site-packages" in path.parts or Path(ast.__file__).parent in path.parents


def _beside(other: str, name: str) -> bool:
    """Whether what a module imports belongs to the same project."""
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
    """A syntax tree as text. What is empty is left out: later versions of Python have fields that earlier ones lack."""
    if isinstance(node, ast.AST):
        parts = ((name, getattr(node, name, None)) for name in node._fields)
        return f"{type(node).__name__}({','.join(f'{n}={_text(v)}' for n, v in parts if v is not None and v != [])})"
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    return repr(node)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
