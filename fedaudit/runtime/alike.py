"""What clients of one round must have done alike, or else it tells of their records and is billed.

How often, how long and at what rate a task trains, after it looked at its records, and which message it answers with
where its function may give several: none of these is protected. What is the same on every client was fixed by the
code; what differs, or what one client alone did, may have been read off the records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedaudit.privacy.ledger import Entry


def unlike(fn: str) -> Entry:
    """The ledger's entry for trainings that were told other numbers on one client than on another, after a look."""
    condition = (
        "told steps, batch or rate that are no hyper-parameters, or trained so often, unlike other clients or on one "
        "client alone, by a task that had looked at its records"
    )
    return Entry.unprotected(f"{fn} (training)", "training", condition)


def chosen(fn: str) -> Entry:
    """The ledger's entry for a message that one client alone chose, after a look, among those of its function."""
    condition = "which message came, of one client alone that had looked at its records; annotate one class as returned"
    return Entry.unprotected(f"{fn} (message class)", "message class", condition)


@dataclass
class Alike:
    """The answers of a round, by function and by how many a client had given to it before."""

    # By training after a look: the optimiser, and behind a space the numbers that are no hyper-parameters.
    told: dict[tuple[str, int], dict[int, tuple[str, ...]]] = field(default_factory=lambda: defaultdict(dict))
    choosing: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    answered: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def add(self, fn: str, k: int, told: Sequence[str], chose: bool) -> None:
        nth = self.answered[fn][k]
        self.answered[fn][k] += 1
        if told:
            self.told[fn, nth][k] = tuple(told)
        if chose:
            self.choosing[fn].add(k)

    def entries(self) -> Iterator[tuple[int, list[Entry]]]:
        for (fn, _), of in self.told.items():
            alone = len(of) == 1 and any(" " in training for told in of.values() for training in told)
            if alone or len(set(of.values())) > 1:
                yield from ((k, [unlike(fn)]) for k in sorted(of))
        for fn, clients in self.choosing.items():
            if len(self.answered[fn]) == 1:
                yield from ((k, [chosen(fn)]) for k in clients)
