"""Loss-threshold membership inference. Yeom et al., "Privacy Risk in Machine Learning", CSF 2018, Adversary 1.

A record that a model was trained on tends to have a smaller loss. The models are those that the target uploaded, if the
threat sees them, and the score is the mean over rounds; otherwise the model is the published one.
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
        return self.by_round(scene, lambda m: -cross_entropy(logits_of(m, scene.x), scene.y, reduction="none"))
