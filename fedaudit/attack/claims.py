"""What an attack may claim: scores of candidates, reconstructions, a histogram, that a client took part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Claims:
    """About membership: one score per candidate, higher for "was trained on"; and what a reader should know of them."""

    scores: Tensor
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Groups:
    """About membership, for baselines that see no release: a group per candidate, such as its label.

    Which groups hold more members is nothing that they could know. The scorer learns it from one half of the candidates
    and scores the other half by it.
    """

    groups: Tensor


@dataclass(frozen=True)
class Features:
    """About membership, for baselines that see no release: numbers of each candidate, such as its pixels.

    What they tell is learned by the scorer, as with groups: a classifier is trained on one half of the candidates, and
    scores the other half.
    """

    values: Tensor


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
    """About a client's labels: the share of each class, not negative, summing to 1; and what it was read from."""

    shares: Tensor
    source: str = ""


@dataclass(frozen=True)
class TookPart:
    """About a client as a whole: one score, higher for "its records went into the run's models"."""

    score: float


@dataclass(frozen=True)
class Attacked:
    """One client, what was claimed of it, and the candidates with the truth."""

    client: int
    claims: Any
    x: Tensor
    y: Tensor
    member: Tensor
