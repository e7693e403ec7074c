"""Runs one setting: rounds of a method over a federation, recorded, metered, evaluated, resumable."""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import ValidationError
from torch import nn

from fedaudit.aggregation.mean import Mean
from fedaudit.aggregation.secure.messages import SumFacts
from fedaudit.aggregation.terms import Terms
from fedaudit.errors import ContractError, NotApplicable, RunError, SettingError
from fedaudit.privacy.ledger import Entry, Ledger
from fedaudit.rng import generator, seed_of, seeded
from fedaudit.runtime.alike import Alike
from fedaudit.runtime.applies import inapplicable, released_kinds
from fedaudit.runtime.checkpoint import Json, Store, room_for_states, write_atomic
from fedaudit.runtime.device_errors import device_error, explained
from fedaudit.runtime.engines import Engine, make_engine
from fedaudit.runtime.engines.isolated import IsolatedEngine
from fedaudit.runtime.folder import default_folder, folder_name, locked, rounding, saving_state
from fedaudit.runtime.guarantee import single_replies
from fedaudit.runtime.meter import Meter, Span, Timings, peak_rss
from fedaudit.runtime.method import Method, check_path, find_function, function_path
from fedaudit.runtime.party import Client, Cohort, Server
from fedaudit.runtime.plan import as_sent, in_sums, unplanned
from fedaudit.runtime.run_record import (
    Absence,
    DataFacts,
    FieldTraffic,
    ModelFacts,
    RoundRecord,
    RunRecord,
    curve_of,
    device_name,
    read_record,
    versions,
)
from fedaudit.runtime.scores import Utility
from fedaudit.runtime.source import NOT_COMPARED, code_of, code_of_setting, differences, harness, is_same, not_compared
from fedaudit.runtime.start import first_setting, take_over
from fedaudit.runtime.sums import Summing
from fedaudit.runtime.task import ClientState, Done, Task, absence, compute, open_client, promised
from fedaudit.runtime.tested import declarations_of
from fedaudit.runtime.utility import Known, evaluate, results, sampling_note
from fedaudit.runtime.world import World, chosen_engine, name_of, world_of
from fedaudit.setting import EXECUTION, ROUNDING, Setting
from fedaudit.training.recorded import listening, unrecorded
from fedaudit.units import bytes_text
from fedaudit.watch import Watch, unwatched
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import decode, encode, hold
from fedaudit.wire.message import Down, Record, Size, Up, live_state, state_of
from fedaudit.wire.packing import Blob
from fedaudit.wire.release import Release
from fedaudit.wire.traffic import compare
from fedaudit.wire.transcript import TranscriptWriter

Asker = Callable[..., dict[int, Any]]
Entries = list[tuple[int, list[Entry]]]  # by client: its entries for the ledger in one round


def run(
    setting: Setting | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    engine: Engine | str | None = None,
    refuse_idle: bool = False,
    **values: Any,
) -> RunRecord:
    """Run a setting (or `method=..., dataset=..., rounds=...`) and leave everything in the folder `out`.

    `engine` is the setting of that name, or an engine that is already running. `refuse_idle` refuses a privacy setting
    if none of its policies covers anything that the method releases; otherwise it runs, and the record says so.
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
        return _Run(setting, folder, resume, watch or unwatched, engine, refuse_idle, beside).go()


def _is_other_code(folder: Path, setting: Setting) -> bool:
    made_by = read_record(folder).code
    return made_by is not None and bool(differences(made_by, code_of_setting(setting)))


def _is_done(folder: Path) -> bool:
    return (folder / "record.json").exists() and read_record(folder).status == "done"


class _Run:
    def __init__(
        self,
        setting: Setting,
        folder: Path,
        resume: bool,
        watch: Watch,
        engine: Engine | None,
        refuse_idle: bool,
        first: Path | None = None,
    ):
        if (folder / "record.json").exists() and not resume:
            raise RunError(f"{folder} already holds a run. Use --resume to go on with it, or another --out.")
        if setting.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
        self.setting, self.folder, self.watch = setting, folder, watch
        self.given_engine, self.refuse_idle, self.first = engine, refuse_idle, first
        self.json = setting.model_dump_json()
        self.world: World = world_of(self.json)
        self.method = self.world.method
        self.store = Store(folder / "checkpoint", room_for_states(self.world.device))
        self.timings = Timings()
        self.answers: dict[str, type[Up]] = {}  # the message class of each function
        self.traffic: dict[tuple[str, str], FieldTraffic] = {}
        self.releases: dict[str, Release] = {}
        self.ledger = Ledger()
        self.scores = Known()
        self._deployed: tuple[int, nn.Module | None] | None = None
        self.digest = ""
        self._committed: Blob = b""  # the server's state, encoded; tensors that the next round sends stay on the device
        self._state: Record | None = None  # the decoded state, once somebody needs it
        self.started = self.attempt = self._now = 0
        self.record: RunRecord

    # --- the whole run ---

    def go(self) -> RunRecord:
        unrecorded.clear()
        try:
            with listening(self._tell_slower):
                return self._go()
        except Exception as e:
            found = device_error(e, "server")
            if found is None:
                raise
            self._log_text(f"round {self._now}, {found.who}: {''.join(traceback.format_exception(e))}")
            raise explained(found, max(self._now, 1), self.folder, self.setting) from e
        finally:
            self.store.abandon()  # after an error: a resumed run finds the last whole round
            if self.given_engine is None and "engine" in vars(self):
                self.engine.close()

    @functools.cached_property
    def engine(self) -> Engine:
        return self.given_engine or make_engine(self.setting)

    @functools.cached_property
    def apart(self) -> IsolatedEngine | None:
        """Return the engine that runs the server in a process of its own; None if the server runs here."""
        return self.engine if self.setting.isolate and isinstance(self.engine, IsolatedEngine) else None

    def _go(self) -> RunRecord:
        with compute(self.world):
            self._check_records()
            self._open()
            if self.record.status == "done" and self.started >= self.setting.rounds:
                self.transcript.close()
                return read_record(self.folder)
            if self.refuse_idle:
                self._check_applicable()
            try:
                for t in range(self.started + 1, self.setting.rounds + 1):
                    self._round(t)
                self._finish()
            finally:
                self.transcript.close()
        return self.record

    def _init(self) -> Record:
        if self.apart is not None:
            _, (blob,) = self.apart.server("init", 0, None, [], lambda path, *_: self._no_asks(path))
            return decode(blob, Record, device=self.world.device)
        with seeded(self.setting.seed, "server", 0, device=self.world.device):
            first = self.method.init(self._server(0))
        self._check_state(first, "init")
        return first

    def _no_asks(self, path: str) -> Any:
        raise ContractError(
            f"{type(self.method).__name__}.init asks clients ({path}), which only `round` may do. Move it there."
        )

    def _open(self) -> None:
        head = self.store.head()
        if head is None:
            write_atomic(self.folder / "setting.json", self.setting.model_dump_json(indent=1).encode())
            self.record = self._new_record()
            self.transcript = self._transcript(offset=0, last_round=0, seq=0)
            first = self._init()
            if self.first is not None:
                self.ledger = Ledger(take_over(self.first, self.record, self.store).ledger)
            self._commit(0, first, self.transcript.end_round_behind(0))
        else:
            self.record = self._read_head(head)
            before = self.record.setting
            self._check_same(before)
            self.record.setting = self.setting
            self.started = head["round"]
            self.timings = Timings(self.record.timings, self.record.peak_rss_bytes, self.record.peak_gpu_bytes)
            self.traffic = {(row.direction, row.field): row for row in self.record.traffic}
            self.releases = {release.field: release for release in self.record.releases}
            self.ledger = Ledger(self.record.ledger)
            self.digest = self.record.transcript_digest
            self.transcript = self._transcript(
                offset=head["transcript"], last_round=self.started, seq=head["seq"], clock=head["clock"]
            )
            self._committed, self._state = self.store.server(head["server"]), None
            if self.started < self.setting.rounds:
                self._go_on(head, before)
        self.watch(self.started, self.setting.rounds, f"ready; the transcript takes {self._expected_size()}")

    def _go_on(self, head: dict[str, Any], before: Setting) -> None:
        """Go on with an unfinished or a longer run: what was recorded about its end no longer holds."""
        made_by = (self.record.versions, self.record.device)
        same = made_by == (versions(), device_name(self.world.device)) and is_same(self.record.harness, harness())
        if not same:
            self.record.notes.append(
                "resumed under other versions, by another harness or on another device: the bits may differ from there"
            )
        if not_compared(self.record.code, self.record.harness):  # it may be other code: as if it were
            same = False
            if (note := f"resumed: {NOT_COMPARED}, and the bits may differ from there") not in self.record.notes:
                self.record.notes.append(note)
        if rounding(before) != rounding(self.setting):  # --step, --together or --engine after an error of the device
            same = False
            self.record.notes.append(
                f"resumed after round {self.started} with other steps, stacks or engine: rounding may differ from there"
            )
        # A replayed round may give other values. Equal noise on unequal values would give both away: draw fresh noise.
        self.attempt = head["attempt"] + (0 if self.setting.deterministic and same else 1)
        self.store.amend(attempt=self.attempt)
        self.record.status, self.record.finished, self.record.published = "running", None, []
        for client in self.record.ledger:
            client.reopen()

    def _expected_size(self) -> str:
        """Return in words what one round adds to the transcript at most: a broadcast is stored once, old model states
        are dropped."""
        declared = self.method.traffic(self.world.plan(1, self._participants(1)))
        if declared is None:
            return "what the method sends, which it does not declare"
        sizes = as_sent(self.method, self.setting.compress, declared)[0].values()
        return f"up to {bytes_text(sum(s.payload + s.buffers for s in sizes))} a round"

    def _round(self, t: int) -> None:
        begun = time.perf_counter()
        self._now = t
        self.watch(t - 1, self.setting.rounds, f"round {t}")
        participants = self._participants(t)
        here = self.world.device if self.engine.in_process and self.world.compression is None else None
        wire = Wire(self.transcript, t, self.answers, here)
        absent: list[Absence] = []
        redone: list[int] = []  # the client of each task that was lost and done again
        entries: Entries = []
        self.transcript.begin_round(t)
        meter = Meter("server", t, self.world.device, self.setting.flops)
        alike = Alike()
        summing = self._summing(t, wire, absent)
        ask = self._asker(t, wire, meter, absent, redone, entries, alike, self._quorum(participants), summing)
        summing.ask = ask

        def mean(cohort: Cohort, fn: Callable[..., Any], message: Any, by: str | None) -> Mean[Any]:
            return summing.mean(cohort, fn, function_path(self.method, fn), message, by)

        cohort = Cohort(participants, ask, mean)
        if not participants:  # drawn by Poisson, and nobody was
            after = self.state
            self._note([f"round {t}: no client was drawn, and the state stayed as it was"])
        elif self.apart is not None:
            after = self._round_apart(self.apart, t, cohort, ask)
        else:
            with seeded(self.setting.seed, "server", t, device=self.world.device), meter.span("round"):
                after = self.method.round(self.state, self._server(t, meter), cohort)
            self._check_state(after, "round")
            self.timings.add(meter.close(), peak_rss(), meter.peak_gpu())
        self._note(f"steps not recorded: {reason}" for reason in unrecorded)
        if participants:
            self._check_traffic(t, participants, wire, summing.facts)
        end = self.transcript.end_round_behind(t)
        utility = self._evaluate(t, after)
        self._count(wire)
        self._enter(t, [*entries, *alike.entries(), *summing.entries], wire)
        up, down = wire.traffic.total("up"), wire.traffic.total("down")
        self.record.rounds.append(
            RoundRecord(
                round=t,
                participants=participants,
                absent=absent,
                redone=len(redone),
                up_payload=up[0],
                up_wire=up[1],
                down_payload=down[0],
                down_wire=down[1],
                utility=utility,
                sums=summing.records,
                diagnostics=self.method.diagnostics(after),
                wall_s=round(time.perf_counter() - begun, 4),
            )
        )
        self._commit(t, after, end)
        self.watch(t, self.setting.rounds, f"round {t}")

    def _round_apart(self, apart: IsolatedEngine, t: int, cohort: Cohort, ask: Asker) -> Record:
        """Carry out the round in the server's own process; what it asks comes here, and goes over the wire."""

        def answers(
            path: str, messages: Mapping[int, bytes], how: Mapping[str, Any] | None
        ) -> tuple[dict[int, bytes], list[int], int]:
            check_path(self.method, path)
            if how is None:
                return ask(cohort, path, messages), list(cohort.ids), 0
            # A broadcast came as one object, and stays one.
            decoded = {id(blob): decode(blob, Down, device=self.world.device) for blob in messages.values()}
            alike = len(decoded) == 1 and sorted(messages) == sorted(cohort.ids)
            message = next(iter(decoded.values())) if alike else {k: decoded[id(b)] for k, b in messages.items()}
            mean = cohort.mean(find_function(self.method, path), message, by=how["by"])
            return {0: encode(mean.value)}, list(cohort.ids), mean.count

        said, (blob,) = apart.server("round", t, encode(self.state), list(cohort.ids), answers)
        self.timings.add([Span(**span) for span in said["spans"]], said["rss"], said["gpu"])
        self._note(f"steps not recorded: {reason}" for reason in said["unrecorded"])
        return decode(blob, Record, device=self.world.device)

    def _finish(self) -> None:
        self.record.published = self._save_models()
        self.store.settle()
        self.record.ledger = self.ledger.close()
        self._note_idle_policies()
        self.record.status = "done"
        self.record.finished = datetime.now(UTC).isoformat(timespec="seconds")
        text = self.record.text()
        write_atomic(self.folder / "record.json", text.encode())
        self.store.amend(record=Json(text))

    def _check_records(self) -> None:
        """Refuse records that the method cannot take. In a suite that is a result, and is kept."""
        if why := self.world.misfit():
            if self.refuse_idle and self.store.head() is None:
                self.record = self._new_record()
                self.record.save(self.folder)
            raise NotApplicable(f"{why}.")

    def _check_applicable(self) -> None:
        first_and_last = {1, 2, max(self.setting.rounds, 1)}  # some messages are sent in one of these rounds only
        plans = (self.world.plan(t, list(range(self.setting.clients))) for t in sorted(first_and_last))
        if self.world.policies and (reason := inapplicable(self.setting.privacy, released_kinds(self.method, plans))):
            self.transcript.close()
            raise NotApplicable(f"{reason}.")

    def _note_alone(self, path: str, reasons: list[str]) -> None:
        """Note what the engine could not stack: the run is slower for it, and otherwise the same."""
        new = [note for reason in reasons if (note := f"not stacked: {path}: {reason}") not in self.record.notes]
        for note in new:
            self.watch(self._now - 1, self.setting.rounds, f"note: {note}")
        self._note(new)

    def _tell_slower(self, reason: str) -> None:
        """Say at once that steps are carried out in a slower way than was asked for, and what that costs."""
        compiled = reason.startswith("not compiled")
        cost = "2 to 3 times as long as compiled" if compiled else "several times as long on small networks"
        self.watch(
            max(self._now - 1, 0), self.setting.rounds, f"note: steps not recorded: {reason}. A step takes {cost}"
        )

    def _note(self, notes: Iterable[str]) -> None:
        self.record.notes += [note for note in notes if note not in self.record.notes]

    def _note_idle_policies(self) -> None:
        used = {entry.kind for client in self.record.ledger for entry in client.entries}
        self.record.idle_policies = sorted(self.world.policies.keys() - used)
        for kind in self.record.idle_policies:
            note = f"the policy on {kind} applied to nothing: {self.setting.method} released none"
            if note not in self.record.notes:
                self.record.notes.append(note)

    # --- asking clients ---

    def _asker(
        self,
        t: int,
        wire: Wire,
        meter: Meter,
        absent: list[Absence],
        redone: list[int],
        entries: Entries,
        alike: Alike,
        quorum: int,
        summing: Summing,
    ) -> Asker:
        def ask(
            cohort: Cohort,
            fn: Callable[..., Any] | str,
            message: Down | Mapping[int, Any],
            terms: Mapping[int, Terms] | None = None,
        ) -> dict[int, Any]:
            """Send messages to clients and return their replies by client.

            A method gives its own function and messages; a server in another process gives a name and bytes. `terms`
            say how replies enter a sum; without them each reply comes back by itself.
            """
            path = fn if isinstance(fn, str) else function_path(self.method, fn)
            if terms is None and self.setting.aggregate == "secure":
                self._check_open(path)
            messages = dict.fromkeys(cohort.ids, message) if isinstance(message, Down) else dict(message)
            if strangers := messages.keys() - set(cohort.ids):
                raise ContractError(
                    f"{path}: client {min(strangers)} is not in this round's cohort, or failed earlier in the round. "
                    "Ask cohort.ids only."
                )
            number = len(wire.traffic.asks)
            tasks = (
                Task(
                    self.json, path, k, t, number, self.store.client(k), blob,
                    drop=self._drops(k, t, number), attempt=self.attempt, here=self.engine.in_process,
                    terms=None if terms is None else terms[k],
                )
                for k, blob in wire.down(messages)
            )  # fmt: skip
            replies: dict[int, Any] = {}
            first_error = ""
            waiting = time.perf_counter()
            for done in self.engine.map(tasks):
                meter.exclude(time.perf_counter() - waiting, done.spans, self.engine.in_process)
                self.timings.add(done.spans, done.rss, done.gpu)
                redone.extend([done.k] * done.redone)
                if done.fatal is not None:
                    self._log(t, number, done)
                    raise done.fatal
                self._note_alone(path, done.alone)
                reply = wire.back(done, path, self.world.device)
                waiting = time.perf_counter()
                if reply is None or done.state is None:
                    first_error = first_error or f"client {done.k}: {done.error}"
                    self._log(t, number, done)
                    lost = [absence(path)] if done.lost and self.world.policies else []
                    entries.append((done.k, [*done.entries, *lost]))
                    absent.append(Absence(client=done.k, ask=number, reason=str(done.error)))
                    cohort.ids.remove(done.k)
                    continue
                # A server in another process gets the decompressed reply: it cannot undo a compression itself.
                whole = encode(reply) if self.world.compression else done.reply
                replies[done.k] = whole if isinstance(fn, str) else reply
                summing.heard(done.k, done.layout, done.cut)
                self.store.put_client(done.k, t, number, done.state)
                entries.append((done.k, done.entries))
                alike.add(path, done.k, done.told, done.picked, done.chose)
                self.watch(t - 1, self.setting.rounds, f"round {t}, {path}, {len(replies)}/{len(messages)} clients")
                waiting = time.perf_counter()
            if len(cohort.ids) < quorum:
                raise RunError(
                    f"Round {t}, {path}: {len(cohort.ids)} clients are left, the quorum is {quorum}. First failure: "
                    f"{first_error} (all of it: {self.folder / 'errors.log'}). "
                    f"Fix it, lower --quorum or --dropout, and go on with --resume."
                )
            return replies

        return ask

    def _check_open(self, path: str) -> None:
        """Refuse to ask for single replies that hold something private, where the server may learn sums only."""
        sent = promised(getattr(find_function(self.method, path), "__func__", None))
        private = [cls for cls in sent if any(d is not None and d.role == "private" for d in cls.declared().values())]
        if not sent or private:
            raise NotApplicable(single_replies(self.method))

    def _summing(self, t: int, wire: Wire, absent: list[Absence]) -> Summing:
        setting = self.setting
        return Summing(
            wire=wire,
            t=t,
            key=(setting.seed, self.attempt),
            secure=setting.aggregate == "secure",
            threshold=setting.threshold,
            bound=setting.update_bound,
            dropping=1 - (1 - setting.dropout) ** 4,  # four phases
            expected=setting.participation * setting.clients,
            guarantee=self.world.guarantee,
            largest=max(map(self.world.count, range(setting.clients))),
            drops=lambda k, number, phase: self._drops(k, t, number, phase),
            device=self.world.device,
            absent=lambda k, number, why: absent.append(Absence(client=k, ask=number, reason=why)),
        )

    def _participants(self, t: int) -> list[int]:
        clients = self.setting.clients
        if self.setting.sampling == "poisson":
            drawn = torch.rand(clients, generator=generator(self.setting.seed, "server", t, "participants"))
            return torch.nonzero(drawn < self.setting.participation).flatten().tolist()
        wanted = max(1, round(self.setting.participation * clients))
        order = torch.randperm(clients, generator=generator(self.setting.seed, "server", t, "participants"))
        return sorted(order[:wanted].tolist())

    def _quorum(self, participants: list[int]) -> int:
        return max(1, -int(-self.setting.quorum * len(participants) // 1))

    def _drops(self, k: int, t: int, ask: int, phase: str = "") -> bool:
        if not self.setting.dropout:
            return False
        path = (self.setting.seed, f"client {k}", t, ask, *([phase] if phase else []), "dropout")
        return seed_of(*path) / 2**63 < self.setting.dropout

    def _server(self, t: int, meter: Meter | None = None) -> Server:
        return Server(self.world.hub, t, meter or Meter("server", t, self.world.device))

    # --- after a round ---

    def _check_state(self, state: Any, where: str) -> None:
        if not isinstance(state, Record):
            raise ContractError(
                f"{type(self.method).__name__}.{where} returned a {type(state).__name__}; the state is a Record."
            )

    def _check_traffic(self, t: int, participants: list[int], wire: Wire, sums: Sequence[SumFacts]) -> None:
        plan = self.world.plan(t, participants, asks=wire.traffic.asks, choices=wire.traffic.choices)
        declared = self.method.traffic(plan)
        self.record.traffic_declared = declared is not None
        if self.setting.aggregate == "secure" and declared is not None:
            declared = in_sums(self.method, declared, sums)
        grown = [name for way, name in wire.traffic.sizes if way == "up" and name in self.world.absent(t)]
        if sent := [name for name in sorted(grown) if wire.traffic.sizes["up", name] != Size()]:
            raise RunError(
                f"{type(self.method).__name__}, round {t}: {', '.join(sent)} was sent, and the traffic that was "
                "declared before the run leaves it out. That it is None elsewhere would tell of the records, and "
                "nobody paid for that. Declare its bytes without looking at what was chosen."
            )
        compare(declared, wire.traffic.whole, method=type(self.method).__name__, t=t)
        if self.world.compression is not None and declared is not None:
            self._note(unplanned(self.method, self.world.compression, declared, wire.traffic.sizes))

    def _evaluate(self, t: int, state: Record) -> Utility | None:
        if t % self.setting.eval_every and t != self.setting.rounds:
            return None
        self.watch(t - 1, self.setting.rounds, f"round {t}, evaluating")
        meter = Meter("evaluation", t, self.world.device)
        with meter.span("evaluate"), seeded(self.setting.seed, "evaluation", t, device=self.world.device):
            predictor = self.method.predictor(state, self._server(t))
            self._deployed = t, predictor
            utility = evaluate(
                self.world,
                predictor,
                self._client if self.setting.eval_clients else None,
                version=self.store.clients.get,
                known=self.scores,
                global_points=self.method.global_points(state, self._server(t)),
            )
        self.timings.add(meter.close())
        self._note(sampling_note(utility))
        return utility

    def _predictor(self, t: int) -> nn.Module | None:
        """Return the model that the server deploys after round t: the evaluated one, or the same built again."""
        if self._deployed is not None and self._deployed[0] == t:
            return self._deployed[1]
        with seeded(self.setting.seed, "evaluation", t, device=self.world.device):
            return self.method.predictor(self.state, self._server(t))

    def _client(self, k: int) -> Client:
        meter = Meter(f"client {k}", self.setting.rounds, self.world.device)
        return open_client(self.world.site(k), 0, 0, meter, self.store.client(k))

    def _count(self, wire: Wire) -> None:
        for (direction, name), sent in wire.traffic.wire.items():
            row = self.traffic.setdefault((direction, name), FieldTraffic(direction=direction, field=name))  # type: ignore[arg-type]
            size = wire.traffic.sizes.get((direction, name))
            row.wire += sent
            if size is not None:
                row.payload += size.payload
                row.buffers += size.buffers
        for release in wire.traffic.releases.values():
            self.releases[release.field] = release
        self.digest = xxhash.xxh3_128_hexdigest((self.digest + "".join(wire.traffic.digests)).encode())

    def _enter(self, t: int, entries: Entries, wire: Wire) -> None:
        for k, of_client in entries:
            self._bill(k, t, of_client)
        for kind, to in sorted(wire.traffic.relayed):
            self.ledger.relayed(kind, to)

    def _bill(self, k: int, t: int, entries: list[Entry]) -> None:
        n = self.world.count(k)
        delta = min((policy.delta_for(n) for policy in self.world.policies.values()), default=1 / n)
        self.ledger.add(k, n, delta, t, entries)

    def _log(self, t: int, ask: int, done: Done) -> None:
        """Write the whole text of a client's failure to a log on this machine alone: the record says its type and
        place."""
        if done.detail:
            self._log_text(f"round {t}, ask {ask}, client {done.k}: {done.detail}")

    def _log_text(self, text: str) -> None:
        with open(self.folder / "errors.log", "a") as file:
            file.write(f"{text}\n")

    @property
    def state(self) -> Record:
        """Return the server's state as its codec left it, so that a resumed run cannot differ."""
        if self._state is None:
            self._state = decode(self._committed, Record, device=self.world.device)
        return self._state

    def _commit(self, t: int, state: Record, end: Future[int]) -> None:
        """Commit the round, once its transcript has ended, while the next one begins."""
        blob = self._committed = hold(state, self.world.device)
        self._state = None
        record = self.record
        record.traffic = [self.traffic[key] for key in sorted(self.traffic)]
        record.releases = [self.releases[key] for key in sorted(self.releases)]
        record.timings = self.timings.table()
        record.peak_rss_bytes, record.peak_gpu_bytes = self.timings.peak_rss_bytes, self.timings.peak_gpu_bytes
        record.transcript_digest = self.digest
        record.ledger = self.ledger.rows()
        record.curve = curve_of(record.rounds)
        record.result = results(record.rounds)
        text = record.text()
        facts = {"seq": self.transcript.seq, "attempt": self.attempt, "clock": self.transcript.clock()}
        self.store.commit_behind(
            t,
            blob,
            lambda: {"transcript": end.result(), **facts, "record": Json(text)},
            then=lambda: write_atomic(self.folder / "record.json", text.encode()),
        )

    def _save_models(self) -> list[str]:
        """Save the final models as safetensors: the global one if there is one, and each client's. Return the published
        names."""
        folder = self.folder / "models"
        folder.mkdir(exist_ok=True)
        saved = []

        predictor = self._predictor(self.setting.rounds)
        # If clients deploy their models as they are, no code of the method runs any more: no copy is needed.
        as_it_is = type(self.method).personal is Method.personal and not (predictor is None and self.world.policies)

        def save(name: str, model: nn.Module) -> None:
            state = live_state(model) if as_it_is else state_of(model)
            self.store.behind(f"models/{name}", saving_state(folder / name, state, name_of(model)))
            saved.append(name)

        if predictor is not None:
            save("global.safetensors", predictor)
        with seeded(self.setting.seed, "evaluation", "final", device=self.world.device):
            for k in sorted(self.store.clients):
                name = f"client-{k:06d}.safetensors"
                if not as_it_is:
                    save(name, self._personal(k, predictor is None))
                    continue
                state = decode(self.store.client(k) or b"", ClientState, device=self.world.device, look=True).model
                self.store.behind(f"models/{name}", saving_state(folder / name, state, self.world.model_name(k)))
                saved.append(name)
        # An outsider gets to see the global model or, if a method has none, what the clients deploy.
        return saved[:1] if predictor is not None else saved

    def _personal(self, k: int, published: bool) -> nn.Module:
        """Return the model that client k deploys. If that is published, whatever went into it beyond the client's model
        is billed."""
        client = self._client(k)
        model = self.method.personal(client)
        if published and self.world.policies:
            entries = [*client.entries]
            tainted = client.private_training and client.plain_fits > 0  # by an earlier task
            if client.looked or tainted or client.plain_fits > self._plain_fits(k):
                condition = "personal() read the records, and what it made of them is published"
                entries.append(Entry.unprotected("(published model)", "weights", condition))
            if entries:
                self._bill(k, self.setting.rounds, entries)
        return model

    def _plain_fits(self, k: int) -> int:
        state = self.store.client(k)
        return 0 if state is None else decode(state, ClientState).plain_fits

    # --- opening ---

    def _read_head(self, head: dict[str, Any]) -> RunRecord:
        try:
            return RunRecord.model_validate(head["record"])
        except ValidationError as e:
            raise RunError(
                f"{self.folder} was begun by another version of fedaudit ({e.error_count()} fields differ). Finish it "
                "with that version, or start anew in another folder."
            ) from None

    def _transcript(self, **where: Any) -> TranscriptWriter:
        return TranscriptWriter(self.folder / "transcript", keep_weights=self.setting.keep_weights, **where)

    def _check_same(self, before: Setting) -> None:
        old, new = before.model_dump(), self.setting.model_dump()
        free = [*EXECUTION, *ROUNDING, "keep_weights", "quorum", "dropout"]
        free += [] if self._planned_for_rounds() else ["rounds"]
        other = [key for key in old if old[key] != new[key] and key not in free]
        other += [key for key in ("precision", "channels_last") if old[key] != new[key]]
        if other:
            raise SettingError(
                f"{self.folder} was begun with another setting: "
                + ", ".join(f"{key} = {old[key]!r}, now {new[key]!r}" for key in other)
                + ". Resume with the same, or choose another --out."
            )
        code = self.record.code  # None: the record is older than this field
        if code is not None and (changed := differences(code, code_of(self.method, self.setting))):
            raise SettingError(
                f"{self.folder} was begun by other code: {'; '.join(changed)}. Its rounds would not belong together: "
                "choose another --out, or take the change back."
            )
        if self.setting.rounds < self.record.rounds[-1].round if self.record.rounds else False:
            raise SettingError(
                f"{self.folder} has {len(self.record.rounds)} rounds; --rounds asks for fewer. "
                "Ask for at least as many."
            )

    def _planned_for_rounds(self) -> bool:
        """Return whether some noise was calibrated so that all rounds together meet an epsilon: their number is then
        fixed."""
        return any(
            policy.calibration == "total" or (policy.mechanism == "dp-sgd" and policy.epsilon is not None)
            for policy in self.world.policies.values()
        )

    def _new_record(self) -> RunRecord:
        world, federation = self.world, self.world.federation
        counts = federation.counts()
        return RunRecord(
            setting=self.setting,
            versions=versions(),
            device=device_name(world.device),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            data=DataFacts(
                shape=list(world.shape),
                tokens=world.shape.tokens,
                classes=world.classes,
                class_names=list(federation.dataset.class_names),
                test=len(federation.dataset.test_y),
                aux=len(federation.aux),
                public=world.public_size,
                members=[world.count(k) for k in range(len(federation.shards))],
                nonmembers=[len(s.nonmembers) for s in federation.shards],
                validation=[len(s.validation) for s in federation.shards],
                counts=counts.tolist(),
            ),
            harness=harness(),
            declarations=declarations_of(self.method),
            code=code_of(self.method, self.setting),
            models={
                arch: ModelFacts(parameters=world.model_size(arch).payload // 4, clients=world.archs.count(arch))
                for arch in dict.fromkeys(world.archs)
            },
        )
