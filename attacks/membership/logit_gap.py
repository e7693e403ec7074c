"""The confidence gap of a client's shared outputs: paired logits (Takahashi et al., CVPR 2023, arXiv 2304.11436).

In that paper a server inverts pairs of its own and a client's logits on public images, because the client is the surer
of the two where it has private records. Here the gap itself is read. The kind of release decides how:

- Outputs on known images (logits, soft labels): a surrogate of the client's model and one of the pair's other side,
  both distilled; the score is the gap of their log(p / (1 - p)) in the candidate's label. The other side is the mean of
  all other clients' answers on the same images, or a model trained on the auxiliary set (`pair`, or where no other
  client answered on them).
- Mean logits or prototypes of each class, at a model that the view shows: a mean leans towards its records. With m the
  mean of N records, mu and Sigma what auxiliary records give, and d = z(x) - mu, the log-likelihood ratio of "x is
  one of the N" is d' S^-1 (m - mu) / N - d' S^-1 d / 2 N^2, S = Sigma (1 / N + 1 / N_aux) + sigma^2 I. N is the most
  likely one. Clipping and noise are applied as public.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._surrogate import Pairs, distilled, imitated, shared, taught
from fedaudit.attacks.shared._view import by_class, confidence, in_chunks, others, received
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.registry import register_attack
from fedaudit.training.models import Net
from fedaudit.wire.release import UNPROTECTED, Protection

Means = list[tuple[Net, dict[int, Tensor], str, Protection]]  # model, mean by class, kind, protection


@register_attack("logit_gap")
class LogitGap(Attack):
    pair: Literal["clients", "auxiliary"] = "clients"
    rounds: int = Field(5, ge=1)  # the last so many of which answers are used
    steps: int = Field(500, ge=1)  # of a surrogate's training

    def cannot(self, scene: Scene) -> str | None:
        who = f"the {scene.view.threat}"
        if class_means(scene):
            return (
                None if len(scene.auxiliary[0]) else "there is no auxiliary set to hold means against: set aux above 0"
            )
        of_target = shared(scene, scene.target, self.rounds)
        if not of_target:
            return f"{who} sees no outputs of client {scene.target} on images that it knows, and no means by class"
        if not self._consensus(scene, of_target) and not len(scene.auxiliary[0]):
            return f"{who} sees no other answers on these images, and there is no auxiliary set: set aux above 0"
        return None

    def run(self, scene: Scene) -> Claims:
        if means := class_means(scene):
            ratios = [tracing(scene, *found) for found in means]
            return Claims(torch.stack(ratios).sum(0))
        arch = scene.arch(scene.target)
        of_target = shared(scene, scene.target, self.rounds)
        own = distilled(scene, arch, list(of_target.values()), self.steps)
        if consensus := self._consensus(scene, of_target):
            pair = distilled(scene, arch, consensus, self.steps)
        else:
            images = torch.cat([x for x, _ in of_target.values()])
            pair = imitated(scene, arch, taught(scene, arch, *scene.auxiliary, self.steps), images, self.steps)
        gap = [confidence(in_chunks(model, scene.x), scene.y) for model in (own, pair)]
        return Claims(gap[0] - gap[1])

    def _consensus(self, scene: Scene, of_target: dict[int, tuple[Tensor, Tensor]]) -> Pairs:
        """Return the mean answer of all others on the same images, by round."""
        if self.pair == "auxiliary":
            return []
        answers = [shared(scene, k, self.rounds) for k in others(scene)]
        found = []
        for t, (images, _) in of_target.items():
            same = [of[t][1] for of in answers if t in of and torch.equal(of[t][0], images)]
            if same:
                found.append((images, torch.stack(same).mean(0)))
        return found


def class_means(scene: Scene) -> Means:
    """Return the target's mean logits or prototypes by class, each with the model that they were taken at."""
    found: Means = []
    for kind in ("logits", "prototypes"):
        for entry, name in scene.released(kind):
            means = by_class(entry[name], scene.classes)
            model = received(scene, entry) if means else None
            if model is not None:
                found.append((model, means, kind, entry.fields[name].protection or UNPROTECTED))
    return found


def tracing(scene: Scene, model: Net, means: dict[int, Tensor], kind: str, protection: Protection) -> Tensor:
    """Return the log-likelihood ratio of each candidate; 0 if its class has no mean or no two auxiliary records."""
    function = model if kind == "logits" else model.encode

    def values(x: Tensor) -> Tensor:
        z = in_chunks(function, x).flatten(1).double()
        return mechanism_of(protection).clipped(z, protection.clip) if protection.clip else z

    x, y = scene.auxiliary
    z, known = values(scene.x), values(x)
    centre = torch.stack([known[y == c].mean(0) if (y == c).any() else known.mean(0) for c in range(scene.classes)])
    spread = known - centre[y]
    Sigma = spread.T @ spread / max(1, len(y) - len(y.unique()))
    Sigma += 1e-3 * Sigma.diagonal().mean().clamp(min=1e-12) * torch.eye(len(Sigma), dtype=Sigma.dtype, device=y.device)
    sigma = protection.sigma or 0.0
    ratio = torch.zeros(len(scene.y), dtype=torch.float64, device=y.device)
    for c, mean in means.items():
        rows, others_of = scene.y == c, int((y == c).sum())
        if rows.any() and others_of > 1:
            ratio[rows] = log_ratio(z[rows] - centre[c], mean.to(z) - centre[c], Sigma, 1 / others_of, sigma)
    return ratio


def log_ratio(d: Tensor, a: Tensor, Sigma: Tensor, extra: float, sigma: float) -> Tensor:
    """Return d' S^-1 a / N - d' S^-1 d / 2 N^2 for each row d, with the N under which a ~ N(0, S) is most likely."""
    eye = torch.eye(len(Sigma), dtype=Sigma.dtype, device=Sigma.device)
    sizes = [2 ** (i / 2) for i in range(30)]

    def S(N: float) -> Tensor:
        return Sigma * (1 / N + extra) + sigma**2 * eye

    def likelihood(N: float) -> float:
        return float(-torch.logdet(S(N)) - a @ torch.linalg.solve(S(N), a))

    N = max(sizes, key=likelihood)
    solved = torch.linalg.solve(S(N), d.T).T
    return solved @ a / N - (solved * d).sum(1) / (2 * N**2)
