"""Checks of the ledger: its entries from the releases in the transcript and the setting's policies, then its epsilons.

1. Every private field that a client sent has an entry in each of its rounds, with the protection it had.
2. A release is free only for a reason that its declaration allows. Anything else without noise is epsilon infinity.
3. The noise of each entry is what the policy asks for, and each client's n and delta are those of its data.
4. The epsilons follow from the entries, and a second accountant (dp-accounting) does not find them too small.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedaudit.errors import FedauditError
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.dpsgd import is_multiplier_for, multiplier_for
from fedaudit.privacy.ledger import ClientLedger, LedgerEntry, grouped_by_relation
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.privacy.policy import TRAINING, Policy, read_policies
from fedaudit.privacy.update_policy import UPDATES
from fedaudit.runtime.guarantee import guarantee_of
from fedaudit.runtime.task import ClientState
from fedaudit.verify.case import RECORD, Case
from fedaudit.verify.sums import UPDATE, check_update_entries
from fedaudit.wire.codec import decode
from fedaudit.wire.message import KINDS
from fedaudit.wire.release import Protection, Sent
from fedaudit.wire.transcript import TranscriptEntry

CLOSE = 1e-6  # relative difference of two numbers that are the same but for rounding
# The PRV accountant's upper end lies up to 2 % above the truth, and so does that of the second accountant.
SLACK = 0.03
SEARCHED = 1e-3  # relative difference of two noise multipliers that a search has found


@dataclass
class _Client:
    """The releases of one client, as the transcript has them."""

    sent: Counter[tuple[str, int]] = field(default_factory=Counter)  # by field and round: messages that held a value
    facts: dict[str, Sent] = field(default_factory=dict)  # of each field, as it was declared last
    protection: dict[tuple[str, int], list[Protection | None]] = field(default_factory=lambda: defaultdict(list))
    rounds: set[int] = field(default_factory=set)  # in which it was asked

    def add(self, entry: TranscriptEntry, in_a_sum: bool) -> None:
        """Add the private fields of a message. Those in a noised sum need no entry of their own."""
        for name, facts in entry.fields.items():
            if facts.role != "private":
                continue
            where, t = f"{entry.message}.{name}", entry.round
            self.facts[where] = facts
            if entry.row["tree"]["r"][1].get(name) is not None and not in_a_sum:
                self.sent[where, t] += 1
                self.protection[where, t].append(facts.protection)


def check_ledger(case: Case, *, cheap: bool = False) -> None:
    """Check the ledger of a finished run. With `cheap`, the noise is not calibrated again and one accountant counts."""
    record = case.record
    check_totals(case, compare=not cheap)
    if case.whole:
        clients, relayed = _read(case)
        taken_over = record.setting.start is not None
        for ledger in record.ledger:
            _check_entries(case, ledger, clients.get(ledger.client, _Client()), taken_over)
        _check_updates(case)
        sent = {k for k, of in clients.items() if of.sent}
        if missing := sorted(sent - {ledger.client for ledger in record.ledger}):
            _wrong(case, "ledger's entries", f"ledger of client {missing[0]}", "nothing", "its releases")
        _check_observers(case, relayed)
        _noted(case, "ledger's entries", "every private field that was sent has its entry")
    else:
        case.found.word("ledger's entries", "the transcript is not whole")
    used = {entry.kind for ledger in record.ledger for entry in ledger.entries}
    case.found.compare(
        "policies that applied to nothing", RECORD, "idle_policies", record.idle_policies,
        sorted(record.setting.privacy.keys() - used - {UPDATES}),
    )  # fmt: skip
    if cheap:
        return
    _check_trainings(case)
    _check_noise(case)
    _check_sizes(case)
    check_second_accountant(case)


def _wrong(case: Case, figure: str, at: str, recorded: Any, recomputed: Any, reason: str = "") -> None:
    if sum(f.figure == figure and f.verdict == "contradicted" for f in case.found.list) < 5:
        case.found.contradicted(figure, RECORD, at, recorded, recomputed, reason)


def _noted(case: Case, figure: str, reason: str) -> None:
    if not any(f.figure == figure and f.verdict == "contradicted" for f in case.found.list):
        case.found.recomputed(figure, reason)


# --- totals ------------------------------------------------------------------------------------------------------


def check_totals(case: Case, *, compare: bool = True) -> None:
    """Check that each client's epsilons follow from its entries, by the accountants that the run used.

    With `compare`, also those that did not give the epsilon of record. Clients with equal entries share the result.
    """
    known: dict[Any, ClientLedger] = {}
    for i, ledger in enumerate(case.record.ledger):
        key = (ledger.delta, *(entry.model_dump_json(exclude={"cosine"}) for entry in ledger.entries))
        try:
            if key not in known:
                known[key] = ledger.model_copy(deep=True)
                known[key].close(compare)
        except (FedauditError, ArithmeticError, ValueError) as e:
            _wrong(case, "epsilon", f"ledger.{i}.entries", "entries", f"no accountant takes them: {e}")
            continue
        said, now = _epsilons(ledger, compare), _epsilons(known[key], compare)
        for name in sorted(said.keys() | now.keys()):
            if not _same(said.get(name), now.get(name), SLACK if _other_opacus(case) else CLOSE):
                at = f"ledger.{i}.{name}"
                _wrong(case, "epsilon", at, said.get(name), now.get(name), f"client {ledger.client}")
    _noted(case, "epsilon", f"from the entries of {len(case.record.ledger)} clients")


def _epsilons(ledger: ClientLedger, compare: bool) -> dict[str, float | None]:
    """Return all epsilons of a client's ledger by their places in it."""
    found = {"epsilon": ledger.epsilon, "claim": ledger.claim}
    found |= {f"by_kind.{kind}": epsilon for kind, epsilon in ledger.by_kind.items()}
    for relation, total in ledger.by_relation.items():
        found[f"by_relation.{relation}.epsilon"] = total.epsilon
        if compare:
            each = total.by_accountant.items()
            found |= {f"by_relation.{relation}.by_accountant.{name}": epsilon for name, epsilon in each}
    return found


def _other_opacus(case: Case) -> bool:
    from fedaudit.runtime.run_record import versions

    return case.record.versions.get("opacus") != versions().get("opacus")


def _same(a: float | None, b: float | None, close: float) -> bool:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return a == b
    return math.isclose(a, b, rel_tol=close, abs_tol=close)


# --- entries against the transcript ------------------------------------------------------------------------------


def _read(case: Case) -> tuple[dict[int, _Client], set[tuple[str, int, int]]]:
    """Return what each client sent, and what was relayed: kind, to whom, in which round."""
    clients: dict[int, _Client] = defaultdict(_Client)
    relayed: set[tuple[str, int, int]] = set()
    protected = UPDATES in case.record.setting.privacy  # then a sum has an entry, and the replies in it have none
    for entry in case.transcript.entries():
        client, t = clients[entry.client], entry.round
        client.rounds.add(t)
        for facts in entry.fields.values():
            if facts.role == "relay" and facts.kind is not None:
                relayed.add((facts.kind, entry.client, t))
        if entry.direction == "up":
            client.add(entry, in_a_sum=protected and (t, entry.ask) in case.sums)
    for of in case.sums.values():
        if of.secure and of.total is not None:  # masked vectors tell nothing of themselves, and all of their sum
            for k in of.stayed:
                clients[k].add(of.total, in_a_sum=protected)
    return dict(clients), relayed


def _check_entries(case: Case, ledger: ClientLedger, client: _Client, taken_over: bool) -> None:
    place = f"ledger of client {ledger.client}"
    billed: Counter[tuple[str, int]] = Counter()
    by_field: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in ledger.entries:
        by_field[entry.field].append(entry)
        for t in entry.rounds:
            billed[entry.field, t] += 1
            # `_check_updates` knows the rounds of entries for sums: amplified ones cost every client in each.
            known = taken_over or entry.field.endswith(UPDATE) or t == case.record.setting.rounds
            if t not in client.rounds and not known:
                _wrong(case, "ledger's entries", f"{place}, {entry.field}", f"round {t}", "it was not asked in it")
    for (where, t), number in client.sent.items():
        if billed[where, t] < number:
            _wrong(
                case, "ledger's entries", f"{place}, {where}, round {t}", f"{billed[where, t]} entries",
                f"{number} releases in the transcript",
            )  # fmt: skip
        seen = [p for p in client.protection[where, t] if p is not None]
        said = [entry.public() for entry in by_field[where] if t in entry.rounds]
        for protection in seen:
            if protection not in said:
                _wrong(
                    case, "ledger's entries", f"{place}, {where}, round {t}", str(said[0] if said else "no entry"),
                    str(protection), "the protection that travelled with the release",
                )  # fmt: skip
    for where, facts in client.facts.items():
        for entry in by_field[where]:
            _check_free(case, place, where, facts, entry)


def _check_updates(case: Case) -> None:
    """Check what sums under a policy on updates cost each client."""
    found = any(entry.field.endswith(UPDATE) for ledger in case.record.ledger for entry in ledger.entries)
    if UPDATES not in case.record.setting.privacy:
        if found:
            _wrong(case, "cost of sums", "ledger", "entries for updates", "none", "the setting has no policy on them")
        return
    try:
        guarantee = guarantee_of(case.record.setting)
        assert guarantee is not None  # the setting has the policy
        wrong = check_update_entries(case, guarantee)
    except (FedauditError, KeyError, IndexError, ValueError, TypeError, AttributeError) as e:
        wrong = [("setting.privacy.updates", "a policy on updates", f"{type(e).__name__}: {e}"[:200])]
    for at, said, now in wrong:
        _wrong(case, "cost of sums", at, said, now, "as the policy on updates has it, for the sums in the transcript")
    _noted(case, "cost of sums", "noise, clipping, sampling and rounds of each client's updates are the policy's")


def _check_free(case: Case, place: str, where: str, facts: Sent, entry: LedgerEntry) -> None:
    """Check that an entry without a cost, or with less than all of it, has a reason that the declaration allows."""
    policies, kind = case.record.setting.privacy, facts.kind or ""
    if entry.kind != kind:
        _wrong(case, "ledger's entries", f"{place}, {where}", entry.kind, kind, "the kind that was declared")
    if entry.noise_multiplier == 0 or kind in policies:
        return  # all of it is billed, or `_check_noise` holds it against the policy
    free = entry.noise_multiplier == math.inf
    allowed = kind == "count" or facts.via == "released" or (facts.via == "model" and TRAINING in policies)
    if not (free and allowed):
        said = "free" if free else f"noise x {entry.noise_multiplier:.4g}"
        _wrong(
            case, "ledger's entries", f"{place}, {where}", said, "epsilon infinity",
            "it is private, and no policy of the setting protects it",
        )  # fmt: skip


def _check_observers(case: Case, relayed: set[tuple[str, int, int]]) -> None:
    for i, ledger in enumerate(case.record.ledger):
        first: dict[str, int] = {}
        for entry in ledger.entries:
            first[entry.kind] = min([first.get(entry.kind, 1 << 60), *entry.rounds])
        again = {kind: {"server"} - ({"server"} if kind == TRAINING else set()) for kind in first}
        for kind, to, t in relayed:
            if kind in first and to != ledger.client and first[kind] <= t and kind != TRAINING:
                again[kind].add(f"client {to}")
        said = {kind: set(seen) for kind, seen in ledger.observers.items()}
        if case.record.setting.start is not None:  # the run before has observers of its own
            continue
        if said != again:
            kind = min(k for k in said.keys() | again.keys() if said.get(k) != again.get(k))
            _wrong(
                case, "observers", f"ledger.{i}.observers.{kind}", ", ".join(sorted(said.get(kind, set()))) or "nobody",
                ", ".join(sorted(again.get(kind, set()))) or "nobody",
            )  # fmt: skip
    _noted(case, "observers", "from the relays in the transcript")


# --- entries against policies and data ---------------------------------------------------------------------------


def _check_trainings(case: Case) -> None:
    """Check that as many private trainings are billed as the clients' states count."""
    if TRAINING not in case.record.setting.privacy:
        return
    figure = "number of private trainings"
    if case.store is None:
        case.found.word(figure, "the checkpoint, in which clients count them, is not here")
        return
    for i, ledger in enumerate(case.record.ledger):
        billed = sum(len(e.rounds) for e in ledger.entries if e.kind == TRAINING and mechanism_of(e).trains)
        try:
            state = case.store.client(ledger.client)
            spent = 0 if state is None else decode(state, ClientState).spent.get(TRAINING, 0)
        except FedauditError as e:
            case.found.contradicted(figure, "checkpoint", f"client {ledger.client}", "a state", str(e)[:200])
            return
        if billed != spent:
            _wrong(case, figure, f"ledger.{i}.entries (training)", billed, spent, "the client's own count")
    _noted(case, figure, "from the clients' states")


def _check_noise(case: Case) -> None:
    """Check that the mechanism, noise, clipping, delta and relation of each entry are what the policy asks for."""
    policies, others = _policies(case), set[str]()
    if not policies:
        return
    for i, ledger in enumerate(case.record.ledger):
        for j, entry in enumerate(ledger.entries):
            policy = policies.get(entry.kind)
            if policy is None or entry.noise_multiplier in (0, math.inf) or entry.field.endswith(UPDATE):
                continue
            wanted = _wanted(case, policy, entry, ledger)
            if not wanted:
                others.add(entry.mechanism)
            for name, value in {**wanted, "unit": policy.unit}.items():
                said = getattr(entry, name)
                close = SEARCHED if name == "noise_multiplier" else CLOSE
                same = said == value if isinstance(value, str) or value is None else _same(said, value, close)
                if not same:
                    where = f"{entry.field} of client {ledger.client}: what the policy asks for"
                    _wrong(case, "noise", f"ledger.{i}.entries.{j}.{name}", said, value, where)
    if others:
        case.found.word("noise of other mechanisms", f"{', '.join(sorted(others))}: --rerun draws it again")
    _noted(case, "noise", "mechanism, noise, clipping and delta of each protected entry are the policies'")


def _wanted(case: Case, policy: Policy, entry: LedgerEntry, ledger: ClientLedger) -> dict[str, float | str | None]:
    """Return what a policy asks of an entry, by name."""
    how = mechanism_of(policy)
    if not how.trains:
        releases: int | None = 1
        if policy.calibration == "total":
            releases = policy.releases or (None if case.world is None else case.world.releases(entry.kind))
        return how.follows(entry, policy, ledger.n, case.record.data.classes, releases)
    found: dict[str, float | str | None] = {"claim": policy.epsilon, "delta": policy.delta_for(ledger.n)}
    if entry.clip is not None:
        found["clip"] = policy.clip
    if entry.sigma is not None and entry.sensitivity:
        found["sigma"] = entry.noise_multiplier * entry.sensitivity
    if policy.noise_multiplier is not None:
        found["noise_multiplier"] = policy.noise_multiplier
    elif policy.epsilon is not None:
        steps = max(entry.steps * (policy.releases or case.record.setting.rounds), 1)
        delta, rate = policy.delta_for(ledger.n), entry.sample_rate
        if (multiplier := _for_training(entry.noise_multiplier, policy.epsilon, delta, rate, steps)) is not None:
            found["noise_multiplier"] = multiplier
    return found


def _policies(case: Case) -> dict[str, Policy]:
    if case.world is not None:
        return case.world.policies
    try:
        return read_policies(case.record.setting.privacy, KINDS)
    except FedauditError:
        return {}


@functools.lru_cache(maxsize=256)
def _for_training(said: float, epsilon: float, delta: float, rate: float, steps: int) -> float | None:
    """Return `said` if it is the multiplier that a search finds, else that one; None if there is none."""
    try:
        if is_multiplier_for(said, epsilon, delta, rate, steps):
            return said
        return multiplier_for(epsilon, delta, rate, steps)
    except (FedauditError, ArithmeticError, ValueError):
        return None


def _check_sizes(case: Case) -> None:
    """Check each client's number of records and its delta."""
    if case.world is None:
        case.found.word("records and delta of each client", case.why_no_world)
        return
    if case.foreign_transport:
        case.found.word("records and delta of each client", "the app's clients said how many records they have")
        return
    for i, ledger in enumerate(case.record.ledger):
        if not 0 <= ledger.client < case.record.setting.clients:
            _wrong(case, "records and delta of each client", f"ledger.{i}.client", ledger.client, "no such client")
            continue
        n = case.world.count(ledger.client)
        deltas = [policy.delta_for(n) for policy in case.world.policies.values()]
        if case.world.guarantee is not None:
            deltas.append(case.world.guarantee.delta)
        delta = min(deltas, default=1 / n)
        for name, value in (("n", n), ("delta", delta)):
            if not _same(getattr(ledger, name), value, 1e-12) and case.record.setting.start is None:
                _wrong(case, "records and delta of each client", f"ledger.{i}.{name}", getattr(ledger, name), value)
    _noted(case, "records and delta of each client", "from the data and the policies")


# --- a second accountant -----------------------------------------------------------------------------------------


def check_second_accountant(case: Case) -> None:
    """Check the worst client's epsilon of each relation with Google's dp-accounting, where it is installed."""
    figure = "epsilon by a second accountant"
    finite = [
        (total.epsilon, relation, i)
        for i, ledger in enumerate(case.record.ledger)
        for relation, total in ledger.by_relation.items()
        if 0 < total.epsilon < math.inf
    ]
    if not finite:
        return
    try:
        import dp_accounting  # noqa: F401
    except ImportError:
        case.found.word(figure, "dp-accounting is not installed: pip install dp-accounting")
        return
    for relation in sorted({of for _, of, _ in finite}):
        said, _, i = max(row for row in finite if row[1] == relation)
        ledger = case.record.ledger[i]
        events = tuple(e.events() for e in grouped_by_relation(ledger.entries).get(relation, []))
        if any(event.loss is not None for event in events):
            case.found.word(figure, f"{relation}: only Gaussian noise is given to it, and there is other noise")
            continue
        low = _by_pld(_plain(events), ledger.delta)
        at = f"ledger.{i}.by_relation.{relation}.epsilon"
        if said < low * (1 - SLACK):
            _wrong(case, figure, at, said, low, "dp-accounting finds that at least this much was spent")
        else:
            at_least = f"dp-accounting finds that at least {low:.4g} was spent"
            _noted(case, figure, f"{relation}, client {ledger.client}: {said:.4g}; {at_least}")


def _plain(events: Sequence[Event]) -> tuple[tuple[float, float, int], ...]:
    """Return events that cost something, as multiplier, sample rate and count; equal ones are merged."""
    counts: Counter[tuple[float, float]] = Counter()
    for event in events:
        if 0 < event.noise_multiplier < math.inf and event.sample_rate > 0 and event.count:
            counts[event.noise_multiplier, event.sample_rate] += event.count
    return tuple((sigma, rate, n) for (sigma, rate), n in sorted(counts.items()))


@functools.lru_cache(maxsize=256)
def _by_pld(events: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Return a lower end for epsilon, by privacy loss distributions."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    whole = None
    for sigma, rate, count in events:
        one = pld.from_gaussian_mechanism(
            sigma, sensitivity=1.0, sampling_prob=rate, pessimistic_estimate=False,
            value_discretization_interval=1e-3, use_connect_dots=False,
        ).self_compose(count)  # fmt: skip
        whole = one if whole is None else whole.compose(one)
    return 0.0 if whole is None else float(whole.get_epsilon_for_delta(delta))
