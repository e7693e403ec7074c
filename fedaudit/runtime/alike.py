"""What clients of one round must have done alike, or else it tells of their records and is billed.

How often, how long, at what rate and by which loss a task trains, after it looked at its records; which of several
known values it sends, which parts of its model it sends or loads, what it keeps; and which message it answers with
where its function may give several: none of these is protected. What is the same on every client was fixed by the
code; what differs, or what one client alone did, may have been read off the records.

A value is the same where it may be from the same place: `n` is another number on each client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fedaudit.privacy.ledger import Entry
from fedaudit.privacy.provenance import NEW, SENT, WHOLE

Ways = Sequence[str]  # in which one thing that a task did may have come about
ByTask = dict[tuple[str, int], dict[int, Sequence[Ways]]]  # by function and number of the answer: by client


def unlike(fn: str) -> Entry:
    """The ledger's entry for trainings that were told other things on one client than on another, after a look."""
    condition = (
        "told another loss, steps, batch or rate, or trained so often, unlike other clients, or told what is no "
        "hyper-parameter on one client alone, by a task that had looked at its records"
    )
    return Entry.unprotected(f"{fn} (training)", "training", condition)


def picked(fn: str) -> Entry:
    """The ledger's entry for known things that one client sent, kept or loaded, and another did not."""
    condition = (
        "which of several known values or parts it sent, kept or loaded, unlike other clients or on one client alone, "
        "by a task that had looked at its records or holds more of them than was paid for"
    )
    return Entry.unprotected(f"{fn} (choice)", "choice", condition)


def chosen(fn: str) -> Entry:
    """The ledger's entry for a message that one client alone chose, after a look, among those of its function."""
    condition = "which message came, of one client alone that had looked at its records; annotate one class as returned"
    return Entry.unprotected(f"{fn} (message class)", "message class", condition)


def agree(did: Collection[Sequence[Ways]]) -> bool:
    """Whether all did as much, and each thing in a way that they have in common."""
    return len({len(things) for things in did}) == 1 and all(
        set.intersection(*map(set, ways)) for ways in zip(*did, strict=True)
    )


@dataclass
class Alike:
    """The answers of a round, by function and by how many a client had given to it before."""

    told: ByTask = field(default_factory=lambda: defaultdict(dict))
    picked: ByTask = field(default_factory=lambda: defaultdict(dict))
    choosing: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    answered: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def add(
        self, fn: str, k: int, told: Sequence[Ways] | None, picked: Sequence[Ways] = (), chose: bool = False
    ) -> None:
        """`told` is None where the task did not look at its records."""
        nth = self.answered[fn][k]
        self.answered[fn][k] += 1
        if told is not None:
            self.told[fn, nth][k] = told
        if picked:
            self.picked[fn, nth][k] = picked
        if chose:
            self.choosing[fn].add(k)

    def entries(self) -> Iterator[tuple[int, list[Entry]]]:
        for (fn, _), of in self.told.items():
            alone = len(of) == 1 and any(
                way.startswith(NEW) for things in of.values() for ways in things for way in ways
            )
            if alone or not agree(of.values()):
                yield from ((k, [unlike(fn)]) for k in sorted(of))
        for (fn, _), of in self.picked.items():
            alone = len(of) == 1 and any(_may_differ(ways) for things in of.values() for ways in things)
            if alone or not agree(of.values()):
                yield from ((k, [picked(fn)]) for k in sorted(of))
        for fn, clients in self.choosing.items():
            if len(self.answered[fn]) == 1:
                yield from ((k, [chosen(fn)]) for k in clients)


def _may_differ(ways: Ways) -> bool:
    """Whether something that was sent may stand there by choice: anything but a whole model."""
    return ways[0].startswith(SENT) and not any(way.endswith(WHOLE) for way in ways)
