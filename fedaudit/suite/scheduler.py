"""Carrying out a suite: cells run in parallel processes, with one audit per folder, and can be resumed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedaudit.errors import FedauditError, RunError, SettingError
from fedaudit.progress import TimedWatch
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.device_errors import Crowding
from fedaudit.runtime.engines import Engine, make_engine
from fedaudit.runtime.folder import STALE, folder_name, locked
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.runtime.seeds_together import alike, stackable_setting
from fedaudit.runtime.starting_clients import first_setting
from fedaudit.setting import Setting
from fedaudit.suite.cell import Cell, carry_out, is_not_compared, look, stage_of, stale_attacks, why_again
from fedaudit.suite.forecast import learn, novelty_first, report_starts, work_of
from fedaudit.suite.forker import Forker
from fedaudit.suite.gpu_sharing import shared_gpu
from fedaudit.suite.ray_cells import carry_out_on_ray
from fedaudit.suite.suite_file import Suite, read_suite, save_suite
from fedaudit.suite.time_left import TimeLeft

PATIENCE = 10.0  # seconds to wait until the processes of a killed audit are gone
MOST = 8  # seeds of a row side by side: each has its records, states and messages in memory
TICK = 1.0  # seconds without news from a cell after which the time left is shown again
QUIET = 20  # after telling how far the audit is, wait so many times as long as that took: many cells take long to count
Where = Literal["here", "ray"]


def make_cells(suite: Suite, out: Path, engine: str | None = None, seeds_together: bool = False) -> list[Cell]:
    """Return the suite's cells, with their folders below `out`.

    A run from which others take their clients is a cell, too, and comes before them. It is attacked only if the suite
    lists it. With `seeds_together` all cells have the engine that trains clients together.
    """
    chosen = {} if engine is None else {"engine": engine}
    settings = [Setting.make(**{**setting.model_dump(), **chosen}) for setting in suite.cells()]
    if seeds_together:
        settings = [stackable_setting(setting) for setting in settings]
    listed = {folder_name(setting) for setting in settings}
    cells: dict[str, Cell] = {}

    def add(setting: Setting) -> None:
        name = folder_name(setting)
        if name in cells:
            return
        if (first := first_setting(setting)) is not None:
            add(first)
        attacks, trials = (suite.wanted(setting), suite.tries(setting)) if name in listed else ([], 0)
        cells[name] = Cell(out / "runs" / name, setting, attacks, suite.threats, trials)

    for setting in settings:
        add(setting)
    return list(cells.values())


def audit(
    suite: Suite | Path | str,
    out: Path | str,
    watch: TimedWatch | None = None,
    jobs: int = 1,
    engine: str | None = None,
    force: bool = False,
    keep_stale: bool = False,
    on: Where = "here",
    ray_address: str | None = None,
    report: bool = False,
    trust: bool = False,
    seeds_together: bool = False,
) -> list[Cell]:
    """Run all cells and attacks of a suite or of its file, and return the cells.

    A finished cell is not run again, unless other code than today's made it, or `force` is set. With `keep_stale`,
    results of other code count, too. A failing cell does not stop the rest.

    `on` says if cells run as processes of this machine or as tasks of a Ray cluster. `report` says that the caller will
    write a report afterwards, which counts in the time left. `trust` allows run folders to name code outside fedaudit.
    `seeds_together` carries out cells that differ in the seed alone side by side, with their clients as one stack.
    """
    suite, out = suite if isinstance(suite, Suite) else read_suite(Path(suite)), Path(out)
    cells = make_cells(suite, out, engine, seeds_together)
    on_ray = any(cell.setting.engine == "ray" for cell in cells)
    if on_ray and jobs > 1:
        raise SettingError(
            f"--jobs {jobs} does not go with the engine ray, which runs the clients of a cell in parallel. Leave "
            "one of the two out."
        )
    if on == "ray" and (on_ray or jobs > 1):
        what = "the engine ray" if on_ray else f"--jobs {jobs}"
        raise SettingError(f"--on ray already runs cells in parallel on the cluster. Leave {what} out.")
    if on == "ray" and seeds_together:
        raise SettingError("--on ray runs each cell as a task of its own. Leave --seeds-together out.")
    with locked(out, "audit", PATIENCE) as lock:  # workers inherit the lock
        records: dict[str, RunRecord | None] = {}
        for cell in cells:
            cell.keep_stale, cell.trust = keep_stale, trust
            with contextlib.suppress(FedauditError):  # a damaged record: its cell will say so
                _put_aside(cell, out, force, keep_stale)
                records[str(cell.folder)] = look(cell)
        save_suite(suite, out)
        at_a_time = jobs * max(map(len, _rows(cells))) if seeds_together else jobs
        progress = _Progress(
            cells, watch, TimeLeft(None if on == "ray" else at_a_time, report_starts(len(cells)) if report else 0.0)
        )
        todo = progress.plan(records)
        progress.tell("")
        sharing: str | None = None
        if on == "ray":
            carry_out_on_ray(
                _Queue(todo), lambda cell, what: progress.tell(f"{cell.setting.method}: {what}"), ray_address
            )
        elif on_ray:
            _here(todo, progress)
        else:
            with shared_gpu([cell.setting for cell in todo], min(jobs, len(todo))) as sharing:
                if sharing is not None:
                    progress.tell(sharing)
                _beside(todo, progress, jobs, lock, seeds_together)
        _save(out, cells, sharing)
        progress.end()
    if all(cell.status != "done" for cell in cells):
        first = next((cell for cell in cells if cell.status == "failed"), cells[0])
        raise RunError(f"No cell of the suite succeeded. {first.folder}: {first.reason}")
    return cells


def _put_aside(cell: Cell, out: Path, force: bool, keep_stale: bool) -> None:
    """Move the stale results of a cell aside, and note in the cell why they do not count. Nothing is deleted."""
    if not (cell.folder / "record.json").exists():
        return
    record = read_record(cell.folder)
    why = why_again(cell, record, force, keep_stale)
    if why is None and (attacks := stale_attacks(cell, record)) and not keep_stale:
        cell.again = f"attacks changed: {', '.join(attacks)}"
    if why is None:
        cell.not_compared = is_not_compared(cell, record)
        return
    with locked(cell.folder):
        number = next(n for n in itertools.count(1) if not (out / STALE / f"{cell.folder.name}.{n}").exists())
        (out / STALE).mkdir(exist_ok=True)
        cell.folder.rename(out / STALE / f"{cell.folder.name}.{number}")
    cell.again = why


def _save(out: Path, cells: list[Cell], sharing: str | None = None) -> None:
    """Write which cells this audit was about and what became of them, for a later report."""
    rows = [
        {
            "folder": str(c.folder.relative_to(out)), "status": c.status, "reason": c.reason,
            **({"label": c.setting.label} if c.setting.label else {}),
        }
        for c in cells
    ]  # fmt: skip
    write_atomic(
        out / "audit.json", json.dumps({"cells": rows, **({"gpu": sharing} if sharing else {})}, indent=1).encode()
    )


# --- progress --------------------------------------------------------------------------------------------------


class _Progress:
    """Tracks how far the cells are and how long the rest will take."""

    def __init__(self, cells: list[Cell], watch: TimedWatch | None, left: TimeLeft):
        self.cells, self.watch, self.left = cells, watch, left
        self.rounds: dict[str, float] = {}  # by folder, for cells under way: rounds done
        self.open: dict[str, Cell] = {}  # by folder: cells that have not ended
        self.what = ""
        self.quiet_until = 0.0  # seconds of the clock before which news of a step is kept back

    def plan(self, records: Mapping[str, RunRecord | None]) -> list[Cell]:
        """Return the cells that are to be carried out, in order, given what earlier audits left of them."""
        works = {}
        for cell in self.cells:
            key, record = str(cell.folder), records.get(str(cell.folder))
            work = work_of(cell, record)
            if record is not None:
                learn(self.left, work, cell, record)
            if cell.status == "to do":
                works[key], self.open[key] = work, cell
        order = novelty_first(works)
        for key in order:
            self.left.add(key, works[key])
        return [self.open[key] for key in order]

    def begin(self, cell: Cell) -> None:
        self.left.begun(str(cell.folder), time.monotonic())

    def put_back(self, cell: Cell) -> None:
        self.left.put_back(str(cell.folder))
        memory = "out of memory beside other cells, goes on when fewer are at work"
        said = memory if cell.crowded == "memory" else "the device failed beside other cells, goes on once more"
        self.tell(f"{cell.setting.method}: {said}")

    def step(self, cell: Cell, t: float, rounds: float, what: str) -> None:
        key, stage = str(cell.folder), stage_of(what)
        share = t / rounds if stage == "rounds" and rounds else 0.0
        self.left.progress(key, stage, share, time.monotonic())
        self.rounds[key] = t
        self.what = f"{cell.setting.method}: {what}"
        if time.monotonic() >= self.quiet_until:
            self.tell()

    def end(self) -> None:
        """Note that all cells are done. A report comes next, if the caller writes one."""
        self.left.reporting(time.monotonic())
        self.tell("writing the report" if self.left.report else "")

    def tell(self, what: str | None = None) -> None:
        """Report how far the audit is and what is being done; with None, repeat what was being done last."""
        now = time.monotonic()
        self.what = self.what if what is None else what
        for key, cell in list(self.open.items()):
            if cell.status != "to do":
                self.left.finished(key, now, cell.status)
                del self.open[key]
        if self.watch is None:
            return
        done = sum(self._share(cell) for cell in self.cells)
        finished = sum(cell.status != "to do" for cell in self.cells)
        text = f"{finished} of {len(self.cells)} cells" + (f", {self.what}" if self.what else "")
        self.watch(done, len(self.cells), text, self.left.left(now))
        self.quiet_until = time.monotonic() + QUIET * (time.monotonic() - now)

    def _share(self, cell: Cell) -> float:
        if cell.status != "to do":
            return 1.0
        return min(1.0, self.rounds.get(str(cell.folder), 0) / max(cell.setting.rounds, 1))


# --- in this process -------------------------------------------------------------------------------------------


def _here(todo: list[Cell], progress: _Progress) -> None:
    """Carry out one cell after another on one pool of Ray's workers. Starting a pool costs more than a small cell."""
    engines: dict[tuple[Any, ...], Engine] = {}
    try:
        waiting = _Queue(todo)
        while waiting.ready():
            cell = waiting.take()
            s = cell.setting
            key = (s.engine, s.together, s.device, s.workers, s.threads, s.gpu_fraction, s.ray_address)
            if key not in engines:
                engines[key] = make_engine(s)
            progress.begin(cell)
            carry_out(cell, functools.partial(progress.step, cell), engines[key])
            progress.tell("")
    finally:
        for engine in engines.values():
            engine.close()


# --- in parallel processes ----------------------------------------------------------------------------


class _Worker:
    """The audit's side of a process that carries out cells."""

    shared: str | None = None  # a folder in which processes leave for each other what all cells would compute alike

    def __init__(self, forker: Forker):
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self.cells: list[Cell] = []
        self.answered: set[int] = set()  # which of them have ended, by their places in that list
        self.again: list[Cell] = []  # those that lacked memory, or the device, beside others
        self.beside = 0  # the most others that were at work while its cells were carried out
        self.start(forker)
        self._text = b""

    def start(self, forker: Forker) -> None:
        self.process = forker.worker(self.log)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.replies = self.process.stdin.fileno(), self.process.stdout.fileno()

    def give(self, cells: list[Cell]) -> None:
        """Have cells carried out: one, or several that differ in the seed alone."""
        self.cells, self.answered, self.beside = cells, set(), 0
        requests = [
            {
                "folder": str(cell.folder),
                "setting": cell.setting.model_dump(),
                "attacks": cell.attacks,
                "threats": cell.threats,
                "trials": cell.trials,
                "keep_stale": cell.keep_stale,
                "trust": cell.trust,
            }
            for cell in cells
        ]
        data = json.dumps({"cells": requests, "shared": self.shared}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it is gone already, which the end of its replies will show
            while data:
                data = data[os.write(self.requests, data) :]

    def read(self) -> list[dict[str, Any]] | None:
        """Return the complete replies that have come; None when the process has ended."""
        data = os.read(self.replies, 1 << 16)
        *lines, self._text = (self._text + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f" Its last line of output: {lines[-1]}" if lines else ""

    def hang_up(self) -> None:
        """Close the pipe, at whose end the process and its cell stop."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        self.hang_up()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


class _Queue:
    """Cells to do in order. A cell waits for the run from which it takes its clients."""

    def __init__(self, cells: list[Cell]):
        self.cells = list(cells)
        self.firsts = {cell.folder: cell for cell in cells}

    def ready(self) -> bool:
        for cell in list(self.cells):
            before = self._first(cell)
            if before is not None and before.status in ("failed", "refused"):
                cell.status = "failed"
                cell.reason = f"its clients come from {before.folder.name}, which {before.status}: {before.reason}"
                self.cells.remove(cell)
        return any(map(self._free, self.cells))

    def put_back(self, cells: list[Cell]) -> None:
        """Have cells carried out again, before all others."""
        self.cells[:0] = cells

    def take(self) -> Cell:
        cell = next(filter(self._free, self.cells))
        self.cells.remove(cell)
        return cell

    def take_row(self) -> list[Cell]:
        """Return the next cell, and with it those that differ from it in the seed alone, up to a number."""
        first = self.take()
        rest = [cell for cell in self.cells if self._free(cell) and alike(first.setting, cell.setting)][: MOST - 1]
        for cell in rest:
            self.cells.remove(cell)
        return [first, *rest]

    def _free(self, cell: Cell) -> bool:
        before = self._first(cell)
        return before is None or before.status == "done"

    def _first(self, cell: Cell) -> Cell | None:
        first = first_setting(cell.setting)
        return None if first is None else self.firsts.get(cell.folder.parent / folder_name(first))


def _rows(cells: list[Cell]) -> list[list[Cell]]:
    """Return the cells in groups of those that differ in the seed alone, as they are carried out side by side."""
    rows: list[list[Cell]] = []
    for cell in cells:
        for row in rows:
            if len(row) < MOST and alike(row[0].setting, cell.setting):
                row.append(cell)
                break
        else:
            rows.append([cell])
    return rows


def _beside(todo: list[Cell], progress: _Progress, jobs: int, lock: int, seeds_together: bool = False) -> None:
    """Carry out so many cells at a time. One that lacks memory beside others goes on beside fewer, one that lost the
    device goes on once more."""
    waiting = _Queue(todo)
    preload = ["opacus"] if any(cell.setting.privacy for cell in todo) else []  # for DP-SGD and ledgers
    selector = selectors.DefaultSelector()
    workers: list[_Worker] = []
    forker = Forker(lock, preload)
    shared = tempfile.TemporaryDirectory(prefix="fedaudit-audit-", ignore_cleanup_errors=True)

    def start() -> None:
        worker = _Worker(forker)
        worker.shared = shared.name
        workers.append(worker)
        selector.register(worker.replies, selectors.EVENT_READ, worker)
        give(worker)

    def give(worker: _Worker) -> None:
        cells = waiting.take_row() if seeds_together else [waiting.take()]
        for cell in cells:
            progress.begin(cell)
        worker.give(cells)
        busy = [one for one in workers if one.cells]
        for one in busy:
            one.beside = max(one.beside, len(busy) - 1)

    def end(worker: _Worker) -> None:
        selector.unregister(worker.replies)
        workers.remove(worker)
        worker.close()

    try:
        while len(workers) < jobs and waiting.ready():
            start()
        while workers:
            heard = selector.select(TICK)
            if not heard:
                progress.tell()
            for key, _ in heard:
                worker: _Worker = key.data
                replies = worker.read()
                busy = sum(bool(one.cells) for one in workers)
                for reply in replies or ():
                    _heed(worker, reply, progress)
                if replies is None:  # the process has ended
                    _heed(worker, {"over": worker.process.wait()}, progress)
                if worker.again and not worker.cells:
                    waiting.put_back(worker.again)
                    if any(cell.crowded == "memory" for cell in worker.again):
                        jobs = max(1, min(jobs, busy) - 1)
                    worker.again = []
                if not worker.cells and (replies is None or not waiting.ready() or len(workers) > jobs):
                    end(worker)
                elif not worker.cells:
                    give(worker)
                while len(workers) < jobs and waiting.ready():
                    start()
    finally:
        for worker in workers:
            worker.hang_up()
        forker.close()
        for worker in list(workers):
            end(worker)
        selector.close()
        shared.cleanup()


def _others_may_have_caused(cell: Cell, crowded: Crowding | None, beside: int) -> bool:
    """Return whether a cell that failed is to be tried again, because cells beside it may have been the reason.

    Without memory it goes on beside fewer, until it is alone. A device is lost to a neighbour that was killed, which is
    over then: a cell that loses it twice is at fault itself.
    """
    return bool(beside) and (crowded == "memory" or (crowded == "device" and cell.crowded != "device"))


def _heed(worker: _Worker, reply: dict[str, Any], progress: _Progress) -> None:
    """Note what a worker says."""
    if not worker.cells:
        return
    if "t" in reply:
        progress.step(worker.cells[reply["cell"]], reply["t"], reply["rounds"], reply["what"])
    elif "status" in reply:
        cell = worker.cells[reply["cell"]]
        worker.answered.add(reply["cell"])
        if _others_may_have_caused(cell, reply["crowded"], worker.beside):
            cell.crowded = reply["crowded"]
            worker.again.append(cell)
            progress.put_back(cell)
        else:
            cell.status, cell.reason = reply["status"], reply["reason"]
    else:
        how = f"signal {-reply['over']}" if reply["over"] < 0 else f"exit code {reply['over']}"
        less = "fewer --jobs" if len(worker.cells) == 1 else "fewer --jobs, or leave out --seeds-together"
        for i, cell in enumerate(worker.cells):
            if i not in worker.answered:
                cell.status = "failed"
                cell.reason = (
                    f"its process ended with {how}, perhaps because memory ran out. Try {less}.{worker.last_words()}"
                )
        worker.cells = []
        progress.tell("")
