"""An inversion network from released embeddings to images. DFFKE, Appendix C ("representation inversion attack").

The attacker has the encoder, which was released too, and auxiliary images. It encodes those, protects them exactly as
the client does (clipping and sigma are public), trains a network to give the images back, and applies it to what the
client released. Reconstruction i is the record of row i.

The paper leaves these points open, and we chose:

- "e.g. an image generator" is a linear layer and three convolutions, in squared error, Adam with a falling step.
- Noise is drawn anew for every training batch, so that the network learns what can be expected under it.
- Auxiliary images are few, and an attacker can encode any image: a share `mix` of every batch are averages of two
  images with random weights.
- The last release is attacked. `releases` takes so many of the last together, with one encoder and one noise each. It
  shows what a record loses by being released again.
- Labels travel beside the embeddings in DFFKE, but the appendix speaks of embeddings alone: `labels` uses them too.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.inversion._invert import CLIENTS, learn, model_at, per_record, same_noise, stacks_on
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind


@register_attack("decoder")
class DecoderAttack(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    needs: ClassVar[frozenset[str]] = frozenset({"embeddings"})

    steps: int = Field(600, ge=1)  # training steps of the inversion network
    batch: int = Field(64, ge=2)
    width: int = Field(16, ge=1)  # channels of its convolutions
    lr: float = Field(4e-3, gt=0)
    mix: float = Field(0.5, ge=0, le=1)  # share of averages among the training images
    releases: int = Field(1, ge=1)  # so many of the last releases are used together
    labels: bool = False  # also use labels that were released per record

    def cannot(self, scene: Scene) -> str | None:
        if reason := super().cannot(scene):
            return reason
        found = per_record(scene, "embeddings")
        if not found:
            return f"client {scene.target} released no embeddings with one row per record"
        if model_at(scene, found[-1][0]) is None:
            return f"the {scene.view.threat} sees no encoder of client {scene.target} beside its embeddings"
        if not len(scene.auxiliary[1]):
            return "there are no auxiliary images to train on: set --aux above 0"
        return None

    def at_once(self, scene: Scene) -> int:
        return CLIENTS if stacks_on(scene.device) else 1

    def run(self, scene: Scene) -> Reconstructions:
        x, y = scene.auxiliary
        rng = scene.rng("decoder")
        released, parts = [], []
        for entry, name in per_record(scene, "embeddings")[-self.releases :]:
            model = model_at(scene, entry)
            if model is None:
                continue
            released.append(entry[name].to(scene.device))
            parts.append((model, entry.fields[name].protection))
        known = self._labels(scene)

        @torch.no_grad()
        def draw(index: Tensor) -> tuple[Tensor, Tensor]:
            image = self._mixed(x[index], x, rng)
            e = [same_noise(model.encode(image), how, rng) for model, how in parts]
            return torch.cat([*e, *([] if known is None else [one_hot(y[index], scene.classes)])], 1), image

        size = {"steps": self.steps, "batch": self.batch, "width": self.width}
        invert = learn(draw, len(x), scene.shape, lr=self.lr, rng=rng, tell=scene.tell, **size)
        e = torch.cat([*released, *([] if known is None else [known])], 1)
        return Reconstructions(invert(e), rows=torch.arange(len(e)))

    def _mixed(self, image: Tensor, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return the images, some of them averaged with others. With labels none is: an average has no label."""
        if self.labels or not self.mix:
            return image
        n = len(image)
        other = x[torch.randint(len(x), (n,), generator=rng, device=x.device)]
        weight = torch.rand(n, 1, 1, 1, generator=rng, device=x.device)
        mixed = torch.rand(n, 1, 1, 1, generator=rng, device=x.device) < self.mix
        return torch.where(mixed, weight * image + (1 - weight) * other, image)

    def _labels(self, scene: Scene) -> Tensor | None:
        found = per_record(scene, "labels") if self.labels else []
        return one_hot(found[-1][0][found[-1][1]].to(scene.device), scene.classes) if found else None
