"""Shared synthetic or condensed images as they are, claimed to be records: do they come nearer to members?

Nothing is computed. The scorer assigns the client's records to the images, and compares the distance to the nearest
member with that to the nearest of as many non-members of the same client. It gives the share of images whose nearest
candidate is a member (chance 1/2), and the ratio of the two distances. Images that were made without looking at single
records show 1/2 and 1; condensed images that begin as records, and stay near them, show more. Of several rounds the
last counts.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import images_in
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind


@register_attack("synthetic_leak")
class SyntheticLeak(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    needs: ClassVar[frozenset[str]] = frozenset({"synthetic_images"})

    most: int = Field(500, ge=1)  # images of a client, drawn at random where there are more

    def cannot(self, scene: Scene) -> str | None:
        if reason := super().cannot(scene):
            return reason
        return None if len(self._images(scene)) else f"client {scene.target} uploaded no synthetic image"

    def run(self, scene: Scene) -> Reconstructions:
        images = self._images(scene)
        rng = scene.rng("synthetic_leak")
        order = torch.randperm(len(images), generator=rng, device=images.device)[: self.most]
        return Reconstructions(images[order.sort().values])

    def _images(self, scene: Scene) -> torch.Tensor:
        entry, name = scene.released("synthetic_images")[-1]
        found = list(images_in(scene, entry[name]))
        return torch.cat(found) if found else torch.empty(0, *scene.shape, device=scene.device)
