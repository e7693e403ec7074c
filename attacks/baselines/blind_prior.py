"""Blind baseline: it uses the candidate's label, and nothing of the run. On an honest split it is at chance."""

from __future__ import annotations

from fedaudit.attack.claims import Groups
from fedaudit.attack.scene import Attack, Scene
from fedaudit.registry import register_attack


@register_attack("blind_prior")
class BlindPrior(Attack):
    blind = True

    def run(self, scene: Scene) -> Groups:
        return Groups(scene.y)  # the scorer learns from the other half which classes hold more members
