"""What crossed the wire in two runs of one setting, and how far the two are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit import Record
from fedaudit.runtime.run_record import RunRecord
from fedaudit.wire.transcript import Transcript


def leaves(value: Any, where: str) -> dict[str, Any]:
    """Every tensor and number of a message's field, by its place."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in leaves(item, f"{where}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in leaves(item, f"{where}.{i}").items()}
    if isinstance(value, Record):
        return {k: v for name in value.declared() for k, v in leaves(getattr(value, name), f"{where}.{name}").items()}
    return {where: value}


def sent(folder: Path) -> dict[str, Any]:
    """All that crossed the wire, by round, ask, client, direction, field and place in it."""
    found: dict[str, Any] = {}
    for entry in Transcript(folder / "transcript").entries():
        place = f"{entry.round}.{entry.ask} {entry.direction} {entry.client}"
        for name in entry.fields:
            found |= leaves(entry[name], f"{place} {name}")
    return found


def protocol(record: RunRecord) -> Any:
    """What must be the same to the bit, whoever rounds how: who took part, bytes, and what is known of releases."""
    rounds = [(r.participants, r.absent, r.up_payload, r.up_wire, r.down_payload, r.down_wire) for r in record.rounds]
    return rounds, record.traffic, record.releases, record.ledger


def apart(a: Path, b: Path) -> float:
    """The largest difference of two numbers that crossed the wire in the same place of two runs."""
    return farthest(sent(a), sent(b))


def farthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    worst = 0.0
    for place, value in a.items():
        other = b[place]
        if isinstance(value, Tensor) and value.is_floating_point():
            assert value.shape == other.shape
            if value.numel():
                worst = max(worst, float((value - other).abs().max()))
        elif isinstance(value, float):
            worst = max(worst, abs(value - other))
        else:
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, place
    return worst
