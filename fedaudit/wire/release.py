"""A release, as the wire, the transcript and the run record know it: what was declared of it, and how it was protected.

The chain: a message's author says `Declared`; on the client the mechanism makes an `Entry` of the ledger for each
release, and from it the `Protection` that everybody may know; the wire makes a `Release` of both, and the record keeps
that.
"""

from __future__ import annotations

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
