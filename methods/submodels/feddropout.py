"""Federated Dropout. Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018; as DFRD's random scheme (Luo et al., NeurIPS 2023, Section 2).

Each client gets, in each round, units drawn at random for it alone. They follow from a seed that travels with the
sub-model (8 bytes), so that the client, and whoever audits the transcript, knows which part of the model it trained.

DFRD leaves these points open, and we chose (see also fedaudit/methods/submodels/_submodel.py):

- Caldas et al. drop the same share for all clients, and compress what travels; here each client has its width R_i,
  and nothing is compressed.
- They drop hidden fully-connected units and filters and keep the input and the logits, and so do we. Dropped units are
  absent from the sub-model; its activations are not scaled up, in training or after.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

import torch

from fedaudit import NUMBER, Down, Plan, Sender, Size, State, register
from fedaudit.methods.submodels._submodel import Layout, Pick, SubModels, Units, choose, ratio_of


class RandomPart(Down):
    seed: int  # which units: see `drawn`
    w: State


def drawn(seed: int) -> Pick:
    """Return a function that draws so many of a layer's units, without replacement, in their order.

    Layer after layer draws from one generator.
    """
    rng = torch.Generator().manual_seed(seed)

    def pick(width: int, m: int) -> torch.Tensor:
        return torch.randperm(width, generator=rng)[:m].sort().values

    return pick


@register("feddropout", tables="DFRD")
class FederatedDropout(SubModels):
    """Average random sub-models. A client sends the weights of its sub-model."""

    single_replies: ClassVar[str] = "each client trains units of its own, so a sum tells whose entries are whose"

    def groups(self, archs: tuple[str, ...]) -> list[int]:
        return list(range(len(archs)))

    def taken(self, plan: Layout, sender: Sender, message: RandomPart) -> Units:
        return choose(plan, ratio_of(sender.arch), drawn(message.seed))

    def units(self, plan: Layout, R: Fraction, server: Any, k: int) -> tuple[Units, Callable[[State], Down]]:
        seed = server.rng(f"units of client {k}").initial_seed() % 2**62
        return choose(plan, R, drawn(seed)), partial(RandomPart, seed)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        declared = super().traffic(plan)
        declared["down", "RandomPart.w"] = declared.pop(("down", "Part.w"))
        return declared | {("down", "RandomPart.seed"): NUMBER * len(plan.asked(0))}
