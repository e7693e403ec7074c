"""Forecasts of how long cells will take, from similar ones, and of what a suite will send."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaudit.attack.attack_run import made
from fedaudit.data import available, describe
from fedaudit.errors import FedauditError, NotApplicable, RunError
from fedaudit.runtime.applicability import inapplicable, released_kinds
from fedaudit.runtime.asking import participants_of
from fedaudit.runtime.attack_result import NotRun
from fedaudit.runtime.method import Method
from fedaudit.runtime.planned_traffic import make_plan, on_average, payload_of_rounds, with_participants
from fedaudit.runtime.run_record import RunRecord, audit_seconds
from fedaudit.runtime.world import world_of
from fedaudit.setting import EXECUTION, Setting
from fedaudit.suite.cell import Cell, carry_out, is_not_compared, look, missing, stale_attacks, untried, why_again
from fedaudit.suite.gpu_sharing import at_once
from fedaudit.suite.time_left import Stage, TimeLeft, Work
from fedaudit.units import bytes_text
from fedaudit.wire.traffic import Plan

# The settings in which a cell may differ from a measured one, nearest first, and the words for it.
NEARNESS = (
    ((), "this cell's own rounds"),
    (("seed",), "the same with another seed"),
    (("seed", "rounds"), "the same with other rounds"),
    (("seed", "rounds", "privacy"), "the same under other privacy"),
)


class Pace:
    """The seconds measured so far per round, per attack, and for the audits of epsilon."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])  # key: seconds, rounds
        self.attacks: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        self.audits: dict[str, float] = {}  # seconds of all audits of a run, per round of the run

    def learn(self, record: RunRecord | None, audits: Mapping[str, float] | None = None) -> None:
        """Add the times of a record of an earlier audit. `audits` has the seconds that its audits of epsilon took."""
        if record is None or not record.rounds:
            return
        if audits:
            self.audits |= dict.fromkeys(_keys(record.setting), sum(audits.values()) / len(record.rounds))
        self.add_rounds(record.setting, sum(row.own_s for row in record.rounds), len(record.rounds))
        for key in _keys(record.setting):
            self.attacks[key] |= {
                (a.attack, a.threat): 0.0 if isinstance(a, NotRun) else a.wall_s for a in record.attacks
            }

    def add_rounds(self, setting: Setting, seconds: float, rounds: int) -> None:
        for key in _keys(setting):
            self.rounds[key][0] += seconds
            self.rounds[key][1] += rounds

    def per_round(self, setting: Setting) -> tuple[float, str] | None:
        """Return seconds per round and where they come from; None if nothing similar was measured."""
        for key, (_, source) in zip(_keys(setting), NEARNESS, strict=True):
            seconds, rounds = self.rounds.get(key, (0.0, 0))
            if rounds:
                return seconds / rounds, source
        return None

    def per_attack(self, setting: Setting, attack: str, threat: str) -> float | None:
        for key in _keys(setting):
            if (attack, threat) in self.attacks.get(key, {}):
                return self.attacks[key][attack, threat]
        return None

    def per_audit(self, setting: Setting) -> float | None:
        """Return the seconds of all audits of epsilon of a similar run; None if none was measured."""
        return next((self.audits[key] * setting.rounds for key in _keys(setting) if key in self.audits), None)


def _keys(setting: Setting) -> list[str]:
    return [setting.model_dump_json(exclude={*EXECUTION, *less}) for less, _ in NEARNESS]


# --- the work of a cell, for the time left -------------------------------------------------------------

NOVEL = (4, 3, 1)  # places in the kinds of `work_of`: method and protection; all but seed, rounds and noise; row
UNKNOWN = 1438 * 64.0  # numbers in a data set of unknown size: as many as in digits


def work_of(cell: Cell, record: RunRecord | None) -> Work:
    """Return the work left for a cell, given its record. Nothing is read from disk and nothing is run.

    The units of rounds and of claims are the numbers in the records that are passed through. The units of attacks are
    those numbers times the number of attacks. They matter if nothing nearer than another method was measured.
    """
    setting, data = cell.setting, _numbers(cell.setting)
    rounds = setting.rounds * setting.participation * data
    kinds = ",".join(sorted(setting.privacy))
    one, row, length, _ = _keys(setting)
    amount = setting.model_dump_json(exclude={*EXECUTION, "seed", "rounds", "privacy"}) + kinds
    names = (one, row, length, amount, f"{setting.method} {kinds}", setting.method, f"any {kinds}", "any")
    behind = 0.0 if record is None or not setting.rounds else min(1.0, len(record.rounds) / setting.rounds)
    attacks = len(cell.attacks) * len(cell.threats)
    if record is not None and record.status == "done":
        attacks = len(missing(cell, record))
    claims = bool(cell.trials and setting.privacy) and (record is None or untried(cell, record))
    units: dict[Stage, float] = {
        "start": 1.0, "rounds": rounds, "attacks": attacks * data, "claims": rounds if claims else 0.0,
    }  # fmt: skip
    return Work(tuple(map(_digest, names)), units, behind, names.index(setting.method) + 1)


def _numbers(setting: Setting) -> float:
    """Return how many numbers the training records of a setting hold."""
    try:
        facts = describe(setting.dataset)
    except FedauditError:  # its cell will say so
        return UNKNOWN
    if facts.train is None or facts.shape is None:
        return UNKNOWN
    side = setting.image_size
    return float(facts.train * (facts.shape[0] * side**2 if side else math.prod(facts.shape)))


def learn(left: TimeLeft, work: Work, cell: Cell, record: RunRecord) -> None:
    """Tell the estimate how long the stages of a cell took in an earlier audit."""
    if not record.rounds:
        return
    per_round = work.units["rounds"] / max(1, cell.setting.rounds)
    rounds = len(record.rounds) * per_round
    left.measured(work.kinds, "rounds", sum(row.wall_s for row in record.rounds), rounds, before=True)
    ran = [a for a in record.attacks if not isinstance(a, NotRun)]
    wanted = len(cell.attacks) * len(cell.threats)
    if record.attacks and wanted and record.status == "done" and not missing(cell, record):
        data = per_round / cell.setting.participation
        left.measured(work.kinds, "attacks", sum(a.wall_s for a in ran), wanted * data, before=True)
    if took := audit_seconds(cell.folder, record.transcript_digest):
        left.measured(work.kinds, "claims", sum(took.values()), rounds, before=True)


def report_starts(cells: int) -> float:
    """Return how long the report on so many cells takes, counted in starts of a worker.

    On the quickstart the report took 1.7 s and 0.155 s per cell of processor time, and a start 9.1 s."""
    return (1.7 + 0.155 * cells) / 9.1


def novelty_first(works: Mapping[str, Work]) -> list[str]:
    """Return the cells in the order in which they tell most about the others: one of each method and protection first,
    then one of each row, then the other seeds. This also shows a method's faults early."""
    seen: set[tuple[int, str]] = set()
    ranks: dict[str, int] = {}
    for cell, work in works.items():
        names = [(i, work.kinds[i]) for i in NOVEL]
        ranks[cell] = sum(name in seen for name in names)
        seen.update(names)
    return sorted(works, key=lambda cell: ranks[cell])


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def duration(seconds: float) -> str:
    """Return a duration in words, rounded as an estimate should be."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


# --- before anything runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """The forecast of one cell: what is left to do. None means not known; `note` says why."""

    cell: Cell
    state: str
    bytes: int | None
    seconds: float | None
    note: str = ""


def by_row(forecasts: list[Forecast]) -> list[tuple[str, str, str, str, str]]:
    """Return a line per row of the grid, over its seeds: its name, cells, state, bytes, time."""
    names = row_names([f.cell.setting.model_dump(exclude={"seed"}) for f in forecasts])
    groups: dict[str, list[Forecast]] = defaultdict(list)
    for name, one in zip(names, forecasts, strict=True):
        groups[name].append(one)
    return [(name, str(len(of)), *_together(of)) for name, of in groups.items()]


def row_names(settings: list[dict[str, Any]]) -> list[str]:
    """Return a name for each row: its method, its label, and the settings that differ from another row's.

    Of `set`, the values come that differ from another row's with the same method.
    """
    varied = [key for key in settings[0] if key == "method" or any(s[key] != settings[0][key] for s in settings)]
    known: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for setting in settings:
        known[setting["method"]].append(setting["set"])
    names = []
    for setting in settings:
        others = known[setting["method"]]
        told = {**setting, "set": {k: v for k, v in setting["set"].items() if any(o.get(k) != v for o in others)}}
        parts = [(key, _short(v) if isinstance(v := told[key], dict) else v) for key in varied]
        plain = ("method", "label", "set", "privacy")
        names.append(" ".join(str(v) if key in plain else f"{key}={v}" for key, v in parts if v not in ("", None)))
    return names


def _together(of: list[Forecast]) -> tuple[str, str, str]:
    states = Counter(f.state for f in of)
    state = ", ".join(s if len(states) == 1 else f"{n} {s}" for s, n in states.items())
    sent, seconds = [f.bytes for f in of], [f.seconds for f in of]
    size = "?" if None in sent else bytes_text(sum(s or 0 for s in sent))
    return state, size, "?" if None in seconds else duration(sum(s or 0.0 for s in seconds))


def forecast(cells: list[Cell], measure: bool = False, force: bool = False, keep_stale: bool = False) -> list[Forecast]:
    """Return a forecast for each cell. With `measure`, run one round and the attacks of each kind of cell in a
    temporary folder. Results of other code will run again, as in an audit, and the forecast says why."""
    pace = Pace()
    records: list[RunRecord | None] = []
    for cell in cells:
        cell.keep_stale = keep_stale
        record = look(cell)
        pace.learn(record, None if record is None else audit_seconds(cell.folder, record.transcript_digest))
        if record is not None and (why := why_again(cell, record, force, keep_stale)):
            cell.status, cell.again, record = "to do", why, None
        if record is not None:
            cell.not_compared = is_not_compared(cell, record)
        if record is not None and not keep_stale and (attacks := stale_attacks(cell, record)):
            cell.again = f"attacks changed: {', '.join(attacks)}"
        records.append(record)
    return [_forecast(cell, record, pace, measure) for cell, record in zip(cells, records, strict=True)]


def _forecast(cell: Cell, record: RunRecord | None, pace: Pace, measure: bool) -> Forecast:
    if cell.status == "done":
        return Forecast(cell, "done", 0, 0.0)
    if cell.status == "refused":
        return Forecast(cell, "does not apply", 0, 0.0, cell.reason or "")
    try:
        method, plans, plan_of_round = _plans(cell.setting)
        reason = inapplicable(cell.setting.privacy, released_kinds(method, plans))
    except NotApplicable as e:
        return Forecast(cell, "does not apply", 0, 0.0, str(e))
    except FedauditError as e:
        return Forecast(cell, "will fail", None, None, str(e))
    if reason:
        return Forecast(cell, "does not apply", 0, 0.0, reason)
    if measure and pace.per_round(cell.setting) is None:
        try:
            pace.learn(*_try_out(cell))
        except FedauditError as e:
            return Forecast(cell, "will fail", None, None, str(e))
    behind = len(record.rounds) if record is not None else 0
    left = cell.setting.rounds - behind
    try:
        sent = payload_of_rounds(method, plan_of_round, cell.setting, range(behind + 1, cell.setting.rounds + 1))
    except FedauditError as e:
        return Forecast(cell, "will fail", None, None, str(e))
    notes = [f"again: {cell.again}"] if cell.again else []
    notes += [] if sent is not None else ["its traffic is not declared"]
    seconds, note = _seconds(cell, record, left, pace)
    fresh = "again" if cell.again else "new"
    state = "attacks" if not left else f"{behind} of {cell.setting.rounds} rounds done" if behind else fresh
    return Forecast(cell, state, sent, seconds, "; ".join([*notes, note]))


def _plans(setting: Setting) -> tuple[Method, list[Plan], Callable[[int], Plan]]:
    """Return the method, plans of its rounds with as many clients as on average, and a function that gives the plan of
    a round with those that the seed draws. They come from the data if they are here, else from their published size.
    """
    looked_at = sorted({1, 2, setting.rounds})
    if not available(setting.dataset, setting.data_dir):
        method, of_all = make_plan(setting, list(range(setting.clients)))
        usual = [with_participants(of_all, t, on_average(setting)) for t in looked_at]
        return method, usual, lambda t: with_participants(of_all, t, participants_of(setting, t))
    world = world_of(setting.model_dump_json())
    if why := world.misfit():
        raise NotApplicable(f"{why}.")
    usual = [world.plan(t, on_average(setting)) for t in looked_at]
    return world.method, usual, lambda t: world.plan(t, participants_of(setting, t))


def _try_out(cell: Cell) -> tuple[RunRecord | None, dict[str, float]]:
    """Run one round, the attacks and the audits of epsilon. Return the record and the seconds of the audits."""
    with tempfile.TemporaryDirectory() as folder:
        setting = cell.setting.model_copy(update={"rounds": 1})
        trial = Cell(Path(folder) / "run", setting, cell.attacks, cell.threats, cell.trials)
        carry_out(trial)
        if trial.error:
            raise RunError(f"One round was run as a test and failed: {trial.error}")
        record = look(trial)
        return record, {} if record is None else audit_seconds(trial.folder, record.transcript_digest)


def _seconds(cell: Cell, record: RunRecord | None, left: int, pace: Pace) -> tuple[float | None, str]:
    found = pace.per_round(cell.setting)
    if found is None:
        return None, "no similar run was measured yet"
    per_round, source = found
    todo = [(made(spec)[0], threat) for spec in cell.attacks for threat in cell.threats]
    if record is not None and not left:
        todo = [(made(spec)[0], threat) for spec, threat in missing(cell, record)]
    attacks = [pace.per_attack(cell.setting, *one) for one in todo]
    unknown = sum(one is None for one in attacks)
    note = f"time from {source}" + (f", {unknown} attacks not counted" if unknown else "")
    audits = 0.0
    if cell.trials and cell.setting.privacy and (record is None or left or untried(cell, record)):
        measured = pace.per_audit(cell.setting)
        # They run every client's tasks again, so they take at least as long as the run without its evaluation.
        audits = cell.setting.rounds * per_round if measured is None else measured
        note += ", audits of epsilon assumed to take as long as the run" if measured is None else ""
    return left * per_round + sum(one or 0.0 for one in attacks) + audits, note


def total(forecasts: list[Forecast], jobs: int) -> str:
    """Return a paragraph: how many cells there are, what they will send and how long they will take."""
    left = [f for f in forecasts if f.state not in ("done", "does not apply")]
    unsized, untimed = sum(f.bytes is None for f in left), sum(f.seconds is None for f in left)
    beside = at_once([f.cell.setting for f in left], max(1, min(jobs, len(left))))
    seconds = sum(f.seconds or 0.0 for f in left) / beside
    states = Counter("to do" if f in left else f.state for f in forecasts)
    lines = [f"{len(forecasts)} cells: " + ", ".join(f"{n} {state}" for state, n in states.items()) + "."]
    if left:
        sent = bytes_text(sum(f.bytes or 0 for f in left))
        lines.append(
            f"To send: {sent} of payload"
            + (f", without {unsized} cells whose traffic is not known." if unsized else ".")
        )
    if left and untimed < len(left):
        more = f", without {untimed} cells that are unlike any measured one" if untimed else ""
        lines.append(f"Time: about {duration(seconds)} with {jobs} at a time{more}.")
    elif left:
        lines.append("Time: not known, because nothing like these cells was measured in this folder.")
        lines.append("--measure runs one round of each kind.")
    notes = Counter(f"{f.cell.setting.method}: {f.note}" for f in forecasts if f.note)
    return "\n".join([*lines, *(f"  {n} x {note}" for note, n in notes.items())])


def _short(table: dict[str, Any]) -> str:
    """Return an inner table in a few words, enough to tell cells apart."""
    return ", ".join(
        f"{key} {' '.join(map(str, value.values()))}" if isinstance(value, dict) else f"{key}={value}"
        for key, value in table.items()
    )
