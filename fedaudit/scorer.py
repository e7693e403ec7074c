"""The scorer: it alone holds the truth. Claims of one attack on several clients in, numbers with intervals out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.errors import ContractError
from fedaudit.scoring import by_group
from fedaudit.stats import student_t
from fedaudit.world import World


@dataclass(frozen=True)
class Claims:
    """About membership: one score per candidate, higher for "was trained on"."""

    scores: Tensor


@dataclass(frozen=True)
class Reconstructions:
    """Images, as the models see them (n, C, H, W), that claim to be a client's records.

    `rows`: image i is the record behind row rows[i] of a release with one row per record. `labels`: image i shows the
    class labels[i], of no record in particular. Neither: image i is some record of the client.
    """

    images: Tensor
    rows: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class Histogram:
    """About a client's labels: the share of each class, not negative, summing to 1."""

    shares: Tensor


@dataclass(frozen=True)
class Attacked:
    """One client, what was claimed of it, and the candidates with the truth."""

    client: int
    claims: Any
    x: Tensor
    y: Tensor
    member: Tensor


def score(parts: Sequence[Attacked], world: World, folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Score claims of one sort. `folder` is where pictures of this attack may be put."""
    sorts = {type(part.claims) for part in parts}
    if sorts == {Claims}:
        return {"claims": "membership", **membership(parts, name, seed)}
    if sorts == {Histogram}:
        return {"claims": "histogram", **histogram(parts, world, name)}
    if sorts == {Reconstructions}:
        from fedaudit.inversion import reconstruction  # pictures: not needed for the rest

        return {"claims": "reconstruction", **reconstruction(parts, world, folder, name, seed)}
    what = ", ".join(sorted(sort.__name__ for sort in sorts))
    raise ContractError(f"{name} returned {what}: an attack returns Claims, Reconstructions or Histogram, one sort.")


def membership(parts: Sequence[Attacked], name: str, seed: int) -> dict[str, Any]:
    for part in parts:
        if part.claims.scores.shape != (len(part.y),):
            shape = tuple(part.claims.scores.shape)
            raise ContractError(f"{name} gave scores of shape {shape} for {len(part.y)} candidates.")
    scores = torch.cat([part.claims.scores.detach().double().cpu() for part in parts])
    owners = torch.cat([torch.full((len(part.y),), part.client) for part in parts])
    groups = {"client": owners.numpy(), "class": torch.cat([part.y.cpu() for part in parts]).numpy()}
    return by_group(scores.numpy(), torch.cat([part.member for part in parts]).numpy(), groups, seed=seed)


def histogram(parts: Sequence[Attacked], world: World, name: str) -> dict[str, Any]:
    """Half the L1 distance to the true shares (0 to 1), and that of the uniform guess, over clients."""
    errors, uniform, clients = [], [], {}
    for part in parts:
        shares = part.claims.shares.detach().double().cpu().numpy()
        if shares.shape != (world.classes,) or not (shares >= 0).all() or abs(shares.sum() - 1) > 1e-4:
            raise ContractError(f"{name} gave no shares of {world.classes} classes that are >= 0 and sum to 1.")
        true = np.bincount(world.members(part.client)[1].cpu().numpy(), minlength=world.classes)
        true = true / true.sum()
        errors.append(float(abs(shares - true).sum() / 2))
        uniform.append(float(abs(1 / world.classes - true).sum() / 2))
        clients[str(part.client)] = {"error": errors[-1], "uniform": uniform[-1], "claimed": shares.round(4).tolist()}
    gain = [u - e for u, e in zip(uniform, errors, strict=True)]
    pooled = {"error": student_t(errors), "uniform": student_t(uniform), "gain": student_t(gain)}
    return {"pooled": pooled, "client": clients, "measure": "half the L1 distance to the true label shares"}
