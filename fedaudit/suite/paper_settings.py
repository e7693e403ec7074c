"""The papers' own settings, as a typed table, and what differs from them in the runs of a published table.

`suites/published/papers.toml` has what each paper says of the runs behind its tables: keys of the setting, and
hyper-parameters by method. What a paper leaves open is not in it. Every difference of a suite has a reason there, so
that no verdict is printed without what differs; a test holds all suites against the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import Field

from fedaudit import registry
from fedaudit.errors import SettingError
from fedaudit.setting import Frozen, Setting, read_toml, validated
from fedaudit.suite.published import FOLDER, Table, Wanted


class Stated(Frozen):
    """The statements of one paper about the runs behind some of its tables."""

    paper: str
    tables: list[str]
    setting: dict[str, Any] = Field(default_factory=dict)  # by key of the setting
    all: dict[str, Any] = Field(default_factory=dict)  # hyper-parameters of every method that has them
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)  # by method; over `all`
    columns: dict[str, dict[str, Any]] = Field(default_factory=dict)  # keys of the setting that one column has instead
    because: dict[str, str] = Field(default_factory=dict)  # why a suite has something else, by key


@dataclass(frozen=True)
class Difference:
    """One thing that a run has otherwise than the paper says."""

    key: str
    paper: Any
    ours: Any
    why: str

    def text(self) -> str:
        return f"{self.key} is {self.ours} here and {self.paper} in the paper ({self.why or 'no reason is given'})"


@lru_cache(maxsize=1)
def _read() -> dict[str, Stated]:
    found = [validated(Stated, values, "key of the paper") for values in read_toml(FOLDER / "papers.toml")["paper"]]
    return {f"{stated.paper} {table}": stated for stated in found for table in stated.tables}


def stated(table: Table) -> Stated | None:
    """Return what the paper says of this table's runs; None if the list of papers does not have it."""
    return _read().get(table.name) if (FOLDER / "papers.toml").exists() else None


def differences(table: Table, cell: Wanted) -> list[Difference]:
    """Return what a cell's runs have otherwise than the paper says, in the order of the paper's table."""
    said = stated(table)
    if said is None:
        return []
    setting = cell.settings[0]
    wanted = {**said.setting, **said.columns.get(cell.column.name, {})}
    found = [
        Difference(key, value, ours, said.because.get(key, ""))
        for key, value in wanted.items()
        if not _same(ours := getattr(setting, key), value)
    ]
    own = said.methods.get(cell.method, {})
    values = _hyper_parameters(setting)
    there = {key: value for key, value in said.all.items() if _value(values, key) is not None}
    for key, value in {**there, **own}.items():
        ours = _value(values, key)
        if ours is None:
            raise SettingError(f"papers.toml, {table.name}: {cell.method} has no hyper-parameter {key!r}.")
        if not _same(ours, value):
            found.append(Difference(f"{cell.method} {key}", value, ours, _reason(said, cell.method, key)))
    return found


def _reason(said: Stated, method: str, key: str) -> str:
    return said.because.get(f"{method} {key}", said.because.get(key, ""))


def _hyper_parameters(setting: Setting) -> Mapping[str, Any]:
    method = registry.find(setting.method).make(setting.set, setting.preset)  # type: ignore[attr-defined]
    return dict(method.model_dump())


def _value(values: Mapping[str, Any], key: str) -> Any:
    """Return a hyper-parameter. A dot reaches into a table, and a star multiplies: "I*I_d*B"."""
    if "*" in key:
        parts = [_value(values, part) for part in key.split("*")]
        return None if None in parts else math.prod(parts)
    first, _, rest = key.partition(".")
    found = values.get(first)
    return _value(found, rest) if rest and isinstance(found, Mapping) else None if rest else found


def _same(ours: Any, value: Any) -> bool:
    if isinstance(value, int | float) and isinstance(ours, int | float) and not isinstance(value, bool):
        return math.isclose(ours, value, rel_tol=1e-9)
    return bool(ours == value)


def differs_text(table: Table, cells: Iterable[Wanted]) -> str:
    """Return, in words, all that is known to differ from the paper in these cells."""
    found = [difference.text() for cell in cells for difference in differences(table, cell)]
    return "; ".join(dict.fromkeys([*filter(None, [table.differs]), *found]))


@dataclass(frozen=True)
class ColumnDiffers:
    """The differences from the paper in one column, in words."""

    column: str
    differs: str


def by_column(table: Table, cells: Sequence[Wanted]) -> list[ColumnDiffers]:
    """Return for each column what is known to differ from the paper."""
    names = dict.fromkeys(cell.column.name for cell in cells)
    return [ColumnDiffers(name, differs_text(table, [c for c in cells if c.column.name == name])) for name in names]
