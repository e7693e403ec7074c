"""Finding methods and attacks by name: the package's own, other packages' entry points, or `module:Class`.

The harness imports none of them by itself; it asks here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from fedaudit.errors import SettingError, unknown

Group = Literal["methods", "attacks"]
T = TypeVar("T", bound=type)

_found: dict[str, dict[str, type]] = {"methods": {}, "attacks": {}}
_broken: dict[str, dict[str, str]] = {"methods": {}, "attacks": {}}
_loaded: set[str] = set()


def register(name: str, group: Group = "methods", *, tables: str = "") -> Callable[[T], T]:
    """Class decorator: make a method (or attack) known by `name`. `tables`: the papers that compare it."""

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
    package = importlib.import_module(f"fedaudit.{group}")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"fedaudit.{group}.{module.name}")
    for entry in importlib.metadata.entry_points(group=f"fedaudit.{group}"):
        try:
            _found[group].setdefault(entry.name, entry.load())
        except Exception as e:  # noqa: BLE001 (somebody else's package; told when it is asked for)
            _broken[group][entry.name] = f"{type(e).__name__}: {e}"
    _loaded.add(group)


def names(group: Group) -> list[str]:
    _load(group)
    return sorted(_found[group])


def find(name: str, group: Group = "methods") -> type:
    """The class behind a name or `package.module:Class`."""
    if ":" in name:
        return _by_path(name, group)
    _load(group)
    if name in _found[group]:
        return _found[group][name]
    if name in _broken[group]:
        raise SettingError(f"The {group[:-1]} {name!r} of another package cannot be imported: {_broken[group][name]}.")
    raise SettingError(
        unknown(group[:-1], name, _found[group]) + f" Your own: package.module:Class, the class of your {group[:-1]}."
    )


def _by_path(path: str, group: Group) -> type:
    module, _, attribute = path.partition(":")
    try:
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does: a file in the working folder is importable
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise SettingError(
            f"The {group[:-1]} {path!r} cannot be imported: {e}. Write package.module:Class, with the package's "
            "folder on PYTHONPATH or as the working folder."
        ) from e
    except SyntaxError as e:
        raise SettingError(f"The {group[:-1]} {path!r}: {e.filename}, line {e.lineno}: {e.msg}.") from e
    except Exception as e:  # somebody's file, which may do anything while it is imported
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise SettingError(
            f"The {group[:-1]} {path!r} fails while it is imported: {type(e).__name__}: {e} ({at.filename}, line "
            f"{at.lineno})."
        ) from e
    base = {"methods": "fedaudit.runtime.method:Method", "attacks": "fedaudit.attack.scene:Attack"}[group]
    parent = getattr(importlib.import_module(base.split(":")[0]), base.split(":")[1])
    if not (isinstance(found, type) and issubclass(found, parent)):
        raise SettingError(f"{path!r} is no {parent.__name__}: it must be a subclass of {base.replace(':', '.')}.")
    return found
