"""Releases without a mechanism of their own: sent as they are, or following from what was paid for before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Generator, Tensor

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanisms.base import Mechanism, Words, reason, times
from fedaudit.wire.release import Protection


class Nothing(Mechanism):
    """No protection. A release costs infinity, or nothing if it is the same for all neighbours."""

    name = "none"
    chosen = False

    def imitated(self, rows: Tensor, protection: Protection, rng: Generator) -> Tensor:
        return rows

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        worst = min(entries, key=lambda e: e.noise_multiplier)
        if math.isinf(worst.noise_multiplier):
            return f"costs nothing{reason(worst)}", "free"
        return f"sent as it is, {times(entries)}", "open"


class PostProcessing(Nothing):
    """Computed from what was released before."""

    name = "post-processing"

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        return f"costs nothing more{reason(entries[0])}", "free"
