"""Reading suites: TOML files with a grid of settings, the attacks on each, and budgets. See docs/guide/suites.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from fedaudit.errors import FedauditError, SettingError, did_you_mean, unknown
from fedaudit.registry import check_trusted
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.code_digest import outside_code
from fedaudit.runtime.folder import setting_key
from fedaudit.setting import Frozen, Setting, read_json, read_toml, validated
from fedaudit.suite.budgets import Budget, parse_budgets, read_budgets
from fedaudit.suite.protections import CHOSEN, RELEASES, UNDER, Protection, variants

SUITES = Path(__file__).parents[1] / "suites"
QUICKSTART = SUITES / "quickstart.toml"
SHIPPED = ("quickstart", "all")  # suites of this package, by name
KEY = 12  # characters of a setting's key that tell it from all others of a suite
TITLES = {"base": "[base]", "grid": "[grid]", "methods": "[[methods]]"}
OF_ROW = ("attacks", CHOSEN, UNDER, RELEASES)  # keys of a table [[methods]] that are no settings


class Extra(Frozen):
    """More attacks, on cells whose settings have one of the listed values each."""

    attacks: list[str | dict[str, Any]]
    on: dict[str, list[Any]] = Field(default_factory=dict)

    def is_for(self, setting: Setting) -> bool:
        return all(getattr(setting, key) in values for key, values in self.on.items())


class Suite(Frozen):
    """A grid of settings, the attacks to run on each, and the budgets to check."""

    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    methods: list[dict[str, Any]] = Field(default_factory=list)
    attacks: list[str | dict[str, Any]] | None = None  # None: all attacks; []: no attack
    threats: list[str] = Field(default_factory=lambda: ["server"])
    trials: int = Field(0, ge=0)  # number of trials of each protected release, to test its claimed epsilon; 0: no test
    trials_on: list[int] | None = None  # seeds of the runs whose claims are tested; None: all seeds
    budgets: list[Budget] = Field(default_factory=list)
    protections: list[Protection] = Field(default_factory=list)  # none: as the settings say
    extra: list[Extra] = Field(default_factory=list)  # attacks on some of the cells
    left_out: list[str] = Field(default_factory=list)  # keys of settings (their beginnings) that are no cells

    def tries(self, setting: Setting) -> int:
        """Return how many trials the claims of a cell get."""
        return self.trials if self.trials_on is None or setting.seed in self.trials_on else 0

    def cells(self) -> list[Setting]:
        """Return every setting, methods outermost. A method's keys win over the grid, and the grid over the base.

        A protection's privacy wins over all of them.
        """
        axes = [[(key, value) for value in values] for key, values in self.grid.items()]
        cells: dict[str, Setting] = {}
        for method in self.methods or [{}]:
            for point in itertools.product(*axes):
                values = {**self.base, **dict(point), **_of_setting(method)}
                setting = Setting.make(**values)
                for change in variants(method, setting, self.protections) if self.protections else [{}]:
                    varied = Setting.make(**{**values, **change}) if change else setting
                    if self.left_out and setting_key(varied)[:KEY] in self.left_out:
                        continue
                    cells.setdefault(varied.model_dump_json(), varied)  # points are equal if a method fixes their key
        if not cells and self.left_out:
            raise SettingError("Every cell of the suite has a kept record by today's code. There is nothing to run.")
        if not cells:
            raise SettingError("The suite has no cell, because a list in [grid] is empty. Fill the list or remove it.")
        return list(cells.values())

    def wanted(self, setting: Setting | None = None) -> list[str | dict[str, Any]]:
        """Return the attacks: names, or tables of a name and settings. With a cell's setting, also those of its row."""
        if self.attacks is None:
            from fedaudit.registry import names

            return list(names("attacks"))
        rows = [row for row in self.methods if "attacks" in row and setting is not None and _is_of(setting, row)]
        more = [spec for row in rows for spec in row["attacks"]]
        more += [
            spec for extra in self.extra if setting is not None and extra.is_for(setting) for spec in extra.attacks
        ]
        return [*self.attacks, *(spec for spec in more if spec not in self.attacks)]


def _of_setting(row: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a table [[methods]] that belong to the setting."""
    return {key: value for key, value in row.items() if key not in OF_ROW}


def _is_of(setting: Setting, row: dict[str, Any]) -> bool:
    """Say if a cell comes from this table [[methods]], plain or as it is under DP-SGD."""
    plain = _of_setting(row)
    ways = [plain, {**plain, **row.get(UNDER, {})}]
    return any(all(getattr(setting, key, None) == value for key, value in way.items()) for way in ways)


def shipped(name: str) -> Path:
    """Return the file of a suite that comes with fedaudit."""
    if name not in SHIPPED:
        raise SettingError(unknown("suite", name, SHIPPED))
    return SUITES / f"{name}.toml"


def read_suite(path: Path | str | None) -> Suite:
    """Return the suite in a file (None: the quickstart), checked as far as possible before anything runs."""
    path = Path(path or QUICKSTART)
    try:
        raw = _with_extended(path)
        suite = validated(Suite, raw, "key of the suite")
        check_suite(suite)
    except FedauditError as e:
        raise type(e)(f"{path}: {e}") from None
    return suite


def _with_extended(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return what a suite's file says, on top of the suite that it extends: a shipped one by name, or a file beside it.

    [base] and [grid] are joined key by key. Every other key of this file takes the place of the other's.
    """
    raw = read_toml(path)
    if "budgets" in raw:
        raw["budgets"] = _budgets(raw["budgets"], path)
    extends = raw.pop("extends", None)
    if extends is None:
        return raw
    if not isinstance(extends, str):
        raise SettingError(f"extends = {extends!r} is not a suite: give the name of one, or a file that ends in .toml.")
    other = path.parent / extends if extends.endswith(".toml") else shipped(extends)
    if other.resolve() in (path.resolve(), *below):
        raise SettingError(f"extends = {extends!r} leads back to {other}: a suite cannot extend itself.")
    first = _with_extended(other, (*below, path.resolve()))
    joined = {**first, **raw}
    for key in ("base", "grid"):
        if all(isinstance(of.get(key, {}), dict) for of in (first, raw)):  # else the check of the suite says so
            joined[key] = {**first.get(key, {}), **raw.get(key, {})}
    return joined


SAVED = "suite.json"  # in the folder of an audit


def save_suite(suite: Suite, folder: Path) -> None:
    """Keep a suite in the folder of its audit, for whoever wants to run it again."""
    write_atomic(folder / SAVED, suite.model_dump_json(indent=1).encode())


def saved_suite(folder: Path) -> Suite:
    """Return the suite of an audit from its folder, checked as `read_suite` does. Call it inside `registry.read_from`.

    A budget that was held against a file beside the suite is left out, as that file is not in the folder.
    """
    path = folder / SAVED
    if not folder.is_dir():
        raise SettingError(f"--from {folder}: there is no such folder. Name the folder of an audit.")
    if not path.is_file():
        raise SettingError(
            f"{path} is missing: the audit is from before suites were kept, or the folder is not an audit's. Name its "
            "suite file instead of --from."
        )
    raw = read_json(path)
    try:
        suite = validated(Suite, raw, "key of the suite")
        suite = suite.model_copy(update={"budgets": [b for b in suite.budgets if b.baseline is None]})
        for setting in suite.cells():
            for code in outside_code(setting.model_dump()):
                check_trusted(code)
        check_suite(suite)
    except FedauditError as e:
        raise type(e)(f"{path}: {e}") from None
    return suite


def _budgets(value: Any, path: Path) -> list[Budget]:
    """Return the budgets of a file, or of the tables [[budgets]]. A baseline lies beside the file that names it."""
    if isinstance(value, str):
        file = path.parent / value
        budgets, folder = read_budgets(file), file.parent
    else:
        budgets, folder = parse_budgets(value if isinstance(value, list) else [value], "budgets"), path.parent
    return [
        budget if budget.baseline is None else budget.model_copy(update={"baseline": str(folder / budget.baseline)})
        for budget in budgets
    ]


def check_suite(suite: Suite) -> None:
    """Raise an error for wrong names and policies. An error that only a run can find (missing data) fails its cell."""
    from fedaudit.attack.attack_run import made
    from fedaudit.data import describe
    from fedaudit.privacy.policy import read_policies
    from fedaudit.registry import find
    from fedaudit.wire.message import KINDS
    from fedaudit.wire.transcript import Threat

    for part, tables in (("base", [suite.base]), ("grid", [suite.grid]), ("methods", suite.methods)):
        for key in (key for table in tables for key in table):
            if key in OF_ROW and part == "methods":
                continue
            if key not in Setting.model_fields:
                raise SettingError(
                    f"Unknown setting {key!r} in {TITLES[part]}.{did_you_mean(key, Setting.model_fields)}"
                )
    for extra in suite.extra:
        for key in extra.on:
            if key not in Setting.model_fields:
                raise SettingError(f"Unknown setting {key!r} in [[extra]].{did_you_mean(key, Setting.model_fields)}")
    for row in suite.methods if suite.protections else ():  # their policies depend on what a method declares
        find(row.get("method", suite.base.get("method", Setting.model_fields["method"].default)))
    cells = suite.cells()
    for name in dict.fromkeys(cell.method for cell in cells):
        find(name)
    _each_once(cells)
    for name in dict.fromkeys(cell.dataset for cell in cells):
        describe(name)
    for privacy in {json.dumps(cell.privacy): cell.privacy for cell in cells}.values():  # each once: there may be many
        read_policies(privacy, KINDS)
    if strangers := set(suite.trials_on or ()) - {cell.seed for cell in cells}:
        raise SettingError(f"trials_on = {suite.trials_on}: no cell has the seed {min(strangers)}. Remove it.")
    for row in suite.methods:
        if not isinstance(row.get("attacks", []), list):
            raise SettingError(f"attacks = {row['attacks']!r} in [[methods]] is not a list. Write one.")
    wanted = [suite.wanted(cell) for cell in cells]
    for specs in {json.dumps(specs): specs for specs in wanted}.values():
        _once("attack", [made(spec)[0] for spec in specs])
    for threat in suite.threats:
        Threat.parse(threat)
    _once("threat", suite.threats)
    for budget in suite.budgets:
        for what, given in (("method", budget.method), ("dataset", budget.dataset)):
            known = {getattr(cell, what) for cell in cells}
            if given is not None and given not in known:
                raise SettingError(
                    f"The budget {budget.title()!r} is about the {what} {given!r}, which no cell has."
                    f"{did_you_mean(given, known)}"
                )


def _each_once(cells: Sequence[Setting]) -> None:
    """Raise an error for two cells that would compute the same, once presets and defaults are filled in.

    A cell whose hyper-parameters are wrong fails by itself when it runs, and equals no other here.
    """
    from fedaudit.registry import find

    filled: dict[str, str] = {}  # by what a row says of its method: a suite has many cells of few rows
    seen: dict[tuple[str, str], Setting] = {}
    for cell in cells:
        said = json.dumps([cell.method, cell.preset, cell.set], sort_keys=True, default=str)
        if said not in filled:
            try:
                method = find(cell.method).make(cell.set, cell.preset)  # type: ignore[attr-defined]
                filled[said] = json.dumps(method.model_dump(), sort_keys=True, default=str)
            except FedauditError:
                filled[said] = said
        other = seen.setdefault((cell.model_dump_json(exclude={"label", "preset", "set"}), filled[said]), cell)
        if other is not cell:
            raise SettingError(
                f"Two rows are the same once presets and defaults are filled in: {_row(other)}, and {_row(cell)} "
                f"(seed {cell.seed}). Remove one, or set what they should differ in."
            )


def _row(cell: Setting) -> str:
    """Return how a suite's file writes a cell's method."""
    told = [f"method = {json.dumps(cell.method)}"]
    if cell.label is not None:
        told.append(f"label = {json.dumps(cell.label)}")
    if cell.preset is not None:
        told.append(f"preset = {json.dumps(cell.preset)}")
    return ", ".join([*told, f"set = {json.dumps(cell.set)}"])


def _once(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise SettingError(
                f"The {what} {name!r} is listed twice, and its results would replace each other. List it once."
            )
