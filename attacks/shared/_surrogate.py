"""Models that answer like a client's, made from the client's answers on images that the attacker knows.

A surrogate is distilled from shared outputs. It has the same architecture and fresh weights, and its loss is the
Kullback-Leibler divergence to the outputs of the last rounds. It depends on those outputs and nothing else, so that one
surrogate serves the attacks on all clients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor, nn

from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._view import in_chunks, inputs_of, released
from fedaudit.rng import generator, seeded
from fedaudit.training.losses import ce, kl

Pairs = list[tuple[Tensor, Tensor]]  # images, logits: one of each round

_made: OrderedDict[str, nn.Module] = OrderedDict()
KEPT = 32  # models, at most


def shared(scene: Scene, k: int, rounds: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Return client k's answers on known images, by round: images and logits (for soft labels: their logarithms)."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for kind in ("soft_labels", "logits"):
        for entry, name in released(scene, kind, k):
            value = entry[name]
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != scene.classes:
                continue
            answers = value.to(scene.device).reshape(-1, scene.classes)
            images = inputs_of(scene, entry, len(answers))
            if images is not None:
                found[entry.round] = images, answers if kind == "logits" else answers.clamp(min=1e-7).log()
        for passed in scene.relayed(kind, k):  # to a peer: answers on the public set, which everybody holds
            rows, public = passed.value, scene.public
            if isinstance(rows, Tensor) and public is not None and rows.shape == (len(public), scene.classes):
                answers = rows.to(scene.device)
                found[passed.round] = public, answers if kind == "logits" else answers.clamp(min=1e-7).log()
    return {t: found[t] for t in sorted(found)[-rounds:]}


def distilled(scene: Scene, arch: str, pairs: Sequence[tuple[Tensor, Tensor]], steps: int) -> nn.Module:
    """Return a model of the architecture that answers like `pairs`."""
    x, z = torch.cat([images for images, _ in pairs]), torch.cat([answers for _, answers in pairs])
    return _trained(scene, arch, x, z, steps)


def taught(scene: Scene, arch: str, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Return a model of the architecture, trained on labelled records."""
    return _trained(scene, arch, x, y, steps)


def imitated(scene: Scene, arch: str, model: nn.Module, images: Tensor, steps: int) -> nn.Module:
    """Return a surrogate of a model of our own. It is made as a client's is, so that distilling changes both alike."""
    return distilled(scene, arch, [(images, in_chunks(model, images))], steps)


def _trained(scene: Scene, arch: str, x: Tensor, target: Tensor, steps: int, batch: int = 64) -> nn.Module:
    key = _digest(arch, steps, x, target)
    if key in _made:
        _made.move_to_end(key)
        return _made[key]
    with seeded("surrogate", key, device=scene.device):
        model = scene.fresh(arch)
        optimiser = torch.optim.Adam(model.parameters(), 1e-3)
        rng = generator("surrogate", key, "batches")
        model.train()
        for _ in range(steps):
            rows = torch.randint(len(x), (min(batch, len(x)),), generator=rng).to(x.device)
            answers = target[rows]
            loss = kl(answers, model(x[rows])) if answers.is_floating_point() else ce(model, x[rows], answers)
            optimiser.zero_grad()
            loss.mean().backward()
            optimiser.step()
    _made[key] = model.eval().requires_grad_(False)
    while len(_made) > KEPT:
        _made.popitem(last=False)
    return _made[key]


def _digest(arch: str, steps: int, *tensors: Tensor) -> str:
    content = xxhash.xxh3_128(f"{arch}/{steps}".encode())
    for t in tensors:
        content.update(t.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()
