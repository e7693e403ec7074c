"""Mechanisms that clip a release of real numbers and add noise to it: the part that all of them share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from fedaudit.errors import NotApplicable, PrivacyError, unknown
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanisms.base import Mechanism, Noise, Prepared, Words, span, times
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.sensitivity import Context, Norm, bounded, clip_rows, dependence, joint
from fedaudit.privacy.trees import leaves_of
from fedaudit.stats import Floats
from fedaudit.wire.message import Declared
from fedaudit.wire.release import Protection

# Kinds to which output noise cannot be added, and what to do instead.
REFUSED = {
    "weights": "noise on finished weights destroys them long before it protects a record. Use DP-SGD: training:eps=...",
    "layers": "noise on finished layers destroys them long before it protects a record. Use DP-SGD: training:eps=...",
    "labels": "labels are class numbers, which take no Gaussian noise. Use mechanism = 'randomised-response'.",
    "count": "a number of records takes no Gaussian noise; under replace-one all neighbours have the same. Remove it.",
}
LEAST = 1e-6  # noise of fewer sensitivities is none
TINY = float(np.finfo(np.float64).tiny)


class AddsNoise(Mechanism):
    """Clip a release, and add noise of `multiplier` times its sensitivity to each number."""

    noun: ClassVar[str]  # the noise in words
    norm: ClassVar[Norm] = 2
    deviation: ClassVar[float] = 1.0  # standard deviation of noise of scale 1

    # --- a policy's options ---

    def refuses(self, kind: str) -> str | None:
        return REFUSED.get(kind)

    def check(self, where: str, kind: str, policy: Policy) -> None:
        super().check(where, kind, policy)
        check_sensitivity(where, kind, policy)

    def multiplier(self, policy: Policy, delta: float, releases: int, moves: int | None) -> float:
        """Return scale / sensitivity of one of so many releases, for a policy that names an epsilon.

        `moves`: counts that one record may change by 1 each; None if it is no release of counts.
        """
        raise NotImplementedError

    # --- a release ---

    def clip(self, policy: Policy) -> float | None:
        return policy.clip

    def clipped(self, rows: Tensor, C: float) -> Tensor:
        return clip_rows(rows, C, self.norm)

    def prepare(self, value: Any, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
        leaves = check_finite_floats(value, where, self.noun)
        delta = self.delta(policy, context.n)
        if dependence(declared) == "record" and any(len(leaf) > context.n for leaf in leaves):
            raise PrivacyError(
                f"{where} has more rows than the client has records ({context.n}). Send one row per record."
            )
        made, sensitivities, how = bounded(leaves, where, declared, policy, context, self.norm)
        if policy.noise_multiplier is None:
            releases = counted(policy, declared, where, context)
            multiplier = self.multiplier(policy, delta, releases, moves_of(declared, sensitivities, self.norm))
        else:
            multiplier = policy.noise_multiplier
        return Prepared(made, sensitivities, multiplier, delta, how, self.deviation)

    def delta(self, policy: Policy, n: int) -> float:
        return policy.delta_for(n)

    def draw(self, like: Tensor, scale: float, policy: Policy, key: tuple[object, ...]) -> Tensor:
        """Return noise of a scale, as many numbers as `like` has. The same key always gives the same noise."""
        raise NotImplementedError

    def noised(self, ready: Prepared, where: str, declared: Declared, policy: Policy, context: Context) -> list[Tensor]:
        noisy = [
            # In place: one pass to draw the noise, one addition.
            self.draw(leaf, scale, policy, (*context.key, where, i)).add_(leaf)
            for i, (leaf, scale) in enumerate(zip(ready.leaves, ready.scales, strict=True))
        ]
        if declared.dtype == "uint8":
            noisy = [leaf.clamp_(-1, 1) for leaf in noisy]  # the range of uint8 on the wire; this is post-processing
        return noisy

    def entry(self, where: str, kind: str, policy: Policy, ready: Prepared) -> LedgerEntry:
        how, largest = ready.bounded, max(ready.sensitivities, default=0.0)
        return LedgerEntry(
            field=where,
            kind=kind,
            mechanism=self.name if how.guaranteed else f"{self.name}, heuristic sensitivity",
            noise_multiplier=ready.multiplier if how.guaranteed else 0.0,
            relation=how.relation,
            sigma=max(ready.sigmas, default=0.0),
            sensitivity=largest,
            clip=how.clip,
            condition=how.condition,
            delta=ready.delta,
            claim=policy.epsilon,
        )

    def follows(
        self, entry: LedgerEntry, policy: Policy, n: int, classes: int, releases: int | None
    ) -> dict[str, float | str | None]:
        delta, multiplier = self.delta(policy, n), policy.noise_multiplier
        if multiplier is None and releases is not None:
            multiplier = self.multiplier(policy, delta, releases, entry.moves)
        found: dict[str, float | str | None] = {
            "mechanism": self.name, "relation": policy.relation, "delta": delta, "claim": policy.epsilon,
        }  # fmt: skip
        if entry.clip is not None:
            found["clip"] = policy.clip
        if multiplier is not None:
            found["noise_multiplier"] = multiplier
        if entry.sigma is not None and entry.sensitivity:
            found["sigma"] = entry.noise_multiplier * entry.sensitivity * self.deviation
        return found

    def imitated(self, rows: Tensor, protection: Protection, rng: Generator) -> Tensor:
        noise = self.standard(rows, rng)
        clipped = self.clipped(rows, protection.clip) if protection.clip is not None else rows
        return clipped + (protection.sigma or 0.0) * noise

    def standard(self, like: Tensor, rng: Generator) -> Tensor:
        """Return noise of standard deviation 1 from a generator."""
        raise NotImplementedError

    def smallest_class(self, protection: Protection) -> float | None:
        if not protection.clip or not protection.sensitivity:
            return None
        swing = 2.0 if protection.relation == "replace-one" else 1.0
        return joint(2, self.norm) * swing * protection.clip / protection.sensitivity

    # --- the test of its noise ---

    def noise(self, sent: Floats, ready: Prepared, leaf: int, seed: int) -> Noise:
        return Noise(as_matrix((sent - as_array(ready.leaves[leaf])) / max(ready.sigmas[leaf], TINY)))

    # --- words ---

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        worst = min(entries, key=lambda e: e.noise_multiplier)
        sigma = span([e.sigma for e in entries if e.sigma is not None])
        asked = f"; asked for: ε = {worst.claim:g} per release" if worst.claim is not None else ""
        cosines = [e.cosine for e in entries if e.cosine is not None]
        kept = f"; cosine to the raw values {math.fsum(cosines) / len(cosines):.2f}" if cosines else ""
        if worst.noise_multiplier == 0:
            return f"noise (sigma {sigma}) by a heuristic that guarantees nothing{asked}{kept}", "open"
        clip = f", clipped to {worst.clip:g}" if worst.clip is not None else ""
        condition = f" ({worst.condition})" if worst.condition else ""
        return f"{self.noun}, sigma {sigma}{clip}{condition}, {times(entries)}{asked}{kept}", "noise"


def as_array(t: Tensor) -> Floats:
    return t.detach().double().cpu().numpy()


def as_matrix(values: Floats) -> Floats:
    """Return rows and columns: rows are on dimension 0, and a vector is one row."""
    return values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(1, -1)


def check_sensitivity(where: str, kind: str, policy: Policy) -> None:
    """Raise if the sensitivity of a policy cannot be read, or does not fit its kind."""
    sort, _, number = policy.sensitivity.partition(":")
    if sort not in ("clip", "random-pixel"):
        raise PrivacyError(unknown(f"sensitivity of {where}", sort, ["clip", "random-pixel"]))
    try:
        value = float(number or 1)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise PrivacyError(f"{where}: sensitivity = {policy.sensitivity!r}; give a number above 0 behind the colon.")
    if sort == "random-pixel" and not value.is_integer():
        raise PrivacyError(f"{where}: sensitivity = {policy.sensitivity!r}; give a whole number of edits.")
    if policy.assume == "logits-of-records" and (kind != "logits" or sort != "random-pixel"):
        raise PrivacyError(
            f"{where}: assume = 'logits-of-records' is only for the random-pixel sensitivity of logits, which it "
            "takes from the model's logits on the client's records. Remove it here."
        )


def check_finite_floats(value: Any, where: str, noun: str = "Gaussian noise") -> list[Tensor]:
    """Return the leaves of a value, all of them floating-point and finite. Raise if one is not."""
    leaves = leaves_of(value, where)
    for leaf in leaves:
        if not leaf.is_floating_point():
            raise NotApplicable(
                f"{where} is {leaf.dtype}: {noun} needs floating-point numbers. Send floats or drop the policy."
            )
        if not bool(torch.isfinite(leaf).all()):
            raise PrivacyError(
                f"{where} holds NaN or infinity before any noise. Training has probably diverged: lower the learning "
                "rate."
            )
    return leaves


def moves_of(declared: Declared, sensitivities: Sequence[float], norm: Norm) -> int | None:
    """Return how many counts one record may change by 1 each; None if it is no release of counts."""
    return round(max(sensitivities, default=1.0) ** norm) if dependence(declared) == "histogram" else None


def counted(policy: Policy, declared: Declared, where: str, context: Context) -> int:
    """Return how many releases share the policy's epsilon, and count this one: 1 unless the calibration is `total`."""
    if policy.calibration != "total":
        return 1
    kind = declared.kind or ""
    planned = policy.releases or context.releases(kind)
    if planned is None:
        raise PrivacyError(
            f"{where}: calibration = 'total' needs the number of releases, and this method does not declare its "
            f"traffic. Set privacy.{kind}.releases."
        )
    context.spent[kind] = context.spent.get(kind, 0) + 1
    if context.spent[kind] > planned:
        raise PrivacyError(
            f"{where}: calibration = 'total' planned {planned} releases of {kind}, and this is number "
            f"{context.spent[kind]}. Set privacy.{kind}.releases to the number that there will be."
        )
    return planned
