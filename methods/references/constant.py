"""The constant predictor: each client answers with the most frequent class among its own records, whatever the image.

Nothing crosses the wire. Personalised accuracy on skewed local test sets has to be read against this floor: with one
class per client a constant is perfect.

The constant is deployed as the client's own network with the weights of its last layer 0 and the bias 1 for that
class, so that it can be saved, published and attacked like any other.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from fedaudit import Client, Cohort, Down, Method, Plan, Record, Server, Size, Up, register


class Go(Down):
    pass


class Counted(Up):
    pass


class Nothing(Record):
    pass


@register("constant")
class Constant(Method):
    """Answer with a client's most frequent class. Nothing leaves a client."""

    def init(self, server: Server) -> Nothing:
        return Nothing()

    def round(self, s: Nothing, server: Server, cohort: Cohort) -> Nothing:
        cohort.ask(self.count, Go())
        return s

    @torch.no_grad()
    def count(self, client: Client, msg: Go) -> Counted:
        majority = client.y.bincount(minlength=client.classes).argmax()
        classifier = cast(nn.Linear, client.model.classifier)
        classifier.weight.zero_()
        classifier.bias.zero_()[majority] = 1
        return Counted()

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {}
