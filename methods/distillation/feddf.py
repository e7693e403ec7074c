"""FedDF. Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, Algorithm 1.

    clients:  local training, as FedAvg's
    server:   x_{t,0} = sum_k n_k / n x_k;  then N steps on batches d of an unlabelled set:
              x_{t,j} = x_{t,j-1} - eta grad KL( sigma( 1/|S| sum_{k in S} f(x_k, d) ), sigma( f(x_{t,j-1}, d) ) )

The server holds the unlabelled set and nobody else needs it: what travels is the host's traffic. The host is FedAvg, as
in Algorithm 1; `heterofl+feddf` and the like distil the sub-models of those hosts into their global model.

We do not have the paper; this is written from its published description. That leaves these points open, and we chose:

- The paper stops when a validation set on the server has not improved for a thousand steps, of ten thousand at most.
  Here N is fixed: a server has no validation records. `N = 0` is the host, to the bit.
- Its rate falls by a cosine from 0.001 with Adam; here it stays.
- Each round's optimiser starts anew, as the student does.
- The teachers run in evaluation mode, on the batch-norm statistics that they uploaded, and answer once for each row.
  The student's batch norm sees the batches of the unlabelled set, as in any training. HeteroFL's sub-models upload no
  statistics: they normalise each chunk of rows by itself.
- Clients of several architectures with a global model for each (the paper's Algorithm 3) are not here: the hosts have
  one global model.
- The set is the setting's `public` share of the same data, its labels unread, or another data set
  (`public_dataset`), as in the paper: CIFAR-100 for CIFAR-10. Sets made by a generator or of noise are not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field, create_model
from torch import Tensor, nn

from fedaudit import Client, Cohort, Method, Plan, Record, Server, Size, State, adam, kl, register, sgd, state_of
from fedaudit.methods.averaging.fedavg import FedAvg
from fedaudit.methods.datafree._host import Overheard, host_of
from fedaudit.methods.shared._ensemble import predict
from fedaudit.methods.submodels.feddropout import FederatedDropout
from fedaudit.methods.submodels.fedrolex import FedRolex
from fedaudit.methods.submodels.heterofl import HeteroFL


class Fused(Record):
    host: Record
    before: State  # the host's global model before the distillation
    agreement: float  # share of the unlabelled rows on which the fused model says what the ensemble says; -1: no round


def avg_logits(f: Any, d: Tensor, e: Tensor, tau: float) -> Tensor:
    """Return KL(sigma(e), sigma(f(d))), one value per row; e is the mean of the teachers' logits."""
    return kl(e, f(d), tau)


@register("feddf")
class FedDF(Method):
    """Distil averaged models on unlabelled public records. A client sends its weights and its number of records."""

    single_replies: ClassVar[str] = "the uploaded models are the teachers of a distillation, each by itself"

    host: FedAvg = FedAvg()
    N: int = Field(default=1000, ge=0)  # steps of distillation in a round
    B: int = Field(default=128, ge=2)  # unlabelled rows in a step
    eta: float = Field(default=1e-3, gt=0)  # learning rate of the student
    opt: Literal["adam", "sgd"] = "adam"  # its optimiser
    tau: float = Field(default=1.0, gt=0)  # temperature of the distillation

    needs_public: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"N": 4, "B": 16}
    on_digits: ClassVar[Mapping[str, Any]] = {"N": 100, "B": 32, "host": {"E": 5, "B": 16, "eta": 0.1}}

    def archs(self, model: str, clients: int) -> list[str]:
        return self.host.archs(model, clients)

    def server_arch(self, model: str) -> str | None:
        return self.host.server_arch(model)

    def init(self, server: Server) -> Fused:
        s = self.host.init(server)
        return Fused(s, cast(Any, s).w, -1.0)

    def round(self, s: Fused, server: Server, cohort: Cohort) -> Fused:
        heard, host = Overheard(cohort, server), host_of(self.host)
        after = host.train(s.host, server, heard)  # x_{t,0}
        if not self.N:
            return Fused(host.settle(after, server, cohort), after.w, -1.0)
        d = server.public[0]
        teachers = [host.teacher(server, k, r.w) for k, r in heard.replies[0].items()]
        e = torch.stack([predict(f, d) for f in teachers]).mean(0)  # 1/|S| sum_k f(x_k, d)
        f = server.model(state=after.w)
        make = adam if self.opt == "adam" else sgd
        given = {"tau": self.tau}
        server.fit(f, avg_logits, (d, e), steps=self.N, batch=self.B, opt=make(self.eta), given=given)  # x_{t,N}
        agreement = float((predict(f, d).argmax(1) == e.argmax(1)).double().mean())
        tuned = dataclasses.replace(cast(Any, after), w=state_of(f, lambda _: after.w.keys()))
        return Fused(host.settle(tuned, server, cohort), after.w, agreement)

    def predictor(self, s: Fused, server: Server) -> nn.Module | None:
        return self.host.predictor(cast(Any, s.host), server)

    def global_points(self, s: Fused, server: Server) -> dict[str, nn.Module]:
        return {"before distillation": server.model(state=s.before)}

    def diagnostics(self, s: Fused) -> dict[str, float]:
        return {**self.host.diagnostics(s.host), **({} if s.agreement < 0 else {"agreement": s.agreement})}

    def personal(self, client: Client) -> nn.Module:
        return self.host.personal(client)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return self.host.traffic(plan) or {}


HOSTS: dict[str, type[Method]] = {"heterofl": HeteroFL, "feddropout": FederatedDropout, "fedrolex": FedRolex}
for _name, _host in HOSTS.items():
    _fields: dict[str, Any] = {"host": (_host, _host())}
    _cls = create_model(f"{_host.__name__}AndFedDF", __base__=FedDF, __module__=FedDF.__module__, **_fields)
    _cls.on_digits = {**FedDF.on_digits, "host": dict(_host.on_digits)}
    register(f"{_name}+feddf")(_cls)
