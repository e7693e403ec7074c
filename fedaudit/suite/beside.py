"""One method beside all others: the cells of a shipped suite for that method, and the kept records of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaudit.errors import SettingError, unknown
from fedaudit.runtime.code_digest import code_of_setting, harness, is_same
from fedaudit.suite.kept_records import MethodRecords, code_digest, key_of, read_records
from fedaudit.suite.suite_file import SUITES, Suite, check_suite, read_suite, shipped

COMPARED = ("all",)  # shipped suites whose records are kept


@dataclass(frozen=True)
class Beside:
    """The suite to run for a method, the kept records of the others, and which of these other code made."""

    suite: Suite
    kept: Mapping[str, MethodRecords]
    changed: tuple[str, ...]  # methods whose own code or settings are not those of their records
    other_harness: bool  # fedaudit's own code is not that of the records


def records_folder(name: str) -> Path:
    """Return the folder of a shipped suite's kept records."""
    if name not in COMPARED:
        raise SettingError(unknown("suite with kept records", name, COMPARED))
    return SUITES / f"{name}_records"


def beside(name: str, method: str, set_: dict[str, Any], *, quick: bool = False, fresh: bool = False) -> Beside:
    """Return what it takes to set a method beside those of a shipped suite.

    `quick`: one seed of the last partition, unprotected, without the attacks that take long. `fresh`: methods whose
    records were made by other code are run again, too.
    """
    folder, whole = records_folder(name), read_suite(shipped(name))
    kept = read_records(folder)
    changed = _changed(whole, kept)
    row: dict[str, Any] = {"method": method, "set": set_} if set_ else {"method": method}
    again = [of for of in whole.methods if fresh and of["method"] in changed and of["method"] != method]
    update: dict[str, Any] = {"methods": [row, *again]}
    if quick:
        update |= {"grid": {key: values[-1:] for key, values in whole.grid.items()}, "extra": []}
        update["protections"] = whole.protections[:1]
    suite = whole.model_copy(update=update)
    check_suite(suite)
    return Beside(suite, {key: of for key, of in kept.items() if key != method}, changed, _other_harness(kept))


def without_kept(name: str) -> Suite:
    """Return a shipped suite without the cells of which a record by today's code of the method is kept."""
    suite, kept = read_suite(shipped(name)), read_records(records_folder(name))
    codes = {cell.key: cell.code for records in kept.values() for cell in records.cells}
    settings = [setting for setting in suite.cells() if key_of(setting) in codes]
    done = [key_of(of) for of in settings if code_digest(code_of_setting(of)) == codes[key_of(of)]]
    suite = suite.model_copy(update={"left_out": done})
    check_suite(suite)
    return suite


def _changed(suite: Suite, kept: Mapping[str, MethodRecords]) -> tuple[str, ...]:
    """Return the methods of a suite of which no kept cell has today's setting and code."""
    found = []
    for row in suite.methods:
        records = kept.get(row["method"])
        if records is None:
            continue
        plain = suite.model_copy(update={"methods": [row], "protections": suite.protections[:1]})
        today = {key_of(setting): code_digest(code_of_setting(setting)) for setting in plain.cells()}
        if not any(today.get(cell.key) == cell.code for cell in records.cells):
            found.append(row["method"])
    return tuple(found)


def _other_harness(kept: Mapping[str, MethodRecords]) -> bool:
    made_by = {cell.harness for records in kept.values() for cell in records.cells if cell.status == "done"}
    return any(not is_same(digest, harness()) for digest in made_by)
