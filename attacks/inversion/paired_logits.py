"""Class images from logits on shared data. PLI: Takahashi, Liu and Liu, "Breaching FedMD: Image Recovery via
Paired-Logits Inversion Attack", CVPR 2023, arXiv 2304.11436.

A client answers on images that the server knows, public or synthetic. The server answers on them too, with a model of
its own, and trains an inversion network from both answers to the image. Where a client is sure of a class and the
server is not, the client has seen records that the server lacks: the network is asked for the image of "client certain
of c, server undecided", for every class c.

This is written from the paper's published description, not from its text. Where that leaves room, we chose:

- The server's model is trained on the auxiliary set, with the registered `cnn`.
- The paper's public data differ in kind from the private data, which makes the gap. Here all data are of one
  distribution, so that the gap is that of members against others, and small.
- In the query the client is one-hot, and the server has `p` for the class and the rest spread evenly. There is no prior
  from a similar domain: the loss also draws towards the mean image with weight `gamma`.
- Releases of all rounds are used together, the last `most` rows. Noised releases are used as they are, after the
  softmax.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.inversion._invert import CLIENTS, learn, stacks_on
from fedaudit.attacks.shared._view import in_chunks, inputs_of
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind
from fedaudit.training import models
from fedaudit.training.fit import adam, fit
from fedaudit.training.losses import ce

FEWEST = 16  # pairs to learn from


@register_attack("paired_logits")
class PairedLogits(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    steps: int = Field(400, ge=1)  # training steps of the inversion network
    batch: int = Field(64, ge=2)
    width: int = Field(16, ge=1)  # channels of its convolutions
    lr: float = Field(2e-3, gt=0)
    server_steps: int = Field(150, ge=1)  # training steps of the server's model
    tau: float = Field(1.0, gt=0)  # temperature of both softmaxes
    p: float | None = Field(None, ge=0, le=1)  # the server's certainty in the query; None: undecided, 1 / classes
    gamma: float = Field(0.03, ge=0, lt=1)  # weight of the mean image
    most: int = Field(2000, ge=FEWEST)  # pairs at most

    def cannot(self, scene: Scene) -> str | None:
        if len(self._pairs(scene)[0]) < FEWEST:
            return (
                f"the {scene.view.threat} sees fewer than {FEWEST} logits or soft labels of client {scene.target} with "
                "the images that they are of"
            )
        return None if len(scene.auxiliary[1]) else "there are no auxiliary records to train a server's model on"

    def at_once(self, scene: Scene) -> int:
        return CLIENTS if stacks_on(scene.device) else 1

    def run(self, scene: Scene) -> Reconstructions:
        client, x = self._pairs(scene)
        server = in_chunks(self._server(scene), x).div(self.tau).softmax(1)
        mean = x.mean(0)

        def draw(index: Tensor) -> tuple[Tensor, Tensor]:
            # ||G - x||^2 + gamma ||G - mean||^2 has the same minimum as the distance to this point between the two.
            target = (x[index] + self.gamma * mean) / (1 + self.gamma)
            return torch.cat([client[index], server[index]], 1), target

        size = {"steps": self.steps, "batch": self.batch, "width": self.width}
        rng = scene.rng("paired_logits")
        invert = learn(draw, len(x), scene.shape, lr=self.lr, rng=rng, tell=scene.tell, **size)
        labels = torch.arange(scene.classes, device=scene.device)
        certain = one_hot(labels, scene.classes).to(x)
        p = 1 / scene.classes if self.p is None else self.p
        undecided = certain * p + (1 - certain) * (1 - p) / max(scene.classes - 1, 1)
        return Reconstructions(invert(torch.cat([certain, undecided], 1)), labels=labels)

    def _pairs(self, scene: Scene) -> tuple[Tensor, Tensor]:
        """Return the client's softened answers and the images that they are of, the latest last."""
        answers, images = [torch.zeros(0, scene.classes, device=scene.device)], []
        for kind in ("logits", "soft_labels"):
            for entry, name in scene.released(kind):
                released = entry[name]
                if not isinstance(released, Tensor) or released.dim() != 2 or released.shape[1] != scene.classes:
                    continue
                if (x := inputs_of(scene, entry, len(released))) is None:
                    continue
                released = released.to(scene.device)
                logits = released if kind == "logits" else released.clamp(min=1e-8).log()
                answers.append((logits / self.tau).softmax(1))
                images.append(x)
        x = torch.cat(images) if images else torch.zeros(0, *scene.shape, device=scene.device)
        return torch.cat(answers)[-self.most :], x[-self.most :]

    def _server(self, scene: Scene) -> nn.Module:
        model = models.build("cnn", shape=scene.shape, classes=scene.classes).to(scene.device)
        rng = scene.rng("paired_logits server")
        fit(model, ce, scene.auxiliary, opt=adam(1e-3), batch=32, steps=self.server_steps, rng=rng)
        return model.eval()
