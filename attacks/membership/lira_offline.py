"""Likelihood-ratio attack (LiRA), offline: shadows without the candidates only. Carlini et al., "Membership Inference
Attacks From First Principles", S&P 2022.

The score is Pr[Z < phi] for the Gaussian Z of the candidate's phi over shadows that were not trained on it: it is high
for a confidence that such models do not reach. We give (phi - mean) / std, of which that probability is an increasing
function; it would itself round to 1 for many candidates. Shadows, `variance` and phi are those of `lira`; one set of
shadows serves all candidates and, kept in the run folder, the attacks `rmia` and `shadow` as well.
"""

from __future__ import annotations

from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.membership.lira import Variance, confidences, gaussians, own_variance
from fedaudit.attacks.shared._models import ShadowAttack, over_rounds
from fedaudit.registry import register_attack


def one_sided(phi: Tensor, shadows: Tensor, each: bool) -> Tensor:
    """Return how many standard deviations phi lies above the shadows' mean. `shadows`: (shadows, candidates)."""
    mean, variance = gaussians(shadows, shadows.isfinite(), each)
    return (phi - mean) / variance.sqrt()


@register_attack("lira_offline")
class OfflineLiRA(ShadowAttack):
    variance: Variance = "auto"  # of each candidate's own, or one for all

    def run(self, scene: Scene) -> Claims:
        each = own_variance(self.variance, self.shadows)
        above: list[Tensor] = []
        notes: set[str] = set()
        for target, shadows in self.attacked_rounds(scene, online=False):
            phi, of_shadows = confidences(target, shadows.logits, scene.y)
            above.append(one_sided(phi, of_shadows, each))
            notes.update(shadows.notes)
        return over_rounds(above, sorted(notes))
