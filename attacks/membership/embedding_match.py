"""Likelihood ratio of released embeddings under the known noise, the candidate encoded with the released encoder.

Encoder, clipping and noise of a release are public, so that the attacker knows the embedding e of a candidate as it
would have been released. If the candidate is a member, one of the n rows is e plus noise; if not, all rows are somebody
else's. Let q be the density of such a row, estimated from the auxiliary records (encoded, clipped and noised alike).
The ratio is

    (1 / n) sum_i N(r_i; e, sigma^2 I) / q(r_i)

If labels travel beside the rows, the sum is over the n rows of the candidate's class, and q is the density of its class
too. Rows stand in the same order in every round if the labels beside them do; then the factors of a row multiply over
rounds before the sum. Without noise the ratio has the order of minus the smallest distance, and that distance is the
score. It is also the score if a release claims to be noise alone: the claim is tested, not believed.

Other clients' rows cannot serve as the null, because their encoders are different.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import encoder_of, in_chunks, received, uploaded
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.registry import register_attack
from fedaudit.training.models import Net
from fedaudit.wire.release import UNPROTECTED
from fedaudit.wire.transcript import TranscriptEntry


@dataclass
class Uploaded:
    """One round: released rows with their labels, and what candidates and auxiliary records would have given."""

    rows: Tensor
    labels: Tensor | None
    candidates: Tensor
    auxiliary: Tensor
    alike: Tensor  # row x auxiliary record: of the same class, as far as that is known
    sigma: float


@register_attack("embedding_match")
class EmbeddingMatch(Attack):
    needs = frozenset({"embeddings"})

    labels: bool = True  # use released labels: a row with another label does not match
    join: bool = True  # a record has the same row in every round, where the labels do not say otherwise

    def cannot(self, scene: Scene) -> str | None:
        if reason := super().cannot(scene):
            return reason
        if not self._encoders(scene):
            return f"the {scene.view.threat} sees no encoder of client {scene.target} of a round with embeddings"
        return None

    def run(self, scene: Scene) -> Claims:
        releases = [self._release(scene, *found) for found in self._encoders(scene)]
        match = self._matching(scene.y, releases[-1])
        if releases[-1].sigma == 0:
            return Claims(-self._distance(releases, match).sqrt())
        return Claims(log_ratio(releases, match))

    def _encoders(self, scene: Scene) -> list[tuple[TranscriptEntry, str, Net]]:
        """Return releases of embeddings with the encoder of that round: the client's own, else the one that it got."""
        own = uploaded(scene, scene.target)
        found = []
        for entry, name in scene.released("embeddings"):
            model = own[entry.round][1] if entry.round in own else received(scene, entry)
            if model is not None and isinstance(entry[name], Tensor):
                found.append((entry, name, model))
        return self._joinable(scene, found) if self.join else found[-1:]

    def _joinable(self, scene: Scene, found: list[Any]) -> list[Any]:
        """Return the last release and those before it with as many rows, of the same labels in the same order."""
        last = self._labels(scene, *found[-1][:2]) if found else None
        kept = []
        for entry, name, model in found:
            labels = self._labels(scene, entry, name)
            same = labels is None if last is None else labels is not None and torch.equal(labels, last)
            if same and len(entry[name]) == len(found[-1][0][found[-1][1]]) and sigma_of(entry, name, found[-1]):
                kept.append((entry, name, model))
        return kept

    def _labels(self, scene: Scene, entry: TranscriptEntry, name: str) -> Tensor | None:
        """Return the labels that travelled beside the rows, if any did."""
        for other, field in entry.fields.items():
            if field.kind == "labels" and isinstance(entry[other], Tensor):
                labels = entry[other].to(scene.device)
                return labels if labels.shape == (len(entry[name]),) else None
        return None

    def _release(self, scene: Scene, entry: TranscriptEntry, name: str, model: Net) -> Uploaded:
        protection = entry.fields[name].protection or UNPROTECTED

        def as_released(x: Tensor) -> Tensor:
            e = in_chunks(encoder_of(model), x)
            return mechanism_of(protection).clipped(e, protection.clip) if protection.clip else e

        labels = self._labels(scene, entry, name) if self.labels else None
        rows = entry[name].to(scene.device).flatten(1)
        aux, aux_y = scene.auxiliary
        known = as_released(aux) if len(aux) else rows[:0]
        alike = torch.ones(len(rows), len(aux), dtype=torch.bool, device=rows.device)
        if labels is not None:
            alike = labels[:, None] == aux_y
            alike |= ~alike.any(1, keepdim=True)  # a class that the auxiliary set lacks: any record
        return Uploaded(rows, labels, as_released(scene.x), known, alike, protection.sigma or 0.0)

    def _matching(self, y: Tensor, release: Uploaded) -> Tensor:
        """Return which rows a candidate may be, by label; all rows if labels are not released."""
        if release.labels is None:
            return torch.ones(len(y), len(release.rows), dtype=torch.bool, device=y.device)
        return y[:, None] == release.labels

    @staticmethod
    def _distance(releases: list[Uploaded], match: Tensor) -> Tensor:
        """Return the smallest squared distance to a row, summed over rounds.

        A candidate that no row can be is the farthest.
        """
        total = sum(squared(r.candidates, r.rows) for r in releases)
        assert isinstance(total, Tensor)
        return total.masked_fill(~match, total.max() + 1).min(1).values


def sigma_of(entry: TranscriptEntry, name: str, last: tuple[TranscriptEntry, str, Net]) -> bool:
    """Return whether a release and the last one agree on noise: both have it, or neither has."""
    one, other = ((e.fields[n].protection or UNPROTECTED).sigma for e, n in ((entry, name), last[:2]))
    return bool(one) == bool(other)


def squared(a: Tensor, b: Tensor) -> Tensor:
    """Return squared distances of all pairs, in double precision: members lie at 0 but for its last digits."""
    a, b = a.double(), b.double()
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp(min=0)


def log_density(rows: Tensor, centres: Tensor, sigma: float) -> Tensor:
    """Return log N(row; centre, sigma^2 I) for all pairs, without the constant that cancels in a ratio."""
    return -squared(rows, centres) / (2 * sigma**2)


def log_ratio(releases: list[Uploaded], match: Tensor) -> Tensor:
    """Return the logarithm of the likelihood ratio for each candidate, over the rows that it may be."""
    total = torch.zeros(match.shape, dtype=torch.float64, device=match.device)
    for r in releases:
        total += log_density(r.candidates, r.rows, r.sigma)
        if len(r.auxiliary):
            theirs = log_density(r.rows, r.auxiliary, r.sigma).masked_fill(~r.alike, -torch.inf)
            total -= theirs.logsumexp(1) - r.alike.sum(1).log()
    ratio = total.masked_fill(~match, -torch.inf).logsumexp(1) - match.sum(1).clamp(min=1).log()
    least = ratio[ratio.isfinite()].min() if ratio.isfinite().any() else ratio.new_zeros(())
    return ratio.where(ratio.isfinite(), least - 1)  # no row can be this candidate
