"""How long cells will take, from how long like ones took; and what a suite would send, before it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaudit.attack.attack_run import made
from fedaudit.data import available, describe
from fedaudit.errors import FedauditError, NotApplicable, RunError
from fedaudit.runtime.applies import inapplicable, released_kinds
from fedaudit.runtime.attack_result import NotRun
from fedaudit.runtime.method import Method
from fedaudit.runtime.plan import as_sent
from fedaudit.runtime.planned_traffic import make_plan
from fedaudit.runtime.run_record import RunRecord, audit_seconds
from fedaudit.runtime.world import world_of
from fedaudit.setting import EXECUTION, Setting
from fedaudit.suite.cell import Cell, carry_out, is_not_compared, look, missing, stale_attacks, untried, why_again
from fedaudit.suite.sharing import at_once
from fedaudit.suite.time_left import Stage, TimeLeft, Work
from fedaudit.units import bytes_text
from fedaudit.wire.traffic import Plan

# What a cell may differ in from one that was measured, nearest first, and how to say so.
NEARNESS = (
    ((), "this cell's own rounds"),
    (("seed",), "the same with another seed"),
    (("seed", "rounds"), "the same with other rounds"),
    (("seed", "rounds", "privacy"), "the same under other privacy"),
)


class Pace:
    """Seconds per round, per attack, and of the audits of epsilon, of what was measured so far."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])  # key: seconds, rounds
        self.attacks: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        self.audits: dict[str, float] = {}  # of all of them, per round of the run

    def learn(self, record: RunRecord | None, audits: Mapping[str, float] | None = None) -> None:
        """From a record that an earlier audit left, and how long its audits of epsilon took."""
        if record is None or not record.rounds:
            return
        if audits:
            self.audits |= dict.fromkeys(_keys(record.setting), sum(audits.values()) / len(record.rounds))
        self.add_rounds(record.setting, sum(row.wall_s for row in record.rounds), len(record.rounds))
        for key in _keys(record.setting):
            self.attacks[key] |= {
                (a.attack, a.threat): 0.0 if isinstance(a, NotRun) else a.wall_s for a in record.attacks
            }

    def add_rounds(self, setting: Setting, seconds: float, rounds: int) -> None:
        for key in _keys(setting):
            self.rounds[key][0] += seconds
            self.rounds[key][1] += rounds

    def per_round(self, setting: Setting) -> tuple[float, str] | None:
        """Seconds, and what they were taken from; None where nothing like it was measured."""
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
        """Seconds of all audits of epsilon of a run like this one; None where none was measured."""
        return next((self.audits[key] * setting.rounds for key in _keys(setting) if key in self.audits), None)


def _keys(setting: Setting) -> list[str]:
    return [setting.model_dump_json(exclude={*EXECUTION, *less}) for less, _ in NEARNESS]


# --- what a cell is to do, for the time that is left -------------------------------------------------------------

NOVEL = (4, 3, 1)  # of the kinds of `work_of`: method and protection; but for seed, rounds and amounts of noise; row
UNKNOWN = 1438 * 64.0  # numbers in a data set that only its files can tell: as many as in digits


def work_of(cell: Cell, record: RunRecord | None) -> Work:
    """Return what is to be done for a cell of which there is such a record; nothing is read, and nothing computed.

    Rounds and claims of epsilon count by the numbers in the records that are passed through, attacks by how many there
    are and by those numbers: that decides where nothing nearer than another method was measured.
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
    """How many numbers the training records of a setting hold."""
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
    """Return how long the report on so many cells takes, in starts of a worker: of processor time 1.7 s and 0.155 s a
    cell on the quickstart, where a start takes 9.1 s."""
    return (1.7 + 0.155 * cells) / 9.1


def novelty_first(works: Mapping[str, Work]) -> list[str]:
    """Return the cells in the order in which they tell most about the others: one of each method and protection first,
    then one of each row, then the other seeds. So a fault of a method shows early, too."""
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
    """In words, no more exact than an estimate is."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


# --- before anything runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """What is left to do for one cell. None: not known, and `note` says why."""

    cell: Cell
    state: str
    bytes: int | None
    seconds: float | None
    note: str = ""


def by_row(forecasts: list[Forecast]) -> list[tuple[str, str, str, str, str]]:
    """A line per row of the grid, its seeds together: what sets it apart, cells, state, bytes, time."""
    settings = [f.cell.setting.model_dump(exclude={"seed"}) for f in forecasts]
    varied = [key for key in settings[0] if key == "method" or any(s[key] != settings[0][key] for s in settings)]
    groups: dict[str, list[Forecast]] = defaultdict(list)
    for setting, one in zip(settings, forecasts, strict=True):
        parts = [(key, _short(v) if isinstance(v := setting[key], dict) else v) for key in varied]
        label = " ".join(str(v) if key in ("method", "privacy") else f"{key}={v}" for key, v in parts if v != "")
        groups[label].append(one)
    return [(label, str(len(of)), *_together(of)) for label, of in groups.items()]


def _together(of: list[Forecast]) -> tuple[str, str, str]:
    states = Counter(f.state for f in of)
    state = ", ".join(s if len(states) == 1 else f"{n} {s}" for s, n in states.items())
    sent, seconds = [f.bytes for f in of], [f.seconds for f in of]
    size = "?" if None in sent else bytes_text(sum(s or 0 for s in sent))
    return state, size, "?" if None in seconds else duration(sum(s or 0.0 for s in seconds))


def forecast(cells: list[Cell], measure: bool = False, force: bool = False, keep_stale: bool = False) -> list[Forecast]:
    """All cells. With `measure`, one round and the attacks of each kind of cell are tried out in a temporary folder.
    What other code made is to be run again, as an audit would, and the forecast says why."""
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
        method, plans = _plans(cell.setting)
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
    declared = method.traffic(plans[0])
    sizes = {} if declared is None else as_sent(method, cell.setting.compress, declared)[0]
    sent = None if declared is None else left * sum(size.payload for size in sizes.values())
    notes = [f"again: {cell.again}"] if cell.again else []
    notes += [] if declared is not None else ["its traffic is not declared"]
    seconds, note = _seconds(cell, record, left, pace)
    fresh = "again" if cell.again else "new"
    state = "attacks" if not left else f"{behind} of {cell.setting.rounds} rounds done" if behind else fresh
    return Forecast(cell, state, sent, seconds, "; ".join([*notes, note]))


def _plans(setting: Setting) -> tuple[Method, list[Plan]]:
    """Rounds as the method will declare them: of the data where they lie here, of their published size elsewhere."""
    if not available(setting.dataset, setting.data_dir):
        method, plan = make_plan(setting)
        return method, [dataclasses.replace(plan, t=t) for t in sorted({1, 2, setting.rounds})]
    world = world_of(setting.model_dump_json())
    if why := world.misfit():
        raise NotApplicable(f"{why}.")
    participants = list(range(max(1, round(setting.participation * setting.clients))))
    return world.method, [world.plan(t, participants) for t in sorted({1, 2, setting.rounds})]


def _try_out(cell: Cell) -> tuple[RunRecord | None, dict[str, float]]:
    """One round, the attacks and the audits of epsilon: the record, and how long the audits took."""
    with tempfile.TemporaryDirectory() as folder:
        setting = cell.setting.model_copy(update={"rounds": 1})
        trial = Cell(Path(folder) / "run", setting, cell.attacks, cell.threats, cell.trials)
        carry_out(trial)
        if trial.error:
            raise RunError(f"A round was tried, and failed: {trial.error}")
        record = look(trial)
        return record, {} if record is None else audit_seconds(trial.folder, record.transcript_digest)


def _seconds(cell: Cell, record: RunRecord | None, left: int, pace: Pace) -> tuple[float | None, str]:
    found = pace.per_round(cell.setting)
    if found is None:
        return None, "no run like it was measured yet"
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
        # They perform every client's tasks again: as long as the run at least, without its evaluation.
        audits = cell.setting.rounds * per_round if measured is None else measured
        note += ", audits of epsilon taken for as long as the run" if measured is None else ""
    return left * per_round + sum(one or 0.0 for one in attacks) + audits, note


def total(forecasts: list[Forecast], jobs: int) -> str:
    """One paragraph: how many cells, what they will send, how long it will take."""
    left = [f for f in forecasts if f.state not in ("done", "does not apply")]
    unsized, untimed = sum(f.bytes is None for f in left), sum(f.seconds is None for f in left)
    beside = at_once([f.cell.setting for f in left], max(1, min(jobs, len(left))))
    seconds = sum(f.seconds or 0.0 for f in left) / beside
    states = Counter("to do" if f in left else f.state for f in forecasts)
    lines = [f"{len(forecasts)} cells: " + ", ".join(f"{n} {state}" for state, n in states.items()) + "."]
    if left:
        sent = bytes_text(sum(f.bytes or 0 for f in left))
        lines.append(f"To send: {sent} of payload" + (f", and what {unsized} cells send." if unsized else "."))
    if left and untimed < len(left):
        more = f", and what {untimed} cells take that are unlike any measured one" if untimed else ""
        lines.append(f"Time: about {duration(seconds)} with {jobs} at a time{more}.")
    elif left:
        lines.append("Time: not known, for nothing like these cells was measured in this folder.")
        lines.append("--measure tries a round of each.")
    notes = Counter(f"{f.cell.setting.method}: {f.note}" for f in forecasts if f.note)
    return "\n".join([*lines, *(f"  {n} x {note}" for note, n in notes.items())])


def _short(table: dict[str, Any]) -> str:
    """A table in a table: enough to tell cells apart."""
    return ", ".join(
        f"{key} {' '.join(map(str, value.values()))}" if isinstance(value, dict) else f"{key}={value}"
        for key, value in table.items()
    )
