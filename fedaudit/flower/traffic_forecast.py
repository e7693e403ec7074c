"""The traffic of a larger run of an app, computed from a short run: each complete round is taken to send the same.

The larger run is taken to ask the same share of nodes, with messages of the same size. A run whose complete rounds
differ tells nothing about more rounds, and is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedaudit.errors import RunError
from fedaudit.runtime.folder import RunFolder
from fedaudit.stored_model import StoredModel
from fedaudit.units import bytes_text

FRAME = "(frame)"
SAME = 0.01  # relative difference allowed between rounds: numbers in metrics may take a byte more or less


class PlannedField(StoredModel):
    """The bytes of one field in one round, over all nodes."""

    direction: str
    field: str
    bytes: int


class Planned(StoredModel):
    """The bytes of one round by field, and of all rounds by direction."""

    fields: list[PlannedField]
    up: int
    down: int
    total: int


def planned(
    folder: Path | str, *, nodes: int, rounds: int, convention: Literal["payload", "wire"] = "payload"
) -> Planned:
    """Return the bytes by field and direction for so many nodes and rounds."""
    run = RunFolder(folder)
    whole = [row for row in run.record.rounds if not row.absent]
    if not whole:
        raise RunError(
            f"{folder} has no round in which every node answered, so it cannot be used for a plan. Run the app again."
        )
    by_round: dict[int, dict[tuple[str, str], int]] = {row.round: {} for row in whole}
    for entry in run.transcript.entries():
        if entry.round in by_round:
            sizes = by_round[entry.round]
            parts = {name: getattr(sent, convention) for name, sent in entry.fields.items()}
            parts |= {FRAME: entry.row["frame"]} if convention == "wire" else {}
            for name, size in parts.items():
                key = (entry.direction, f"{entry.message}.{name}")
                sizes[key] = sizes.get(key, 0) + size
    totals = [sum(sizes.values()) for sizes in by_round.values()]
    if max(totals) - min(totals) > SAME * max(totals):
        least, most = bytes_text(min(totals)), bytes_text(max(totals))
        raise RunError(
            f"{folder}: its rounds sent between {least} and {most}, so further rounds cannot be planned. Use a run in "
            "which every round asks the same."
        )
    grown = {key: size * nodes / run.record.setting.clients for key, size in by_round[whole[0].round].items()}
    up, down = (
        round(rounds * sum(size for (direction, _), size in grown.items() if direction == way))
        for way in ("up", "down")
    )
    fields = [PlannedField(direction=d, field=name, bytes=round(size)) for (d, name), size in sorted(grown.items())]
    return Planned(fields=fields, up=up, down=down, total=up + down)
