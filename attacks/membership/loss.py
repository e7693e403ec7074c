"""Loss-threshold membership inference. Yeom et al., "Privacy Risk in Machine Learning", CSF 2018, Adversary 1.

A record that a model was trained on tends to have a smaller loss. The model is the last one that the target
uploaded, if the threat sees it; otherwise the published one.
"""

from __future__ import annotations

from torch.nn.functional import cross_entropy

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import ModelAttack, logits_of
from fedaudit.registry import register_attack


@register_attack("loss")
class LossThreshold(ModelAttack):
    def run(self, scene: Scene) -> Claims:
        return Claims(-cross_entropy(logits_of(self.model(scene), scene.x), scene.y, reduction="none"))
