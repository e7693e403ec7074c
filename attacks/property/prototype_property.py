"""The classes that a client holds, and their shares, from one vector per class (prototypes, mean outputs).

Two things give them away, and the result says which was read:

- `noise`: a class mean is protected by noise that is smaller the larger the class is, sigma_c = K / (N_c - 1). The
  difference between the vectors of two rounds is mostly noise, so its size shows sigma_c. K follows from the public
  parameters, which are those of the smallest class. Shares are those of N_c = 1 + K / sigma_c.
- `classes`: a vector for a class says that the client holds it. No vector, zeros, or the very vector that the client
  had been sent for the class say that it does not. All held classes get equal shares.

Noise needs two rounds with a vector for the class. If the public sensitivity is not that of class means, the noise is
of one size, and `classes` is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedaudit.attack.claims import Histogram
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._means import Means, releases, vectors
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.registry import register_attack


@register_attack("prototype_property")
class PrototypeProperty(Attack):
    def cannot(self, scene: Scene) -> str | None:
        if not releases(scene):
            return f"the {scene.view.threat} sees no vectors by class of client {scene.target}"
        return None

    def run(self, scene: Scene) -> Histogram:
        found = releases(scene)
        held = {c for means in found for c, v in means.of.items() if is_own(v, sent_down(scene, means, c))}
        counts, source = from_noise(found, held), "noise"
        if counts is None:
            counts, source = dict.fromkeys(held, 1.0), "classes"
        shares = torch.zeros(scene.classes, dtype=torch.float64)
        for c, n in counts.items():
            shares[c] = n
        total = float(shares.sum())
        return Histogram(shares / total if total > 0 else torch.full_like(shares, 1 / len(shares)), source)


def sent_down(scene: Scene, means: Means, c: int) -> list[Tensor]:
    """Return the vectors of class c that the client had got before it answered."""
    got = []
    for entry in scene.view.entries(direction="down", client=scene.target, t=means.entry.round):
        if entry.ask <= means.entry.ask:
            tables = [vectors(entry[name], scene.classes) for name in entry.fields if entry.kept(name)]
            got += [table[c] for table in tables if c in table]
    return got


def is_own(v: Tensor, got: Sequence[Tensor]) -> bool:
    """Return whether a vector says anything of the records: it is not 0, and not one that the client was sent."""
    return bool(v.any()) and not any(g.shape == v.shape and torch.equal(g.to(v), v) for g in got)


def from_noise(found: Sequence[Means], held: set[int]) -> dict[int, float] | None:
    """Return N_c of each class by the size of its noise; None without noise of class means, or with one round only."""
    public = found[-1].protection
    smallest = mechanism_of(public).smallest_class(public)  # N_c - 1 where sigma_c is the largest
    if smallest is None or smallest < 1 - 1e-9:
        return None  # more than one record can do to any class mean: the noise of another kind of release
    K = smallest * (public.sigma or 0.0)
    counts = {}
    for c in held:
        rows = [means.of[c].flatten().double() for means in found if c in means.of]
        if len(rows) < 2:
            return None
        apart = torch.stack([b - a for a, b in itertools.pairwise(rows)])
        sigma = float(apart.square().mean().sqrt()) / math.sqrt(2)
        counts[c] = 1 + max(K / max(sigma, 1e-12), smallest)
    return counts
