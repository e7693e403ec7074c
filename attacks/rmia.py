"""Robust membership inference (RMIA), offline. Zarifzadeh, Liu and Shokri, "Low-Cost High-Power Membership Inference
Attacks", ICML 2024.

    LR(x, z) = (p(x | theta) / p(x)) / (p(z | theta) / p(z)),   score(x) = share of z with LR(x, z) >= gamma

p(. | theta) is the target's probability of the true class, p(.) its mean over models. Reference models are shadows
without x (as in `lira_offline`, and the same ones); what models with x would say is interpolated: p_in = a p_out + (1 -
a), so p(x) = ((1 + a) p_out + (1 - a)) / 2. The population z are the auxiliary records.

Chosen where we found nothing: p(z) is interpolated in the same way, from the shadows that z was left out of. The score
takes few values (one more than there are z), and a tie tells nothing: among equal scores the larger p(x | theta) / p(x)
comes first, by an amount that never reaches the next score.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks._models import ShadowAttack, Shadows
from fedaudit.registry import register_attack


def marginal(out: Tensor, a: float) -> Tensor:
    """p from the mean over models without the record."""
    return ((1 + a) * out + (1 - a)) / 2


def dominated(ratio_x: Tensor, ratio_z: Tensor, gamma: float) -> Tensor:
    """The share of z with ratio_x >= gamma ratio_z, for each x: a product, because ratio_z may be 0."""
    below = (gamma * ratio_z).sort().values
    return torch.searchsorted(below, ratio_x, right=True).double() / len(ratio_z)


def finer(share: Tensor, ratio: Tensor, steps: int) -> Tensor:
    """Order equal shares (multiples of 1 / steps) by ratio."""
    return share + ratio / (1 + ratio) / (2 * steps)


def of_true_class(logits: Tensor, y: Tensor) -> Tensor:
    """The probability of the true class: (..., rows)."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1)).squeeze(-1).exp()


@register_attack("rmia")
class RMIA(ShadowAttack):
    gamma: float = Field(2.0, gt=0)  # how much more x must stand out than z does
    a: float = Field(0.3, ge=0, le=1)  # 1: models with x are as sure of it as those without; 0: they are certain

    def run(self, scene: Scene) -> Claims:
        target, shadows = self.attacked(scene, online=False)
        ratio = self.ratios(target, shadows)
        ratio_x, ratio_z = ratio[: shadows.candidates], ratio[shadows.auxiliary]
        known = ratio_z.isfinite()  # a record that no shadow left out has no p_out
        share = dominated(ratio_x, ratio_z[known], self.gamma)
        return Claims(finer(share, ratio_x, int(known.sum())), shadows.notes)

    def ratios(self, target: Tensor, shadows: Shadows) -> Tensor:
        """p(. | theta) / p(.) of each record of the pool; NaN where every shadow was trained on it."""
        p, out = of_true_class(shadows.logits, shadows.y), ~shadows.member
        p_out = p.where(out, 0).sum(0) / out.sum(0)
        return of_true_class(target, shadows.y) / marginal(p_out, self.a).clamp(min=1e-300)
