"""Active server: a model whose first layer sorts records into bins, so that an update holds single records.

This is Fowl et al., "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models", ICLR
2022, without changing the architecture. The first layer has to be linear on the pixels. Its rows all measure one thing
(the mean brightness v'x), with biases at the quantiles of auxiliary records. Unit j is on for records above its
quantile, and every further layer passes all units on alike. So each record adds one g(x) (x, 1) to the rows and biases
of the units that it turns on. The difference of neighbouring units holds the records between their quantiles. If that
is one record, the change of the weights over that of the bias is the record.

One step gives it exactly. More steps move the model and blur the bins. The attack cannot change the client's steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.replay import brings_model
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.inversion.gradient_match import first_linear
from fedaudit.errors import ThreatError
from fedaudit.registry import register_attack
from fedaudit.shape import IMAGES, Kind
from fedaudit.wire.message import State, Up, state_of
from fedaudit.wire.transcript import TranscriptEntry

SCALE = 1e-2  # of the later layers' weights: small, so that one step hardly moves the sorting layer


@register_attack("imprint")
class Imprint(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    active: ClassVar[bool] = True

    def cannot(self, scene: Scene) -> str | None:
        if reason := super().cannot(scene):
            return reason
        if _download(scene) is None:
            return (
                f"not visible: no message brings client {scene.target} a whole model that it answers with an update of"
            )
        if first_linear(scene.fresh(scene.arch(scene.target)), math.prod(scene.shape)) is None:
            return f"not attacked by this: the first layer of client {scene.target}'s model is not linear on the pixels"
        if not len(scene.auxiliary[0]):
            return "there are no auxiliary records to place the bins by: set aux above 0"
        return None

    def run(self, scene: Scene) -> Reconstructions:
        found = _download(scene)
        assert found is not None  # cannot() has looked
        entry, name = found
        model = scene.fresh(scene.arch(scene.target))
        layer = trap(model, scene.auxiliary[0], scene.rng("imprint"))
        sent = state_of(model)
        reply = scene.ask(entry, dataclasses.replace(entry.record(), **{name: _cpu(sent)}), "imprint", 0)
        back = _returned(reply, sent)
        change = {
            of: (sent[of].cpu().double() - back[of].cpu().double()) for of in (f"{layer}.weight", f"{layer}.bias")
        }
        rows = between(change[f"{layer}.weight"], change[f"{layer}.bias"])
        return Reconstructions(rows.unflatten(1, scene.shape).float().clamp(-1, 1).to(scene.device))


def trap(model: nn.Module, aux: Tensor, rng: torch.Generator) -> str:
    """Give the model weights that sort, and return the first layer's name."""
    name = first_linear(model, math.prod(aux.shape[1:]))
    assert name is not None
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        first, *later = linears
        v = torch.full((first.in_features,), 1 / first.in_features, device=first.weight.device)
        cuts = torch.quantile(aux.flatten(1) @ v, torch.linspace(0, 1, first.out_features + 2, device=aux.device)[1:-1])
        first.weight.copy_(v.expand_as(first.weight))
        first.bias.copy_(-cuts)
        for layer in later:  # units are passed on alike, but differently to each class: else g(x) would be 0
            column = torch.rand(layer.out_features, 1, generator=rng, device=rng.device).to(layer.weight) + 0.5
            layer.weight.copy_((SCALE * column).expand_as(layer.weight))
            if layer.bias is not None:
                layer.bias.zero_()
    return name


def between(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the records between neighbouring units: the rows that can be images.

    If there is none, return the first row, cut to the range of pixels.
    """
    ends = torch.cat([weight, torch.zeros_like(weight[:1])]), torch.cat([bias, torch.zeros_like(bias[:1])])
    rows, share = ends[0][:-1] - ends[0][1:], ends[1][:-1] - ends[1][1:]
    kept = share.abs() > 1e-9 * share.abs().max().clamp(min=1e-30)
    if not bool(kept.any()):
        return torch.zeros_like(weight[:1])
    images = rows[kept] / share[kept, None]
    within = (images.abs() <= 1 + 1e-2).all(1)
    return images[within] if bool(within.any()) else images[:1].clamp(-1, 1)


def _download(scene: Scene) -> tuple[TranscriptEntry, str] | None:
    """Return the last message that brought the target a whole model and was answered by one, or by its change."""
    answered = {
        (entry.round, entry.ask)
        for entry in scene.view.entries(direction="up", client=scene.target)
        if {"weights", "gradients"} & entry.kinds()
    }
    model = scene.fresh(scene.arch(scene.target))
    for entry in reversed(list(scene.view.entries(direction="down", client=scene.target))):
        kept = all(map(entry.kept, entry.fields))
        if (entry.round, entry.ask) in answered and kept and brings_model(entry, model):
            whole = {name: tuple(t.shape) for name, t in model.state_dict().items()}
            return entry, next(name for name in entry.fields if entry.state_shapes(name) == whole)
    return None


def _returned(reply: Up, sent: State) -> State:
    """Return the model that came back, whole or as a change of the one that was sent."""
    for name, declared in reply.declared().items():
        value = getattr(reply, name)
        if isinstance(value, State) and value.keys() == sent.keys():
            if declared is not None and declared.kind == "gradients":
                return State({of: sent[of].cpu() + t.cpu() for of, t in value.items()})
            return value
    raise ThreatError("the client does not answer with a model like the one that it was sent")


def _cpu(state: State) -> State:
    return state.like({name: t.cpu() for name, t in state.items()})
