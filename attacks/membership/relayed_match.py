"""A peer compares candidates with the rows that are passed on to it: how near a candidate comes to the target's rows.

There is one row for each record: embeddings, or outputs such as DFFKE's logits on the image decoded of each record. The
peer has no model of the target. It has its own, which saw the same protocol, and the rows of everybody. The score is
the distance to the nearest row of the others less that to the nearest row of the target, both relative to the distances
of auxiliary records: models that differ move all of a client's rows alike, and candidates with them. Outputs are
compared as log-probabilities. Outputs on the public set are not rows of records; `logit_gap` reads those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import encoder_of, in_chunks, nearest
from fedaudit.registry import register_attack
from fedaudit.training.models import Net

KINDS = ("embeddings", "logits")


@register_attack("relayed_match")
class RelayedMatch(Attack):
    def cannot(self, scene: Scene) -> str | None:
        if scene.view.threat.peer is None:
            return f"not attacked by this: the {scene.view.threat} has the uploads themselves"
        passed = [rows for kind in KINDS for rows in _rows(scene, scene.target, kind)]
        if not passed:
            return f"the {scene.view.threat} is passed on no embeddings or outputs of client {scene.target}'s records"
        if (model := _own(scene)) is None:
            return f"the {scene.view.threat} was never asked, and has no encoder"
        if not any(_comparable(scene, model, kind) for kind in KINDS):
            return f"the {scene.view.threat} has an encoder of another width than client {scene.target}"
        return None

    def run(self, scene: Scene) -> Claims:
        model = _own(scene)
        assert model is not None  # cannot() has looked
        total = torch.zeros(len(scene.y), dtype=torch.float64, device=scene.device)
        for kind in KINDS:
            if _comparable(scene, model, kind):
                total += self._score(scene, model, kind)
        return Claims(total)

    @staticmethod
    def _score(scene: Scene, model: Net, kind: str) -> Tensor:
        function, (aux, _) = _function(model, kind), scene.auxiliary
        e = in_chunks(function, scene.x).double()
        known = in_chunks(function, aux).double() if len(aux) else e
        total = torch.zeros(len(e), dtype=torch.float64, device=e.device)
        for t, rows in enumerate(_rows(scene, scene.target, kind)):
            total -= _relative(e, known, rows.double())
            others = [_rows(scene, k, kind) for k in range(scene.setting["clients"]) if k != scene.target]
            theirs = [of[t] for of in others if len(of) > t and of[t].shape[1] == e.shape[1]]
            if theirs:
                total += _relative(e, known, torch.cat(theirs).double())
        return total


def _relative(e: Tensor, known: Tensor, rows: Tensor) -> Tensor:
    """Return the distance to the nearest row, in units of the mean such distance of auxiliary records."""
    return nearest(e, rows) / nearest(known, rows).mean().clamp(min=1e-12)


def _rows(scene: Scene, k: int, kind: str) -> list[Tensor]:
    """Return the rows of client k that were passed on, by message. A table by round gives those of its round."""
    found = []
    for passed in scene.relayed(kind, k):
        value = passed.value.get(passed.round) if isinstance(passed.value, Mapping) else passed.value
        if isinstance(value, Tensor) and value.dim() > 1:
            rows = value.to(scene.device).flatten(1)
            if kind == "logits" and scene.public is not None and len(rows) == len(scene.public):
                continue
            found.append(rows.log_softmax(1) if kind == "logits" else rows)
    return found


def _function(model: Net, kind: str) -> Callable[[Tensor], Tensor]:
    return encoder_of(model) if kind == "embeddings" else lambda x: model(x).log_softmax(1)


def _comparable(scene: Scene, model: Net, kind: str) -> bool:
    """Return whether the target's rows are as wide as the peer's own."""
    rows = _rows(scene, scene.target, kind)
    return bool(rows) and rows[-1].shape[1] == in_chunks(_function(model, kind), scene.x[:2]).shape[1]


def _own(scene: Scene) -> Net | None:
    """Return the peer's own model after the last round."""
    state = scene.own[2]
    if state is None:
        return None
    model = scene.model(scene.arch(scene.view.threat.peer or 0), state.model)
    return model if isinstance(model, Net) else None
