"""Runs one setting: rounds of a method over a federation, recorded, metered, evaluated, resumable."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedaudit.aggregation.secure.messages import SumFacts
from fedaudit.errors import RunError, SettingError
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import seeded
from fedaudit.runtime import nursery
from fedaudit.runtime.asking import Asker, RoundSoFar, asker, participants_of, quorum_of
from fedaudit.runtime.code_digest import code_of_setting, differences
from fedaudit.runtime.device_errors import device_error, explained
from fedaudit.runtime.engines import Engine
from fedaudit.runtime.engines.isolated import IsolatedEngine
from fedaudit.runtime.folder import clear_unfinished, default_folder, folder_name, locked
from fedaudit.runtime.lockstep import here
from fedaudit.runtime.meter import Meter, Span, peak_rss
from fedaudit.runtime.method import check_path, find_function, offers_next_points
from fedaudit.runtime.party import Cohort
from fedaudit.runtime.plan import in_sums, unplanned
from fedaudit.runtime.run_commit import commit, count, enter, finish
from fedaudit.runtime.run_opening import check_applicable, check_records, check_state, open_run
from fedaudit.runtime.run_record import (
    RoundRecord,
    RunRecord,
    read_record,
)
from fedaudit.runtime.run_state import RunState
from fedaudit.runtime.scores import Utility
from fedaudit.runtime.starting_clients import first_setting
from fedaudit.runtime.sums import summing_of
from fedaudit.runtime.task import compute
from fedaudit.runtime.utility import evaluate, sampling_note
from fedaudit.runtime.world import chosen_engine
from fedaudit.setting import Setting
from fedaudit.training.cuda_graphs import begin_run, listening, unrecorded
from fedaudit.training.stacked.kept_steps import forget as forget_recorded_steps
from fedaudit.units import MANY
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import decode, encode
from fedaudit.wire.message import Down, Record, Size
from fedaudit.wire.traffic import compare


def run(
    setting: Setting | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    engine: Engine | str | None = None,
    refuse_idle: bool = False,
    noise_key: Path | str | None = None,
    overwrite: bool = False,
    twin_sets: int = 1,
    **values: Any,
) -> RunRecord:
    """Run a setting (or `method=..., dataset=..., rounds=...`) and leave everything in the folder `out`.

    `engine` is the setting of that name, or an engine that is already running. `refuse_idle` refuses a privacy setting
    if none of its policies covers anything that the method releases; otherwise it runs, and the record says so.
    `noise_key` is the file of another run's secret: the noise is then the same as there.
    `overwrite` starts anew in the folder of a run of ours that did not finish.
    `twin_sets` is the number of sets of other records with which each client that has a twin is compared.
    """
    if isinstance(engine, str):
        values["engine"], engine = engine, None
    if setting is not None and values:
        setting = Setting.make(**{**setting.model_dump(), **values})
    setting = setting or Setting.make(**values)
    # So that the record says which engine it was.
    setting = setting.model_copy(update={"engine": chosen_engine(setting)})
    folder = Path(out) if out is not None else default_folder(setting)
    first = first_setting(setting)
    beside = None if first is None else folder.parent / folder_name(first)
    if first is not None and beside is not None and (not _is_done(beside) or _is_other_code(beside, first)):
        run(first, out=beside, resume=True, watch=watch, engine=engine)
    with locked(folder):
        if overwrite:
            clear_unfinished(folder)
        if not (folder / "record.json").exists():
            nursery.start_for(setting.privacy, setting.twins)  # while the run reads its data
        return _go(
            RunState(setting, folder, resume, watch or unwatched, engine, refuse_idle, beside, noise_key, twin_sets)
        )


def _is_other_code(folder: Path, setting: Setting) -> bool:
    made_by = read_record(folder).code
    return made_by is not None and bool(differences(made_by, code_of_setting(setting)))


def _is_done(folder: Path) -> bool:
    return (folder / "record.json").exists() and read_record(folder).status == "done"


class RoundByRound:
    """A run whose caller says when the next round is carried out, so that each can be timed.

    Use it as `with RoundByRound(setting, out) as run: run.round()`. A round is on disk after `settle`. Nothing is
    evaluated before the last round of the setting, and the run is not finished: its record says "running".
    """

    def __init__(self, setting: Setting, out: Path | str):
        self.setting = setting.model_copy(update={"engine": chosen_engine(setting), "eval_every": MANY})
        if self.setting.start is not None:
            raise SettingError(
                f"The run of {setting.method} starts with the clients of another run, which cannot be taken round by "
                "round. Leave out `start`."
            )
        self.folder = Path(out)
        self._closing = ExitStack()

    def __enter__(self) -> RoundByRound:
        with ExitStack() as closing:
            closing.enter_context(locked(self.folder))
            self._run = run = RunState(self.setting, self.folder, False, unwatched, None, False)
            closing.callback(_close, run)
            with _explaining(run), compute(run.world):
                check_records(run)
                open_run(run)
            closing.callback(run.transcript.close)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def record(self) -> RunRecord:
        """Return the record up to the last round."""
        return self._run.record

    def round(self) -> RoundRecord:
        """Carry out the next round and return its row of the record. It is written behind what follows."""
        t = len(self.record.rounds) + 1
        if t > self.setting.rounds:
            raise RunError(
                f"{self.folder}: all {self.setting.rounds} rounds of the run are over. Give it more with rounds=..."
            )
        with _explaining(self._run), compute(self._run.world):
            _one_round(self._run, t)
        if self._run.world.device.type == "cuda":
            torch.cuda.synchronize(self._run.world.device)
        return self.record.rounds[-1]

    def settle(self) -> None:
        """Wait until everything is on disk."""
        self._run.store.settle()


def _go(run: RunState) -> RunRecord:
    if here() is None:  # runs that take turns begin together
        begin_run()
    try:
        with _explaining(run):
            return _all_rounds(run)
    finally:
        _close(run)


def _close(run: RunState) -> None:
    if "twins" in vars(run):
        run.twins.close()
    run.store.abandon()  # after an error: a resumed run finds the last whole round
    if run.given_engine is None and "engine" in vars(run):
        run.engine.close()
    forget_recorded_steps()


@contextmanager
def _explaining(run: RunState) -> Iterator[None]:
    """Tell of slower steps at once, and explain the errors of a device."""
    try:
        with listening(run.tell_slower):
            yield
    except Exception as e:
        found = device_error(e, "server")
        if found is None:
            raise
        run.log(f"round {run.now}, {found.who}: {''.join(traceback.format_exception(e))}")
        raise explained(found, max(run.now, 1), run.folder, run.setting) from e


def _all_rounds(run: RunState) -> RunRecord:
    with compute(run.world):
        check_records(run)
        open_run(run)
        if run.record.status == "done" and run.started >= run.setting.rounds:
            run.transcript.close()
            return read_record(run.folder)
        if run.refuse_idle:
            check_applicable(run)
        try:
            for t in range(run.started + 1, run.setting.rounds + 1):
                _one_round(run, t)
            finish(run)
        finally:
            run.transcript.close()
    return run.record


def _one_round(run: RunState, t: int) -> None:
    begun, turn = time.perf_counter(), here()
    waited, seeds = (0.0, []) if turn is None else (turn.waited_s, turn.beside)
    run.now = t
    run.watch(t - 1, run.setting.rounds, f"round {t}")
    participants = participants_of(run.setting, t)
    at = run.world.device if run.engine.in_process and run.world.compression is None else None
    wire = Wire(run.transcript, t, run.answers, at)
    run.transcript.begin_round(t)
    meter = Meter("server", t, run.world.device, run.setting.flops)
    if turn is not None:
        turn.away = meter.away
    so_far = RoundSoFar(t, wire, meter, quorum_of(run.setting, participants))
    ask = asker(run, so_far)
    summing = summing_of(run, so_far, ask)
    cohort = Cohort(participants, ask, summing.mean)
    if not participants:  # drawn by Poisson, and nobody was
        after = run.state
        run.note([f"round {t}: no client was drawn, and the state stayed as it was"])
    elif run.isolated is not None:
        after = _round_in_own_process(run, run.isolated, t, cohort, ask)
    else:
        with seeded(run.setting.seed, "server", t, device=run.world.device), meter.span("round"):
            after = run.method.round(run.state, run.server(t, meter), cohort)
        check_state(run, after, "round")
        run.timings.add(meter.close(), peak_rss(), meter.peak_gpu())
    run.note(f"steps not recorded: {reason}" for reason in unrecorded)
    run.world.shared_work.forget()
    if participants:
        _check_traffic(run, t, participants, wire, summing.facts)
    end = run.transcript.end_round_behind(t)
    utility = _evaluate_round(run, t, after)
    count(run, wire)
    enter(run, t, [*so_far.entries, *so_far.alike.entries(), *summing.entries], wire)
    up, down = wire.traffic.total("up"), wire.traffic.total("down")
    wall = time.perf_counter() - begun
    run.record.rounds.append(
        RoundRecord(
            round=t,
            participants=participants,
            absent=so_far.absent,
            redone=len(so_far.redone),
            up_payload=up[0],
            up_wire=up[1],
            down_payload=down[0],
            down_wire=down[1],
            utility=utility,
            sums=summing.records,
            diagnostics=run.method.diagnostics(after),
            wall_s=round(wall, 4),
            seeds=len(seeds) + 1 if seeds else None,
            share_s=round(wall - (turn.waited_s - waited), 4) if turn is not None and seeds else None,
        )
    )
    commit(run, t, after, end)
    run.watch(t, run.setting.rounds, f"round {t}")


def _round_in_own_process(run: RunState, apart: IsolatedEngine, t: int, cohort: Cohort, ask: Asker) -> Record:
    """Carry out the round in the server's own process; what it asks comes here, and goes over the wire."""

    def answers(
        path: str, messages: Mapping[int, bytes], how: Mapping[str, Any] | None
    ) -> tuple[dict[int, bytes], list[int], int]:
        check_path(run.method, path)
        if how is None:
            return ask(cohort, path, messages), list(cohort.ids), 0
        # A broadcast came as one object, and stays one.
        decoded = {id(blob): decode(blob, Down, device=run.world.device) for blob in messages.values()}
        alike = len(decoded) == 1 and sorted(messages) == sorted(cohort.ids)
        message = next(iter(decoded.values())) if alike else {k: decoded[id(b)] for k, b in messages.items()}
        mean = cohort.mean(find_function(run.method, path), message, by=how["by"])
        return {0: encode(mean.value)}, list(cohort.ids), mean.count

    said, (blob,) = apart.server("round", t, encode(run.state), list(cohort.ids), answers)
    run.timings.add([Span(**span) for span in said["spans"]], said["rss"], said["gpu"])
    run.note(f"steps not recorded: {reason}" for reason in said["unrecorded"])
    return decode(blob, Record, device=run.world.device)


def _check_traffic(run: RunState, t: int, participants: list[int], wire: Wire, sums: Sequence[SumFacts]) -> None:
    plan = run.world.plan(t, participants, asks=wire.traffic.asks, choices=wire.traffic.choices)
    declared = run.method.traffic(plan)
    run.record.traffic_declared = declared is not None
    if run.setting.aggregate == "secure" and declared is not None:
        declared = in_sums(run.method, declared, sums)
    grown = [name for way, name in wire.traffic.sizes if way == "up" and name in run.world.absent(t)]
    if sent := [name for name in sorted(grown) if wire.traffic.sizes["up", name] != Size()]:
        raise RunError(
            f"{type(run.method).__name__}, round {t}: {', '.join(sent)} was sent, and the traffic that was "
            "declared before the run leaves it out. That it is None elsewhere would tell of the records, and "
            "nobody paid for that. Declare its bytes without looking at what was chosen."
        )
    compare(declared, wire.traffic.whole, method=type(run.method).__name__, t=t)
    if run.world.compression is not None and declared is not None:
        run.note(unplanned(run.method, run.world.compression, declared, wire.traffic.sizes))


def _evaluate_round(run: RunState, t: int, state: Record) -> Utility | None:
    if t % run.setting.eval_every and t != run.setting.rounds:
        return None
    run.watch(t - 1, run.setting.rounds, f"round {t}, evaluating")
    meter = Meter("evaluation", t, run.world.device)
    if (turn := here()) is not None:
        turn.away = meter.away
    with meter.span("evaluate"), seeded(run.setting.seed, "evaluation", t, device=run.world.device):
        predictor = run.method.predictor(state, run.server(t))
        run.deployed = t, predictor
        utility = evaluate(
            run.world,
            predictor,
            run.client if run.setting.eval_clients else None,
            version=run.store.clients.get,
            known=run.scores,
            global_points=run.method.global_points(state, run.server(t)),
            next_points=partial(run.method.next_points, state) if offers_next_points(run.method) else None,
        )
    run.timings.add(meter.close())
    run.note(sampling_note(utility))
    return utility
