"""LiRA on shared logits or soft labels, after the idea of Shi et al., arXiv 2502.08001.

The client's model is distilled from its answers on public or synthetic images, and the copy's confidence in the
candidate is compared with that of other models.

The others are copies of the clients that do not hold the candidate (`null = "clients"`; the server has their answers
too), or of `shadows` models trained on random halves of the auxiliary set and distilled alike (`null = "auxiliary"`).
The test is one-tailed, with a normal distribution per candidate over log(p / (1 - p)); with fewer than `few` others the
spread is the same for all candidates. Images must be known: those sent in the same ask, or the public set.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._surrogate import distilled, imitated, shared, taught
from fedaudit.attacks.shared._view import confidence, in_chunks, others
from fedaudit.registry import register_attack


@register_attack("logit_lira")
class LogitLira(Attack):
    null: Literal["clients", "auxiliary"] = "clients"
    shadows: int = Field(8, ge=2)
    rounds: int = Field(5, ge=1)  # the last so many of which answers are used
    steps: int = Field(500, ge=1)  # of a surrogate's training
    few: int = Field(8, ge=2)

    def cannot(self, scene: Scene) -> str | None:
        who = f"the {scene.view.threat}"
        if not shared(scene, scene.target, self.rounds):
            return f"{who} sees no logits or soft labels of client {scene.target} on images that it knows"
        if self.null == "auxiliary":
            return (
                None
                if len(scene.auxiliary[0]) > 1
                else "there is no auxiliary set to train shadows on: set aux above 0"
            )
        if sum(bool(shared(scene, k, self.rounds)) for k in others(scene)) < 2:
            return f"{who} sees the answers of fewer than two other clients, the null: use null = auxiliary"
        return None

    def run(self, scene: Scene) -> Claims:
        of_target = shared(scene, scene.target, self.rounds)
        arch = scene.arch(scene.target)
        models = [distilled(scene, arch, list(of_target.values()), self.steps)]
        if self.null == "clients":
            answers = [shared(scene, k, self.rounds) for k in others(scene)]
            models += [distilled(scene, arch, list(of.values()), self.steps) for of in answers if of]
        else:
            images = torch.cat([x for x, _ in of_target.values()])
            models += [imitated(scene, arch, self._shadow(scene, i), images, self.steps) for i in range(self.shadows)]
        measured = torch.stack([confidence(in_chunks(model, scene.x), scene.y) for model in models])
        return Claims(one_tailed(measured, self.few))

    def _shadow(self, scene: Scene, i: int) -> nn.Module:
        x, y = scene.auxiliary
        half = torch.randperm(len(x), generator=scene.rng(f"shadow {i}"), device=scene.device)[: max(1, len(x) // 2)]
        return taught(scene, scene.arch(scene.target), x[half], y[half], self.steps)


def one_tailed(measured: Tensor, few: int) -> Tensor:
    """Return how many standard deviations the first row, the target's, lies above the mean of the rest, the null."""
    null = measured[1:]
    spread = null.std(0) if len(null) >= few else (null - null.mean(0)).square().sum().div(null[1:].numel()).sqrt()
    return (measured[0] - null.mean(0)) / spread.clamp(min=1e-8)
