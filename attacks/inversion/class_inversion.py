"""Images of each class from weights. MIFace (Fredrikson et al., CCS 2015) and DeepInversion (Yin et al., CVPR 2020).

MIFace descends on 1 - p_c(x) from the auxiliary mean. DeepInversion descends on the cross-entropy plus a prior: total
variation, the squared norm, and the distance of each batch norm's statistics over the images to those it has stored.

The model is the last one that the target uploaded, if the threat sees it; otherwise the published one. We chose:
`form = "auto"` is DeepInversion if the model has batch norms with stored statistics, and MIFace otherwise. MIFace's
step is Adam's, because plain descent from a flat start does not move where a softmax saturates; its auto-encoder for
faces is left out. DeepInversion's batch is all images together, `per_class` of each class; its competition term (a
student that disagrees) is left out, because there is no student. All classes are made, because it is unknown which ones
the client holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.inversion._invert import descend, starts, total_variation
from fedaudit.attacks.shared._models import target_model
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind


@register_attack("class_inversion")
class ClassInversion(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    form: Literal["auto", "miface", "deepinversion"] = "auto"
    steps: int = Field(300, ge=1)  # of descent
    lr: float = Field(0.05, gt=0)
    tv: float = Field(0.01, ge=0)  # DeepInversion: weight of the total variation
    l2: float = Field(1e-4, ge=0)  # DeepInversion: weight of the mean square
    bn: float = Field(0.1, ge=0)  # DeepInversion: weight of the batch norms' distance
    per_class: int = Field(2, ge=1)  # images of each class
    restarts: int = Field(1, ge=1)

    def cannot(self, scene: Scene) -> str | None:
        model = target_model(scene)
        if model is None:
            return f"the {scene.view.threat} sees no model of client {scene.target}"
        if self.form == "deepinversion" and not batch_norms(model):
            return f"the model of client {scene.target} has no batch norm with stored statistics; use form = 'miface'"
        return None

    def run(self, scene: Scene) -> Reconstructions:
        model = target_model(scene)
        assert model is not None  # cannot() has looked
        model.eval().requires_grad_(False)
        labels = torch.arange(scene.classes, device=scene.device).repeat_interleave(self.per_class)
        deep = self.form == "deepinversion" or (self.form == "auto" and bool(batch_norms(model)))
        loss = self._deep(model, labels) if deep else miface(model, labels)
        begin = starts(scene, len(labels), scene.rng("class_inversion"))
        images, _ = descend(
            loss, begin, steps=self.steps, lr=self.lr, restarts=self.restarts, batch=len(labels), tell=scene.tell
        )  # together: the batch norms' statistics are over all of them
        return Reconstructions(images, labels=labels)

    def _deep(self, model: nn.Module, labels: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        layers = batch_norms(model)
        seen: list[Tensor] = []

        def look(layer: nn.BatchNorm2d, arrived: tuple[Tensor]) -> None:
            mean, var = arrived[0].mean((0, 2, 3)), arrived[0].var((0, 2, 3), correction=0)
            stored = layer.running_mean, layer.running_var
            seen.append((mean - stored[0]).norm() + (var - stored[1]).norm())  # type: ignore[operator]

        for layer in layers:
            layer.register_forward_pre_hook(look)

        def loss(x: Tensor, index: Tensor) -> Tensor:
            seen.clear()
            value = cross_entropy(model(x), labels[index], reduction="none")
            prior = self.tv * total_variation(x) + self.l2 * x.square().flatten(1).mean(1)
            return value + prior + self.bn * torch.stack(seen).sum()

        return loss


def miface(model: nn.Module, labels: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss 1 - p_c(x), by the logarithm of the others' share.

    The order is the same, and the gradient is not zero where the loss is near 1.
    """

    def loss(x: Tensor, index: Tensor) -> Tensor:
        log_p = model(x).log_softmax(1)
        true = nn.functional.one_hot(labels[index], log_p.shape[1]).bool()
        return log_p.masked_fill(true, -torch.inf).logsumexp(1)

    return loss


def batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None]
