"""FedGen as HtFLlib has it, and DFFKE compares with (FedGen with a dagger in its Tables 2 and 3): FedGen on LG-FedAvg.

FedGen (see fedgen.py) averages whole models. If models differ, only their classifiers can be averaged: theta^p, the
predictor on top of the embedding, travels with the label counts; encoders stay with the clients. The generator of
latents is trained as in FedGen, by the uploaded classifiers, and clients learn from its latents as in Eq. 5.

These points are left open, and we chose:

- Everything is as in FedGen, but the classifiers' average is weighted by records, as in LG-FedAvg. The sums of the
  label counts are the numbers of records. (`weights = "equal"`: all weigh the same.)
- HtFLlib (preset `htfllib`): noise of 32 numbers, uniform; 100 steps of the generator at 0.1; logits averaged by
  records. Its server trains the generator and does not save it: clients learn from the first, untrained one in all
  rounds. Here they get the trained one. DFFKE's code has the same slip, and batches of 100 (preset `dffke_authors`).
- All embeddings have one width. There is no global model: a client deploys its own, after local training. HtFLlib
  scores it with the new classifier, before the next training: the point "new head" of every evaluated round.
- Images instead of latents (`space = "image"`) need a whole model on the server; there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedaudit import Client, Part, Server, register, state_of
from fedaudit.methods.datafree.fedgen import FedGen, Learned
from fedaudit.methods.prototypes.fedproto import DFFKE
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS, HTFLLIB
from fedaudit.methods.shared._prototypes import common_width, head, with_head

IN_HTFLLIB = {
    "I_g": 100, "eta_g": 0.1, "d": 32, "hidden": 512, "noise": "uniform", "teacher": "samples", "weights": "samples",
}  # fmt: skip


@register("fedgen_lg", tables="DFFKE")
class FedGenLG(FedGen):
    """Train a shared head with a generator of embeddings. A client sends its head and its label counts."""

    space: Literal["latent"] = "latent"
    weights: Literal["equal", "samples"] = "samples"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "dffke_authors": {**DFFKE_AUTHORS, **IN_HTFLLIB, "B_hat": 100, "B_g": 100},
        "htfllib": {**HTFLLIB, **IN_HTFLLIB, "B_hat": 10, "B_g": 10},
    }

    def part(self) -> Part:
        return head

    def init(self, server: Server) -> Learned:
        width = common_width(server, self.registered_name)
        p = torch.full((server.classes,), 1 / server.classes, device=server.device)
        theta = state_of(server.model(server.arch(0)), head)
        return Learned(theta, state_of(self.generator(server, width)), p)

    def next_points(self, s: Learned, client: Client) -> dict[str, nn.Module]:
        return {"new head": with_head(client.model, s.theta)}

    def predictor(self, s: Learned, server: Server) -> None:
        return None
