"""The ledger: what each client has spent, release by release, and the epsilon that is really guaranteed.

An unprotected release has epsilon infinity, and so has its client's total. "epsilon = 1 on the embeddings" beside
unprotected weights is reported as exactly that. Entries of different neighbouring relations are never composed; but an
entry may hold under more than one. DP-SGD holds under zero-out, too, and has one epsilon with releases that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pydantic import Field

from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.stored_model import Delta, Epsilon, StoredModel
from fedaudit.wire.release import Protection


class LedgerEntry(StoredModel):
    """All releases of one field under one protection. `rounds` has the round of each of them."""

    field: str
    kind: str
    mechanism: str
    noise_multiplier: float  # 0: unprotected; infinite: free
    relation: str
    sample_rate: float = 1.0
    steps: int = 1  # mechanisms in one release
    sigma: float | None = None
    sensitivity: float | None = None
    clip: float | None = None
    condition: str | None = None
    delta: Delta | None = None
    claim: Epsilon | None = None  # the epsilon by the paper's way of counting: one release, no composition
    grid: float | None = None  # the step between values that a release may have
    moves: int | None = None  # counts that one record may change, by 1 each
    keep: float | None = None  # probability that a label stays as it is
    rounds: list[int] = Field(default_factory=list)
    cosine: float | None = None  # mean over releases; for the auditor only
    unit: str = "record"  # whom it protects: one record, all records of a person, or the whole client
    to: str = "everybody"  # against whom it holds

    @classmethod
    def unprotected(cls, field: str, kind: str, condition: str | None = None) -> LedgerEntry:
        """Return the entry of a release with epsilon infinity."""
        return cls(field=field, kind=kind, mechanism="none", noise_multiplier=0.0, relation="any", condition=condition)

    @classmethod
    def free(cls, field: str, kind: str, condition: str, mechanism: str = "none") -> LedgerEntry:
        """Return the entry of a release that costs nothing. `condition` says why."""
        return cls(
            field=field, kind=kind, mechanism=mechanism, noise_multiplier=math.inf, relation="any", condition=condition
        )

    def public(self) -> Protection:
        """Return the parameters of the mechanism that are public."""
        known = {name: getattr(self, name) for name in Protection.model_fields}
        return Protection(**{name: value for name, value in known.items() if value is not None})

    def events(self) -> Event:
        """Return the cost of all releases, as the mechanism counts it."""
        return mechanism_of(self).event(self)

    def same_as(self, other: LedgerEntry) -> bool:
        apart = {"rounds", "cosine"}
        return self.model_dump(exclude=apart) == other.model_dump(exclude=apart)


class Total(StoredModel):
    """The composed cost of all entries of one relation."""

    epsilon: Epsilon
    accountant: str
    by_accountant: dict[str, Epsilon] = Field(default_factory=dict)
    reason: str = ""


class ClientLedger(StoredModel):
    client: int
    n: int
    delta: Delta
    entries: list[LedgerEntry] = Field(default_factory=list)
    by_kind: dict[str, Epsilon] = Field(default_factory=dict)
    by_relation: dict[str, Total] = Field(default_factory=dict)
    epsilon: Epsilon | None = None  # of record; None if entries of different relations cannot be composed
    claim: Epsilon | None = None  # the largest claim for a single release, as papers state it
    observers: dict[str, list[str]] = Field(default_factory=dict)  # kind: who saw it

    def add(self, entry: LedgerEntry, t: int) -> None:
        for known in reversed(self.entries):
            if known.same_as(entry):
                if entry.cosine is not None and known.cosine is not None:
                    known.cosine += (entry.cosine - known.cosine) / (len(known.rounds) + 1)
                known.rounds.append(t)
                return
        self.entries.append(entry.model_copy(update={"rounds": [t]}))

    def reopen(self) -> None:
        """Clear the totals, because more rounds follow and the totals so far are no longer those of the run."""
        self.by_kind, self.by_relation, self.epsilon = {}, {}, None

    def close(self, compare: bool = True) -> None:
        """Compose all entries, by kind and in total. With `compare`, totals have every accountant's epsilon."""
        self.by_kind = {
            kind: max(
                (
                    total.epsilon
                    for total in _by_relation([e for e in self.entries if e.kind == kind], self.delta).values()
                ),
                default=0.0,
            )
            for kind in sorted({e.kind for e in self.entries})
        }
        self.by_relation = _by_relation(self.entries, self.delta, compare=compare)
        epsilons = [total.epsilon for total in self.by_relation.values()]
        finite = [e for e in epsilons if e > 0]
        self.epsilon = math.inf if math.inf in epsilons else (max(finite, default=0.0) if len(finite) <= 1 else None)
        self.claim = max((e.claim for e in self.entries if e.claim is not None), default=None)


# Whom a guarantee protects, the smallest first.
UNITS = {"record": "one record", "person": "one person", "client": "one whole client"}


def unit_in_words(clients: Iterable[ClientLedger]) -> str:
    """Return whom the noise in these ledgers protects, as the end of "a guarantee for".

    Where several protections compose, the guarantee is for the smallest of their units.
    """
    units = {e.unit for client in clients for e in client.entries if 0 < e.noise_multiplier < math.inf}
    return next((words for unit, words in UNITS.items() if unit in units), UNITS["record"])


def grouped_by_relation(entries: Sequence[LedgerEntry]) -> dict[str, list[LedgerEntry]]:
    """Return the entries that are composed with each other, by their neighbouring relation."""
    grouped: dict[str, list[LedgerEntry]] = {}
    told = {entry.relation for entry in entries if entry.noise_multiplier < math.inf}
    for entry in entries:
        # A mechanism that holds under other entries' neighbours as well is counted with them.
        also = next((relation for relation in mechanism_of(entry).relations if relation in told), entry.relation)
        grouped.setdefault(also, []).append(entry)
    return grouped


def _by_relation(entries: Sequence[LedgerEntry], delta: float, compare: bool = False) -> dict[str, Total]:
    totals = {}
    for relation, group in sorted(grouped_by_relation(entries).items()):
        done = compose([e.events() for e in group], delta, compare=compare)
        totals[relation] = Total(
            epsilon=done.epsilon_of_record,
            accountant=done.accountant,
            by_accountant=done.by_accountant,
            reason=done.reason,
        )
    return totals


class Ledger:
    """The entries of all clients in one run."""

    def __init__(self, clients: Iterable[ClientLedger] = ()):
        self.clients = {ledger.client: ledger for ledger in clients}

    def add(self, k: int, n: int, delta: float, t: int, entries: Iterable[LedgerEntry]) -> None:
        ledger = self.clients.setdefault(k, ClientLedger(client=k, n=n, delta=delta))
        for entry in entries:
            ledger.add(entry, t)
            _see(ledger, entry.kind, "server")

    def relayed(self, kind: str, to: int) -> None:
        """Note that client `to` has seen other clients' releases of this kind, passed on to it. It costs nothing."""
        for k, ledger in self.clients.items():
            if k != to and any(e.kind == kind for e in ledger.entries):
                _see(ledger, kind, f"client {to}")

    def close(self) -> list[ClientLedger]:
        for ledger in self.clients.values():
            ledger.close()
        return self.rows()

    def rows(self) -> list[ClientLedger]:
        return [self.clients[k] for k in sorted(self.clients)]


def _see(ledger: ClientLedger, kind: str, who: str) -> None:
    seen = ledger.observers.setdefault(kind, [])
    if kind != "training" and who not in seen:
        seen.append(who)
