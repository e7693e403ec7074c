"""White box: the norm of a candidate's gradient at the models that the target uploaded, over all rounds.

Training makes the gradients of the records that it trains on small. A loss says how small in one number; the gradient's
norm also counts how many parameters agree about it (one of the white-box features of Nasr, Shokri and Houmansadr,
"Comprehensive Privacy Analysis of Deep Learning", S&P 2019). The score is minus the mean over rounds of the logarithm.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._models import over_rounds, whole_uploads
from fedaudit.registry import register_attack
from fedaudit.training.losses import ce

ROWS = 64  # records whose gradients are held at a time


@register_attack("gradient_norm")
class GradientNorm(Attack):
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})

    def cannot(self, scene: Scene) -> str | None:
        if reason := super().cannot(scene):
            return reason
        if next(whole_uploads(scene), None) is None:
            return f"client {scene.target} uploads parts of its model, which have no gradient by themselves"
        return None

    def run(self, scene: Scene) -> Claims:
        norms = [gradient_norms(model, scene.x, scene.y) for _, _, model in whole_uploads(scene)]
        return over_rounds([-norm.clamp(min=1e-30).log() for norm in reversed(norms)])


def gradient_norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the norm of the gradient of each record's loss, over all parameters.

    The model is in evaluation mode: running statistics, no dropout.
    """
    from fedaudit.privacy.persample import row_gradients

    model = model.eval()
    found = []
    for rows in zip(x.split(ROWS), y.split(ROWS), strict=True):
        gradients = row_gradients(model, ce, rows)
        squares = [g.detach().double().flatten(1).square().sum(1) for g in gradients.values()]
        found.append(torch.stack(squares).sum(0).sqrt())
    return torch.cat(found)
