"""Checks of setting, code and versions: which code ran, whether it is the code here, and whether its tests held.

Also the copies: the setting lies beside the record, and the checkpoint holds the record as the run left it.
"""

from __future__ import annotations

import json
from typing import Any

from fedaudit.errors import FedauditError
from fedaudit.registry import find, read_from
from fedaudit.runtime.code_digest import NOT_COMPARED, comparable, not_compared
from fedaudit.runtime.declarations.tested import declarations_of
from fedaudit.runtime.run_record import BESIDE, versions
from fedaudit.setting import EXECUTION, ROUNDING
from fedaudit.verify.case import HEAD, RECORD, Case
from fedaudit.verify.finding import differences

SETTING = "setting.json"
# These may change when a run goes on; its first setting stays in setting.json.
FREE = {*EXECUTION, *ROUNDING, "keep_weights", "quorum", "dropout", "rounds"}
# The last lines of a record: a kill between two writes may leave them in record.json alone.
LAST = {"status", "finished", "published", "ledger", "idle_policies", "notes"}


def check_copies(case: Case) -> None:
    """Check that setting.json and the checkpoint's copy of the record say what record.json says."""
    try:
        setting = json.loads((case.folder / SETTING).read_text())
        said = case.record.setting.model_dump(mode="json", exclude=FREE)
        # A setting from before an option was there does not have it.
        known = {key: value for key, value in setting.items() if key not in FREE} if isinstance(setting, dict) else {}
        case.found.compare("setting", SETTING, "", known, {key: said[key] for key in said if key in known})
        if missing := [key for key in ("method", "dataset", "seed", "clients", "privacy") if key not in known]:
            case.found.contradicted("setting", SETTING, missing[0], "nothing", str(said[missing[0]]))
    except (OSError, ValueError, RecursionError) as e:
        case.found.contradicted("setting", SETTING, "the file", str(e)[:200], "the setting of the run")
    if case.head is None or not isinstance(case.head.get("record"), dict):
        there = (case.folder / "checkpoint").exists()
        if there:
            case.found.contradicted("copy of the record", HEAD, "the file", "nothing that can be read", "a checkpoint")
        else:
            case.found.word("copy of the record", "the checkpoint is not here, and with it the clients' last states")
        return
    raw = json.loads((case.folder / RECORD).read_text())
    copy = case.head["record"]
    left_out = {*BESIDE, *(LAST if copy.get("status") == "running" else ())}
    a, b = ({key: value for key, value in of.items() if key not in left_out} for of in (raw, copy))
    found = list(differences(a, b))
    for where, mine, other in found[:5]:
        case.found.contradicted("copy of the record", RECORD, where, mine, other, f"the copy in {HEAD}")
    if not found:
        case.found.recomputed("copy of the record", f"{HEAD} says the same")


def check_code(case: Case) -> None:
    """Check which code ran, and what is known of it here."""
    record, found = case.record, case.found
    if case.other_code:
        found.word("code", case.other_code)
    elif not_compared(record.code, record.harness):
        found.word("code", NOT_COMPARED)
    else:
        found.recomputed("code", "the method's and fedaudit's code are the ones that are here, by their digests")
    _check_declarations(case)
    now = versions()
    apart = {name: (record.versions.get(name), now.get(name)) for name in record.versions.keys() | now.keys()}
    changed = [f"{name} {a}, here {b}" for name, (a, b) in sorted(apart.items()) if a != b]
    found.word("versions", "; ".join(changed) or "those recorded are those that are here")
    found.word("times, memory and dates", "they depend on the machine, and nothing else tells of them")


def _check_declarations(case: Case) -> None:
    record, figure = case.record, "declarations"
    said = record.declarations
    if said is None:
        case.found.word(figure, "the record does not say whether they were tested")
        return
    modules = (record.code or {}).get("modules", {})
    try:
        with read_from(case.folder):
            method: Any = find(record.setting.method).make(record.setting.set, record.setting.preset)  # type: ignore[attr-defined]
            now = declarations_of(method)
    except FedauditError as e:
        case.found.word(figure, case.why_no_world if case.world is None else f"the method is not here: {e}")
        return
    if not comparable(said.source, now.source):
        case.found.word(figure, f"the record says: {said.text()}")
    elif not case.other_code and said.source != now.source:
        case.found.contradicted(figure, RECORD, "declarations.source", said.source, now.source)
    elif said.source == now.source and said.tested == "held" and now.tested != "held":
        case.found.contradicted(figure, RECORD, "declarations.tested", said.tested, now.tested, "for the same source")
    elif said.source == now.source and now.tested == said.tested:
        case.found.recomputed(figure, f"{now.text()}; {len(modules)} modules")
    else:
        case.found.word(figure, f"the record says: {said.text()}")
