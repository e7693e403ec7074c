"""A release, as the wire, the transcript and the run record know it: what was declared of it, and how it was protected.

The chain: a message's author says `Declared`; on the client the mechanism makes an `Entry` of the ledger for each
release, and from it the `Protection` that everybody may know; the wire writes both into the transcript (`Sent`) and
makes a `Release` of them, which the record keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedaudit.kept import AsGiven, Kept
from fedaudit.wire.message import Declared


class Protection(AsGiven):
    """The public parameters of a mechanism; what does not apply to it is not given."""

    mechanism: str
    sigma: float | None = None
    sensitivity: float | None = None
    clip: float | None = None
    relation: str | None = None  # of neighbours
    delta: float | None = None
    claim: float | None = None  # epsilon as asked for, for one release


UNPROTECTED = Protection(mechanism="none")


class Sent(AsGiven):
    """One field of one message, as the transcript has it: its bytes, what was declared of it, how it was protected."""

    payload: int = 0  # the papers' convention: parameters without buffers
    buffers: int = 0
    wire: int = 0  # what really travelled
    whole: int | None = None  # the payload before it was compressed
    role: str | None = None
    kind: str | None = None
    via: str | None = None
    unit: str | None = None
    dtype: str | None = None
    by: str | None = None  # of a relay: what its table's keys are
    protection: Protection | None = None

    @classmethod
    def of(cls, sizes: Mapping[str, int], declared: Declared | None, protection: Protection | None) -> Sent:
        known: dict[str, Any] = {} if declared is None else {name: getattr(declared, name) for name in DECLARED}
        known |= {**sizes, "protection": protection}
        return cls(**{name: value for name, value in known.items() if value is not None})


DECLARED = ("role", "kind", "via", "unit", "dtype", "by")


class Release(Kept):
    """A field that left clients, as its message declared it, with the protection it had."""

    field: str
    role: str
    kind: str | None = None
    via: str | None = None
    unit: str | None = None
    protection: Protection | None = None

    @classmethod
    def of(cls, field: str, declared: Declared, protection: Protection | None) -> Release:
        return cls(
            field=field,
            role=declared.role,
            kind=declared.kind,
            via=declared.via,
            unit=declared.unit,
            protection=protection,
        )
