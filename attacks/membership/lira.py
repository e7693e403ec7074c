"""Likelihood-ratio attack (LiRA), online. Carlini et al., "Membership Inference Attacks From First Principles", S&P
2022, Algorithm 1.

For every candidate, shadows with it and shadows without it give two Gaussians over the logit-scaled confidence
phi = log(p_y / (1 - p_y)); the score is the log-ratio of their densities at the target's phi.

- Shadows are replays of the target's own update on the messages that it received, with other records; see
  fedaudit.attack.replay, and attacks/shared/_models.py for what they are trained on. Each candidate is in half of them.
- `variance`: with few shadows a variance per candidate is noise, and the paper then takes one for all candidates, which
  helps it below some 64 shadows. "auto" does so below 64. The one for all is pooled: squared distances from each
  candidate's own mean, over the degrees of freedom.
- `rounds`: the paper attacks one model. A server sees one in every round; the log-ratios of all of them, or of so many
  of the last, are averaged. Each has shadows of its own that hold the same records. The last round's stand beside it.
- One query per candidate: the paper's augmented queries follow the training's augmentation, and there is none here.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import ShadowAttack, over_rounds
from fedaudit.attacks.shared._view import confidence
from fedaudit.registry import register_attack

Variance = Literal["auto", "candidate", "global"]
FEW = 64  # shadows
LEAST = 1e-12  # of a variance: constant answers have none


def gaussians(phi: Tensor, chosen: Tensor, each: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance of phi (shadows, candidates) over the chosen shadows, for each candidate.

    The variance is the candidate's own, or pooled over all.
    """
    count = chosen.sum(0)
    mean = phi.where(chosen, 0).sum(0) / count
    squares = (phi - mean).where(chosen, 0).square().sum(0)
    variance = squares / (count - 1).clamp(min=1) if each else (squares.sum() / (count - 1).sum().clamp(min=1))
    return mean, (variance + mean * 0).clamp(min=LEAST)


def log_density(phi: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((phi - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def likelihood_ratio(phi: Tensor, shadows: Tensor, member: Tensor, each: bool) -> Tensor:
    """Return log N(phi; in) - log N(phi; out) of each candidate. `shadows`, `member`: (shadows, candidates)."""
    inside, outside = gaussians(shadows, member, each), gaussians(shadows, ~member, each)
    return log_density(phi, *inside) - log_density(phi, *outside)


def own_variance(variance: Variance, shadows: int) -> bool:
    return variance == "candidate" or (variance == "auto" and shadows >= FEW)


def confidences(target: Tensor, shadows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return phi of the target (candidates) and of the shadows (shadows, candidates)."""
    n = len(y)
    flat = shadows[:, :n].flatten(0, 1)
    return confidence(target[:n], y), confidence(flat, y.repeat(len(shadows))).unflatten(0, (-1, n))


@register_attack("lira")
class LiRA(ShadowAttack):
    variance: Variance = "auto"  # of each candidate's own, or one for all

    def run(self, scene: Scene) -> Claims:
        each = own_variance(self.variance, self.shadows)
        ratios: list[Tensor] = []
        notes: set[str] = set()
        for target, shadows in self.attacked_rounds(scene, online=True):
            phi, of_shadows = confidences(target, shadows.logits, scene.y)
            ratios.append(likelihood_ratio(phi, of_shadows, shadows.member[:, : len(scene.y)], each))
            notes.update(shadows.notes)
        return over_rounds(ratios, sorted(notes))
