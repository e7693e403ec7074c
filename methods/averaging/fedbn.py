"""FedBN. Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1.

FedAvg of everything but batch norm: its weights, biases and statistics stay with the client. With a model that has no
batch norm it is FedAvg, to the bit.

The papers leave these points open, and we chose:

- FedAF reports the accuracy of a *global* model for FedBN (Table 1), which has none: nobody holds batch-norm layers for
  it. We read it as the mean accuracy of the clients' models on the common test set, which every run reports. If the
  model has no batch norm, there is a global model, and it is evaluated.
- In Algorithm 1 every client weighs the same; here every record does, as in FedAvg.
- Group and layer norm travel; the paper speaks of batch norm alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedaudit import (
    NUMBER,
    Client,
    Cohort,
    Down,
    Part,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    ce,
    load,
    private,
    register,
    state_of,
    trained,
)
from fedaudit.methods.averaging.fedavg import FedAvg


class Shared(Down):
    w: State  # all but batch norm


class Trained(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


class Averaged(Record):
    w: State


def travels(model: nn.Module) -> set[str]:
    """Return the names of the tensors that do not belong to a batch norm."""
    names = set(model.state_dict())
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            names -= {f"{path}.{name}" for name in layer.state_dict()}
    return names


def trained_without_norms(model: nn.Module) -> set[str]:
    return travels(model) & trained(model)


@register("fedbn", tables="FedAF")
class FedBN(FedAvg):
    """Average models, but keep each client's batch norms with it.

    A client sends its other weights and its number of records.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9}}

    @property
    def part(self) -> Part:
        return travels if self.send == "all" else trained_without_norms

    def init(self, server: Server) -> Averaged:
        return Averaged(state_of(server.model(), self.part))

    def round(self, s: Averaged, server: Server, cohort: Cohort) -> Averaged:
        return Averaged(cohort.mean(self.client_update, Shared(s.w), by="n").value.w)

    def client_update(self, client: Client, msg: Shared) -> Trained:  # on client k
        load(client.model, msg.w, self.part)
        client.fit(ce, **self.local_training, batch=self.B, opt=self.optimiser(self.eta))
        return Trained(state_of(client.model, self.part), len(client))

    def predictor(self, s: Averaged, server: Server) -> nn.Module | None:
        model = server.model()
        return load(model, s.w) if travels(model) == set(model.state_dict()) else None

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        w = plan.state(part=self.part)
        return {
            ("down", "Shared.w"): w * len(plan.asked(0)),
            ("up", "Trained.w"): w * len(plan.replied(0)),
            ("up", "Trained.n"): NUMBER * len(plan.replied(0)),
        }
