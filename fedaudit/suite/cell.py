"""One cell of a suite: a run, and the attacks on it. Finished parts are kept, unfinished parts go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedaudit import registry
from fedaudit.attack.attack_run import attack_run, made
from fedaudit.errors import DataError, FedauditError, NotApplicable, place_of
from fedaudit.privacy.policy import TRAINING
from fedaudit.progress import Watch
from fedaudit.registry import find
from fedaudit.runtime.attack_result import AnyResult, NotRun
from fedaudit.runtime.code_digest import (
    VERSIONS,
    code_of_setting,
    comparable,
    differences,
    harness,
    is_same,
    not_compared,
    source_of,
)
from fedaudit.runtime.device_errors import Crowding, crowding
from fedaudit.runtime.engines import Engine
from fedaudit.runtime.run_record import REFUSED, RunRecord, read_record, versions
from fedaudit.runtime.runner import run
from fedaudit.runtime.seeds_together import Place, run_together
from fedaudit.setting import Setting
from fedaudit.suite.time_left import Stage
from fedaudit.wire.transcript import Threat

Spec = str | dict[str, Any]
Status = Literal["to do", "done", "refused", "failed"]
ATTACK, CLAIMS = "attack", "claims of epsilon"  # progress of these stages begins so; all other progress is about rounds


@dataclass
class Cell:
    """A setting with its attacks, and what became of them."""

    folder: Path
    setting: Setting
    attacks: list[Spec]
    threats: list[str]
    trials: int = 0  # number of trials of each protected release path, to test its claimed epsilon
    status: Status = "to do"
    keep_stale: bool = False  # results of other code count, too
    trust: bool = False  # code outside fedaudit that its run folder names is imported
    again: str | None = None  # why the results of an earlier audit do not count
    not_compared: bool = False  # it counts, but its code was recorded by another scheme of digests: nobody can tell
    reason: str | None = None  # why it failed, or why its privacy setting does not apply
    crowded: Crowding | None = None  # what was missing when it failed, if processes beside it may be the reason

    @property
    def error(self) -> str | None:
        return self.reason if self.status == "failed" else None


def look(cell: Cell) -> RunRecord | None:
    """Return the record that an earlier audit left, or None. Set the cell's status if nothing is left to do."""
    if not (cell.folder / "record.json").exists():
        return None
    record = read_record(cell.folder)
    if record.status == "refused" and record.versions.get("fedaudit") == versions().get("fedaudit"):
        cell.status, cell.reason = "refused", "; ".join(record.notes).removeprefix(REFUSED)
    elif record.status == "done" and not missing(cell, record) and not untried(cell, record):
        cell.status = "done"
    return record


def why_stale(cell: Cell, record: RunRecord) -> str | None:
    """Return why a run does not count any more (other code, defaults or versions made it); None if it counts.

    Code that was recorded by another scheme of digests counts as unchanged: `is_not_compared` tells of it.
    """
    if record.code is None:
        return None if record.status == "running" else "its record does not say which code made it"
    changed = differences(record.code, code_of_setting(cell.setting))
    now = versions()
    changed += [
        f"{name} was {record.versions.get(name, 'not there')}, is {now.get(name, 'not there')}"
        for name in VERSIONS
        if record.versions.get(name) != now.get(name)
    ]
    if not is_same(record.harness, harness()):
        changed.append("fedaudit's own code changed")
    return "; ".join(changed) or None


def is_not_compared(cell: Cell, record: RunRecord) -> bool:
    """Tell whether the run or an attack of the cell counts though its code cannot be compared with today's."""
    if not_compared(record.code, record.harness):
        return True
    return any(not comparable(before, now) for _, before, now in _attacks_code(cell, record))


def why_again(cell: Cell, record: RunRecord, force: bool, keep_stale: bool) -> str | None:
    """Return why a cell of an earlier audit must run again; None if its results count or can be continued."""
    if force:
        return "--force"
    return None if keep_stale and record.status != "running" else why_stale(cell, record)


def stale_attacks(cell: Cell, record: RunRecord) -> list[str]:
    """Return the cell's attacks whose results were made by other code than today's."""
    return sorted({name for name, before, now in _attacks_code(cell, record) if not is_same(before, now)})


def _attacks_code(cell: Cell, record: RunRecord) -> set[tuple[str, str | None, str]]:
    """Return the attacks of the cell that were carried out, each with the digest of its code then and now."""
    found = {made(spec)[0]: source_of(type(made(spec)[1])) for spec in cell.attacks}
    return {(r.attack, r.source, found[r.attack]) for r in record.attacks if r.attack in found}


def missing(cell: Cell, record: RunRecord) -> list[tuple[Spec, str]]:
    """Return the pairs (attack, threat) not yet run on this transcript. Other settings make another attack."""
    return [
        (spec, threat)
        for threat in cell.threats
        for spec in cell.attacks
        if not any(_same(result, spec, threat, record.setting.clients, cell.keep_stale) for result in record.attacks)
    ]


def untried(cell: Cell, record: RunRecord) -> bool:
    """Say if the cell's claims of epsilon are still to be tested against a lower bound."""
    return bool(cell.trials and cell.setting.privacy and not record.audits)


def _same(result: AnyResult, spec: Spec, threat: str, clients: int, keep_stale: bool = False) -> bool:
    name, attack = made(spec)
    if (result.attack, result.threat) != (name, threat):
        return False
    if result.settings != attack.model_dump(mode="json"):
        return False
    if not is_same(result.source, source_of(type(attack))) and not keep_stale:
        return False
    targets = clients - (Threat.parse(threat).peer is not None)  # a peer does not attack itself
    # Otherwise only some clients were attacked.
    return isinstance(result, NotRun) or len(result.clients) + len(result.left_out) >= targets


def stage_of(what: str) -> Stage:
    """Return the stage of a cell from the words in which `carry_out` reported progress."""
    return "attacks" if what.startswith(f"{ATTACK} ") else "claims" if what.startswith(CLAIMS) else "rounds"


def carry_out(
    cell: Cell, watch: Watch | None = None, engine: Engine | None = None, failed: Exception | None = None
) -> None:
    """Do what is left of the run and its attacks. This never raises: an error becomes the cell's reason.

    `failed` is the error with which its run has ended already.
    """
    try:
        record = look(cell)
        cell.crowded = None
        if cell.status != "to do":
            return
        if failed is not None:
            raise failed
        _trust(cell)
        if record is None or record.status != "done":
            run(cell.setting, out=cell.folder, resume=True, watch=watch, engine=engine, refuse_idle=True)
        errors = [*_attack(cell, watch), *_try_claims(cell, watch)]
        cell.status, cell.reason = ("failed", "; ".join(errors)) if errors else ("done", None)
    except NotApplicable as e:
        cell.status, cell.reason = "refused", str(e)
        read_record(cell.folder).refuse(cell.folder, str(e))  # the run wrote a first record before it was refused
    except Exception as e:  # noqa: BLE001 (a bug in a user's method must not stop the other cells; it is listed)
        cell.status, cell.reason, cell.crowded = "failed", _text(e), crowding(e)


def carry_out_together(cells: Sequence[Cell], watches: Sequence[Watch]) -> Iterator[Cell]:
    """Do what is left of cells that differ in the seed alone: their runs side by side, then the attacks on each.

    Yield each cell when it has ended. This never raises: an error becomes the cell's reason.
    """
    failed: dict[int, Exception] = {}
    left = []
    for i, cell in enumerate(cells):
        try:
            record = look(cell)
            if cell.status == "to do" and (record is None or record.status != "done"):
                _trust(cell)
                left.append(i)
        except Exception as e:  # noqa: BLE001 (a damaged record, or a user's method: `carry_out` says it)
            failed[i] = e
    try:
        places = [Place(cells[i].setting, cells[i].folder, watches[i]) for i in left]
        ended = run_together(places, resume=True, refuse_idle=True) if left else []
        failed |= {i: end.error for i, end in zip(left, ended, strict=True) if end.error is not None}
    except Exception as e:  # noqa: BLE001 (it is about all of them)
        failed |= dict.fromkeys(left, e)
    for i, cell in enumerate(cells):
        carry_out(cell, watches[i], failed=failed.get(i))
        yield cell


def _trust(cell: Cell) -> None:
    if cell.trust:
        registry.trust()
    find(cell.setting.method)  # the suite names the method, so its run folder may name it, too


def _attack(cell: Cell, watch: Watch | None) -> list[str]:
    """Run the missing attacks and return errors. Each result is kept at once; a failure does not stop the others."""
    errors: list[str] = []
    wanted: dict[str, list[Spec]] = {}
    for spec, threat in missing(cell, read_record(cell.folder)):
        wanted.setdefault(threat, []).append(spec)
    for threat, specs in wanted.items():

        def tell(_: float, __: float, name: str, threat: str = threat) -> None:
            if watch:
                watch(cell.setting.rounds, cell.setting.rounds, f"{ATTACK} {name} by {threat}")

        def failed(name: str, e: Exception, threat: str = threat) -> None:
            cell.crowded = cell.crowded or crowding(e)
            errors.append(f"attack {name} by {threat}: {_text(e)}")

        try:
            attack_run(cell.folder, attacks=specs, threat=threat, watch=tell, failed=failed)
        except Exception as e:  # noqa: BLE001 (as above: a user's attack, or its setting)
            cell.crowded = cell.crowded or crowding(e)
            errors.append(f"attacks by {threat}: {_text(e)}")
    return errors


def _try_claims(cell: Cell, watch: Watch | None) -> list[str]:
    """Test each claimed epsilon on its release path, and a claim for the whole run by canaries. Return errors."""
    if not untried(cell, read_record(cell.folder)):
        return []
    from fedaudit.epsilon.clipping import audit_clipping
    from fedaudit.epsilon.gradient_canaries import Canaries, keep_canaries
    from fedaudit.epsilon.one_run import audit_run
    from fedaudit.epsilon.release_path import audit_releases
    from fedaudit.epsilon.residuals import audit_residuals

    if watch:
        watch(cell.setting.rounds, cell.setting.rounds, CLAIMS)
    try:
        with contextlib.suppress(DataError):  # nothing was sent from which a record's loss could be computed
            audit_run(cell.folder)
        audit_releases(cell.folder, trials=cell.trials)
        audit_clipping(cell.folder)
        canaries = Canaries() if TRAINING in cell.setting.privacy else None
        audit_residuals(cell.folder, beside=canaries.of if canaries else None)
        if canaries:
            with contextlib.suppress(DataError):  # the method trains on nothing private, or cannot be repeated
                keep_canaries(cell.folder, canaries)
    except Exception as e:  # noqa: BLE001 (as above)
        cell.crowded = cell.crowded or crowding(e)
        return [f"claims of epsilon: {_text(e)}"]
    return []


def _text(e: Exception) -> str:
    if isinstance(e, FedauditError):
        return str(e)
    return f"{type(e).__name__}: {e}{place_of(e)}"
