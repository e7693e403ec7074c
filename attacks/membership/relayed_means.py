"""A peer reads class means of all clients together that are passed on to it: FedAF's V, FedProto's prototypes.

The peer has sent a mean of its own, v. If K clients' means weigh the same, the mean of the others is
(K V - v) / (K - 1); with one other client it is that client's mean itself. The peer then tells whether a candidate is
in it as a server does for one client's mean (`logit_gap`), at the model that everybody was sent. For a class that the
peer does not hold, the mean of the others is V itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.membership.logit_gap import Means, tracing
from fedaudit.attacks.shared._view import by_class, received, released
from fedaudit.registry import register_attack
from fedaudit.wire.release import UNPROTECTED, Protection
from fedaudit.wire.transcript import TranscriptEntry


@register_attack("relayed_means")
class RelayedMeans(Attack):
    def cannot(self, scene: Scene) -> str | None:
        who = f"the {scene.view.threat}"
        if scene.view.threat.peer is None:
            return f"not attacked by this: {who} has the uploads themselves"
        if not any(scene.mixed(kind) for kind in ("logits", "prototypes")):
            return f"{who} is passed on no means by class"
        if not means_of_others(scene):
            return f"not attacked by this: {who} was sent no model that the means by class were taken at"
        return None if len(scene.auxiliary[0]) else "there is no auxiliary set to hold means against: set aux above 0"

    def run(self, scene: Scene) -> Claims:
        return Claims(torch.stack([tracing(scene, *found) for found in means_of_others(scene)]).sum(0))


def means_of_others(scene: Scene) -> Means:
    """Return the mean of all others by class, with the model that it was taken at, for each message."""
    found: Means = []
    K = max(2, round(scene.setting["participation"] * scene.setting["clients"]))
    for kind in ("logits", "prototypes"):
        for entry, name in scene.mixed(kind):
            V = by_class(entry[name], scene.classes)
            model = received(scene, entry) if V else None
            if model is not None:
                v, protection = own(scene, kind, entry)
                less = protection.model_copy(update={"sigma": (protection.sigma or 0.0) / math.sqrt(K - 1)})
                found.append((model, others(V, v, K), kind, less))
    return found


def own(scene: Scene, kind: str, passed: TranscriptEntry) -> tuple[dict[int, Tensor], Protection]:
    """Return the mean that the peer itself sent before the common one was passed on to it, and its protection."""
    mine: tuple[dict[int, Tensor], Protection] = {}, UNPROTECTED
    for entry, name in released(scene, kind, passed.client):
        if entry.round == passed.round and entry.ask < passed.ask and (v := by_class(entry[name], scene.classes)):
            mine = v, entry.fields[name].protection or UNPROTECTED
    return mine


def others(V: dict[int, Tensor], v: dict[int, Tensor], K: int) -> dict[int, Tensor]:
    """Return (K V - v) / (K - 1) by class, if the peer has a mean of its own."""
    return {c: (K * mean - v[c].to(mean)) / (K - 1) if c in v else mean for c, mean in V.items()}
