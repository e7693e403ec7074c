"""The distance to condensed or synthetic images, which lie nearer to the records that they were made of.

The score is minus the distance to the nearest such image, in pixels or in the features of a model that the view shows
(the one that the client last got, else the last that it uploaded, else the published one). `calibrate` subtracts the
distance to the nearest auxiliary image, because some records are close to everything.

Images are those that the target released. If it released none, they are the images that were sent to it (a generator's,
made of everybody's releases), without those of the public set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import encoder_of, images_in, in_chunks, nearest, received, uploaded
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind
from fedaudit.training.models import Net

Found = list[tuple[int | None, Tensor]]  # class, if it is known, and images


@register_attack("nearest_synthetic")
class NearestSynthetic(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    space: Literal["pixel", "feature"] = "pixel"
    same_class: bool = True  # compare with images of the candidate's class, where they say theirs
    calibrate: bool = False  # it did not help on digits

    def cannot(self, scene: Scene) -> str | None:
        who = f"the {scene.view.threat}"
        if not images(scene):
            return f"{who} sees no synthetic images of client {scene.target}"
        if self.space == "feature" and self._encoder(scene) is None:
            return f"{who} sees no model to take features of: use space = pixel"
        return None

    def run(self, scene: Scene) -> Claims:
        model = self._encoder(scene) if self.space == "feature" else None

        def feature(x: Tensor) -> Tensor:
            return x.flatten(1) if model is None else in_chunks(encoder_of(model), x)

        synthetic = [(c, feature(x)) for c, x in images(scene)]
        candidates, (aux, aux_y) = feature(scene.x), scene.auxiliary
        calibrate = self.calibrate and len(aux) > 0
        known = feature(aux) if calibrate else candidates[:0]
        score = torch.zeros(len(scene.y), dtype=candidates.dtype, device=scene.device)
        everything = torch.cat([x for _, x in synthetic])
        for c in scene.y.unique().tolist():
            rows = scene.y == c
            of_class = [x for label, x in synthetic if label == c and self.same_class]
            score[rows] = -nearest(candidates[rows], torch.cat(of_class) if of_class else everything)
            if calibrate:
                alike = known[aux_y == c] if of_class and (aux_y == c).any() else known
                score[rows] += nearest(candidates[rows], alike)
        return Claims(score)

    @staticmethod
    def _encoder(scene: Scene) -> Net | None:
        asked = list(scene.view.entries(direction="up", client=scene.target))
        for entry in reversed([e for e in asked if e.readable]):
            if (model := received(scene, entry)) is not None:
                return model
        if own := uploaded(scene, scene.target):
            return own[max(own)][1]
        last = scene.published()
        return last if isinstance(last, Net) else None


def images(scene: Scene) -> Found:
    """Return the synthetic images that the view shows, of all rounds."""
    if found := [part for entry, name in scene.released("synthetic_images") for part in labelled(scene, entry[name])]:
        return found
    sent = [entry for entry in scene.view.entries(direction="down", client=scene.target) if entry.readable]
    every = [(None, x) for entry in sent for name in entry.fields for x in images_in(scene, entry[name])]
    if scene.public is None or not every:
        return list(every)
    known = scene.public.flatten(1)
    kept = [x[nearest(x.flatten(1), known) > 1e-6] for _, x in every]
    return [(None, x) for x in kept if len(x)]


def labelled(scene: Scene, value: object) -> Found:
    if isinstance(value, Mapping) and all(isinstance(c, int) and c in range(scene.classes) for c in value):
        return [(c, x) for c, of_class in value.items() for x in images_in(scene, of_class)]
    return [(None, x) for x in images_in(scene, value)]
