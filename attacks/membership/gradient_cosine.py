"""Membership from the direction of updates: the cosine with a candidate's gradient, over all rounds.

A client that trained on a record moved against that record's gradient. The score is the mean over rounds of the cosine
between what training took away from the received model and the gradient of the candidate's loss there (the measurement
of `update_alignment`, without a null distribution). So it needs no other client, and none of the target's architecture:
it attacks a client that is alone with its model. Where three clients and more share an architecture, `update_alignment`
also knows which records are easy for everybody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.membership.update_alignment import cosines, flat
from fedaudit.attacks.shared._models import over_rounds
from fedaudit.attacks.shared._view import received, trained, uploads
from fedaudit.registry import register_attack
from fedaudit.training.models import Net


@register_attack("gradient_cosine")
class GradientCosine(Attack):
    def cannot(self, scene: Scene) -> str | None:
        if next(iter(self._moves(scene)), None) is None:
            return (
                f"the {scene.view.threat} sees no round with the whole model that client {scene.target} got and the "
                "one that it sent back"
            )
        return None

    def run(self, scene: Scene) -> Claims:
        return over_rounds([cosines(start, scene.x, scene.y, change[None])[0] for start, change in self._moves(scene)])

    def _moves(self, scene: Scene) -> list[tuple[Net, Tensor]]:
        """Return, for each round, the model that the target got and what training took away from it."""
        found = []
        for _, (entry, name) in sorted(uploads(scene, scene.target).items()):
            start, model = received(scene, entry), trained(scene, entry, name)
            if start is not None and model is not None and len(flat(start)) == len(flat(model)):
                found.append((start, flat(start) - flat(model)))
        return [(start, change) for start, change in found if torch.any(change != 0)]
