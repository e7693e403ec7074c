"""The claims that an attack may make: scores of candidates, reconstructions, a histogram, that a client took part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Claims:
    """Claims about membership: one score per candidate, higher for "was trained on", and notes for the reader.

    Scores that were read from several rounds come with those of the last round alone.
    """

    scores: Tensor
    notes: tuple[str, ...] = ()
    last: Tensor | None = None


@dataclass(frozen=True)
class Groups:
    """Claims about membership by baselines that see no release: a group per candidate, such as its label.

    Such a baseline cannot know which groups hold more members. The scorer learns it from one half of the candidates and
    scores the other half by it.
    """

    groups: Tensor


@dataclass(frozen=True)
class Features:
    """Claims about membership by baselines that see no release: numbers of each candidate, such as its pixels.

    The scorer learns from them, as with groups: a classifier is trained on one half of the candidates, and scores the
    other half.
    """

    values: Tensor


@dataclass(frozen=True)
class Reconstructions:
    """Images, as the models see them (n, C, H, W), that claim to be a client's records.

    With `rows`, image i is the record behind row rows[i] of a release with one row per record. With `labels`, image i
    shows the class labels[i], and no record in particular. With neither, image i is some record of the client.
    """

    images: Tensor
    rows: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class Histogram:
    """A claim about a client's labels: the share of each class, >= 0, summing to 1; and what it was read from."""

    shares: Tensor
    source: str = ""


@dataclass(frozen=True)
class TookPart:
    """A claim about a client as a whole: one score, higher for "its records went into the run's models"."""

    score: float


@dataclass(frozen=True)
class Attacked:
    """One client, the claims about it, and the candidates with the truth."""

    client: int
    claims: Any
    x: Tensor
    y: Tensor
    member: Tensor
