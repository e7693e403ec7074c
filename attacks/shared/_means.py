"""One vector per class: a client's prototypes or mean outputs, and what shadows of that client would have sent.

If models stay with the clients, no view shows the space that such vectors lie in. A view does show the messages that
led to them. The target's own function can be run again on these messages with records that the attacker knows (a
shadow). It gives class means of known records, protected as the target's are. Shadows differ from the target in what no
view shows: the model that the target began with, and its batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._models import draw
from fedaudit.attacks.shared._view import by_class
from fedaudit.errors import ThreatError
from fedaudit.wire.release import UNPROTECTED, Protection
from fedaudit.wire.transcript import TranscriptEntry

KINDS = ("prototypes", "logits", "soft_labels")


@dataclass(frozen=True, eq=False)
class Means:
    """One release, with a vector for each class in it."""

    entry: TranscriptEntry
    field: str
    of: dict[int, Tensor]

    @property
    def protection(self) -> Protection:
        return self.entry.fields[self.field].protection or UNPROTECTED


def vectors(value: Any, classes: int) -> dict[int, Tensor]:
    """Return vectors by class: as they were sent, or as the rows of a table with one row for each class.

    The result is empty if the value is neither.
    """
    if isinstance(value, Tensor) and value.dim() == 2 and len(value) == classes and value.is_floating_point():
        return dict(enumerate(value))
    return by_class(value, classes)


def releases(scene: Scene) -> list[Means]:
    """Return the target's class means that the view shows, oldest first. They are of the first kind that it has."""
    for kind in KINDS:
        found = [
            Means(entry, name, of)
            for entry, name in scene.released(kind)
            if entry.fields[name].unit == "client" and (of := vectors(entry[name], scene.classes))
        ]
        if found:
            return found
    return []


@dataclass(frozen=True, eq=False)
class ShadowMeans:
    """The shadows' answers: class means by shadow, and which records of the pool each of them held."""

    of: list[dict[int, Tensor]]
    member: Tensor  # (shadows, rows of the pool)
    notes: tuple[str, ...]

    def of_class(self, c: int) -> tuple[Tensor, Tensor]:
        """Return the vectors of class c, of the shadows that have one, and which shadows these are."""
        who = [i for i, sent in enumerate(self.of) if c in sent]
        rows = [self.of[i][c].flatten().double() for i in who]
        return torch.stack(rows) if rows else torch.empty(0, 0), torch.tensor(who, device=self.member.device)


class MeansAttack(Attack):
    """An attack that compares the target's last class means with those of shadows."""

    shadows: int = Field(32, ge=4)  # of each client
    together: int = Field(64, ge=1)  # shadows that are trained at the same time

    def cannot(self, scene: Scene) -> str | None:
        found = releases(scene)
        if not found:
            return f"the {scene.view.threat} sees no vectors by class of client {scene.target}"
        if not len(scene.auxiliary[1]):
            return "there are no auxiliary records to make shadows of: set aux above 0"
        try:
            scene.replayable(found[-1].entry)
        except ThreatError as e:
            return str(e)
        return None

    def compared(self, scene: Scene, online: bool) -> tuple[Means, ShadowMeans]:
        """Return the target's last release and the shadows'. `online`: shadows hold halves of the candidates, too."""
        last = releases(scene)[-1]
        picks, member, repeated = draw(scene, self.shadows, online)
        replies = scene.replay(last.entry, picks, together=self.together)
        of = [vectors(getattr(reply, last.field), scene.classes) for reply in replies]
        notes = ("there are too few auxiliary records for shadows as large as the target: some are repeated",)
        return last, ShadowMeans(of, member, notes if repeated else ())
