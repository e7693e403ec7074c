"""Membership from labels alone: the distance to the decision boundary. Choquette-Choo et al., "Label-Only Membership
Inference Attacks", ICML 2021.

Training pushes the boundary away from the records that are trained on. A candidate that the model gets wrong has
distance 0: with any threshold just above 0 this is the gap attack, the floor of the paper's attacks, which calls
exactly the rightly classified records members. Only predicted labels are used, `queries` of them for each candidate at
most, in every round whose model the target uploaded and the threat sees; the score is the mean distance over rounds.

The distance is an upper estimate, by a search in the manner of HopSkipJump (Chen, Jordan and Wainwright, S&P 2020), L2.
It starts at the nearest auxiliary record to which the model gives another label (one query for each auxiliary record,
shared by all candidates and not counted). It goes to the boundary by bisection, estimates its normal there from the
labels of random probes, steps along it, and bisects again. Images stay in [-1, 1], rows between the least and the
greatest number that the attacker knows. If the model gives every record the same label, there is no boundary to be
found, and the distance is the diameter of the space of records.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import ModelAttack
from fedaudit.attacks.shared._view import in_chunks
from fedaudit.registry import register_attack
from fedaudit.shape import Kind

Predict = Callable[[Tensor], Tensor]  # images in, labels (or what is said of them) out
Bounds = tuple[float, float]  # of every number of a record
CANDIDATES = 128  # searched for at a time: probes of so many are held in memory


@register_attack("label_only")
class LabelOnly(ModelAttack):
    takes: ClassVar[frozenset[Kind]] = frozenset({"images", "rows"})  # between two texts there is nothing
    queries: int = Field(500, ge=16)  # labels asked for each candidate
    probes: int = Field(30, ge=2)  # of them, for one estimate of the boundary's normal
    bisections: int = Field(8, ge=1)  # of them, for one way to the boundary
    steps: int = Field(4, ge=1)  # of them, for one choice of a step's length

    def run(self, scene: Scene) -> Claims:
        return self.by_round(scene, lambda model: self._of_model(scene, model.eval()))

    def _of_model(self, scene: Scene, model: nn.Module) -> Tensor:
        """Return each candidate's distance to the boundary of one model."""

        def predict(x: Tensor) -> Tensor:
            return in_chunks(lambda part: model(part).argmax(1), x)

        right = predict(scene.x) == scene.y
        distance = torch.zeros(len(scene.y), dtype=torch.float64, device=scene.device)
        x, y = scene.x[right], scene.y[right]
        others = scene.auxiliary[0]
        bounds = (-1.0, 1.0) if scene.shape.kind == "images" else reach(torch.cat([scene.x, others]))
        distance[right] = self.distances(predict, x, y, others, scene.rng("probes"), bounds)
        return distance

    def distances(
        self, predict: Predict, x: Tensor, y: Tensor, others: Tensor, rng: torch.Generator, bounds: Bounds = (-1.0, 1.0)
    ) -> Tensor:
        """Return how far rightly classified records are from the boundary of their class, at most."""
        farthest = math.sqrt(x[0].numel()) * (bounds[1] - bounds[0]) if len(x) else 0.0
        found = torch.full((len(x),), farthest, dtype=torch.float64, device=x.device)
        labels = predict(others) if len(others) else y[:0]
        for rows in torch.arange(len(x), device=x.device).split(CANDIDATES):
            far = torch.cdist(x[rows].flatten(1), others.flatten(1)).masked_fill(labels == y[rows, None], torch.inf)
            rows = rows[far.isfinite().any(1)]
            if len(rows):
                start = others[far[far.isfinite().any(1)].argmin(1)]
                found[rows] = self._search(predict, x[rows], y[rows], start, rng, bounds)
        return found

    def _search(
        self, predict: Predict, x: Tensor, y: Tensor, start: Tensor, rng: torch.Generator, bounds: Bounds
    ) -> Tensor:
        shape = x.shape[1:]
        x, point = x.flatten(1).double(), start.flatten(1).double()

        def outside(points: Tensor) -> Tensor:
            """Return whether points (candidates, ..., pixels) have another label than the candidate's."""
            labels = predict(points.reshape(-1, *shape).float()).view(points.shape[:-1])
            return labels != y.view(-1, *[1] * (points.dim() - 2))

        point = self._bisect(outside, x, point)
        left, t = self.queries - 1 - self.bisections, 1  # one was asked for the candidate itself
        while left >= self.probes + self.steps + self.bisections:
            point = self._closer(outside, x, point, t, rng, bounds)
            left, t = left - self.probes - self.steps - self.bisections, t + 1
        return (point - x).norm(dim=1)

    def _bisect(self, outside: Predict, x: Tensor, point: Tensor) -> Tensor:
        """Return the point moved towards x as far as its label stays another one."""
        near, far = torch.zeros_like(point[:, :1]), torch.ones_like(point[:, :1])
        for _ in range(self.bisections):
            middle = (near + far) / 2
            other = outside(x + middle * (point - x))[:, None]
            near, far = near.where(other, middle), middle.where(other, far)
        return x + far * (point - x)

    def _closer(
        self, outside: Predict, x: Tensor, point: Tensor, t: int, rng: torch.Generator, bounds: Bounds
    ) -> Tensor:
        """Return the points after one round of the search. A candidate that comes no closer keeps its point."""
        n, pixels = x.shape
        distance = (point - x).norm(dim=1, keepdim=True)
        u = torch.randn(n, self.probes, pixels, generator=rng, device=x.device, dtype=torch.float64)
        u /= u.norm(dim=2, keepdim=True)
        # As wide as the last bisection was coarse, so that probes fall on both sides of the boundary.
        delta = (distance * max(1 / pixels, 2.0**-self.bisections))[:, :, None]
        probes = (point[:, None] + delta * u).clamp(*bounds)
        sign = outside(probes).double() * 2 - 1
        mean = sign.mean(1, keepdim=True)
        weight = torch.where(mean.abs() < 1, sign - mean, sign)  # if all are equal, sign - mean would be 0
        normal = (weight[:, :, None] * u).mean(1)
        normal /= normal.norm(dim=1, keepdim=True).clamp(min=1e-12)
        step, new = distance / math.sqrt(t), point
        open_ = torch.ones(n, 1, dtype=torch.bool, device=x.device)
        for _ in range(self.steps):
            tried = (point + step * normal).clamp(*bounds)
            good = outside(tried)[:, None] & open_
            new, open_ = tried.where(good, new), open_ & ~good
            step = step / 2
        new = self._bisect(outside, x, new)
        closer = (new - x).norm(dim=1, keepdim=True) < distance
        return new.where(closer, point)


def reach(x: Tensor) -> Bounds:
    """Return the least and the greatest number in rows."""
    return float(x.min()), float(x.max())
