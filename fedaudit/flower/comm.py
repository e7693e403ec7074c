"""What a larger run of an app will send, by a short one: every whole round of a strategy sends what the others sent.

Nodes are asked in the same proportion and answer with messages of the same size; a run in which whole rounds differ in
that tells nothing of more rounds, and is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedaudit.errors import RunError
from fedaudit.kept import Kept
from fedaudit.runtime.folder import RunFolder
from fedaudit.units import bytes_text

FRAME = "(frame)"
SAME = 0.01  # by how much two rounds may differ: numbers in metrics take a byte more or less


class PlannedField(Kept):
    """Bytes of one field in one round, over all nodes."""

    direction: str
    field: str
    bytes: int


class Planned(Kept):
    """One round by field, and all rounds by direction."""

    fields: list[PlannedField]
    up: int
    down: int
    total: int


def planned(
    folder: Path | str, *, nodes: int, rounds: int, convention: Literal["payload", "wire"] = "payload"
) -> Planned:
    """Bytes by field and direction, of so many nodes over so many rounds."""
    run = RunFolder(folder)
    whole = [row for row in run.record.rounds if not row.absent]
    if not whole:
        raise RunError(f"{folder} has no round in which every node answered: nothing can be planned by it.")
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
            f"{folder}: rounds sent from {least} to {most}, and do not tell what others will send. Plan by a run in "
            "which every round asks the same."
        )
    grown = {key: size * nodes / run.record.setting.clients for key, size in by_round[whole[0].round].items()}
    up, down = (
        round(rounds * sum(size for (direction, _), size in grown.items() if direction == way))
        for way in ("up", "down")
    )
    fields = [PlannedField(direction=d, field=name, bytes=round(size)) for (d, name), size in sorted(grown.items())]
    return Planned(fields=fields, up=up, down=down, total=up + down)
