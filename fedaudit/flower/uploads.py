"""Tests whether the uploads that really left a run hold the noise that a local DP mod claims.

`fedaudit.flower.epsilon` tries the mods as they are now. Here the run's own messages are looked at: an upload less the
model that its node was sent is the clipped update plus the noise. Flower draws that noise from a generator that no
record holds, so that it cannot be drawn again and taken away. But an update can only make the sum of squares larger:

    |clipped update + noise|^2 / sigma^2 is noncentral chi-square, and not below a central one with as many degrees

So P[chi-square <= what was found] is a valid p-value against noise that is missing, whatever the nodes trained. Over
all uploads of all rounds the sums and the degrees add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, message_size_mod
from scipy.special import chdtr, chdtri, chndtr, chndtrix

from fedaudit.epsilon.noise_tests import POWER, SEEKS
from fedaudit.flower.claims import LocalClaim, OlderLocalDpMod, training_mods
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit
from fedaudit.significance import level_of, said
from fedaudit.wire.transcript import TranscriptEntry

TEST = "uploads of the run"
HARMLESS = (message_size_mod, arrays_size_mod)  # mods of Flower that leave an upload as it is
SCALES = [round(1 - 0.01 * i, 2) for i in range(1, 100)]  # of the promised noise, to say which would be found


@dataclass(frozen=True)
class Left:
    """All uploads of a run that can be held against the model that their nodes were sent."""

    squares: float = 0.0  # of upload less model
    numbers: int = 0
    uploads: int = 0


def uploads_of(run: RunFolder) -> Left:
    """Return the sum of squares over all uploads, as far as the transcript kept them and what they began with."""
    sent: dict[tuple[int, int, int], dict[str, Any]] = {}
    found = Left()
    for entry in run.transcript.entries():
        at = (entry.client, entry.round, entry.ask)
        arrays = _arrays(run, entry)
        if arrays is None:
            continue
        if entry.direction == "down":
            sent[at] = arrays
        elif (before := sent.pop(at, None)) is not None and before.keys() == arrays.keys():
            pairs = [(arrays[name], before[name]) for name in arrays]
            if all(a.shape == b.shape and a.is_floating_point() for a, b in pairs):
                squares = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
                found = Left(
                    found.squares + squares, found.numbers + sum(a.numel() for a, _ in pairs), found.uploads + 1
                )
    return found


def _arrays(run: RunFolder, entry: TranscriptEntry) -> dict[str, torch.Tensor] | None:
    """Return the only array record of a message of training; None if it has none, several, or it was not kept."""
    shape = run.record.setting.set.get("messages", {}).get(entry.message)
    if not shape or shape["type"] != "train":
        return None
    names = [name for name, field in shape["fields"].items() if field["is"] == "arrays"]
    if len(names) != 1 or not entry.kept(names[0]):
        return None
    value = entry[names[0]]
    return dict(value) if hasattr(value, "keys") else None


def audit_uploads(run: RunFolder, app: ClientApp, claim: LocalClaim, kind: str, confidence: float) -> EpsilonAudit:
    """Hold the uploads that left against the noise of a claim. Return the audit; it says why where it cannot tell."""
    left, lacks = uploads_of(run), _lacks(app, claim)
    if not lacks and not left.numbers:
        lacks = "the transcript kept no upload beside the model that its node was sent: run with a larger keep_weights"
    n, found = left.numbers, left.squares / claim.sigma**2
    level = level_of(confidence)
    p, high, finds, tells_at = 1.0, math.inf, None, 1.0
    how = lacks
    if not lacks:
        p, high = float(chdtr(n, found)), math.sqrt(found / float(chdtri(n, confidence)))
        beyond = left.uploads * (claim.clip / claim.sigma) ** 2  # at most: updates as long as C
        finds, tells_at = _would_find(n, beyond, level)
        scale = math.sqrt(found / n)
        how = (
            f"{n} numbers of {left.uploads} uploads: noise x {scale:.4g} of what is promised if the updates were "
            f"nothing, at most x {high:.4g}; noise x {finds:.3g} or less would be refuted with a probability of 99 %, "
            f"at a level of {level:g}; the noise itself cannot be drawn again: no record holds Flower's generator"
        )
    ledger = max((c.by_kind.get(kind, math.inf) for c in run.record.ledger), default=math.inf)
    verdict = said(p, tells_at, confidence)
    bound = 0.0 if lacks else gaussian_epsilon(claim.sensitivity / (claim.sigma * max(high, 1e-12)), claim.delta)
    return EpsilonAudit(
        test=TEST, kind=kind, threat="whoever sees the upload: server", claim=f"{claim.mod}, one upload",
        claim_epsilon=claim.epsilon, ledger_epsilon=ledger,
        lower_bound=bound if verdict in ("refuted", "suspicious") else min(bound, claim.epsilon), p_value=p,
        trials=n, confidence=confidence, delta=claim.delta, verdict=verdict, method="chi-square of squared uploads",
        how=how, ceiling=math.inf, finds=finds, seeks=SEEKS, tells_at=tells_at,
    )  # fmt: skip


def _lacks(app: ClientApp, claim: LocalClaim) -> str:
    """Return why uploads cannot be held against a claim: another mod changes them after its noise."""
    for mod in training_mods(app):
        if isinstance(mod, LocalDpMod | OlderLocalDpMod):
            if type(mod).__name__ == claim.mod:
                return ""
            return f"{type(mod).__name__} adds noise of its own after {claim.mod}: uploads hold the sum of both"
        if mod not in HARMLESS:
            name = getattr(mod, "__name__", type(mod).__name__)
            return f"the mod {name} may change an upload after the noise of {claim.mod}"
    return ""


def _would_find(n: int, beyond: float, level: float) -> tuple[float, float]:
    """Return the largest share of the noise that would be refuted with 99 %, and at which level SEEKS would be.

    `beyond`: how much the updates can add to the sum of squares at most, in variances of the promised noise."""
    most = float(chdtri(n, 1 - level))  # what is below it is refuted
    finds = next((s for s in SCALES if float(chndtr(most / s**2, n, beyond / s**2)) >= POWER), 0.0)
    unlucky = float(chndtrix(POWER, n, beyond / SEEKS**2)) * SEEKS**2
    return finds, float(chdtr(n, unlucky))
