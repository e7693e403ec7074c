"""A share of the run, computed again: some client tasks, chosen by the reviewer's seed, and the server's rounds.

A client's task is a pure function of its state, the message and the seed. A chosen task is given the message from the
transcript. Its state is first taken to be the client's first or last one: many methods overwrite it, and a reply that
comes out to the bit from any state is the task's. If none does, all tasks of the client up to this one are done again,
in order, from the first. Under a privacy policy that is always so, because what a release costs depends on the state.

The server's rounds are done again with the clients' replies from the transcript. Every message to a client must come
out, and the global model of every evaluated round is tried on the data.

On the machine type of the run, bits must be equal. Elsewhere a stated tolerance holds.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedaudit.epsilon.client_replay import apart
from fedaudit.errors import FedauditError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.noise_key import task_key
from fedaudit.rng import seeded
from fedaudit.runtime.asking import participants_of
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import function_path
from fedaudit.runtime.party import Cohort, Server
from fedaudit.runtime.scores import Utility
from fedaudit.runtime.task import Done, Task, compute, run_task
from fedaudit.runtime.utility import evaluate
from fedaudit.runtime.world import World
from fedaudit.verify.accuracy import compare_utility
from fedaudit.verify.case import RECORD, Case
from fedaudit.wire.codec import decode, encode, read_header
from fedaudit.wire.codec.packing import Blob
from fedaudit.wire.message import Down, Record, Up
from fedaudit.wire.transcript import TranscriptEntry

INDEX = "transcript/index.jsonl"
Both = tuple[TranscriptEntry, TranscriptEntry | None]  # a message to a client, and its answer
TOLERANCE = 0.01  # relative difference of a field's numbers up to which a reply is the same on another machine type


@dataclass(frozen=True)
class Asked:
    """One task as the transcript has it: what the client was sent, and what it answered."""

    down: TranscriptEntry
    up: TranscriptEntry

    @property
    def readable(self) -> bool:
        return all(entry.kept(name) for entry in (self.down, self.up) for name in entry.fields)

    @property
    def where(self) -> str:
        return f"row {self.up.seq}: client {self.up.client}, round {self.up.round}, {self.up.fn}"


@dataclass
class _Outcome:
    done: int = 0
    exact: int = 0
    largest: float = 0.0  # relative difference, where bits are not equal
    unreadable: int = 0
    wrong: int = 0
    reasons: list[str] = field(default_factory=list)


def check_rerun(case: Case, share: float, seed: int) -> tuple[int, int]:
    """Do a share of all client tasks and the server's rounds again. Return how many tasks there are and were redone."""
    tasks = _tasks(case)
    every = [asked for of in tasks.values() for asked in of]
    if case.world is None or not every:
        case.found.word("rerun", case.why_no_world if every else "no client answered")
        return len(every), 0
    if case.foreign_transport:
        case.found.word("rerun", "another framework ran the clients; `fedaudit flower run` runs the app again")
        return len(every), 0
    if case.record.setting.start is not None:
        case.found.word("rerun", "the clients started as another run left them, which this folder does not hold")
        return len(every), 0
    wanted = max(1, math.ceil(share * len(every)))
    order = sorted(every, key=lambda asked: asked.up.seq)
    chosen = set(random.Random(seed).sample(range(len(order)), wanted))  # the reviewer's choice, not the author's
    picked: dict[int, set[int]] = defaultdict(set)
    for i in chosen:
        picked[order[i].up.client].add(order[i].up.seq)
    outcome = _Outcome()
    with compute(case.world):
        for number, (k, wanted_of) in enumerate(sorted(picked.items())):
            case.watch(number, len(picked), f"rerun, client {k}")
            _rerun_client(case, case.world, tasks[k], wanted_of, outcome)
        _report(case, outcome, wanted, len(every), seed)
        _rerun_server(case, case.world)
    return len(every), outcome.done


def _tasks(case: Case) -> dict[int, list[Asked]]:
    """Return all answered tasks by client, in order."""
    found: dict[int, list[Asked]] = defaultdict(list)
    sent: dict[tuple[int, int, int], TranscriptEntry] = {}
    for entry in case.transcript.entries():
        key = (entry.client, entry.round, entry.ask)
        if entry.direction == "down":
            sent[key] = entry
        elif key in sent:
            found[entry.client].append(Asked(sent.pop(key), entry))
    return dict(found)


def _rerun_client(case: Case, world: World, tasks: list[Asked], wanted: set[int], outcome: _Outcome) -> None:
    chain = [asked for asked in tasks if asked.up.seq <= max(wanted)]
    if not world.policies:
        left = [asked for asked in chain if asked.up.seq in wanted and not _from_any_state(case, world, asked, outcome)]
        chain = [asked for asked in chain if left and asked.up.seq <= left[-1].up.seq]
        wanted = {asked.up.seq for asked in left}
    if any(policy.secure for policy in world.policies.values()):
        outcome.unreadable += len(wanted)
        outcome.reasons.append("noise from the operating system's entropy (secure = true) cannot be drawn again")
        return
    if world.policies and _secret(case) is None:
        outcome.unreadable += len(wanted)
        outcome.reasons.append("the key of the run's noise is not in the folder, so its noise cannot be drawn again")
        return
    state: Blob | None = None
    for asked in chain:
        if not asked.readable:
            outcome.unreadable += len(wanted)
            outcome.reasons.append(f"what was sent in round {asked.down.round} was not kept (keep_weights)")
            return
        done = _done_as(case, world, asked, state)
        if asked.up.seq in wanted:
            wanted = wanted - {asked.up.seq}
            outcome.done += 1
            _compare(case, asked, done, outcome)
            if done.reply is not None and world.policies:
                _compare_bill(case, asked, done.entries)
        if done.state is None:
            return
        state = done.state


def _secret(case: Case) -> bytes | None:
    """Return the secret from which the run's noise follows; None if the author did not hand it on."""
    try:
        return case.run.secret
    except FedauditError:
        return None


def _task(case: Case, world: World, asked: Asked, state: Blob | None, attempt: int) -> Task:
    """Return a task as an engine was given it."""
    return Task(
        world.setting.model_dump_json(), asked.down.fn, asked.down.client, asked.down.round, asked.down.ask,
        state, encode(asked.down.record()), attempt=attempt,
        noise=task_key(_secret(case) or b"", asked.down.client, asked.down.round, asked.down.ask, attempt),
    )  # fmt: skip


def _done_as(case: Case, world: World, asked: Asked, state: Blob | None) -> Done:
    """Do a task again. A resumed run draws its noise under another number from there on: each is tried."""
    latest = int((case.head or {}).get("attempt", 0)) if world.policies else 0
    done = run_task(_task(case, world, asked, state, 0))
    for attempt in range(1, min(latest, 16) + 1):
        if done.reply is not None and read_header(done.reply).digest == asked.up.digest:
            break
        done = run_task(_task(case, world, asked, state, attempt))
    return done


def _from_any_state(case: Case, world: World, asked: Asked, outcome: _Outcome) -> bool:
    """Return whether the reply comes out to the bit from the client's first or last state."""
    if not asked.readable:
        return False
    last = None if case.store is None else case.store.client(asked.up.client)
    for state in (None, last):
        done = run_task(_task(case, world, asked, state, 0))
        if done.reply is not None and read_header(done.reply).digest == asked.up.digest:
            outcome.done += 1
            outcome.exact += 1
            return True
    return False


def _compare(case: Case, asked: Asked, done: Done, outcome: _Outcome) -> None:
    """Compare a reply with the transcript's, and note a contradiction."""
    if done.reply is None:
        outcome.wrong += 1
        if outcome.wrong <= 5:
            case.found.contradicted(
                "client tasks", INDEX, asked.where, "a reply", f"none: {done.error}", case.other_code or ""
            )
        return
    now = read_header(done.reply).digest
    if now == asked.up.digest:
        outcome.exact += 1
        return
    if case.other_code:
        outcome.reasons.append(f"the code here is other code ({case.other_code}), and other replies come out")
        return
    if case.other_machine:
        said = asked.up.record()
        again = decode(done.reply, Up, answered=lambda: asked.down.record())
        gap = max((apart(getattr(again, name), getattr(said, name)) for name in said.declared()), default=0.0)
        outcome.largest = max(outcome.largest, gap)
        if gap <= TOLERANCE:
            return
        now = f"a relative difference of {gap:.2g}, more than {TOLERANCE:g}"
    outcome.wrong += 1
    if outcome.wrong <= 5:
        case.found.contradicted("client tasks", INDEX, asked.where, asked.up.digest, now, "its reply, done again")


def _compare_bill(case: Case, asked: Asked, entries: list[LedgerEntry]) -> None:
    """Check that what a task's releases cost stands in the client's ledger."""
    k, t = asked.up.client, asked.up.round
    ledger = next((row for row in case.record.ledger if row.client == k), None)
    known = [] if ledger is None else [entry for entry in ledger.entries if t in entry.rounds]
    for entry in entries:
        if not any(_same_bill(entry, other) for other in known) and not case.other_code:
            like = next((other for other in known if other.field == entry.field), None)
            case.found.contradicted(
                "ledger's entries, done again", RECORD, f"ledger of client {k}, {entry.field}, round {t}",
                "no entry" if like is None else _bill(like), _bill(entry),
            )  # fmt: skip


def _same_bill(a: LedgerEntry, b: LedgerEntry) -> bool:
    if (a.field, a.kind, a.mechanism, a.relation, a.steps) != (b.field, b.kind, b.mechanism, b.relation, b.steps):
        return False
    return all(
        x == y or (x is not None and y is not None and math.isclose(x, y, rel_tol=1e-6))
        for x, y in ((getattr(a, name), getattr(b, name)) for name in ("noise_multiplier", "sample_rate", "sigma"))
    )


def _bill(entry: LedgerEntry) -> str:
    return f"{entry.mechanism}, noise x {entry.noise_multiplier:.4g}, {entry.steps} steps, rate {entry.sample_rate:.4g}"


def _report(case: Case, outcome: _Outcome, wanted: int, every: int, seed: int) -> None:
    what = f"{outcome.done:,} of {every:,} tasks, chosen by seed {seed}"
    if outcome.unreadable or outcome.reasons:
        reason = outcome.reasons[0] if outcome.reasons else "their messages were not kept"
        case.found.word("client tasks", f"{wanted - outcome.exact:,} of {wanted:,} chosen tasks: {reason}")
    if outcome.exact:
        case.found.recomputed("client tasks", f"{what}: {outcome.exact:,} replies are the same to the bit")
    elif outcome.done and not outcome.wrong and not outcome.reasons:
        case.found.recomputed(
            "client tasks", f"{what}: replies differ by {outcome.largest:.2g} at most, relative to their size; up to "
            f"{TOLERANCE:g} is allowed here ({case.other_machine})"
        )  # fmt: skip


# --- the server --------------------------------------------------------------------------------------------------


class _Apart(Exception):
    """The server sent something else: where, what the transcript has, and what came out."""


def _rerun_server(case: Case, world: World) -> None:
    """Do the server's rounds again on the clients' replies, and evaluate its model where the run did."""
    figure = "server's rounds"
    if case.contents.dropped:
        case.found.word(figure, f"the messages of {len(case.contents.dropped)} rounds were not kept (keep_weights)")
        return
    by_ask: dict[tuple[int, int], dict[int, Both]] = defaultdict(dict)
    for entry in case.transcript.entries():
        of = by_ask[entry.round, entry.ask]
        of[entry.client] = (entry, None) if entry.direction == "down" else (of[entry.client][0], entry)
    setting, record = world.setting, case.record
    same = True
    try:
        with seeded(setting.seed, "server", 0, device=world.device):
            state = world.method.init(Server(world.hub, 0, Meter("server", 0, world.device)))
        for row in record.rounds:
            t = row.round
            case.watch(t - 1, len(record.rounds), f"rerun, the server's round {t}")
            cohort = Cohort(participants_of(setting, t), _asker(world, t, by_ask))
            state = decode(encode(state), Record, device=world.device)
            with seeded(setting.seed, "server", t, device=world.device):
                state = world.method.round(state, Server(world.hub, t, Meter("server", t, world.device)), cohort)
            if row.utility is not None and t < record.rounds[-1].round:
                same = _compare_round(case, world, state, t, row.utility) and same
    except _Apart as e:
        where, said, now = e.args
        if case.other_code or case.other_machine:
            case.found.word(figure, f"{where}: other bits come out here ({case.other_code or case.other_machine})")
        else:
            case.found.contradicted(figure, INDEX, where, said, now, "what the server sends, done again")
        return
    except (FedauditError, KeyError) as e:
        case.found.contradicted(figure, INDEX, "the server's rounds", "messages", f"{type(e).__name__}: {e}"[:200])
        return
    case.found.recomputed(figure, f"{len(record.rounds)} rounds: every message to a client comes out to the bit")
    _compare_last(case, state)


def _compare_last(case: Case, state: Record) -> None:
    if case.store is None or not case.record.rounds:
        return
    left = case.store.server(f"server.{case.record.rounds[-1].round}")
    case.found.compare(
        "server's last state", "checkpoint", "the server's state", read_header(left).digest,
        read_header(encode(state)).digest, reason="it follows from the messages",
        excuse=case.other_code or case.other_machine,
    )  # fmt: skip


def _asker(
    world: World, t: int, by_ask: Mapping[tuple[int, int], Mapping[int, tuple[TranscriptEntry, TranscriptEntry | None]]]
) -> Any:
    """Return a function that answers a server's asks with what the transcript has, and compares what it sends."""
    number = -1

    def ask(cohort: Cohort, fn: Callable[..., Any] | str, message: Down | Mapping[int, Any]) -> dict[int, Any]:
        nonlocal number
        number += 1
        path = fn if isinstance(fn, str) else function_path(world.method, fn)
        messages = dict.fromkeys(cohort.ids, message) if isinstance(message, Down) else dict(message)
        there = by_ask.get((t, number), {})
        if there.keys() != messages.keys():
            raise _Apart(f"round {t}, ask {number}", f"clients {sorted(there)}", f"clients {sorted(messages)}")
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
                raise _Apart(f"row {down.seq}: to client {k}, round {t}", down.digest, digests[key])
            if up is None:
                cohort.ids.remove(k)
            else:
                replies[k] = decode(encode(up.record()), Up, device=world.device)
        return replies

    return ask


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
