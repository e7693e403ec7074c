"""Images that reproduce a released embedding, prototype or logit row, by gradient descent through the model. After
Mahendran and Vedaldi, "Understanding Deep Image Representations by Inverting Them", CVPR 2015.

The image x minimises the squared distance of the model's output on x to the released vector, relative to that vector's
size, plus `tv` times the total variation. A row per record gives an image per record; a vector per class (a prototype,
a mean logit) gives an image of that class. The model is the one in the same message, or the one sent to the client
before it.

We chose the following. `release = "auto"` takes the first of embeddings, prototypes and logits that is there. Of
several rounds the last one is attacked. Pixels stay in [-1, 1]. Adam starts from the auxiliary mean first, and from
noise around it in further restarts; the restart with the smallest loss counts. If a release was clipped, the model's
output on x is clipped too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.inversion._invert import descend, model_at, starts, total_variation
from fedaudit.attacks.shared._view import by_class
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind
from fedaudit.training.models import Net
from fedaudit.wire.release import UNPROTECTED, Protection
from fedaudit.wire.transcript import TranscriptEntry

KINDS = ("embeddings", "prototypes", "logits")


@register_attack("feature_match")
class FeatureMatch(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    release: Literal["auto", "embeddings", "prototypes", "logits"] = "auto"
    steps: int = Field(300, ge=1)  # of descent
    lr: float = Field(0.05, gt=0)
    tv: float = Field(0.01, ge=0)  # weight of the total variation
    restarts: int = Field(2, ge=1)
    most: int = Field(64, ge=1)  # images of a client, the first rows
    batch: int = Field(64, ge=1)  # images in memory at a time

    def cannot(self, scene: Scene) -> str | None:
        if self._found(scene) is None:
            kinds = KINDS if self.release == "auto" else (self.release,)
            return (
                f"the {scene.view.threat} sees no {' or '.join(kinds)} of client {scene.target} by record or class "
                "together with the model that they come from"
            )
        return None

    def run(self, scene: Scene) -> Reconstructions:
        found = self._found(scene)
        assert found is not None  # cannot() has looked
        entry, name, model, kind = found
        released = entry[name]
        labels = by_class(released, scene.classes)
        targets = torch.stack(list(labels.values())) if labels else released
        targets = targets[: self.most].to(scene.device)
        loss = self._loss(kind, model, targets, entry.fields[name].protection or UNPROTECTED)
        begin = starts(scene, len(targets), scene.rng("feature_match"))
        images, _ = descend(
            loss, begin, steps=self.steps, lr=self.lr, restarts=self.restarts, batch=self.batch, tell=scene.tell
        )
        if labels:
            return Reconstructions(images, labels=torch.tensor(list(labels)[: self.most]))
        return Reconstructions(images, rows=torch.arange(len(images)))

    def _loss(
        self, kind: str, model: Net, targets: Tensor, protection: Protection
    ) -> Callable[[Tensor, Tensor], Tensor]:
        clip, how = protection.clip if kind == "embeddings" else None, mechanism_of(protection)
        function = model if kind == "logits" else model.encode
        scale = targets.square().sum(1).clamp(min=1e-12)

        def loss(x: Tensor, index: Tensor) -> Tensor:
            made = function(x)
            made = made if clip is None else how.clipped(made, clip)
            gap = (made - targets[index]).square().sum(1) / scale[index]
            return gap + self.tv * total_variation(x)

        return loss

    def _found(self, scene: Scene) -> tuple[TranscriptEntry, str, Net, str] | None:
        for kind in KINDS if self.release == "auto" else (self.release,):
            for entry, name in reversed(scene.released(kind)):
                by_record = entry.fields[name].unit == "record"
                if not by_record and not by_class(entry[name], scene.classes):
                    continue  # outputs on images that are not records: public or synthetic ones
                if (model := model_at(scene, entry)) is not None:
                    return entry, name, model, kind
        return None
