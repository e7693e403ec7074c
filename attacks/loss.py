"""Loss-threshold membership inference. Yeom et al., "Privacy Risk in Machine Learning", CSF 2018, Adversary 1.

A record that a model was trained on tends to have a smaller loss. The model is the last one that the target
uploaded, where the threat sees it; otherwise the published one.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from fedaudit.attack import Attack, Claims, Scene
from fedaudit.registry import register_attack


@register_attack("loss")
class LossThreshold(Attack):
    def cannot(self, scene: Scene) -> str | None:
        if self._model(scene) is None:
            return f"the {scene.view.threat} sees no model of client {scene.target}"
        return None

    def run(self, scene: Scene) -> Claims:
        model = self._model(scene)
        assert model is not None  # cannot() has looked
        with torch.no_grad():
            return Claims(-cross_entropy(model(scene.x), scene.y, reduction="none"))

    @staticmethod
    def _model(scene: Scene) -> torch.nn.Module | None:
        uploads = scene.released("weights")
        if not uploads:
            return scene.published()
        message, field = uploads[-1]
        return scene.model(scene.arch(scene.target), message[field])
