"""The recorder, which writes an app's messages into a run folder like any other while the app runs.

Flower's server is in control; this module only writes. An ask is one exchange of the server with some nodes. A round
ends when Flower's strategy says so (see fedaudit.flower.server). For a server without a strategy it ends before the
next training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from fedaudit.errors import RunError
from fedaudit.flower.client import Terms, Told
from fedaudit.flower.messages import Field, class_name, downs, ups
from fedaudit.flower.record_kinds import Names, app_policies
from fedaudit.privacy.ledger import Ledger
from fedaudit.progress import Watch
from fedaudit.runtime.checkpoint import Store, write_atomic
from fedaudit.runtime.code_digest import harness
from fedaudit.runtime.folder import save_model
from fedaudit.runtime.meter import Span, Timings, peak_rss
from fedaudit.runtime.run_record import (
    BESIDE,
    Absence,
    DataFacts,
    FieldTraffic,
    ModelFacts,
    RoundRecord,
    RunRecord,
    curve_of,
    device_name,
    versions,
)
from fedaudit.runtime.scores import Utility
from fedaudit.runtime.seal import seal_again
from fedaudit.runtime.task import absence, compute
from fedaudit.runtime.utility import evaluate, results, sampling_note
from fedaudit.runtime.world import World, world_of
from fedaudit.setting import Setting
from fedaudit.wire.channel import RoundTraffic, Wire
from fedaudit.wire.codec import Header, encode, measure
from fedaudit.wire.message import Record, State, load
from fedaudit.wire.release import Protection, Release
from fedaudit.wire.transcript import TranscriptWriter

DELTA = 1e-5  # the ledger's delta if neither a policy nor the number of records gives one


class Arrays(Record):
    """The global model after a round, if the server showed one."""

    w: State


@dataclass(frozen=True)
class Exchange:
    """One message to node k and its reply. `reply` is None if none came, or if it was an error."""

    k: int
    asked: tuple[dict[str, Field], int]  # fields, and bytes around them
    reply: tuple[dict[str, Field], int] | None = None
    told: Told | None = None
    error: str | None = None


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
    """Writes one run of one app. The server's side calls `ask`, `end_round` and `finish` as these things happen."""

    def __init__(self, folder: Path, setting: Setting, terms: Terms, watch: Watch):
        if (folder / "record.json").exists():
            raise RunError(f"{folder} already holds a run. An app's server cannot go on from it: choose another --out.")
        self.folder, self.setting, self.terms, self.watch = folder, setting, terms, watch
        self.names, self.policies = Names(terms.kinds), app_policies(terms.privacy)
        self.world: World | None = world_of(setting.model_dump_json()) if terms.records is not None else None
        self.model: nn.Module | None = None if terms.records is None else terms.records().model()
        self.store, self.timings, self.ledger = Store(folder / "checkpoint"), Timings(), Ledger()
        self.traffic: dict[tuple[str, str], FieldTraffic] = {}
        self.releases: dict[str, Release] = {}
        self.shapes: dict[str, dict[str, Any]] = {}  # shapes of the messages seen, for readers of the folder
        self.counts: dict[int, int] = {}
        self.digest, self.t, self.trained, self.begun = "", 0, False, 0.0
        self.wire: FlowerWire | None = None  # the wire of the open round
        self.participants: set[int] = set()
        self.absent: list[Absence] = []
        self.arrays: dict[str, torch.Tensor] | None = None
        write_atomic(folder / "setting.json", setting.model_dump_json(indent=1).encode())
        self.transcript = TranscriptWriter(folder / "transcript", keep_weights=setting.keep_weights)
        self.record = self._new_record()
        self.transcript.begin_round(0)
        self._commit(self.transcript.end_round(0))

    # --- while messages pass ---

    @property
    def buffers(self) -> frozenset[str]:
        """Return the names in an array record that are not parameters; empty if there is no model to tell."""
        if self.model is None:
            return frozenset()
        return frozenset(self.model.state_dict().keys() - dict(self.model.named_parameters()).keys())

    def ask(self, message_type: str, exchanges: Sequence[Exchange]) -> None:
        """Record one exchange with some nodes, each of which was sent one message."""
        if not exchanges:
            return
        exchanges = sorted(exchanges, key=lambda e: e.k)
        train = message_type.partition(".")[0] == "train"
        if train and self.trained:
            self.end_round()
        self.trained = self.trained or train
        wire = self._begin()
        self._seen(class_name(message_type, False), message_type, [e.asked[0] for e in exchanges])
        requests = downs([e.asked[0] for e in exchanges], message_type)
        for _ in wire.down({e.k: r for e, r in zip(exchanges, requests, strict=True)}):  # type: ignore[misc]
            pass
        answered = [e for e in exchanges if e.reply is not None]
        replies = iter(ups([e.reply[0] for e in answered if e.reply], message_type))
        self._seen(class_name(message_type, True), message_type, [e.reply[0] for e in answered if e.reply])
        number, fn = len(wire.traffic.asks) - 1, message_type
        for e in exchanges:
            wire.flower["down", e.k] = e.asked
            self.participants.add(e.k)
            if e.reply is None:
                wire.back(_Answer(e.k, None, e.error), fn, "cpu")
                self.absent.append(Absence(client=e.k, ask=number, reason=str(e.error)))
                if self.policies:
                    self._bill(e.k, None, [absence(fn)])
                continue
            wire.flower["up", e.k] = e.reply
            told = e.told or Told(wall_s=0.0)
            wire.back(_Answer(e.k, encode(next(replies)), None, told.protection), fn, "cpu")
            self.timings.add([Span(f"client {e.k}", self.t, message_type, told.wall_s)])
            self._bill(e.k, told.n, told.entries)
        self.watch(self.t - 1, max(self.setting.rounds, self.t), f"round {self.t}, {message_type}")

    def _begin(self) -> FlowerWire:
        """Return the wire of the open round, or begin a new round."""
        if self.wire is None:
            self.t += 1
            self.begun = time.perf_counter()
            self.transcript.begin_round(self.t)
            self.wire = FlowerWire(self.transcript, self.t)
            self.participants, self.absent = set(), []
        return self.wire

    def _seen(self, name: str, message_type: str, contents: Sequence[Mapping[str, Field]]) -> None:
        shape = self.shapes.setdefault(name, {"type": message_type, "fields": {}})
        for fields in contents:
            for field_name, of in fields.items():
                what = "arrays" if isinstance(of.value, State | torch.Tensor) and of.key is None else "table"
                named = None if of.named is None else of.named.model_dump()
                shape["fields"][field_name] = {"record": of.record, "key": of.key, "is": what, "named": named}

    def _bill(self, k: int, n: int | None, entries: Any) -> None:
        if n is not None:
            self.counts[k] = n
        known = self.counts.get(k, 0)
        delta = min(
            (policy.delta_for(known) for policy in self.policies.values()), default=1 / known if known else DELTA
        )
        self.ledger.add(k, known, delta, self.t, entries)

    def end_round(
        self, arrays: Mapping[str, torch.Tensor] | None = None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """End the round. `arrays` is the global model after it, `metrics` what the server measured on that model."""
        if arrays is not None:
            self.arrays = dict(arrays)
        if self.wire is None:
            return
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
                utility=self._utility() if arrays is not None else None,
                diagnostics={k: float(v) for k, v in (metrics or {}).items() if isinstance(v, int | float)},
                wall_s=round(time.perf_counter() - self.begun, 4),
            )
        )
        self.wire, self.trained = None, False
        self._commit(offset)
        self.watch(self.t, max(self.setting.rounds, self.t), f"round {self.t}")

    def note(self, text: str) -> None:
        if text not in self.record.notes:
            self.record.notes.append(text)

    def finish(self) -> RunRecord:
        """Complete the run after the app's server has ended, and return its record."""
        self.end_round()
        self.transcript.close()
        record = self.record
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
        if self.terms.records is None:
            self.note("no adapter tells members from non-members, so attacks that need the truth cannot be scored")
        record.status, record.finished = "done", datetime.now(UTC).isoformat(timespec="seconds")
        record.save(self.folder)
        self.store.amend(record=json.loads(record.model_dump_json(exclude=set(BESIDE))))
        seal_again(self.folder)
        return record

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
        }
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
