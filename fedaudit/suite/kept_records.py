"""Kept records of a suite: of each cell the few figures that a comparison needs, one small file for each method.

`fedaudit audit --suite all` fills gigabytes. What is kept of it beside the suite is small enough for the package, and
says by which code each figure was made. A method that is added later adds a file, and changes no other.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedaudit.errors import SettingError
from fedaudit.runtime.attack_result import AnyResult, HistogramResult, NotRun, ReconstructionResult, measures_of
from fedaudit.runtime.attack_result import results as read_results
from fedaudit.runtime.folder import setting_key
from fedaudit.runtime.run_record import REFUSED, RunRecord, read_record
from fedaudit.setting import Frozen, Setting, read_json, validated
from fedaudit.stored_model import Epsilon
from fedaudit.suite.protections import TRAINING
from fedaudit.suite.suite_file import KEY

VERSION = 1
OPEN, DP_SGD, MESSAGES, BOTH = "none", "DP-SGD", "messages", "both"
MEASURES = {"membership": "auc", "participation": "auc", "histogram": "gain", "reconstruction": "mse"}
PACKAGE = "fedaudit."
DIGITS = 5  # significant digits of a kept figure


class Found(Frozen):
    """The figure of an attack over all clients together, its interval within the run, and its verdict."""

    attack: str
    threat: str
    claims: Literal["membership", "participation", "histogram", "reconstruction"]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    leak: bool | None = None  # of a reconstruction: whether it beats every guess
    baseline: float | None = None  # a guess's error: for histograms the uniform one, for images the best one

    @property
    def over_guessing(self) -> float | None:
        """Return by how much the attack is better than guessing: 0 is a guess, 1 is certainty."""
        if self.value is None:
            return None
        if self.claims in ("membership", "participation"):
            return 2 * self.value - 1
        if not self.baseline:
            return None
        return self.value / self.baseline if self.claims == "histogram" else 1 - self.value / self.baseline


class CellFigures(Frozen):
    """The figures of one cell of a suite."""

    key: str  # of its setting
    partition: str
    seed: int
    protection: str  # none, DP-SGD, messages or both
    asked: Epsilon | None = None  # the epsilon that its policies have together
    status: Literal["done", "refused", "failed"]
    reason: str | None = None
    code: str = ""  # digest of the method's code and values
    harness: str | None = None
    global_test: float | None = None  # accuracy of the global model on the common test set
    own: float | None = None  # mean accuracy of clients' models on their own held-out records
    common: float | None = None  # mean accuracy of clients' models on the common test set
    epsilon: Epsilon | None = None  # the largest of the clients' ledgers; None: infinite, or it cannot be composed
    open: dict[str, str] = Field(default_factory=dict)  # fields that left a client with no guarantee, and why
    up: float = 0.0  # payload bytes that a client sends in a round
    down: float = 0.0
    seconds: float = 0.0  # of a client's computation in a round
    server_seconds: float = 0.0
    wall: float = 0.0  # seconds of the whole cell: its rounds and its attacks
    attacks: tuple[Found, ...] = ()


class SentField(Frozen):
    """A field that leaves a client, as it is declared."""

    field: str
    kind: str | None = None
    via: str | None = None
    unit: str | None = None


class MethodRecords(Frozen):
    """All kept cells of one method."""

    version: Literal[1] = 1
    method: str
    fields: tuple[SentField, ...] = ()  # of its uploads
    not_run: dict[str, str] = Field(default_factory=dict)  # by attack: why it ran for no threat, as the first was told
    cells: tuple[CellFigures, ...] = ()


def protection_of(privacy: dict[str, Any]) -> str:
    """Return which sort of protection a privacy setting is."""
    if not privacy:
        return OPEN
    if TRAINING not in privacy:
        return MESSAGES
    return DP_SGD if len(privacy) == 1 else BOTH


def asked_epsilon(privacy: dict[str, Any]) -> float | None:
    """Return the epsilon that the policies have together, by simple composition; None if there is no policy."""
    return round(sum(policy.get("epsilon") or 0.0 for policy in privacy.values()), 6) if privacy else None


def cell_figures(record: RunRecord, results: Sequence[AnyResult], failed: str | None = None) -> CellFigures:
    """Return the figures to keep of one cell: of its record, and of the results of the attacks on it."""
    setting = record.setting
    start: dict[str, Any] = {
        "key": key_of(setting),
        "partition": setting.partition,
        "seed": setting.seed,
        "protection": protection_of(setting.privacy),
        "asked": asked_epsilon(setting.privacy),
        "code": code_digest(record.code),
        "harness": record.harness,
    }
    if record.status != "done" or record.result.last is None:
        refused = record.status == "refused"
        reason = "; ".join(record.notes).removeprefix(REFUSED) if refused else failed or "it did not end"
        return CellFigures(**start, status="refused" if refused else "failed", reason=reason)
    last = record.result.last
    tasks = max(1, sum(len(row.participants) for row in record.rounds))
    epsilons = [client.epsilon for client in record.ledger]
    finite = all(epsilon is not None and math.isfinite(epsilon) for epsilon in epsilons)
    clients = last.clients
    return CellFigures(
        **start,
        status="done",
        reason=failed,
        global_test=_short(last.global_.test.accuracy) if last.global_ else None,
        own=_short(clients.local_test.mean) if clients and clients.local_test else None,
        common=_short(clients.global_test.mean) if clients and clients.global_test else None,
        epsilon=_short(max((e for e in epsilons if e is not None), default=0.0)) if finite else None,
        open=unprotected(record),
        up=round(record.bytes("up") / tasks, 1),
        down=round(record.bytes("down") / tasks, 1),
        seconds=round(_seconds(record, "client") / tasks, 4),
        server_seconds=round(_seconds(record, "server") / max(1, len(record.rounds)), 4),
        wall=round(sum(row.wall_s for row in record.rounds) + sum(getattr(of, "wall_s", 0.0) for of in results), 2),
        attacks=tuple(_found(result) for result in results if not isinstance(result, NotRun) and not result.blind),
    )


def unprotected(record: RunRecord) -> dict[str, str]:
    """Return the fields of a run that left some client with no guarantee at all, and the ledger's reason."""
    entries = [entry for client in record.ledger for entry in client.entries if entry.noise_multiplier == 0]
    return {entry.field: entry.condition or "" for entry in sorted(entries, key=lambda entry: entry.field)}


def code_digest(code: dict[str, dict[str, str]] | None) -> str:
    """Return one digest of the method's modules and values that make a run.

    For a method of this package only modules of this package count. Libraries that lie in the same folder as a checkout
    count as a method's own code elsewhere.
    """
    modules = (code or {}).get("modules", {})
    if any(name.startswith(PACKAGE) for name in modules):
        modules = {name: digest for name, digest in modules.items() if name.startswith(PACKAGE)}
        code = {**(code or {}), "modules": modules}
    return hashlib.blake2b(json.dumps(code, sort_keys=True).encode(), digest_size=8).hexdigest()


def key_of(setting: Setting) -> str:
    """Return the key by which kept records know a setting."""
    return setting_key(setting)[:KEY]


def _seconds(record: RunRecord, party: str) -> float:
    phase = "task" if party == "client" else "round"
    rows = [row for row in record.timings if row.party.startswith(party) and row.phase == phase]
    return sum(row.wall_s for row in rows)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _found(result: Any) -> Found:
    measured = measures_of(result)[MEASURES[result.claims]]
    leak = result.beats_baselines if isinstance(result, ReconstructionResult) else result.leak
    baseline = None
    if isinstance(result, HistogramResult):
        baseline = result.pooled.uniform.value
    if isinstance(result, ReconstructionResult):
        baseline = min((of.mse.value for of in result.baselines.values() if of.mse.value is not None), default=None)
    return Found(
        attack=result.attack,
        threat=result.threat.partition(":")[0],
        claims=result.claims,
        value=_short(measured.value),
        low=_short(measured.low),
        high=_short(measured.high),
        leak=leak,
        baseline=_short(baseline),
    )


# --- from an audit ----------------------------------------------------------------------------------------------------


def gathered(cells: Iterable[tuple[RunRecord, Sequence[AnyResult], str | None]]) -> list[MethodRecords]:
    """Return the kept records of all methods among these cells: each a record, its attacks' results, and its error.

    A cell that was under way when the audit stopped is left out.
    """
    by_method: dict[str, list[tuple[RunRecord, Sequence[AnyResult], str | None]]] = {}
    for cell in cells:
        if cell[0].status == "running" and cell[2] is None:
            continue  # the audit was stopped: the cell is to be run, and has not failed
        by_method.setdefault(cell[0].setting.method, []).append(cell)
    return [_of_method(name, of) for name, of in sorted(by_method.items())]


def _of_method(name: str, cells: list[tuple[RunRecord, Sequence[AnyResult], str | None]]) -> MethodRecords:
    fields: dict[str, SentField] = {}
    not_run: dict[str, str] = {}
    ran: set[str] = set()
    for record, results, _ in cells:
        for release in record.releases:
            fields[release.field] = SentField(
                field=release.field, kind=release.kind, via=release.via, unit=release.unit
            )
        for result in results:
            if isinstance(result, NotRun):
                if result.threat == "server":
                    not_run[result.attack] = result.reason
                not_run.setdefault(result.attack, result.reason)
            else:
                ran.add(result.attack)
    found = [cell_figures(*cell) for cell in cells]
    order = sorted(found, key=lambda of: (of.partition, of.protection, -(of.asked or math.inf), of.seed))
    return MethodRecords(
        method=name,
        fields=tuple(fields[field] for field in sorted(fields)),
        not_run={attack: reason for attack, reason in sorted(not_run.items()) if attack not in ran},
        cells=tuple(order),
    )


def cells_of(path: Path) -> Iterator[tuple[RunRecord, Sequence[AnyResult], str | None]]:
    """Yield the cells of an audit's folder, or of a file that `pack_audit.py` made of one."""
    if path.is_dir():
        errors = _errors(path)
        for file in sorted(path.glob("runs/*/record.json")):
            record = read_record(file.parent)
            yield record, record.attacks, errors.get(file.parent.name)
        return
    errors = _errors(path.parent)
    with lzma.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            results = read_results.validate_python([_unpacked(result) for result in row["attacks"]])
            yield RunRecord.model_validate(row["record"]), results, errors.get(row["folder"])


def _unpacked(result: dict[str, Any]) -> dict[str, Any]:
    """Return an attack's result with empty places for the figures of single clients, which packing leaves out."""
    empty: dict[str, Any] = {"client": {}} if result["ran"] else {}
    if result.get("claims") == "reconstruction":
        empty |= {"picture": None, "matched_by": []}
    return {**empty, **result}


def _errors(folder: Path) -> dict[str, str]:
    """Return why cells failed, by their folder's name, as the audit noted it."""
    file = folder / "audit.json"
    rows = json.loads(file.read_text())["cells"] if file.is_file() else []
    return {Path(row["folder"]).name: row["reason"] for row in rows if row["status"] == "failed" and row["reason"]}


# --- in files ---------------------------------------------------------------------------------------------------------


def file_of(folder: Path, method: str) -> Path:
    return folder / f"{method.replace(':', '_')}.json"


def write_records(folder: Path, records: Iterable[MethodRecords]) -> list[Path]:
    """Write one file for each method, and return the files. Earlier cells stay unless a new one has their key."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for record in records:
        file = file_of(folder, record.method)
        if file.is_file():
            record = _joined(read_file(file), record)
        lines = [json.dumps(_plain(cell), separators=(",", ":")) for cell in record.cells]
        head = json.dumps(_plain(record.model_copy(update={"cells": ()})), separators=(",", ":"))
        file.write_text(head[:-1] + ',"cells":[\n' + ",\n".join(lines) + "\n]}\n")
        written.append(file)
    return written


FOUND = tuple(Found.model_fields)  # in a file, an attack's result is a list in this order: names would be most of it


def _plain(of: MethodRecords | CellFigures) -> dict[str, Any]:
    plain = of.model_dump(exclude_defaults=True)
    if isinstance(of, MethodRecords):
        return {"version": VERSION, **plain}
    if of.attacks:
        plain["attacks"] = [[getattr(found, name) for name in FOUND] for found in of.attacks]
    return plain


def _joined(old: MethodRecords, new: MethodRecords) -> MethodRecords:
    keys = {cell.key for cell in new.cells}
    cells = (*(cell for cell in old.cells if cell.key not in keys), *new.cells)
    return new.model_copy(update={"cells": cells})


def read_records(folder: Path) -> dict[str, MethodRecords]:
    """Return the kept records in a folder, by method."""
    return {record.method: record for record in map(read_file, sorted(folder.glob("*.json")))}


def read_file(file: Path) -> MethodRecords:
    raw = read_json(file)
    if raw.get("version") != VERSION:
        raise SettingError(
            f"{file} has version {raw.get('version')!r} of kept records, and this fedaudit reads {VERSION}. Make it "
            "again from its audit."
        )
    for cell in raw.get("cells", []):
        cell["attacks"] = [dict(zip(FOUND, found, strict=True)) for found in cell.get("attacks", [])]
    found: MethodRecords = validated(MethodRecords, raw, "key of the kept records")
    return found
