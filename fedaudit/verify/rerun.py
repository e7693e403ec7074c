"""A share of the run, computed again: some client tasks, chosen by the reviewer's seed, and the server's rounds.

A client's task is a pure function of its state, the message and the seed. A chosen task is given the message from the
transcript. Its state is first taken to be the client's first or last one: many methods overwrite it, and a reply that
comes out to the bit from any state is the task's. If none does, all tasks of the client up to this one are done again,
in order, from the first. Under a privacy policy that is always so, because what a release costs depends on the state.

The server's rounds come first, see `server_rounds`: they tell on which terms a reply enters a sum.

On the machine type of the run, bits must be equal. Elsewhere a stated tolerance holds.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

from fedaudit.aggregation.terms import Terms
from fedaudit.epsilon.client_replay import apart
from fedaudit.errors import FedauditError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.noise_key import task_key
from fedaudit.runtime.task import Done, Task, compute, run_task
from fedaudit.runtime.world import World
from fedaudit.verify.case import RECORD, Case
from fedaudit.verify.server_rounds import INDEX, rerun_server
from fedaudit.verify.sum_rows import is_phase
from fedaudit.wire.codec import decode, encode, read_header
from fedaudit.wire.codec.packing import Blob
from fedaudit.wire.message import Up
from fedaudit.wire.transcript import TranscriptEntry

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


@dataclass(frozen=True)
class _Rerun:
    """A case, the world of its run, and the terms on which replies enter sums, by client, round and ask."""

    case: Case
    world: World
    terms: dict[tuple[int, int, int], Terms]

    @property
    def secret(self) -> bytes | None:
        """Return the secret from which the run's noise follows; None if the author did not hand it on."""
        try:
            return self.case.run.secret
        except FedauditError:
            return None

    @property
    def why_not(self) -> str:
        """Return why no client's task can be done again; empty if it can."""
        policies, guarantee = self.world.policies.values(), self.world.guarantee
        own_noise = guarantee is not None and guarantee.policy.where != "server" and guarantee.policy.secure
        if own_noise or any(policy.secure for policy in policies):
            return "noise from the operating system's entropy (secure = true) cannot be drawn again"
        if policies and self.secret is None:
            return "the key of the run's noise (noise.key) is not in the folder, so its noise cannot be drawn again"
        return ""

    def lacks_terms(self, asked: Asked) -> bool:
        """Return whether a reply entered a sum on terms that are not known, because the server's rounds were not done
        again."""
        if (asked.up.client, asked.up.round, asked.up.ask) in self.terms:
            return False
        guarantee = self.world.guarantee
        local = guarantee is not None and guarantee.policy.where == "client"
        summed = (asked.up.round, asked.up.ask) in self.case.sums
        return summed and (local or self.world.setting.aggregate == "secure")


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
        terms = rerun_server(case, case.world)
        for number, (k, wanted_of) in enumerate(sorted(picked.items())):
            case.watch(number, len(picked), f"rerun, client {k}")
            _rerun_client(_Rerun(case, case.world, terms), tasks[k], wanted_of, outcome)
        _report(case, outcome, wanted, len(every), seed)
    return len(every), outcome.done


def number_of_tasks(case: Case) -> int:
    """Return how many client tasks of a run were answered."""
    return sum(map(len, _tasks(case).values()))


def _tasks(case: Case) -> dict[int, list[Asked]]:
    """Return all answered tasks by client, in order."""
    found: dict[int, list[Asked]] = defaultdict(list)
    sent: dict[tuple[int, int, int], TranscriptEntry] = {}
    for entry in case.transcript.entries():
        if is_phase(entry.fn):  # the harness answers it, and no function of the method's
            continue
        key = (entry.client, entry.round, entry.ask)
        if entry.direction == "down":
            sent[key] = entry
        elif key in sent:
            found[entry.client].append(Asked(sent.pop(key), entry))
    return dict(found)


def _rerun_client(again: _Rerun, tasks: list[Asked], wanted: set[int], outcome: _Outcome) -> None:
    case, world = again.case, again.world
    chain = [asked for asked in tasks if asked.up.seq <= max(wanted)]
    if why := again.why_not:
        outcome.unreadable += len(wanted)
        outcome.reasons.append(why)
        return
    if not world.policies:
        left = [asked for asked in chain if asked.up.seq in wanted and not _from_any_state(again, asked, outcome)]
        chain = [asked for asked in chain if left and asked.up.seq <= left[-1].up.seq]
        wanted = {asked.up.seq for asked in left}
    state: Blob | None = None
    for asked in chain:
        if not asked.readable or again.lacks_terms(asked):
            outcome.unreadable += len(wanted)
            outcome.reasons.append(
                f"the server's round {asked.down.round} was not done again, and with it the terms of its sum"
                if asked.readable
                else f"what was sent in round {asked.down.round} was not kept (keep_weights)"
            )
            return
        done = _done_as(again, asked, state)
        if asked.up.seq in wanted:
            wanted = wanted - {asked.up.seq}
            outcome.done += 1
            _compare(case, asked, done, outcome)
            if done.reply is not None and world.policies:
                _compare_bill(case, asked, _billed(again, asked, done))
        if done.state is None:
            return
        state = done.state


def _billed(again: _Rerun, asked: Asked, done: Done) -> list[LedgerEntry]:
    """Return what a task costs its client. In a noised sum, a reply costs nothing beside the sum."""
    rows = again.case.sums.get((asked.up.round, asked.up.ask))
    if again.world.guarantee is None or rows is None or rows.total is None:
        return done.entries
    own = f"{rows.total.message}."
    return [e for e in done.entries if e.noise_multiplier > 0 or not e.field.startswith(own)]


def _task(again: _Rerun, asked: Asked, state: Blob | None, attempt: int) -> Task:
    """Return a task as an engine was given it."""
    k, t, ask = asked.down.client, asked.down.round, asked.down.ask
    return Task(
        again.world.setting.model_dump_json(), asked.down.fn, k, t, ask, state, encode(asked.down.record()),
        attempt=attempt, noise=task_key(again.secret or b"", k, t, ask, attempt), terms=again.terms.get((k, t, ask)),
    )  # fmt: skip


def _done_as(again: _Rerun, asked: Asked, state: Blob | None) -> Done:
    """Do a task again. A resumed run draws its noise under another number from there on: each is tried."""
    done = run_task(_task(again, asked, state, 0))
    for attempt in range(1, again.case.attempts if again.world.policies else 1):
        if done.reply is not None and read_header(done.reply).digest == asked.up.digest:
            break
        done = run_task(_task(again, asked, state, attempt))
    return done


def _from_any_state(again: _Rerun, asked: Asked, outcome: _Outcome) -> bool:
    """Return whether the reply comes out to the bit from the client's first or last state."""
    if not asked.readable or again.lacks_terms(asked):
        return False
    last = None if again.case.store is None else again.case.store.client(asked.up.client)
    for state in (None, last):
        done = run_task(_task(again, asked, state, 0))
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
    if case.other_machine and any(facts.role == "masked" for facts in asked.up.fields.values()):
        outcome.reasons.append(f"masked replies are the same to the bit or tell nothing, and {case.other_machine}")
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
    named = ("field", "kind", "mechanism", "relation", "steps", "unit")
    if any(getattr(a, name) != getattr(b, name) for name in named):
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
