"""Reads a view: which model a client started from, which images outputs belong to, how far images lie apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.attack.scene import Scene
from fedaudit.errors import ContractError
from fedaudit.training import forward
from fedaudit.training.models import Net
from fedaudit.wire.message import State
from fedaudit.wire.transcript import TranscriptEntry

ROWS = 256  # in one forward pass
PLACES = 1024  # entries in a vector of token counts


def released(scene: Scene, kind: str, k: int) -> Iterator[tuple[TranscriptEntry, str]]:
    """Yield client k's uploads of one kind that the view shows and the transcript kept, as (message, field)."""
    for entry in scene.view.entries(direction="up", kind=kind, client=k):
        for name, field in entry.fields.items():
            if field.kind == kind and entry.kept(name):
                yield entry, name


def others(scene: Scene) -> list[int]:
    """Return the clients beside the target whose uploads the view shows."""
    return sorted({e.client for e in scene.view.entries(direction="up") if e.readable} - {scene.target})


def model_of(scene: Scene, k: int, state: Any) -> Net | None:
    """Return client k's model with this state; None if the state does not fit that architecture."""
    if not isinstance(state, State):
        return None
    try:
        model = scene.model(scene.arch(k), state)
    except ContractError:
        return None
    return model if isinstance(model, Net) else None


def received(scene: Scene, upload: TranscriptEntry) -> Net | None:
    """Return the model that the client last got in this round before it answered; None if the view shows none."""
    found = None
    for entry in scene.view.entries(direction="down", client=upload.client, t=upload.round):
        if entry.ask <= upload.ask:
            for name, field in entry.fields.items():
                if field.role != "relay" and entry.kept(name):
                    found = model_of(scene, upload.client, entry[name]) or found
    return found


def uploads(scene: Scene, k: int) -> dict[int, tuple[TranscriptEntry, str]]:
    """Return client k's last message of each round with its weights or their change: (message, field), not yet read."""
    found = {}
    for kind in ("gradients", "weights"):
        for entry, name in released(scene, kind, k):
            found[entry.round] = entry, name
    return found


def trained(scene: Scene, entry: TranscriptEntry, name: str) -> Net | None:
    """Return the client's model as it was uploaded, whole or as a change of the one that it got."""
    state = entry[name]
    if entry.fields[name].kind == "gradients" and isinstance(state, State):
        start = received(scene, entry)
        if start is None or start.state_dict().keys() != state.keys():
            return None
        state = State({key: t + state[key].to(t.device) for key, t in start.state_dict().items()})
    return model_of(scene, entry.client, state)


def uploaded(scene: Scene, k: int) -> dict[int, tuple[TranscriptEntry, Net]]:
    """Return client k's own model by round."""
    models = {t: (entry, trained(scene, entry, name)) for t, (entry, name) in uploads(scene, k).items()}
    return {t: (entry, model) for t, (entry, model) in models.items() if model is not None}


def images_in(scene: Scene, value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a value that holds images, as rows."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() > 3 and tuple(value.shape[-3:]) == tuple(scene.shape):
            yield value.reshape(-1, *scene.shape).to(scene.device)
    elif isinstance(value, Mapping) and not isinstance(value, State):
        for item in value.values():
            yield from images_in(scene, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from images_in(scene, item)


def inputs_of(scene: Scene, upload: TranscriptEntry, rows: int) -> Tensor | None:
    """Return the images of which `rows` outputs were computed, else None.

    They were sent in the same ask, or they are the rows of the public set whose numbers were sent, or that whole set.
    """
    came = [
        entry[name]
        for entry in scene.view.entries(direction="down", client=upload.client, t=upload.round)
        if entry.ask == upload.ask
        for name in entry.fields
    ]
    sent = [images for value in came for images in images_in(scene, value)]
    whole = [] if scene.public is None else [scene.public]
    named = [public[value.long().to(public.device)] for public in whole for value in came if row_numbers(value, public)]
    for images in [*sent, *([torch.cat(sent)] if sent else []), *named, *whole]:
        if len(images) == rows:
            return images
    return None


def row_numbers(value: Any, public: Tensor) -> bool:
    """Return whether a value is a list of numbers of rows of the public set, each once."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dim() != 1 or not len(value):
        return False
    low, high = int(value.min()), int(value.max())
    return low >= 0 and high < len(public) and len(value.unique()) == len(value)


def by_class(value: Any, classes: int) -> dict[int, Tensor]:
    """Return one vector for each class that a client holds; the result is empty if the value is anything else."""
    if not isinstance(value, Mapping) or isinstance(value, State):
        return {}
    right = all(isinstance(v, Tensor) and v.dim() == 1 and v.is_floating_point() for v in value.values())
    return dict(value) if right and all(c in range(classes) for c in value) else {}


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward.in_chunks(function, x, ROWS)


def confidence(logits: Tensor, y: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the true class.

    This is the measure whose distribution over models is closest to normal (LiRA).
    """
    log_p = logits.double().log_softmax(1)
    true = torch.nn.functional.one_hot(y, logits.shape[1]).bool()
    return log_p[true] - log_p.masked_fill(true, -torch.inf).logsumexp(1)


def numbers_of(scene: Scene, x: Tensor) -> Tensor:
    """Return records as vectors that distances can tell apart.

    Texts become counts of their tokens; tokens share a place if there are many. Other records stay as they are.
    """
    if not scene.shape.tokens:
        return x.flatten(1)
    places = min(scene.shape.tokens, PLACES)
    counts = torch.zeros(len(x), places, device=x.device)
    return counts.scatter_add_(1, x % places, torch.ones_like(x, dtype=counts.dtype))


def nearest(rows: Tensor, to: Tensor) -> Tensor:
    """Return the Euclidean distance of each row to the nearest of others.

    The nearest is found by products, and its distance is measured by differences: products lose what is close to 0.
    """
    found = [part.sub(to[torch.cdist(part, to).argmin(1)]).norm(dim=1) for part in rows.split(1024)]
    return torch.cat(found) if found else rows.new_zeros(0)


def encoder_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model.encode(x).flatten(1)  # type: ignore[operator]
