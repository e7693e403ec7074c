"""The registry finds methods and attacks by name, and users' own models and data by path.

A name is one of this package, an entry point of another package, or `module:Class`. Users' own models and data have
such paths only. The harness imports none of them by itself; it asks the registry.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedaudit.errors import SettingError, last_frame, unknown

Group = Literal["methods", "attacks"]
T = TypeVar("T", bound=type)

_found: dict[str, dict[str, type]] = {"methods": {}, "attacks": {}}
_broken: dict[str, dict[str, str]] = {"methods": {}, "attacks": {}}
_loaded: set[str] = set()
_read_from: ContextVar[str | None] = ContextVar("_read_from", default=None)  # the folder whose file gives the names
_trusting = False


@contextlib.contextmanager
def read_from(folder: Path | str | None) -> Iterator[None]:
    """Treat all names looked up in this block as coming from a file in `folder`, not from the user.

    Code outside fedaudit then needs `trust`.
    """
    token = _read_from.set(None if folder is None else str(folder))
    try:
        yield
    finally:
        _read_from.reset(token)


def trust(yes: bool = True) -> None:
    """Allow files to name code outside fedaudit (`module:Class`). It is then imported, from PYTHONPATH only."""
    global _trusting
    _trusting = yes


def check_trusted(path: str) -> None:
    """Raise if a file names `package.module:name`, it is not imported yet, and the user does not trust it."""
    module, folder = path.partition(":")[0], _read_from.get()
    if folder is not None and module not in sys.modules:
        _may_be_imported(path, module.partition(".")[0], folder)


def register(name: str, group: Group = "methods", *, tables: str = "") -> Callable[[T], T]:
    """Return a class decorator that makes a method (or an attack) known by `name`.

    `tables` lists the papers that compare the method.
    """

    def add(cls: T) -> T:
        other = _found[group].get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise SettingError(
                f"{name!r} names two {group}: {other.__module__}.{other.__qualname__} and "
                f"{cls.__module__}.{cls.__qualname__}. Rename one of them."
            )
        _found[group][name] = cls
        cls.registered_name = name  # type: ignore[attr-defined]
        cls.tables = tuple(tables.split())  # type: ignore[attr-defined]
        return cls

    return add


def register_attack(name: str) -> Callable[[T], T]:
    return register(name, "attacks")


def _load(group: Group) -> None:
    if group in _loaded:
        return
    importlib.import_module(f"fedaudit.{group}")
    for name, family in _families[f"fedaudit.{group}"].items():
        if not name.startswith("_") and family != SHARED:
            importlib.import_module(f"fedaudit.{group}.{family}.{name}")
    from importlib.metadata import entry_points  # slow to import, and --help looks for nothing

    for entry in entry_points(group=f"fedaudit.{group}"):
        try:
            _found[group].setdefault(entry.name, entry.load())
        except Exception as e:  # noqa: BLE001 (another package's fault; `find` reports it when the name is used)
            _broken[group][entry.name] = f"{type(e).__name__}: {e}"
    _loaded.add(group)


def _load_one(name: str, group: Group) -> None:
    """Import the module that is called like a method or an attack of this package, and all of them for other names."""
    if group in _loaded:
        return
    importlib.import_module(f"fedaudit.{group}")
    family = _families[f"fedaudit.{group}"].get(name, SHARED)
    if family != SHARED:
        importlib.import_module(f"fedaudit.{group}.{family}.{name}")
    if family == SHARED or name not in _found[group]:
        _load(group)


class _WithoutFamily(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `fedaudit.methods.fedavg` as the module `fedaudit.methods.averaging.fedavg`, of which there is one."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        package, _, name = fullname.rpartition(".")
        if name not in _families.get(package, {}):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: Any) -> Any:
        package, _, name = spec.name.rpartition(".")
        module = importlib.import_module(f"{package}.{_families[package][name]}.{name}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Put back the module's own specification: the import system has just replaced it. Nothing runs twice."""
        module.__spec__ = self._specs.pop(module.__spec__.name)


_families: dict[str, dict[str, str]] = {}  # by package: the folder in which each of its modules lies
_finder = _WithoutFamily()
SHARED = "shared"  # the folder of parts that several families use


def without_family(package: str, path: Iterable[str]) -> None:
    """Make the modules in the folders of a package importable without the folder's name."""
    found: dict[str, str] = {}
    for family in pkgutil.iter_modules(list(path)):
        if family.ispkg:
            inner = [str(Path(place) / family.name) for place in path]
            found |= {module.name: family.name for module in pkgutil.iter_modules(inner)}
    _families[package] = found
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def public_module(name: str) -> str:
    """Return the name of a module without its family: fedaudit.methods.fedavg, whatever folder the file lies in."""
    parts = name.split(".")
    short = ".".join([*parts[:2], parts[-1]])
    return short if len(parts) == 4 and parts[-1] in _families.get(".".join(parts[:2]), {}) else name


def family_of(cls: type) -> str:
    """Return the family of a method or attack of this package: the folder of its file. "own" for anybody else's."""
    parts = cls.__module__.split(".")
    return parts[2] if public_module(cls.__module__) != cls.__module__ else "own"


def names(group: Group) -> list[str]:
    _load(group)
    return sorted(_found[group])


def find(name: str, group: Group = "methods") -> type:
    """Return the class behind a name or `package.module:Class`."""
    if ":" in name:
        return _by_path(name, group)
    _load_one(name, group)
    if name in _found[group]:
        return _found[group][name]
    if name in _broken[group]:
        raise SettingError(
            f"The {group[:-1]} {name!r} of another package cannot be imported: {_broken[group][name]}. Repair or "
            "reinstall that package."
        )
    raise SettingError(
        unknown(group[:-1], name, _found[group]) + f" For your own {group[:-1]}, write package.module:Class."
    )


def _may_be_imported(path: str, top: str, folder: str) -> None:
    """Raise if a file in `folder` names code to import that the user does not trust or has not put on PYTHONPATH."""
    if top == "fedaudit":
        return  # its code is running already
    if not _trusting:
        raise SettingError(
            f"{folder} names code outside fedaudit, {path!r}, which would be imported and run. If you trust it, put "
            "its folder on PYTHONPATH and say --trust."
        )
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # the import itself will report the problem
    places = [Path(p).resolve() for p in (spec.submodule_search_locations or [spec.origin or ""])] if spec else []
    named = {Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    for unsafe in {Path.cwd(), Path(folder).resolve()} - named:
        if any(place.parent == unsafe for place in places):
            raise SettingError(
                f"{folder} names {path!r}, which lies in {unsafe}: nothing is imported from the working folder because "
                "a file names it. Put the folder of the code that you mean on PYTHONPATH."
            )


def outside(path: str, what: str) -> Any:
    """Import and return the object behind `package.module:name`, if the rules of trust allow it.

    `what` names the kind of object in error messages.
    """
    module, _, attribute = path.partition(":")
    folder = _read_from.get()
    if folder is not None and module not in sys.modules:
        _may_be_imported(path, module.partition(".")[0], folder)
    try:
        if folder is None and "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does: a file in the working folder is importable
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise SettingError(
            f"The {what} {path!r} cannot be imported: {e}. Write package.module:{_NAMES.get(what, 'Class')}, with the "
            "package's folder on PYTHONPATH or as the working folder."
        ) from e
    except SyntaxError as e:
        raise SettingError(f"The {what} {path!r} has a syntax error: {e.filename}, line {e.lineno}: {e.msg}.") from e
    except Exception as e:  # a user's file may do anything while it is imported
        raise SettingError(f"The {what} {path!r} fails while it is imported: {failure(e)}.") from e
    return found


_NAMES = {"data set": "function"}  # the word behind the colon, if it is not Class
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_path(text: str) -> bool:
    """Return whether a text has the form package.module:name, which names users' own code."""
    return _PATH.fullmatch(text) is not None


def failure(e: BaseException) -> str:
    """Describe an error in a user's own code: its class, its message and its place."""
    at = last_frame(e, libraries=False)
    return f"{type(e).__name__}: {e}" + (f" ({at.filename}, line {at.lineno})" if at else "")


def named_by() -> str | None:
    """Return the folder whose file gives the names that are looked up, or None if the user gives them."""
    return _read_from.get()


def _by_path(path: str, group: Group) -> type:
    found = outside(path, group[:-1])
    base = {"methods": "fedaudit.runtime.method:Method", "attacks": "fedaudit.attack.scene:Attack"}[group]
    parent = getattr(importlib.import_module(base.split(":")[0]), base.split(":")[1])
    if not (isinstance(found, type) and issubclass(found, parent)):
        raise SettingError(f"{path!r} is not a {parent.__name__}. Make it a subclass of {base.replace(':', '.')}.")
    return found
