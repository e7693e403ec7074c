"""Blind baseline: it uses the distance to the nearest auxiliary record, and nothing of the run.

Members and non-members of an honest split are equally far from records that no client holds.
"""

from __future__ import annotations

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import nearest, numbers_of
from fedaudit.registry import register_attack


@register_attack("blind_nearest")
class BlindNearest(Attack):
    blind = True

    def cannot(self, scene: Scene) -> str | None:
        return None if len(scene.auxiliary[0]) else "there is no auxiliary set: set aux above 0"

    def run(self, scene: Scene) -> Claims:
        return Claims(-nearest(numbers_of(scene, scene.x), numbers_of(scene, scene.auxiliary[0])))
