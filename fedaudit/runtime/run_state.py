"""Holds what a run carries from round to round: its setting, world, store, record, ledger, and the engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from fedaudit.errors import RunError
from fedaudit.privacy.ledger import Ledger, LedgerEntry
from fedaudit.progress import Watch
from fedaudit.rng import seeded
from fedaudit.runtime.checkpoint import Store, room_for_states
from fedaudit.runtime.declarations.twins import Twins
from fedaudit.runtime.engines import Engine, make_engine
from fedaudit.runtime.engines.isolated import IsolatedEngine
from fedaudit.runtime.folder import ways_on
from fedaudit.runtime.meter import Meter, Timings
from fedaudit.runtime.party import Client, Server
from fedaudit.runtime.run_record import (
    FieldTraffic,
    RunRecord,
    read_record,
)
from fedaudit.runtime.task import Done, open_client
from fedaudit.runtime.utility import Known
from fedaudit.runtime.world import World, world_of
from fedaudit.setting import Setting
from fedaudit.training.cuda_graphs import MEMORY_FULL
from fedaudit.wire.codec import decode
from fedaudit.wire.codec.packing import Blob
from fedaudit.wire.message import Record, Up
from fedaudit.wire.release import Release
from fedaudit.wire.transcript import TranscriptWriter

Entries = list[tuple[int, list[LedgerEntry]]]  # by client: its entries for the ledger in one round


def before_cuda(setting: Setting) -> None:
    """Set what cuBLAS reads when CUDA starts, so that its sums are the same each time."""
    if setting.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class RunState:
    """A run in progress. The rooms beside this one open it, ask its clients, and commit its rounds."""

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        resume: bool,
        watch: Watch,
        engine: Engine | None,
        refuse_idle: bool,
        first: Path | None = None,
        noise_key: Path | str | None = None,
        twin_sets: int = 1,
    ):
        if (folder / "record.json").exists() and not resume:
            if read_record(folder).status == "running":
                raise RunError(f"{folder} already holds a run. {ways_on(folder)}")
            raise RunError(f"{folder} already holds a run. Use --resume to go on with it, or another --out.")
        before_cuda(setting)
        self.setting, self.folder, self.watch = setting, folder, watch
        self.given_engine, self.refuse_idle, self.first = engine, refuse_idle, first
        self.json = setting.model_dump_json()
        self.world: World = world_of.begun(setting)
        self.method = self.world.method
        self.store = Store(folder / "checkpoint", room_for_states(self.world.device))
        self.timings = Timings()
        self.answers: dict[str, type[Up]] = {}  # the message class of each function
        self.traffic: dict[tuple[str, str], FieldTraffic] = {}
        self.releases: dict[str, Release] = {}
        self.ledger = Ledger()
        self.scores = Known()
        self.deployed: tuple[int, nn.Module | None] | None = None
        self.digest = ""
        self.committed: Blob = b""  # the server's state, encoded; tensors that the next round sends stay on the device
        self.decoded: Record | None = None  # the decoded state, once somebody needs it
        self.started = self.attempt = self.now = 0
        self.noise_key = None if noise_key is None else Path(noise_key)  # where the secret is taken from, if not drawn
        self.secret: bytes  # from which noise follows, and which clients have a twin
        self.twins: Twins
        self.twin_sets = twin_sets  # how many sets of other records a client with a twin is compared with
        self.record: RunRecord
        self.transcript: TranscriptWriter

    @functools.cached_property
    def engine(self) -> Engine:
        return self.given_engine or make_engine(self.setting)

    @functools.cached_property
    def isolated(self) -> IsolatedEngine | None:
        """Return the engine that runs the server in a process of its own; None if the server runs here."""
        return self.engine if self.setting.isolate and isinstance(self.engine, IsolatedEngine) else None

    def note_alone(self, path: str, reasons: list[str]) -> None:
        """Note what the engine could not stack: the run is slower for it, and otherwise the same."""
        new = [note for reason in reasons if (note := f"not stacked: {path}: {reason}") not in self.record.notes]
        for note in new:
            self.watch(self.now - 1, self.setting.rounds, f"note: {note}")
        self.note(new)

    def tell_slower(self, reason: str) -> None:
        """Say at once that steps are carried out in a slower way than was asked for, and what that costs."""
        cost = "A step takes several times as long on small networks"
        if reason.startswith("not compiled"):
            cost = "A step of small networks takes 2 to 3 times as long as compiled, of deep ones up to a sixth longer"
        elif reason == MEMORY_FULL:
            cost = "They are made anew, which takes as long as five steps each. Let fewer runs share the GPU"
        self.watch(max(self.now - 1, 0), self.setting.rounds, f"note: steps not recorded: {reason}. {cost}")

    def note(self, notes: Iterable[str]) -> None:
        self.record.notes += [note for note in notes if note not in self.record.notes]

    def server(self, t: int, meter: Meter | None = None) -> Server:
        return Server(self.world.hub, t, meter or Meter("server", t, self.world.device))

    def predictor(self, t: int) -> nn.Module | None:
        """Return the model that the server deploys after round t: the evaluated one, or the same built again."""
        if self.deployed is not None and self.deployed[0] == t:
            return self.deployed[1]
        with seeded(self.setting.seed, "evaluation", t, device=self.world.device):
            return self.method.predictor(self.state, self.server(t))

    def client(self, k: int) -> Client:
        meter = Meter(f"client {k}", self.setting.rounds, self.world.device)
        return open_client(self.world.site(k), 0, 0, meter, self.store.client(k))

    def has_begun(self, k: int) -> bool:
        """Return whether client k has a state of this run: it answered before."""
        return k in self.store.clients and (self.setting.start is None or bool(self.record.rounds))

    def bill(self, k: int, t: int, entries: list[LedgerEntry]) -> None:
        n = self.world.count(k)
        deltas = [policy.delta_for(n) for policy in self.world.policies.values()]
        if self.world.guarantee is not None:
            deltas.append(self.world.guarantee.delta)
        delta = min(deltas, default=1 / n)
        self.ledger.add(k, n, delta, t, entries)

    def log_failure(self, t: int, ask: int, done: Done) -> None:
        """Write the whole text of a client's failure to a log on this machine alone: the record says its type and
        place."""
        if done.detail:
            self.log(f"round {t}, ask {ask}, client {done.k}: {done.detail}")

    def log(self, text: str) -> None:
        with open(self.folder / "errors.log", "a") as file:
            file.write(f"{text}\n")

    @property
    def state(self) -> Record:
        """Return the server's state as its codec left it, so that a resumed run cannot differ."""
        if self.decoded is None:
            self.decoded = decode(self.committed, Record, device=self.world.device)
        return self.decoded
