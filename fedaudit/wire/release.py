"""Releases as the wire, the transcript and the run record store them, with their declaration and their protection.

The author of a message writes a `Declared` for each field. On the client, the mechanism makes an `Entry` of the ledger
for each release, and from it the `Protection`, which is public. The wire writes both into the transcript (`Sent`) and
makes a `Release` of them, which the run record keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedaudit.stored_model import AsGiven, Delta, Epsilon, StoredModel
from fedaudit.wire.message import Declared


class Protection(AsGiven):
    """The public parameters of a mechanism. Fields that do not apply to it are not given."""

    mechanism: str
    sigma: float | None = None
    sensitivity: float | None = None
    clip: float | None = None
    relation: str | None = None  # which data sets count as neighbours
    delta: Delta | None = None
    claim: Epsilon | None = None  # the epsilon that the policy asks for, for one release
    grid: float | None = None  # the step between values that a release may have
    keep: float | None = None  # probability that a label stays as it is


UNPROTECTED = Protection(mechanism="none")


class Sent(AsGiven):
    """One field of one message in the transcript: its bytes, its declaration and its protection."""

    payload: int = 0  # the papers' convention: parameters without buffers
    buffers: int = 0
    wire: int = 0  # the bytes that really travelled
    whole: int | None = None  # the payload before it was compressed
    role: str | None = None
    kind: str | None = None
    via: str | None = None
    unit: str | None = None
    dtype: str | None = None
    by: str | None = None  # for a relay: what the keys of its table are
    protection: Protection | None = None

    @classmethod
    def of(cls, sizes: Mapping[str, int], declared: Declared | None, protection: Protection | None) -> Sent:
        known: dict[str, Any] = {} if declared is None else {name: getattr(declared, name) for name in DECLARED}
        known |= {**sizes, "protection": protection}
        return cls(**{name: value for name, value in known.items() if value is not None})


DECLARED = ("role", "kind", "via", "unit", "dtype", "by")


class Release(StoredModel):
    """A field that left clients: its declaration and its protection."""

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
