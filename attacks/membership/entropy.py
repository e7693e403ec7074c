"""Membership from the entropy of a model's prediction. Song and Mittal, "Systematic Evaluation of Privacy Risks of
Machine Learning Models", USENIX Security 2021.

A model tends to be surer of the records that it was trained on. The label is not looked at, so a confident mistake
counts as a member: `modified_entropy` mends that. The paper's thresholds per class come from a shadow. Here a score is
given, and the record has the results per class. The attacked models are the target's uploaded ones if the threat sees
them, and the score is the mean over rounds; else the published one.
"""

from __future__ import annotations

from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import ModelAttack, logits_of
from fedaudit.registry import register_attack


def entropy(logits: Tensor) -> Tensor:
    """Return -sum_i p_i log p_i of each row."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@register_attack("entropy")
class Entropy(ModelAttack):
    def run(self, scene: Scene) -> Claims:
        return self.by_round(scene, lambda model: -entropy(logits_of(model, scene.x)))
