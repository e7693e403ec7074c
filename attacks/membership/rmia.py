"""Robust membership inference (RMIA), offline. Zarifzadeh, Liu and Shokri, "Low-Cost High-Power Membership Inference
Attacks", ICML 2024.

    LR(x, z) = (p(x | theta) / p(x)) / (p(z | theta) / p(z)),   score(x) = share of z with LR(x, z) >= gamma

p(. | theta) is the target's probability of the true class, p(.) its mean over models. Reference models are shadows
without x (as in `lira_offline`, and the same ones); what models with x would say is interpolated: p_in = a p_out + (1 -
a), so p(x) = ((1 + a) p_out + (1 - a)) / 2. The population z are the auxiliary records.

The best gamma and a depend on how far training went. If they are not given, they are tuned on the shadows. Each shadow
stands in for the target in turn, the others for its references, and the auxiliary records that it was trained on, or
not, are the candidates. The pair with the largest mean AUC is taken.

`rounds`: the geometric mean of p(x | theta) / p(x) is taken over all uploads that the transcript kept, or so many of
the last. The constants are tuned on the last one.

The paper does not say the following, as far as we found, and we chose it. p(z) is interpolated in the same way, from
the shadows that z was left out of. The score takes few values (one more than there are z), and a tie tells nothing.
Among equal scores the larger p(x | theta) / p(x) comes first, by an amount that never reaches the next score.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.membership import auc
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import ShadowAttack, Shadows
from fedaudit.registry import register_attack


def marginal(out: Tensor, a: float) -> Tensor:
    """Return p from the mean over models without the record."""
    return ((1 + a) * out + (1 - a)) / 2


def dominated(ratio_x: Tensor, ratio_z: Tensor, gamma: float) -> Tensor:
    """Return the share of z with ratio_x >= gamma ratio_z, for each x: a product, because ratio_z may be 0."""
    below = (gamma * ratio_z).sort().values
    return torch.searchsorted(below, ratio_x, right=True).double() / len(ratio_z)


def finer(share: Tensor, ratio: Tensor, steps: int) -> Tensor:
    """Order equal shares (multiples of 1 / steps) by ratio."""
    return share + ratio / (1 + ratio) / (2 * steps)


def of_true_class(logits: Tensor, y: Tensor) -> Tensor:
    """Return the probability of the true class: (..., rows)."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1)).squeeze(-1).exp()


GAMMAS, MIXES = (1.0, 1.5, 2.0, 4.0), (0.0, 0.3, 0.6, 1.0)  # among which they are tuned


def p_without(p: Tensor, member: Tensor) -> Tensor:
    """Return the mean over the shadows that a record was left out of; NaN if there is none."""
    return p.where(~member, 0).sum(0) / (~member).sum(0)


def tuned(p: Tensor, member: Tensor, gammas: Sequence[float], mixes: Sequence[float]) -> tuple[float, float]:
    """Return gamma and a with the largest mean AUC over shadows that stand in for the target.

    p and member are (shadows, auxiliary records).
    """
    found: dict[tuple[float, float], list[float]] = {}
    for i in range(len(p)):
        rest = torch.arange(len(p)) != i
        out = p_without(p[rest], member[rest])
        known = out.isfinite()
        if not 0 < int(member[i][known].sum()) < int(known.sum()):
            continue
        for a in mixes:
            ratio = p[i][known] / marginal(out[known], a).clamp(min=1e-300)
            for gamma in gammas:
                z = ratio[~member[i][known]]
                score = finer(dominated(ratio, z, gamma), ratio, len(z))
                value = auc(score.cpu().numpy(), member[i][known].cpu().numpy()).value
                found.setdefault((gamma, a), []).append(float(value or 0.5))
    if not found:
        return 2.0, 0.3
    return max(found, key=lambda pair: sum(found[pair]) / len(found[pair]))


@register_attack("rmia")
class RMIA(ShadowAttack):
    gamma: float | None = Field(None, gt=0)  # how much more x must stand out than z does; None: tuned
    a: float | None = Field(None, ge=0, le=1)  # 1: models with x are as sure of it as those without; 0: certain

    def run(self, scene: Scene) -> Claims:
        rounds = self.attacked_rounds(scene, online=False)
        gamma, a = self._constants(rounds[-1][1])
        logs = torch.stack([self.ratios(target, shadows, a).log() for target, shadows in rounds])
        shadows = rounds[-1][1]
        scores = self._scores(logs.mean(0).exp(), shadows, gamma)
        last = self._scores(logs[-1].exp(), shadows, gamma) if len(rounds) > 1 else None
        notes = {note for _, of_round in rounds for note in of_round.notes}
        if None in (self.gamma, self.a):
            notes.add(f"tuned on the shadows: gamma = {gamma:g}, a = {a:g}")
        return Claims(scores, tuple(sorted(notes)), last)

    def _scores(self, ratio: Tensor, shadows: Shadows, gamma: float) -> Tensor:
        """Return the share of the population that each candidate stands out from."""
        ratio_x, ratio_z = ratio[: shadows.candidates], ratio[shadows.auxiliary]
        known = ratio_z.isfinite()  # a record that no shadow left out has no p_out
        return finer(dominated(ratio_x, ratio_z[known], gamma), ratio_x, int(known.sum()))

    def _constants(self, shadows: Shadows) -> tuple[float, float]:
        gammas = GAMMAS if self.gamma is None else (self.gamma,)
        mixes = MIXES if self.a is None else (self.a,)
        if len(gammas) == len(mixes) == 1:
            return gammas[0], mixes[0]
        aux = shadows.auxiliary
        p = of_true_class(shadows.logits[:, aux], shadows.y[aux])
        return tuned(p, shadows.member[:, aux], gammas, mixes)

    def ratios(self, target: Tensor, shadows: Shadows, a: float) -> Tensor:
        """Return p(. | theta) / p(.) of each record of the pool; NaN if every shadow was trained on it."""
        p_out = p_without(of_true_class(shadows.logits, shadows.y), shadows.member)
        return of_true_class(target, shadows.y) / marginal(p_out, a).clamp(min=1e-300)
