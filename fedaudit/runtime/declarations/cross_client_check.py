"""Checks that the clients of one round did the same things, and bills what differs: it may tell of their records.

A task that has looked at its records may still choose which of several known values it sends; which parts of its model
it sends or loads; what it keeps; and which message it answers with, if its function may give several. None of these
choices is protected. A choice that is the same on every client was fixed by the code. A choice that differs between
clients, or that one client alone made, may have been read off the records. (How a client trains is held against its
twin's training.)

Two clients' values count as the same if they may come from the same place: `n` is another number on each client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.provenance import SENT, WHOLE

Ways = Sequence[str]  # the ways in which one thing that a task did may have come about
ByTask = dict[tuple[str, int], dict[int, Sequence[Ways]]]  # by function and number of the answer, then by client


def picked(fn: str) -> LedgerEntry:
    """Return the ledger's entry for known things that one client sent, kept or loaded, and another did not."""
    condition = (
        "which of several known values or parts it sent, kept or loaded, unlike other clients or on one client alone, "
        "by a task that had looked at its records or holds more of them than was paid for"
    )
    return LedgerEntry.unprotected(f"{fn} (choice)", "choice", condition)


def chosen(fn: str) -> LedgerEntry:
    """Return the ledger's entry for a message that one client alone chose, after a look, among several."""
    condition = "which message came, of one client alone that had looked at its records; annotate one class as returned"
    return LedgerEntry.unprotected(f"{fn} (message class)", "message class", condition)


def agree(did: Collection[Sequence[Ways]]) -> bool:
    """Return whether all clients did equally many things, and each thing in a way that all of them have in common."""
    return len({len(things) for things in did}) == 1 and all(
        set.intersection(*map(set, ways)) for ways in zip(*did, strict=True)
    )


@dataclass
class CrossClientCheck:
    """Collects the answers of a round, by function and by how many answers a client had given to it before."""

    picked: ByTask = field(default_factory=lambda: defaultdict(dict))
    choosing: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    answered: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def add(self, fn: str, k: int, picked: Sequence[Ways] = (), chose: bool = False) -> None:
        """Note what client k did in one answer to `fn`."""
        nth = self.answered[fn][k]
        self.answered[fn][k] += 1
        if picked:
            self.picked[fn, nth][k] = picked
        if chose:
            self.choosing[fn].add(k)

    def entries(self) -> Iterator[tuple[int, list[LedgerEntry]]]:
        for (fn, _), of in self.picked.items():
            alone = len(of) == 1 and any(_may_differ(ways) for things in of.values() for ways in things)
            if alone or not agree(of.values()):
                yield from ((k, [picked(fn)]) for k in sorted(of))
        for fn, clients in self.choosing.items():
            if len(self.answered[fn]) == 1:
                yield from ((k, [chosen(fn)]) for k in clients)


def _may_differ(ways: Ways) -> bool:
    """Return whether something that was sent may be there by choice: anything but a whole model."""
    return ways[0].startswith(SENT) and not any(way.endswith(WHOLE) for way in ways)
