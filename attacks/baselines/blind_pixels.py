"""Blind baseline: it uses the candidates' pixels (numbers, token ids), a few statistics of them, and nothing of the
run.

If a split dithers, rescales or compresses one of its sides, pixels alone tell the sides apart, though labels and
distances to other images are those of an honest split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.attack.claims import Features
from fedaudit.attack.scene import Attack, Scene
from fedaudit.registry import register_attack


@register_attack("blind_pixels")
class BlindPixels(Attack):
    blind = True

    def run(self, scene: Scene) -> Features:
        return Features(looks(scene.x))  # the scorer learns from the other half what members look like


def looks(x: Tensor) -> Tensor:
    """Return the pixels and statistics of them.

    The statistics are the number of values, how often the commonest comes, range, mean, deviation, and steps to
    neighbours.
    """
    flat = x.flatten(1).to(torch.get_default_dtype())  # token ids, too: they are told apart, not measured
    ordered = flat.sort(1).values
    new = (ordered.diff(dim=1) > 0).sum(1) + 1
    commonest = (flat == flat.mode(1).values[:, None]).float().mean(1)
    steps = flat.diff(dim=1).abs()
    statistics = [new, commonest, ordered[:, 0], ordered[:, -1], flat.mean(1), flat.std(1), steps.mean(1), steps.std(1)]
    return torch.cat([flat, torch.stack([s.to(flat) for s in statistics], 1).nan_to_num()], 1)
