"""Membership from the prediction's entropy, with the label taken into account. Song and Mittal, "Systematic Evaluation
of Privacy Risks of Machine Learning Models", USENIX Security 2021.

    Mentr(p, y) = -(1 - p_y) log p_y - sum_{i != y} p_i log(1 - p_i)

It falls with p_y and rises with every other p_i: 0 for a certain, right answer, without bound for a certain, wrong one.
The attacked models are the target's uploaded ones if the threat sees them, and the score is the mean over rounds; else
the published one.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import one_hot

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import ModelAttack, log_rest, logits_of
from fedaudit.registry import register_attack


def modified_entropy(logits: Tensor, y: Tensor) -> Tensor:
    log_p, log_q = logits.log_softmax(-1), log_rest(logits)  # log p_i, log(1 - p_i)
    true = one_hot(y, logits.shape[-1]).bool()
    terms = (log_q.exp() * log_p).where(true, log_p.exp() * log_q)
    return -terms.sum(-1)


@register_attack("modified_entropy")
class ModifiedEntropy(ModelAttack):
    def run(self, scene: Scene) -> Claims:
        return self.by_round(scene, lambda model: -modified_entropy(logits_of(model, scene.x), scene.y))
