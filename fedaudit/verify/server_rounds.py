"""The server's rounds, done again with the clients' replies from the transcript.

Every message to a client must come out, every sum, and the global model of every evaluated round is tried on the data.
A secure sum is done again phase by phase: keys, shares and masks follow from the run's seed, so each message of each
phase must come out, too, and the sum from the masked vectors and the shares that clients gave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fedaudit.aggregation.terms import Terms
from fedaudit.aggregation.update import update_of
from fedaudit.errors import FedauditError
from fedaudit.privacy.noise_key import FILE as KEY_FILE
from fedaudit.rng import seeded
from fedaudit.runtime.asking import participants_of
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import function_path
from fedaudit.runtime.party import Cohort, Server
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.runtime.scores import Utility
from fedaudit.runtime.sums import Summing, last_sum, secret_of_sums
from fedaudit.runtime.utility import evaluate
from fedaudit.runtime.world import World
from fedaudit.verify.accuracy import compare_utility
from fedaudit.verify.case import RECORD, Case
from fedaudit.verify.sum_rows import Both, Pairs, SumRows, is_phase
from fedaudit.wire.codec import decode, encode, read_header
from fedaudit.wire.message import Down, Record, Up
from fedaudit.wire.transcript import TranscriptEntry

INDEX = "transcript/index.jsonl"
FIGURE = "server's rounds"
UNSEEN = {"cut_off"}  # clients alone know it
TermsOf = dict[tuple[int, int, int], Terms]  # by client, round and ask


class _Apart(Exception):
    """The server sent something else: where, what the transcript has, and what came out."""


def rerun_server(case: Case, world: World) -> TermsOf:
    """Do the server's rounds again on the clients' replies, and evaluate its model where the run did.

    Return the terms on which replies entered sums, of the rounds that could be done again.
    """
    terms: TermsOf = {}
    if case.contents.dropped:
        case.found.word(FIGURE, f"the messages of {len(case.contents.dropped)} rounds were not kept (keep_weights)")
        return terms
    guarantee = world.guarantee
    if guarantee is not None and guarantee.policy.secure and guarantee.policy.where == "server":
        case.found.word(
            FIGURE, "the server's noise came from the operating system's entropy, and cannot be drawn again"
        )
        return terms
    by_key = world.setting.aggregate == "secure" or (guarantee is not None and not guarantee.policy.secure)
    if by_key and not (case.folder / KEY_FILE).is_file():
        case.found.word(FIGURE, f"{KEY_FILE} is not there, so the noise or the masks of sums cannot be drawn again")
        return terms
    by_ask: dict[tuple[int, int], Pairs] = defaultdict(dict)
    for entry in case.transcript.entries():
        if not is_phase(entry.fn):
            of = by_ask[entry.round, entry.ask]
            of[entry.client] = (entry, None) if entry.direction == "down" else (of[entry.client][0], entry)
    try:
        with seeded(world.setting.seed, "server", 0, device=world.device):
            state = world.method.init(Server(world.hub, 0, Meter("server", 0, world.device)))
        for row in case.record.rounds:
            case.watch(row.round - 1, len(case.record.rounds), f"rerun, the server's round {row.round}")
            state, told = _round(case, world, state, row, by_ask)
            terms |= told
            if row.utility is not None and row.round < case.record.rounds[-1].round:
                _compare_round(case, world, state, row.round, row.utility)
    except _Apart as e:
        where, said, now = e.args
        if case.other_code or case.other_machine:
            case.found.word(FIGURE, f"{where}: other bits come out here ({case.other_code or case.other_machine})")
        else:
            case.found.contradicted(FIGURE, INDEX, where, said, now, "what the server sends, done again")
        return terms
    except (FedauditError, KeyError) as e:
        case.found.contradicted(FIGURE, INDEX, FIGURE, "messages", f"{type(e).__name__}: {e}"[:200])
        return terms
    sums = f", and {len(case.sums)} sums" if case.sums else ""
    number = len(case.record.rounds)
    case.found.recomputed(FIGURE, f"{number} rounds: every message to a client comes out to the bit{sums}")
    _compare_last(case, state)
    return terms


def _round(
    case: Case, world: World, state: Record, row: RoundRecord, by_ask: Mapping[tuple[int, int], Pairs]
) -> tuple[Record, TermsOf]:
    """Do one round again. A resumed run draws noise on sums under another number from there on: each is tried."""
    t, ids = row.round, participants_of(world.setting, row.round)
    if not ids:  # drawn by Poisson, and nobody was
        return state, {}
    attempts = case.attempts if case.sums else 1
    for attempt in range(attempts):
        replay = _Replay(case, world, t, by_ask)
        summing = _Sums.of(replay, attempt)
        start = decode(encode(state), Record, device=world.device)
        try:
            with seeded(world.setting.seed, "server", t, device=world.device):
                cohort = Cohort(ids, replay.ask, summing.mean)
                after = world.method.round(start, Server(world.hub, t, Meter("server", t, world.device)), cohort)
        except _Apart:
            if attempt + 1 < attempts:
                continue
            raise
        said, now = ([one.model_dump(exclude=UNSEEN) for one in of] for of in (row.sums, summing.records))
        if said or now:
            case.found.compare(f"sums of round {t}, done again", RECORD, f"rounds.{t - 1}.sums", said, now, close=1e-9)
        # A client's own noise does not show in what the server does, so nobody can say which attempt drew it.
        local = world.guarantee is not None and world.guarantee.policy.where == "client"
        return after, {} if attempts > 1 and local else replay.terms
    raise AssertionError("a run has at least one attempt")


@dataclass
class _Replay:
    """One round's messages, which are compared with the transcript instead of sent. It stands in for the wire."""

    case: Case
    world: World
    t: int
    by_ask: Mapping[tuple[int, int], Pairs]
    asks: list[Any] = field(default_factory=list)
    terms: TermsOf = field(default_factory=dict)
    # What `Summing` looks for in the round so far.
    layouts: dict[int, str] = field(default_factory=dict)
    absent: list[Any] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    cut_off: int = 0

    @property
    def wire(self) -> _Replay:
        return self

    @property
    def traffic(self) -> _Replay:
        return self

    def rows(self, number: int) -> SumRows:
        rows = self.case.sums.get((self.t, number))
        if rows is None:
            raise _Apart(f"round {self.t}, ask {number}", "no sum", "a sum of replies")
        return rows

    def ask(
        self,
        cohort: Cohort,
        fn: Callable[..., Any] | str,
        message: Down | Mapping[int, Any],
        terms: Mapping[int, Terms] | None = None,
    ) -> dict[int, Any]:
        """Answer a server's ask with what the transcript has, and compare what it sends."""
        number = len(self.asks)
        self.asks.append(None)
        path = fn if isinstance(fn, str) else function_path(self.world.method, fn)
        messages = dict.fromkeys(cohort.ids, message) if isinstance(message, Down) else dict(message)
        there = self.by_ask.get((self.t, number), {})
        if there.keys() != messages.keys():
            raise _Apart(f"round {self.t}, ask {number}", f"clients {sorted(there)}", f"clients {sorted(messages)}")
        digests: dict[int, str] = {}
        replies: dict[int, Any] = {}
        for k in sorted(messages):
            down, up = there[k]
            key = id(messages[k])
            if key not in digests:
                digests[key] = read_header(encode(messages[k])).digest
            if down.fn != path:
                raise _Apart(f"row {down.seq}, fn", down.fn, path)
            if digests[key] != down.digest:
                raise _Apart(f"row {down.seq}: to client {k}, round {self.t}", down.digest, digests[key])
            if up is None:
                cohort.ids.remove(k)
                continue
            replies[k] = decode(encode(up.record()), Up, device=self.world.device)
            if terms is not None:
                self.terms[k, self.t, number] = terms[k]
                self.layouts[k] = self._layout(number, messages[k], terms[k])
        return replies

    def _layout(self, number: int, message: Down, terms: Terms) -> str:
        """Return what the replies of a sum look like: as the sum does."""
        total = self.rows(number).total
        if total is None:
            raise _Apart(f"round {self.t}, ask {number}", "no sum", "a sum of replies")
        return update_of(total.record(), message if terms.based else None, terms.by).layout.text()

    def summed(self, value: Up, fn: str, number: int, clients: list[int]) -> None:
        """Compare a sum with the one that the transcript has."""
        total = self.rows(number).total
        now = read_header(encode(value)).digest
        if total is None or total.digest != now:
            at = f"round {self.t}, ask {number}" if total is None else f"row {total.seq}: the sum of round {self.t}"
            raise _Apart(at, "no sum" if total is None else total.digest, now)
        if total.row["clients"] != list(clients) or total.fn != fn:
            raise _Apart(f"row {total.seq}, clients", f"{total.row['clients']}, {total.fn}", f"{list(clients)}, {fn}")


class _Sums(Summing):
    """The sums of one round, done again: their messages are compared with the transcript."""

    @classmethod
    def of(cls, replay: _Replay, attempt: int) -> _Sums:
        world = replay.world
        run = cast(Any, _Run(world))
        largest = max(map(world.count, range(world.setting.clients)))
        there = (replay.case.folder / KEY_FILE).is_file()  # without it nothing is drawn that has to come out again
        secret = secret_of_sums(replay.case.run.secret if there else b"", attempt)
        before = last_sum([row for row in replay.case.record.rounds if row.round < replay.t])
        return cls(run, cast(Any, replay), replay.ask, secret, world.guarantee, largest, before)

    def _both(self, k: int, phase: str, number: int) -> Both:
        rows = cast(_Replay, self.so_far).rows(number)
        if k not in rows.phase(phase):
            at = f"round {self.so_far.t}, ask {number}, {phase}"
            raise _Apart(at, f"clients {sorted(rows.phase(phase))}", f"client {k}")
        return rows.phase(phase)[k]

    def _stays(self, cohort: Cohort, k: int, number: int, phase: str) -> bool:
        if self._both(k, phase, number)[1] is not None:
            return True
        if k in cohort.ids:
            cohort.ids.remove(k)
        return False

    def _down(self, k: int, message: Record, phase: str, number: int) -> Any:
        return self._same(message, self._both(k, phase, number)[0])

    def _up(self, k: int, message: Record, phase: str, number: int) -> Any:
        up = self._both(k, phase, number)[1]
        assert up is not None  # it stayed
        return self._same(message, up)

    def _same(self, message: Record, entry: TranscriptEntry) -> Any:
        now = read_header(encode(message)).digest
        if now != entry.digest:
            ends = f"{entry.sender} to {entry.receiver}, round {entry.round}, {entry.fn}"
            raise _Apart(f"row {entry.seq}: {ends}", entry.digest, now)
        return decode(encode(message), type(message))


@dataclass(frozen=True)
class _Run:
    """The part of a run that its sums look at."""

    world: World

    @property
    def setting(self) -> Any:
        return self.world.setting

    @property
    def method(self) -> Any:
        return self.world.method


def _compare_last(case: Case, state: Record) -> None:
    if case.store is None or not case.record.rounds:
        return
    left = case.store.server(f"server.{case.record.rounds[-1].round}")
    case.found.compare(
        "server's last state", "checkpoint", "the server's state", read_header(left).digest,
        read_header(encode(state)).digest, reason="it follows from the messages",
        excuse=case.other_code or case.other_machine,
    )  # fmt: skip


def _compare_round(case: Case, world: World, state: Record, t: int, said: Utility) -> bool:
    """Evaluate the server's model after a round, and compare it with the record."""
    server = Server(world.hub, t, Meter("server", t, world.device))
    state = decode(encode(state), Record, device=world.device)
    with seeded(world.setting.seed, "evaluation", t, device=world.device):
        now = evaluate(world, world.method.predictor(state, server), None,
                       global_points=world.method.global_points(state, server))  # fmt: skip
    of_server = Utility.model_validate({"global": said.global_, "global_points": said.global_points})
    at = f"rounds.{t - 1}.utility"
    if said.global_ is None and now.global_ is None and not said.global_points:
        return True
    return compare_utility(
        case, f"accuracy of round {t}", at, of_server, now, "the server's model, computed again from the messages"
    )
