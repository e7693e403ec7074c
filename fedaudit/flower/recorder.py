"""The recorder, which writes an app's messages into a run folder like any other while the app runs.

Flower's server is in control; this module only writes. An ask is one exchange of the server with some nodes, in one
message to all or in one thread for each. A round ends when the server sends a message with another number of a round
(see fedaudit.flower.round_number). For a server that numbers nothing it ends before the next training, or before a node
is asked the same again.
"""

from __future__ import annotations

import difflib
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from fedaudit.errors import PrivacyError, RunError, SettingError, unknown
from fedaudit.flower.claims import CentralClaim, LocalClaim, Reported, reported, reported_audit
from fedaudit.flower.client import Terms, Told
from fedaudit.flower.messages import Field, Layout, class_name, downs, ups
from fedaudit.flower.record_kinds import Named, Names, app_policies
from fedaudit.flower.secure_sums import COLLECT
from fedaudit.flower.shown import shown
from fedaudit.privacy.ledger import Ledger, LedgerEntry
from fedaudit.progress import Watch
from fedaudit.runtime.checkpoint import Store, write_atomic
from fedaudit.runtime.code_digest import harness
from fedaudit.runtime.folder import save_model
from fedaudit.runtime.meter import Span, Timings, peak_rss
from fedaudit.runtime.run_record import (
    BESIDE,
    NOT_AWAITED,
    Absence,
    DataFacts,
    EpsilonAudit,
    FieldTraffic,
    ModelFacts,
    RoundRecord,
    RunRecord,
    curve_of,
    device_name,
    read_record,
    save_audits,
    versions,
)
from fedaudit.runtime.scores import Utility
from fedaudit.runtime.seal import seal_again
from fedaudit.runtime.task import absence, compute
from fedaudit.runtime.utility import evaluate, results, sampling_note
from fedaudit.runtime.world import World, world_of
from fedaudit.setting import Setting
from fedaudit.wire.channel import RoundTraffic, Wire
from fedaudit.wire.codec import Header, decode, encode, measure
from fedaudit.wire.message import Record, State, load
from fedaudit.wire.release import Protection, Release
from fedaudit.wire.transcript import TranscriptWriter

SUM = "sum"  # the record and message type of what the server computes from masked vectors
DELTA = 1e-5  # the ledger's delta if neither a policy nor the number of records gives one


class Arrays(Record):
    """The global model after a round, if the server showed one."""

    w: State


Fields = tuple[dict[str, Field], int]  # the fields of a message, and the bytes around them


@dataclass(frozen=True)
class Answer:
    """A node's answer. `reply` is None if none came, or if it was an error."""

    reply: Fields | None = None
    told: Told | None = None
    error: str | None = None


@dataclass(frozen=True)
class Exchange:
    """One message to node k and its answer."""

    k: int
    asked: Fields
    answer: Answer


@dataclass(eq=False)
class Sending:
    """One message to node k, and its answer as soon as one came."""

    k: int
    message_type: str
    asked: Fields
    answer: Answer | None = None
    taken: bool = False  # whether the app's server has got the answer, or knows that there is none
    written: bool = False


@dataclass(eq=False)
class Ask:
    """The messages of one type that belong together: each node has one of them."""

    message_type: str
    sendings: list[Sending] = field(default_factory=list)
    written: bool = False
    number: int = -1  # among the asks of its round, once it is written

    @property
    def complete(self) -> bool:
        return all(sending.answer is not None for sending in self.sendings)


@dataclass(frozen=True)
class _Answer:
    k: int
    reply: bytes | None
    error: str | None
    protection: Mapping[str, Protection] = field(default_factory=dict)


class FlowerWire(Wire):
    """The wire, with every message counted in the bytes that Flower sends for it."""

    def __init__(self, transcript: TranscriptWriter, t: int):
        super().__init__(transcript, t)
        self.flower: dict[tuple[str, int], tuple[Mapping[str, Field], int]] = {}

    def back(self, done: Any, fn: str, device: Any) -> Any:
        """Take a reply. All replies of one ask have one class, which no node chooses. Asks may differ in it."""
        self._answers.clear()
        return super().back(done, fn, device)

    def sizes(self, direction: str, k: int, head: Header, blob_size: int) -> dict[str, dict[str, int]]:
        ours = measure(head, blob_size)
        fields, frame = self.flower[direction, k]
        for name, size in ours.items():
            size["wire"] = frame if name == "(frame)" else fields[name].wire if name in fields else 0
        return ours


class Recorder:
    """Writes one run of one app. The server's side calls `send`, `answer`, `model_after` and `finish` as they happen.

    All four may be called from many threads.
    """

    def __init__(self, folder: Path, setting: Setting, terms: Terms, watch: Watch, resume: bool = False):
        held = (folder / "record.json").exists()
        if held and (not resume or read_record(folder).status == "done"):
            raise RunError(_held(folder))
        self.folder, self.setting, self.terms, self.watch = folder, setting, terms, watch
        self.names, self.policies = Names(terms.kinds), app_policies(terms.privacy)
        self.world: World | None = world_of(setting.model_dump_json()) if terms.records is not None else None
        self.model: nn.Module | None = None if terms.records is None else terms.records().model()
        self.store, self.timings, self.ledger = Store(folder / "checkpoint"), Timings(), Ledger()
        self.traffic: dict[tuple[str, str], FieldTraffic] = {}
        self.releases: dict[str, Release] = {}
        self.shapes: dict[str, dict[str, Any]] = {}  # shapes of the messages seen, for readers of the folder
        self.places: set[tuple[str, str]] = set()  # message types and records of replies, or entries of those
        self.counts: dict[int, int] = {}
        self.digest, self.t, self.begun = "", 0, 0.0
        self.lock = threading.RLock()
        self.wire: FlowerWire | None = None  # the wire of the open round
        self.number: int | None = None  # the app's own number of the open round
        self.asks: list[Ask] = []  # of the open round
        self.late = self.overtaken = 0  # answers and requests of a round that was over
        self.worked = 0.0  # seconds of all nodes' answers in the open round
        self.redone = 0  # tasks done again since the last round, because the process that did them was lost
        self.participants: set[int] = set()
        self.absent: list[Absence] = []
        self.fresh = False  # whether the server has shown the model that the open round made
        self.metrics: dict[str, float] = {}
        self.sums_of_round: set[str] = set()
        self.smallest_sum: int | None = None  # nodes in the smallest sum of masked vectors; None: there was none
        self.local: list[LocalClaim] = []
        self.central: list[CentralClaim] = []
        self.reported: list[Reported] = []
        self.arrays: dict[str, torch.Tensor] | None = None
        self.after: int | None = None  # a resumed run: the app's number of the last round that is in the folder
        head = self.store.head() if held else None
        if head is not None and head["round"] > 0:
            self._go_on(head)
            return
        write_atomic(folder / "setting.json", setting.model_dump_json(indent=1).encode())
        self.transcript = TranscriptWriter(folder / "transcript", keep_weights=setting.keep_weights)
        self.record = self._new_record()
        self.transcript.begin_round(0)
        self._commit(self.transcript.end_round(0))

    def _go_on(self, head: Mapping[str, Any]) -> None:
        """Take up a run after its last whole round. The app has to go on by itself: its next message will show it."""
        record = RunRecord(**head["record"])
        if self.policies:
            raise PrivacyError(
                f"{self.folder}: a run with noise cannot be resumed. Nodes have forgotten how often they answered, and "
                "would draw the same noise again. Choose another --out."
            )
        if record.setting != self.setting:
            raise SettingError(f"{self.folder} was begun with other settings. Repeat them, or choose another --out.")
        kept = head["flower"]
        if kept["number"] is None:
            raise RunError(
                f"{self.folder}: the app does not number its rounds, so nobody can tell whether it goes on or begins "
                "again. Choose another --out."
            )
        self.record, self.t, self.digest = record, head["round"], record.transcript_digest
        self.traffic = {(row.direction, row.field): row for row in record.traffic}
        self.releases = {release.field: release for release in record.releases}
        self.ledger, self.shapes, self.after = Ledger(record.ledger), kept["shapes"], kept["number"]
        self.places = {(kind, place) for kind, place in kept["places"]}
        self.counts = {int(k): n for k, n in kept["counts"].items()}
        self.reported, self.smallest_sum = [Reported(*row) for row in kept["reported"]], kept["smallest_sum"]
        self.arrays = dict(decode(self.store.server(head["server"]), Arrays).w) or None
        self.transcript = TranscriptWriter(
            self.folder / "transcript", keep_weights=self.setting.keep_weights, offset=head["transcript"],
            last_round=self.t, seq=head["seq"], clock=head["clock"],
        )  # fmt: skip
        self.timings = Timings(record.timings, record.peak_rss_bytes)
        self.note(f"the run was resumed after round {self.t}")

    def _check_going_on(self, number: int | None) -> None:
        """Raise an error if the first message after a resumption is not of the round after the last one."""
        if self.after is not None and number != self.after + 1:
            begins = "does not number its rounds" if number is None else f"begins with round {number}"
            raise RunError(
                f"{self.folder} holds the app's rounds up to {self.after}, and the app {begins}: it does not go on "
                "from a state of its own, so its run cannot be continued. Choose another --out."
            )
        self.after = None

    # --- while messages pass ---

    @functools.cached_property
    def layout(self) -> Layout:
        """Return the model's arrays, in their order; empty if there is no model to tell."""
        if self.model is None:
            return Layout()
        state = self.model.state_dict()
        buffers = frozenset(state.keys() - dict(self.model.named_parameters()).keys())
        return Layout({name: tuple(t.shape) for name, t in state.items()}, buffers)

    def send(self, message_type: str, number: int | None, requests: Sequence[tuple[int, Fields]]) -> list[Sending]:
        """Note requests to some nodes, which are about to be sent, and return what their answers are noted on.

        `number` is the app's own number of the round. Requests of one type that belong together may come in one call,
        or in one call each, from many threads.
        """
        if not requests:
            return []
        with self.lock:
            self._check_going_on(number)
            if self.wire is not None and self._is_next(message_type, number, [k for k, _ in requests]):
                self.end_round()
            self._begin(number)
            sendings = [
                Sending(k, message_type, asked) for k, asked in sorted(requests, key=lambda request: request[0])
            ]
            for sending in sendings:
                self._ask_for(message_type, sending.k).sendings.append(sending)
            self.watch(self.t - 1, max(self.setting.rounds, self.t), f"round {self.t}, {message_type}")
            return sendings

    def answer(self, sending: Sending, answer: Answer, taken: bool = True) -> None:
        """Note the answer to a request, or that none came. `taken` says whether the app's server has got it."""
        with self.lock:
            if sending.written:
                self.late += 1
            sending.answer, sending.taken = answer, taken

    def task_redone(self) -> None:
        """Note that a node's task was lost with its process, and is done again."""
        with self.lock:
            self.redone += 1

    def _is_next(self, message_type: str, number: int | None, clients: Sequence[int]) -> bool:
        """Return whether requests begin another round than the open one."""
        if number is not None and self.number is not None:
            if number >= self.number or all(ask.complete for ask in self.asks):
                return number != self.number
            self.overtaken += 1  # the server asks for a round that others of its threads have left
            return False
        if number is None and self.number is not None:
            return False
        earlier = [ask for ask in self.asks if ask.message_type == message_type]
        again = any(s.k in clients for ask in earlier for s in ask.sendings)
        waited = any(all(s.taken for s in ask.sendings) for ask in earlier)
        return again or (waited and message_type.partition(".")[0] == "train")

    def _begin(self, number: int | None) -> None:
        """Begin a new round if none is open, and note the app's number of it."""
        if self.wire is None:
            self.t += 1
            self.begun = time.perf_counter()
            self.transcript.begin_round(self.t)
            self.wire = FlowerWire(self.transcript, self.t)
            self.participants, self.absent, self.asks, self.number = set(), [], [], None
            self.fresh, self.metrics, self.sums_of_round = False, {}, set()
        if number is not None and (self.number is None or number > self.number):
            self.number = number

    def _ask_for(self, message_type: str, k: int) -> Ask:
        """Return the ask that a request to a node belongs to: one that has not asked this node, or a new one."""
        for ask in self.asks:
            if ask.message_type == message_type and not ask.written and all(s.k != k for s in ask.sendings):
                return ask
        for ask in self.asks:  # the server goes on, so those that have all their answers can be written
            if not ask.complete:
                break
            self._write(ask)
        self.asks.append(ask := Ask(message_type))
        return ask

    def ask(self, message_type: str, exchanges: Sequence[Exchange], number: int | None = None) -> None:
        """Record requests to some nodes that were answered before."""
        sendings = self.send(message_type, number, [(e.k, e.asked) for e in exchanges])
        for sending, e in zip(sendings, sorted(exchanges, key=lambda e: e.k), strict=True):
            self.answer(sending, e.answer)

    def _write(self, ask: Ask) -> None:
        """Write the messages of one ask, by ascending node, so that nothing depends on which thread came first."""
        if ask.written:
            return
        ask.written = True
        wire, message_type = self.wire, ask.message_type
        assert wire is not None
        sendings = sorted(ask.sendings, key=lambda s: s.k)
        self._seen(class_name(message_type, False), message_type, [s.asked[0] for s in sendings])
        requests = downs([s.asked[0] for s in sendings], message_type)
        for _ in wire.down({s.k: r for s, r in zip(sendings, requests, strict=True)}):  # type: ignore[misc]
            pass
        answered = [s.answer.reply[0] for s in sendings if s.answer is not None and s.answer.reply is not None]
        replies = iter(ups(answered, message_type))
        self._seen(class_name(message_type, True), message_type, answered)
        number, fn = len(wire.traffic.asks) - 1, message_type
        ask.number = number
        for s in sendings:
            s.written = True
            wire.flower["down", s.k] = s.asked
            self.participants.add(s.k)
            answer = s.answer or Answer(error=NOT_AWAITED)
            if answer.reply is None:
                wire.back(_Answer(s.k, None, answer.error), fn, "cpu")
                self.absent.append(Absence(client=s.k, ask=number, reason=str(answer.error)))
                if self.policies:
                    self._bill(s.k, None, [absence(fn)])
                continue
            wire.flower["up", s.k] = answer.reply
            told = answer.told or Told(wall_s=0.0)
            wire.back(_Answer(s.k, encode(next(replies)), None, told.protection), fn, "cpu")
            inner = "evaluation" if message_type == "evaluate" else message_type  # "evaluate" is the audit's own
            self.timings.add([Span(f"client {s.k}", self.t, phase, told.wall_s) for phase in ("task", inner)])
            self.worked += told.wall_s
            self._bill(s.k, told.n, told.entries)
            if message_type.partition(".")[0] == "train" and (said := reported(s.k, _tables(answer.reply[0]))):
                self.reported.append(said)
            s.answer = Answer()  # what it held is on disk

    def summed(self, mean: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Note the mean that the server computed from masked vectors, if the open round has any: all that it saw."""
        with self.lock:
            masked = [ask for ask in self.asks if ask.message_type.endswith(f".{COLLECT}")]
            if not masked or masked[-1].message_type in self.sums_of_round or self.wire is None:
                return
            for ask in self.asks:
                self._write(ask)
            ask, wire = masked[-1], self.wire
            self.sums_of_round.add(ask.message_type)
            inside = [
                s.k for s in sorted(ask.sendings, key=lambda s: s.k) if s.answer is not None and not s.answer.error
            ]
            self.smallest_sum = min(self.smallest_sum or len(inside), len(inside))
            arrays = State(self.layout.named(dict(mean())), self.layout.buffers)
            shown = Field(SUM, None, arrays, Named(kind="weights"), 0)
            self._seen(class_name(SUM, True), SUM, [{SUM: shown}])
            value = ups([{SUM: shown}], SUM)[0]
            wire.summed(value, ask.message_type, ask.number, inside)  # type: ignore[arg-type]
            seen = f"the server sees it in a sum of {len(inside)} nodes, without noise of fedaudit"
            for k in inside:
                self._bill(k, None, [LedgerEntry.unprotected(f"{class_name(SUM, True)}.{SUM}", "weights", seen)])

    def model_after(self, arrays: Mapping[str, torch.Tensor], metrics: Mapping[str, Any] | None = None) -> None:
        """Note the global model after the open round's training, and what the server measured on it."""
        with self.lock:
            self.arrays, self.fresh = self.layout.named(dict(arrays)), True
            self.measured(metrics or {})

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """Note what the server measured on the global model of the open round."""
        with self.lock:
            self.metrics |= {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}

    def _seen(self, name: str, message_type: str, contents: Sequence[Mapping[str, Field]]) -> None:
        shape = self.shapes.setdefault(name, {"type": message_type, "fields": {}})
        for fields in contents:
            for field_name, of in fields.items():
                if name.endswith("Reply"):
                    entries = [of.key] if of.key is not None else list(of.value) if isinstance(of.value, dict) else []
                    self.places |= {(message_type, of.record), *((message_type, f"{of.record}.{e}") for e in entries)}
                what = "arrays" if isinstance(of.value, State | torch.Tensor) and of.key is None else "table"
                named = None if of.named is None else of.named.model_dump()
                role = None if of.protocol is None else of.protocol.role
                found = {"record": of.record, "key": of.key, "is": what, "named": named, "role": role}
                found["numbers"] = _numbers(of.value)
                shape["fields"][field_name] = found

    def _check_kinds(self, sure: bool) -> None:
        """Raise an error if a kind was given to a record that no reply has. Until the end only a likeness is sure."""
        for key in self.names.unmatched(self.places):
            there = sorted({place for _, place in self.places})
            typed = [f"{kind}.{place}" for kind, place in self.places]
            if sure or difflib.get_close_matches(key, [*there, *typed], n=1, cutoff=0.8):
                raise SettingError(f"--kind {key}: {unknown('record of a reply', key, there)}")

    def _bill(self, k: int, n: int | None, entries: Any) -> None:
        if n is not None:
            self.counts[k] = n
        known = self.counts.get(k, 0)
        delta = min(
            (policy.delta_for(known) for policy in self.policies.values()), default=1 / known if known else DELTA
        )
        self.ledger.add(k, known, delta, self.t, entries)

    def end_round(self) -> None:
        """End the open round: write what is not written yet, and score the global model if the server showed one."""
        if self.wire is None:
            return
        wall = time.perf_counter() - self.begun  # from its first message on, training included, without our scoring
        for ask in self.asks:
            self._write(ask)
        self.timings.add([Span("server", self.t, "round", max(0.0, wall - self.worked))])  # on Ray, nodes work at once
        offset = self.transcript.end_round(self.t)
        self._count(self.wire.traffic)
        up, down = self.wire.traffic.total("up"), self.wire.traffic.total("down")
        self.record.rounds.append(
            RoundRecord(
                round=self.t,
                participants=sorted(self.participants),
                absent=self.absent,
                up_payload=up[0],
                up_wire=up[1],
                down_payload=down[0],
                down_wire=down[1],
                utility=self._utility() if self.fresh else None,
                diagnostics=self.metrics,
                wall_s=round(wall, 4),
                redone=self.redone,
            )
        )
        self.wire, self.redone, self.worked = None, 0, 0.0
        self._commit(offset)
        if self.t == 1:
            self._check_kinds(sure=False)
        self.watch(self.t, max(self.setting.rounds, self.t), f"round {self.t}")

    def note(self, text: str) -> None:
        if text not in self.record.notes:
            self.record.notes.append(text)

    def finish(self) -> RunRecord:
        """Complete the run after the app's server has ended, and return its record."""
        with self.lock:
            self.end_round()
            self._check_kinds(sure=True)
        self.transcript.close()
        record = self.record
        if self.late:
            self.note(f"{self.late} answers came after their round had ended, and are not in the transcript")
        if self.overtaken:
            self.note(
                f"{self.overtaken} times the server asked for a round after it had begun a later one; these messages "
                "are counted in the later one"
            )
        made_with = {**self.setting.set, "messages": self.shapes}
        record.setting = self.setting.model_copy(update={"rounds": self.t, "set": made_with})
        write_atomic(self.folder / "setting.json", record.setting.model_dump_json(indent=1).encode())
        record.published = self._publish()
        record.ledger = self.ledger.close()
        used = {entry.kind for client in record.ledger for entry in client.entries}
        record.idle_policies = sorted(self.policies.keys() - used)
        for kind in record.idle_policies:
            self.note(f"the policy on {kind} applied to nothing: no record of the app has this kind")
        for name in sorted(r.field for r in self.releases.values() if r.kind == "unmapped"):
            self.note(f"{name} was given no kind, so it is unprotected and no attack can use it")
        for text in shown(self.shapes):
            self.note(text)
        if self.terms.records is None:
            self.note("no adapter tells members from non-members, so attacks that need the truth cannot be scored")
        if self.smallest_sum is not None:
            self.note(f"secure aggregation: the server sees only sums of at least {self.smallest_sum} nodes' models")
        claimed = self._claimed()
        record.status, record.finished = "done", datetime.now(UTC).isoformat(timespec="seconds")
        record.save(self.folder)
        self.store.amend(record=json.loads(record.model_dump_json(exclude=set(BESIDE))))
        if claimed:
            save_audits(self.folder, record.transcript_digest, claimed)
        record.audits = claimed
        seal_again(self.folder)
        return record

    def _claimed(self) -> list[EpsilonAudit]:
        """Return all claims of the app beside the ledger, and note what is wrong with them on their face."""
        spent = [client.epsilon for client in self.record.ledger]
        ledger = None if None in spent else max((e for e in spent if e is not None), default=0.0)  # None: not composed
        found = [claim.audit(ledger) for claim in self.local]
        took_part = [len(row.participants) - len({a.client for a in row.absent}) for row in self.record.rounds]
        for claim in self.central:
            found.append(claim.audit(self.t, ledger))
            if (remark := claim.remark(min(took_part, default=0))) is not None:
                self.note(remark)
        if self.reported:
            said, remark = reported_audit(self.reported, ledger)
            found.append(said)
            if remark is not None:
                self.note(remark)
        return found

    def close(self) -> None:
        """Close all files, whatever happened."""
        self.transcript.close()

    # --- writing the record ---

    def _count(self, seen: RoundTraffic) -> None:
        for (direction, name), sent in seen.wire.items():
            row = self.traffic.setdefault((direction, name), FieldTraffic(direction=direction, field=name))  # type: ignore[arg-type]
            size = seen.sizes.get((direction, name))
            row.wire += sent
            if size is not None:
                row.payload, row.buffers = row.payload + size.payload, row.buffers + size.buffers
        self.releases |= {release.field: release for release in seen.releases.values()}
        self.digest = xxhash.xxh3_128_hexdigest((self.digest + "".join(seen.digests)).encode())

    def _loaded(self) -> nn.Module | None:
        """Return the global model; None if it is unknown what the arrays are."""
        if self.model is None or self.arrays is None or self.world is None:
            return None
        return load(self.world.build(self.world.archs[0]), self.arrays)

    def _utility(self) -> Utility | None:
        model = self._loaded()
        if model is None or self.world is None:
            return None
        with compute(self.world):
            utility = evaluate(self.world, model, None)
        self.record.notes += [note for note in sampling_note(utility) if note not in self.record.notes]
        return utility

    def _publish(self) -> list[str]:
        model = self._loaded()
        if model is None:
            return []
        (self.folder / "models").mkdir(exist_ok=True)
        return [save_model(self.folder / "models" / "global.safetensors", model)]

    def _commit(self, offset: int) -> None:
        record = self.record
        record.traffic = [self.traffic[key] for key in sorted(self.traffic)]
        record.releases = [self.releases[key] for key in sorted(self.releases)]
        self.timings.add([], peak_rss())
        record.timings, record.peak_rss_bytes = self.timings.table(), self.timings.peak_rss_bytes
        record.transcript_digest, record.ledger = self.digest, self.ledger.rows()
        record.curve, record.result = curve_of(record.rounds), results(record.rounds)
        facts = {
            "transcript": offset,
            "seq": self.transcript.seq,
            "attempt": 0,
            "clock": self.transcript.clock(),
            "record": json.loads(record.model_dump_json(exclude=set(BESIDE))),
            "flower": {
                "number": self.number, "shapes": self.shapes, "places": sorted(self.places), "counts": self.counts,
                "reported": [[r.k, r.epsilon, r.delta] for r in self.reported], "smallest_sum": self.smallest_sum,
            },
        }  # fmt: skip
        self.store.commit(self.t, encode(Arrays(State(self.arrays or {}))), facts)
        record.save(self.folder)

    def _new_record(self) -> RunRecord:
        return RunRecord(
            setting=self.setting,
            versions=versions() | flower_version(),
            device=device_name(torch.device("cpu")),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            data=_facts(self.world),
            harness=harness(),
            traffic_declared=False,
            models=self._models(),
        )

    def _models(self) -> dict[str, ModelFacts]:
        if self.model is None:
            return {}
        parameters = sum(p.numel() for p in self.model.parameters())
        return {self.setting.model: ModelFacts(parameters=parameters, clients=self.setting.clients)}


def _held(folder: Path) -> str:
    """Return in words that a folder holds a run, and that an unfinished one cannot be continued."""
    record = read_record(folder)
    if record.status == "done":
        return f"{folder} already holds a run. Choose another --out."
    return (
        f"{folder} already holds a run that ended after round {len(record.rounds)}. If the app goes on from a state of "
        "its own, use --resume. Flower's strategies do not: they begin again, and need another --out."
    )


def _numbers(value: Any) -> str | None:
    """Return "real" or "whole" for the numbers of arrays; None for tables, and for arrays without any."""
    tensors = list(value.values()) if isinstance(value, State) else [value] if isinstance(value, torch.Tensor) else []
    if not sum(t.numel() for t in tensors):
        return None
    return "real" if any(t.is_floating_point() for t in tensors) else "whole"


def _tables(fields: Mapping[str, Field]) -> list[dict[str, Any]]:
    """Return the metric and config records of a reply, with entries that are fields of their own put together."""
    found: dict[str, dict[str, Any]] = {}
    for of in fields.values():
        if of.key is not None:
            found.setdefault(of.record, {})[of.key] = of.value
        elif isinstance(of.value, dict) and not isinstance(of.value, State):
            found.setdefault(of.record, {}).update(of.value)
    return list(found.values())


def _facts(world: World | None) -> DataFacts:
    """Return the sizes of the parts of the data; all empty if there is no adapter."""
    if world is None:
        return DataFacts(
            shape=[], classes=0, class_names=[], test=0, aux=0, public=0, members=[], nonmembers=[], validation=[],
            counts=[],
        )  # fmt: skip
    held = world.federation
    return DataFacts(
        shape=list(world.shape),
        classes=world.classes,
        class_names=list(held.dataset.class_names),
        test=len(held.dataset.test_y),
        aux=len(held.aux),
        public=0,
        members=[world.count(k) for k in range(len(held.shards))],
        nonmembers=[len(shard.nonmembers) for shard in held.shards],
        validation=[0 for _ in held.shards],
        counts=held.counts().tolist(),
    )


def flower_version() -> dict[str, str]:
    from importlib import metadata

    return {"flwr": metadata.version("flwr")}
