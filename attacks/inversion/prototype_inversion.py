"""Images of each class from one vector per class (prototypes, mean outputs), by shadows: a linear inverse, learned.

A shadow (see _means) holds auxiliary records only, so for each of its classes two things are known: the vector p that
it sent, and the mean image x of its records of that class. Ridge regression learns how the second departs from its mean
over shadows with the first: x - x_c = A (p - p_c), one A for all classes. The image claimed of the target's class c is
x_c + A (m - p_c).

The ridge is the one of `RIDGES` with the least error on a quarter of the shadows that were kept aside. Infinity is
among them: then A is 0, the vector tells nothing, and the claim is the auxiliary class mean, with which the scorer
compares every claim. Nothing of the target's model is needed; `feature_match` descends through it if the view shows
one.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._means import MeansAttack, ShadowMeans
from fedaudit.errors import ThreatError
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, math.inf)  # in units of the mean variance of an entry, per pair


@register_attack("prototype_inversion")
class PrototypeInversion(MeansAttack):
    takes: ClassVar[frozenset[Kind]] = IMAGES

    def run(self, scene: Scene) -> Reconstructions:
        target, shadows = self.compared(scene, online=False)
        pairs = {c: self._pairs(scene, shadows, c) for c in target.of}
        known = {c: pair for c, pair in pairs.items() if len(pair[0]) > 1 and pair[0].shape[1] == target.of[c].numel()}
        if not known:
            raise ThreatError(f"no shadow sent a vector for a class that client {scene.target} sent one for")
        A = learned([(p - p.mean(0), x - x.mean(0)) for p, x in known.values()])
        images = [x.mean(0) + (target.of[c].flatten().to(p) - p.mean(0)) @ A for c, (p, x) in known.items()]
        made = torch.stack(images).clamp(-1, 1).to(scene.x.dtype).unflatten(1, scene.shape)
        return Reconstructions(made, labels=torch.tensor(list(known)))

    def _pairs(self, scene: Scene, shadows: ShadowMeans, c: int) -> tuple[Tensor, Tensor]:
        """Return, for class c, the shadows' vectors and the mean images of the records behind them."""
        x, y = scene.pool
        p, who = shadows.of_class(c)
        held = shadows.member[who] & (y == c) if len(who) else shadows.member[:0]
        weights = held.to(torch.float64)
        return p, weights @ x.flatten(1).double() / weights.sum(1, keepdim=True).clamp(min=1)


def learned(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return A for the ridge that is best on pairs kept aside, fitted to all pairs."""
    aside = [slice(0, max(1, len(p) // 4)) for p, _ in pairs]
    left = [slice(max(1, len(p) // 4), None) for p, _ in pairs]
    p_fit, x_fit = joined([(p[s], x[s]) for (p, x), s in zip(pairs, left, strict=True)])
    p_try, x_try = joined([(p[s], x[s]) for (p, x), s in zip(pairs, aside, strict=True)])
    best = min(RIDGES, key=lambda ridge: float((p_try @ solved(p_fit, x_fit, ridge) - x_try).square().sum()))
    return solved(*joined(pairs), best)


def joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([p for p, _ in pairs]), torch.cat([x for _, x in pairs])


def solved(p: Tensor, x: Tensor, ridge: float) -> Tensor:
    """Return (p'p + ridge n s^2 I)^-1 p'x."""
    if math.isinf(ridge):
        return x.new_zeros(p.shape[1], x.shape[1])
    gram = p.T @ p
    scale = (gram.diagonal().mean() + 1e-12) * ridge
    return torch.linalg.solve(gram + scale * torch.eye(len(gram), dtype=p.dtype, device=p.device), p.T @ x)
