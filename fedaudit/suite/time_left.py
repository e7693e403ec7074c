"""The estimate of the time that an audit still needs, from what it has done and measured so far.

A cell has four stages. A stage is expected to take as long as it took in the most similar cell that was measured,
scaled by how much there is to do (its units). The waiting cells are then dealt out to the jobs in their order, as the
audit will do, and the report comes last. Nothing is smoothed: an estimate changes when something was measured.

Nothing here runs anything or looks at a clock: the time is an argument.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Stage = Literal["start", "rounds", "attacks", "claims"]
STAGES: tuple[Stage, ...] = ("start", "rounds", "attacks", "claims")
START = 3.0  # least seconds that a process takes to start; a cell in the audit's own process takes none
GUESSED = 0.5  # share of the rest that may be unlike anything measured; beyond it, there is no estimate
LATE = 0.5  # a stage that is late by x seconds is expected to need another x / 2
LEAST = 0.05  # share of its estimate that a stage under way is always expected to need


@dataclass(frozen=True)
class Work:
    """The work of one cell.

    `kinds` names groups of similar cells, the narrowest group first. The first is the cell alone, the second its row,
    which differs in the seed only. `units` is how much of each stage there is; a stage without units is left out.
    `behind` is the share of its rounds that an earlier audit has made. `near` is how many of the kinds are near enough
    for more than a guess: the kinds after them hold other methods, too.
    """

    kinds: tuple[str, ...]
    units: Mapping[Stage, float]
    behind: float = 0.0
    near: int = 99

    @property
    def row(self) -> str:
        return self.kinds[1]

    def share(self, stage: Stage) -> float:
        """Return the part of a stage that is still to be done when the cell begins."""
        return 1 - self.behind if stage == "rounds" else 1.0


@dataclass
class _Running:
    """A cell under way: its stage, the time `since` the last report, and the share done by then."""

    stage: Stage
    since: float
    share: float
    counts: bool  # True if its start tells how long other starts will take


_Rates = dict[tuple[Stage, str], list[float]]  # by stage and kind: seconds, and the units done in them


class TimeLeft:
    """Estimates the seconds left from reports of what begins, goes on and ends."""

    def __init__(self, jobs: int | None, report: float = 0.0):
        """Start an estimate without any cells.

        `jobs` is how many cells run at a time; None if this is unknown, and then nobody says when a cell begins.
        `report` is how long the report after the last cell takes, counted in starts of a process: both are the work
        of one process that computes little, and every audit measures how long a start takes on this machine."""
        self.jobs, self.report = jobs, report
        self._works: dict[str, Work] = {}
        self._waiting: dict[str, Work] = {}  # in the order in which they will run
        self._running: dict[str, _Running] = {}
        self._over: dict[str, Work] = {}
        self._measured: _Rates = defaultdict(lambda: [0.0, 0.0])  # in this audit
        self._before: _Rates = defaultdict(lambda: [0.0, 0.0])  # in earlier audits, perhaps on another machine
        self._refused: set[str] = set()  # rows
        self._begun = 0
        self._starts: list[float] = []  # seconds that the first start of each job took
        self._first: float | None = None  # the time of the first question
        self._reporting: float | None = None  # the time when the report began

    # --- the work, and what earlier audits measured ---

    def add(self, cell: str, work: Work) -> None:
        """Add a cell that is to be carried out after all cells added before it."""
        self._works[cell] = self._waiting[cell] = work

    def measured(self, kinds: tuple[str, ...], stage: Stage, seconds: float, units: float, before: bool) -> None:
        """Note that `units` of a stage took `seconds` in a cell of these kinds.

        `before` is True for a figure of an earlier audit. It counts only if this audit has measured nothing as near."""
        for kind in kinds:
            of = (self._before if before else self._measured)[stage, kind]
            of[0] += seconds
            of[1] += units

    # --- what happens ---

    def begun(self, cell: str, now: float) -> None:
        """Note that a cell began. The first cell of each job waits for its process, so its start tells nothing."""
        self._waiting.pop(cell)
        self._running[cell] = _Running("start", now, 0.0, self._begun >= (self.jobs or 1))
        self._begun += 1

    def progress(self, cell: str, stage: Stage, share: float, now: float) -> None:
        """Note how much of a stage is done. If the stage is later than the last one reported, the last one is over."""
        at, work = self._running[cell], self._works[cell]
        if stage != at.stage:
            if at.stage != "rounds":
                self._note(cell, at, now, work.units.get(at.stage, 0.0))
            else:
                self._note(cell, at, now, 0.0)  # its rounds have been noted, one by one
            at.stage, at.since, at.share = stage, now, share
        elif share > at.share:
            self._note(cell, at, now, (share - at.share) * work.units.get(stage, 0.0))
            at.since, at.share = now, share

    def finished(self, cell: str, now: float, status: str = "done") -> None:
        """Note the end of a cell. If it was refused, the others of its row will be, too. A cell that failed tells
        nothing about how long its last stage takes."""
        work, at = self._works[cell], self._running.pop(cell, None)
        self._waiting.pop(cell, None)
        self._over[cell] = work
        if status == "refused":
            self._refused.add(work.row)
        elif status == "done" and at is not None:
            self._note(cell, at, now, 0.0 if at.stage == "rounds" else work.units.get(at.stage, 0.0))

    def put_back(self, cell: str) -> None:
        """Note that a cell will begin again. What it has done so far tells nothing."""
        self._running.pop(cell)
        self._waiting = {cell: self._works[cell], **self._waiting}

    def reporting(self, now: float) -> None:
        """Note that all cells are done and the report is being written."""
        self._reporting = now

    def _note(self, cell: str, at: _Running, now: float, units: float) -> None:
        if at.stage == "start" and not at.counts:
            self._starts.append(now - at.since)
        else:
            self.measured(self._works[cell].kinds, at.stage, now - at.since, units, before=False)

    # --- the estimate ---

    def left(self, now: float) -> float | None:
        """Return the seconds that are left; None while too little was measured."""
        if self._reporting is not None:
            return _rest(self._report(), now - self._reporting)
        if self.jobs is None:
            return self._by_share(now)
        late = self._late(now)
        jobs, guessed, total = [], 0.0, 0.0
        for cell, at in self._running.items():
            rest = self._rest_of(cell, at, now, late)
            if rest is None:
                return None
            jobs.append(rest)
            total += rest
            guessed += 0.0 if self._is_near(self._works[cell]) else rest
        jobs += [0.0] * (self.jobs - len(jobs))
        heapq.heapify(jobs)
        for work in self._waiting.values():
            whole = self._whole(work, late)
            if whole is None:
                return None
            heapq.heapreplace(jobs, jobs[0] + whole)
            total += whole
            guessed += 0.0 if self._is_near(work) else whole
        return None if guessed > GUESSED * total else max(jobs) + self._report()

    def _is_near(self, work: Work) -> bool:
        """Say if a round of a similar cell was measured."""
        return any(("rounds", kind) in of for kind in work.kinds[: work.near] for of in (self._measured, self._before))

    def _report(self) -> float:
        return self.report * max(START, sum(self._starts) / max(1, len(self._starts)))

    def _by_share(self, now: float) -> float | None:
        """Return the seconds left if only the ends of cells are known, at the pace so far."""
        self._first = now if self._first is None else self._first
        done, rest = (sum(w.units.get("rounds", 0.0) for w in of.values()) for of in (self._over, self._waiting))
        return (now - self._first) * rest / done + self._report() if done else None

    def _whole(self, work: Work, late: Mapping[tuple[Stage, str], float]) -> float | None:
        """Return the seconds that a waiting cell will take."""
        if work.row in self._refused:
            return 0.0
        total = 0.0
        for stage in STAGES:
            seconds = self._seconds(work, stage, late)
            if seconds is None:
                return None
            total += seconds * work.share(stage)
        return total

    def _rest_of(self, cell: str, at: _Running, now: float, late: Mapping[tuple[Stage, str], float]) -> float | None:
        """Return the seconds left for a cell under way: the rest of its stage, and the stages after it."""
        work = self._works[cell]
        here = self._seconds(work, at.stage, late)
        if here is None:
            return None
        total = _rest(here * (1 - at.share), now - at.since)
        for stage in STAGES[STAGES.index(at.stage) + 1 :]:
            seconds = self._seconds(work, stage, late)
            if seconds is None:
                return None
            total += seconds * work.share(stage)
        return total

    def _seconds(self, work: Work, stage: Stage, late: Mapping[tuple[Stage, str], float]) -> float | None:
        """Return the seconds of a whole stage, at the rate of the nearest measured cell; None if there is none."""
        units = work.units.get(stage, 0.0)
        if not units:
            return 0.0
        for kind in work.kinds:
            seconds, of = self._measured.get((stage, kind), (0.0, 0.0))
            if of:
                return units * seconds / of
            if (stage, kind) in late:
                return units * late[stage, kind]
            seconds, of = self._before.get((stage, kind), (0.0, 0.0))
            if of:
                return units * seconds / of
        if stage == "claims":  # they perform every client's tasks again
            return self._seconds(work, "rounds", late)
        return 0.0 if stage == "start" else None

    def _late(self, now: float) -> dict[tuple[Stage, str], float]:
        """Return seconds per unit of stages under way that outlast their estimate.

        They serve as the rate for similar cells of which none was measured to the end."""
        found: dict[tuple[Stage, str], float] = {}
        for cell, at in self._running.items():
            work = self._works[cell]
            units, seconds = work.units.get(at.stage, 0.0) * (1 - at.share), self._seconds(work, at.stage, {})
            if at.stage == "start" or not units or seconds is None:
                continue
            gone, wanted = now - at.since, seconds * (1 - at.share)
            if gone > wanted:
                for kind in work.kinds:
                    rate = (gone + _rest(wanted, gone)) / units
                    found[at.stage, kind] = max(rate, found.get((at.stage, kind), 0.0))
        return found


def _rest(wanted: float, gone: float) -> float:
    """Return the seconds left for something that should take `wanted` and has run for `gone`."""
    return max(wanted - gone, LEAST * wanted + LATE * max(0.0, gone - wanted))
