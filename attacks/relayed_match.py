"""A peer on embeddings that are passed on to it: how near a candidate comes to the target's rows by its own encoder.

The peer has no encoder of the target. It has its own, which saw the same protocol, and the rows of everybody. The score
is the distance to the nearest row of the others less that to the nearest row of the target, both taken relative to what
auxiliary records have: encoders that differ move all of a client's rows alike, and candidates with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks._view import encoder_of, in_chunks, nearest
from fedaudit.registry import register_attack
from fedaudit.training.models import Net


@register_attack("relayed_match")
class RelayedMatch(Attack):
    def cannot(self, scene: Scene) -> str | None:
        if scene.view.threat.peer is None:
            return f"not attacked by this: the {scene.view.threat} has the uploads themselves"
        if not _rows(scene, scene.target):
            return f"the {scene.view.threat} is passed on no embeddings of client {scene.target}"
        if (model := _own(scene)) is None:
            return f"the {scene.view.threat} was never asked, and has no encoder"
        width = in_chunks(encoder_of(model), scene.x[:2]).shape[1]
        if _rows(scene, scene.target)[-1].shape[1] != width:
            return f"the {scene.view.threat} has an encoder of another width than client {scene.target}"
        return None

    def run(self, scene: Scene) -> Claims:
        model = _own(scene)
        assert model is not None  # cannot() has looked
        e = in_chunks(encoder_of(model), scene.x).double()
        aux, _ = scene.auxiliary
        known = in_chunks(encoder_of(model), aux).double() if len(aux) else e
        total = torch.zeros(len(e), dtype=torch.float64, device=e.device)
        for t, rows in enumerate(_rows(scene, scene.target)):
            total -= _relative(e, known, rows.double())
            others = [_rows(scene, k) for k in range(scene.setting["clients"]) if k != scene.target]
            theirs = [of[t] for of in others if len(of) > t and of[t].shape[1] == e.shape[1]]
            if theirs:
                total += _relative(e, known, torch.cat(theirs).double())
        return Claims(total)


def _relative(e: Tensor, known: Tensor, rows: Tensor) -> Tensor:
    """The distance to the nearest row, in units of what auxiliary records have in the mean."""
    return nearest(e, rows) / nearest(known, rows).mean().clamp(min=1e-12)


def _rows(scene: Scene, k: int) -> list[Tensor]:
    """The embeddings of client k that were passed on, by message."""
    found = [passed.value for passed in scene.relayed("embeddings", k)]
    return [rows.to(scene.device).flatten(1) for rows in found if isinstance(rows, Tensor) and rows.dim() > 1]


def _own(scene: Scene) -> Net | None:
    """The peer's own model after the last round."""
    state = scene.own[2]
    if state is None:
        return None
    model = scene.model(scene.arch(scene.view.threat.peer or 0), state.model)
    return model if isinstance(model, Net) else None
