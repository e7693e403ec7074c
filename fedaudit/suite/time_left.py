"""How long an audit will take from here: from what it has done and measured so far, stage by stage.

A cell has four stages. What a stage took in one cell is what it will take in cells like it, the nearest that was
measured; how much of it there is to do (its units) corrects for what differs. The cells that wait are then dealt out to
the jobs in their order, as the audit will do, and the report comes last. Nothing is smoothed: an estimate moves when
something was measured.

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
START = 3.0  # seconds that a process takes to start at least; a cell in the audit's own process takes none
GUESSED = 0.5  # of what is left, that may be unlike anything measured: beyond, an estimate has no ground
LATE = 0.5  # what outlasts its estimate is taken to need half as long again as it is late
LEAST = 0.05  # of its estimate, that a stage under way still needs at least


@dataclass(frozen=True)
class Work:
    """What a cell is to do.

    `kinds` names what it is like, nearest first: cells that share a name are alike so far. The first name is the cell's
    own, the second that of its row: the same but for the seed. `units` is how much of each stage there is; a stage with
    none is left out. `behind` is the share of its rounds that an earlier audit has made. `near` is how many of the
    kinds are near enough for more than a guess: those after them hold other methods, too.
    """

    kinds: tuple[str, ...]
    units: Mapping[Stage, float]
    behind: float = 0.0
    near: int = 99

    @property
    def row(self) -> str:
        return self.kinds[1]

    def share(self, stage: Stage) -> float:
        """Return what part of a stage is to be done before the cell is begun."""
        return 1 - self.behind if stage == "rounds" else 1.0


@dataclass
class _Running:
    """A cell under way: its stage, since when, how much of it was done at that instant."""

    stage: Stage
    since: float
    share: float
    counts: bool  # whether its start tells how long another will take to start


_Rates = dict[tuple[Stage, str], list[float]]  # by stage and kind: seconds, and units that took them


class TimeLeft:
    """Told what begins, goes on and ends, it says how many seconds are left."""

    def __init__(self, jobs: int | None, report: float = 0.0):
        """`jobs`: how many cells are carried out at a time; None: nobody knows, and nobody says when one begins.
        `report`: how long what comes after the last of them takes, in starts of a process: both are the work of one
        process that computes little, and how long a start takes on this machine every audit measures."""
        self.jobs, self.report = jobs, report
        self._works: dict[str, Work] = {}
        self._waiting: dict[str, Work] = {}  # in the order in which they will be taken
        self._running: dict[str, _Running] = {}
        self._over: dict[str, Work] = {}
        self._measured: _Rates = defaultdict(lambda: [0.0, 0.0])  # in this audit
        self._before: _Rates = defaultdict(lambda: [0.0, 0.0])  # in earlier ones, perhaps on another machine
        self._refused: set[str] = set()  # rows
        self._begun = 0
        self._starts: list[float] = []  # seconds, of the first of each job
        self._first: float | None = None  # when it was asked first
        self._reporting: float | None = None  # since when

    # --- what there is to do, and what is known of it before ---

    def add(self, cell: str, work: Work) -> None:
        """Note a cell that is to be carried out, after those that were added before it."""
        self._works[cell] = self._waiting[cell] = work

    def measured(self, kinds: tuple[str, ...], stage: Stage, seconds: float, units: float, before: bool) -> None:
        """Note how long so much of a stage took in a cell of these kinds. `before`: in an earlier audit, which counts
        where this one has measured nothing as near."""
        for kind in kinds:
            of = (self._before if before else self._measured)[stage, kind]
            of[0] += seconds
            of[1] += units

    # --- what happens ---

    def begun(self, cell: str, now: float) -> None:
        """Note that a cell is being carried out. The first of each job wait for their process: they tell nothing."""
        self._waiting.pop(cell)
        self._running[cell] = _Running("start", now, 0.0, self._begun >= (self.jobs or 1))
        self._begun += 1

    def progress(self, cell: str, stage: Stage, share: float, now: float) -> None:
        """Note how much of a stage is done. A later stage than the last one: that one is over."""
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
        """Note the end of a cell. Where it was refused, those of its row will be, too; a cell that failed tells nothing
        of how long its last stage takes."""
        work, at = self._works[cell], self._running.pop(cell, None)
        self._waiting.pop(cell, None)
        self._over[cell] = work
        if status == "refused":
            self._refused.add(work.row)
        elif status == "done" and at is not None:
            self._note(cell, at, now, 0.0 if at.stage == "rounds" else work.units.get(at.stage, 0.0))

    def reporting(self, now: float) -> None:
        """Note that all cells are through, and the report is being written."""
        self._reporting = now

    def _note(self, cell: str, at: _Running, now: float, units: float) -> None:
        if at.stage == "start" and not at.counts:
            self._starts.append(now - at.since)
        else:
            self.measured(self._works[cell].kinds, at.stage, now - at.since, units, before=False)

    # --- the estimate ---

    def left(self, now: float) -> float | None:
        """Return the seconds that are left; None while nothing was measured that could tell."""
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
        """Whether a round of something like it was measured."""
        return any(("rounds", kind) in of for kind in work.kinds[: work.near] for of in (self._measured, self._before))

    def _report(self) -> float:
        return self.report * max(START, sum(self._starts) / max(1, len(self._starts)))

    def _by_share(self, now: float) -> float | None:
        """Where only ends are seen: as long as so far for as much as so far."""
        self._first = now if self._first is None else self._first
        done, rest = (sum(w.units.get("rounds", 0.0) for w in of.values()) for of in (self._over, self._waiting))
        return (now - self._first) * rest / done + self._report() if done else None

    def _whole(self, work: Work, late: Mapping[tuple[Stage, str], float]) -> float | None:
        """All of a cell that waits."""
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
        """What is left of a cell under way: of its stage, and the stages after it."""
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
        """A whole stage, at the rate of the nearest cell in which it was measured; None where it never was."""
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
        """Seconds per unit of stages that are under way and outlast their estimate: for others like them, of which
        none was measured to the end."""
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
    """What is left of something that should take so long and has been going on for so long."""
    return max(wanted - gone, LEAST * wanted + LATE * max(0.0, gone - wanted))
