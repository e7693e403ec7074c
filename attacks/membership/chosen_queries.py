"""Active server: it sends the candidates themselves, if the protocol asks a client for outputs on images.

A client that answers whatever images it is sent (FedZGE's queries) answers these too. The score is the logit-scaled
confidence in the true class. If outputs are protected, each answer costs the client another release.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import confidence
from fedaudit.errors import ThreatError
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind
from fedaudit.wire.message import Up
from fedaudit.wire.transcript import TranscriptEntry


@register_attack("chosen_queries")
class ChosenQueries(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    active: ClassVar[bool] = True

    def cannot(self, scene: Scene) -> str | None:
        if reason := super().cannot(scene):
            return reason
        if _question(scene) is None:
            return f"not visible: no message asks client {scene.target} for outputs on images that it brings"
        return None

    def run(self, scene: Scene) -> Claims:
        found = _question(scene)
        assert found is not None  # cannot() has looked
        entry, name, batch = found
        template, logits = entry.record(), []
        for number, part in enumerate(scene.x.split(batch)):
            padded = torch.cat([part, part[:1].expand(batch - len(part), *part.shape[1:])])
            reply = scene.ask(entry, dataclasses.replace(template, **{name: padded.cpu()}), "queries", number)
            logits.append(_outputs(scene, reply, batch)[: len(part)])
        return Claims(confidence(torch.cat(logits).to(scene.device), scene.y))


def _question(scene: Scene) -> tuple[TranscriptEntry, str, int] | None:
    """Return the last message that brought the target images and was answered by outputs.

    The field of the images and their number come with it.
    """
    answered = {
        (entry.round, entry.ask)
        for entry in scene.view.entries(direction="up", client=scene.target)
        if {"logits", "soft_labels"} & entry.kinds()
    }
    for entry in reversed(list(scene.view.entries(direction="down", client=scene.target))):
        if (entry.round, entry.ask) not in answered or not all(map(entry.kept, entry.fields)):
            continue
        for name in entry.fields:
            value = entry[name]
            if isinstance(value, Tensor) and value.dim() == 4 and tuple(value.shape[1:]) == tuple(scene.shape):
                return entry, name, len(value)
    return None


def _outputs(scene: Scene, reply: Up, rows: int) -> Tensor:
    """Return the answer's first rows of outputs."""
    for name, declared in reply.declared().items():
        value: Any = getattr(reply, name)
        wanted = declared is not None and declared.kind in ("logits", "soft_labels")
        if wanted and isinstance(value, Tensor) and value.shape[-1] == scene.classes and value.numel() >= rows:
            found = value.reshape(-1, scene.classes)[:rows].double()
            return found if declared is not None and declared.kind == "logits" else found.clamp(min=1e-7).log()
    raise ThreatError(f"client {scene.target} does not answer with outputs on the images that it was sent")
