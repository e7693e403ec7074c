"""The sums of a transcript: who took part in each phase, and what the server computed, as the rows have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedaudit.aggregation.secure.messages import SumFacts
from fedaudit.wire.transcript import Transcript, TranscriptEntry

PHASE = "(sum) "  # begins the name of the function of a message that is no ask of the method's own
Both = tuple[TranscriptEntry, TranscriptEntry | None]  # a message to a client, and its answer
Pairs = dict[int, Both]  # by client


def is_phase(fn: Any) -> bool:
    """Return whether a row belongs to a phase of a secure sum, and not to an ask of the method's."""
    return str(fn).startswith(PHASE)


@dataclass
class SumRows:
    """The rows of one ask whose replies are summed."""

    t: int
    ask: int
    total: TranscriptEntry | None = None  # what the server computed; None: the rows have no sum
    asked: Pairs = field(default_factory=dict)  # the method's own messages
    phases: dict[str, Pairs] = field(default_factory=dict)

    @property
    def secure(self) -> bool:
        return bool(self.phases)

    def phase(self, name: str) -> Pairs:
        return self.phases.get(name, {})

    def answered(self, name: str) -> list[int]:
        """Return the clients that answered in a phase."""
        return sorted(k for k, (_, up) in self.phase(name).items() if up is not None)

    @property
    def invited(self) -> list[int]:
        return sorted(self.phase("advertise") if self.secure else self.asked)

    @property
    def stayed(self) -> list[int]:
        """Return the clients whose update is in the sum."""
        return sorted(k for k, (_, up) in self.asked.items() if up is not None)

    def neighbours(self) -> dict[int, list[int]]:
        """Return the neighbours that each client was told."""
        return {k: down["ids"].tolist() for k, (down, _) in self.phase("share").items()}

    def facts(self) -> SumFacts:
        """Return what the traffic of a secure sum depends on."""
        replies = [up for _, up in self.asked.values() if up is not None]
        length = int(replies[0].row["tensors"][0][1][0]) if replies else 0
        return SumFacts(
            self.invited, self.neighbours(), self.answered("share"), self.stayed, self.answered("unmask"), length
        )


def sums_of(transcript: Transcript) -> dict[tuple[int, int], SumRows]:
    """Return the asks of a run by round and number, with the rows of their sums; asks without a sum are left out."""
    found: dict[tuple[int, int], SumRows] = {}
    for entry in _entries(transcript):
        key = (entry.round, entry.ask)
        rows = found.setdefault(key, SumRows(*key))
        if entry.row["type"] == "sum":
            rows.total = entry
            continue
        fn = str(entry.fn)
        pairs = rows.phases.setdefault(fn.removeprefix(PHASE), {}) if is_phase(fn) else rows.asked
        pairs[entry.client] = (entry, None) if entry.direction == "down" else (pairs[entry.client][0], entry)
    return {key: rows for key, rows in found.items() if rows.total is not None or rows.secure}


def _entries(transcript: Transcript) -> Iterator[TranscriptEntry]:
    rows = (row for row in transcript.rows() if row["type"] in ("message", "sum"))
    return (TranscriptEntry(row, transcript.folder) for row in rows)
