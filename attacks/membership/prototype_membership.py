"""Membership from one vector per class (prototypes, mean outputs), by shadows: LiRA on class means.

A mean leans towards the records that it was taken of, and a model towards those that it was trained on. Shadows (see
_means) hold a random half of the candidates each. For a candidate of class c, with m the target's vector of class c,
mu_in and mu_out the means of the shadows' vectors with and without the candidate, and s^2 the variance of each entry
over all shadows, the score is the log-likelihood ratio of two Gaussians of one diagonal covariance:

    sum_j (m_j - (mu_in + mu_out)_j / 2) (mu_in - mu_out)_j / s_j^2

Nothing of the target's model is needed. If the view shows the model that means were taken at, shadows start from it,
too; `logit_gap` has a closed form for that case. Candidates of a class without a vector score 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._means import MeansAttack
from fedaudit.registry import register_attack

LEAST = 1e-12  # of a variance: what never varies tells nothing


@register_attack("prototype_membership")
class PrototypeMembership(MeansAttack):
    def run(self, scene: Scene) -> Claims:
        target, shadows = self.compared(scene, online=True)
        scores = torch.zeros(len(scene.y), dtype=torch.float64, device=scene.device)
        for c, m in target.of.items():
            rows = (scene.y == c).nonzero()[:, 0]
            of_class, who = shadows.of_class(c)
            if len(rows) and len(who) > 1 and of_class.shape[1] == m.numel():
                inside = shadows.member[who][:, rows]
                scores[rows] = ratio(m.flatten().to(of_class), of_class, inside)
        return Claims(scores, shadows.notes)


def ratio(m: Tensor, of_shadows: Tensor, inside: Tensor) -> Tensor:
    """Return one value per candidate; it is 0 if all shadows or none hold the candidate.

    `of_shadows` is (shadows, entries), and `inside` is (shadows, candidates).
    """
    w_in, w_out = (side.to(of_shadows) for side in (inside, ~inside))
    n_in, n_out = w_in.sum(0), w_out.sum(0)
    mu_in, mu_out = (w.T @ of_shadows / n.clamp(min=1)[:, None] for w, n in ((w_in, n_in), (w_out, n_out)))
    s2 = of_shadows.var(0)
    s2 = s2 + 0.1 * s2.mean() + LEAST  # few shadows: an entry that hardly varied must not decide
    value = ((m - (mu_in + mu_out) / 2) * (mu_in - mu_out) / s2).sum(1)
    return torch.where((n_in > 0) & (n_out > 0), value, torch.zeros_like(value))
