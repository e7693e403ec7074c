"""FedZKT. Zhang, Wu and Yuan, "FedZKT: Zero-Shot Knowledge Transfer towards Resource-Constrained Federated Learning
with Heterogeneous On-Device Models", ICDCS 2022.

Devices have models of their own architectures and upload them. The server distils their ensemble into a global model F
on data from a generator that looks for disagreement. Still on the server, it distils F back into each device's model,
and sends that back. Devices do nothing but local training.

    L_SL(F, ens) = || softmax F(x) - 1/m sum_k softmax f_k(x) ||_1,  x = G(z):  G raises it, F lowers it
    then, for each device k: min || softmax F(x) - softmax f_k(x) ||_1 over f_k
    on the device: CE + mu / 2 ||theta - theta_received||^2

We do not have the paper; this is written from its published description. Where that leaves room, we chose:

- The loss of the way back is the SL loss of the way in.
- Transferred models travel at the end of the round, so that they are what a device deploys; one that fails to answer
  there keeps what it trained. Down and up are |theta_k| for each device, as FedZGE's Table 8 says.
- Only the round's devices are in the ensemble, and only they get models back.
- F and G go on from round to round; optimiser state lasts one round. Steps, rates, mu and the generator are ours.
- Batch norm in the devices' models: batch statistics while they learn from F, so that the running ones follow the
  synthetic data; the statistics that the device uploaded are put back before its model is sent (`keep_statistics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import (
    Client,
    Cohort,
    Down,
    Many,
    Method,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    adam,
    load,
    private,
    register,
    sgd,
    state_of,
)  # fmt: skip
from fedaudit.methods.datafree._datafree import frozen, learning, take_turns
from fedaudit.methods.datafree._generator import Generator, teach


class Train(Down):
    pass


class OnDevice(Up):
    w: State = private("weights", via="model", unit="client")


class Transferred(Down):
    w: State


class Absorbed(Up):
    pass


class Central(Record):
    w: State  # the global model F
    G: State


def local_loss(f: Any, x: Tensor, y: Tensor, received: Mapping[str, Tensor], mu: float) -> Tensor:
    """Return the cross-entropy with the proximal term, one value per row."""
    far = sum((p - received[name]).square().sum() for name, p in f.params.items())
    return cross_entropy(f(x), y, reduction="none") + mu / 2 * far


def L_SL(a: Tensor, b: Tensor) -> Tensor:
    """Return the l1 distance of two probability vectors, one value per row."""
    return (a - b).abs().sum(-1)


@register("fedzkt", tables="FedZGE")
class FedZKT(Method):
    """Distil unlike clients' models on the server, without data. A client sends its weights."""

    single_replies: ClassVar[str] = "each client's model is distilled from and back into by itself"

    images_only: ClassVar[str] = "trains a generator of images on the server"
    on_digits: ClassVar[Mapping[str, Any]] = {
        "E": 5, "B": 16, "eta": 0.1, "I": 20, "I_k": 20, "width": 32, "B_s": 32,
    }  # fmt: skip
    quick: ClassVar[Mapping[str, Any]] = {"I": 1, "I_d": 1, "I_k": 1, "B_s": 16, "d": 8, "width": 8}

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    opt: Literal["sgd", "adam"] = "sgd"  # optimiser of local training
    mu: float = 0.1  # proximal term
    I: int = 50  # turns of generator and global model in a round  # noqa: E741
    I_g: int = 1  # steps of the generator in a turn
    I_d: int = 5  # steps of the global model in a turn
    I_k: int = 50  # steps of each device's model on the way back
    B_s: int = 64  # synthetic batch
    eta_g: float = 1e-3  # learning rate of the generator, Adam
    eta_d: float = 0.01  # learning rate of the global model, SGD
    eta_k: float = 0.01  # learning rate of the way back, SGD
    momentum: float = 0.9  # of both, on the server
    d: int = 100  # dimension of z
    width: int = 128  # channels of the generator
    keep_statistics: bool = True

    def generator(self, server: Server) -> Generator:
        return Generator("none", self.d, server.shape, server.classes, self.width).to(server.device).train()

    def init(self, server: Server) -> Central:
        return Central(state_of(server.model()), state_of(self.generator(server)))

    def round(self, s: Central, server: Server, cohort: Cohort) -> Central:
        replies = cohort.ask(self.local_update, Train())
        f = {k: server.model(server.arch(k), state=r.w) for k, r in replies.items()}
        F, G = server.model(state=s.w), load(self.generator(server), s.G)
        rng = server.rng("z")
        self.collect(server, F, G, list(f.values()), rng)
        for k, f_k in f.items():
            self.give_back(server, F, G, f_k, rng)
            if self.keep_statistics:
                load(f_k, {**state_of(f_k), **{name: replies[k].w[name] for name in replies[k].w.buffers}})
        cohort.ask(self.absorb, {k: Transferred(state_of(f_k)) for k, f_k in f.items()})
        return Central(state_of(F), state_of(G))

    def collect(
        self, server: Server, F: nn.Module, G: nn.Module, devices: list[nn.Module], rng: torch.Generator
    ) -> None:
        """Distil the devices' ensemble into F, against the generator."""
        ensemble_of = Many(frozen(f_k) for f_k in devices)

        def disagreement(x: Tensor) -> Tensor:
            ensemble = teach(ensemble_of, x).softmax(2).mean(0)
            return L_SL(F(x).softmax(1), ensemble).mean()

        def sample() -> Tensor:
            return G(torch.randn(self.B_s, self.d, generator=rng, device=rng.device))

        def global_model() -> Tensor:
            with torch.no_grad():
                x = sample()
            return disagreement(x)

        opts = adam(self.eta_g), sgd(self.eta_d, momentum=self.momentum)
        take_turns(
            server, G, F, lambda: -disagreement(sample()), global_model,
            turns=self.I, steps=(self.I_g, self.I_d), opts=opts,
        )  # fmt: skip

    def give_back(self, server: Server, F: nn.Module, G: nn.Module, f_k: nn.Module, rng: torch.Generator) -> None:
        """Distil F into one device's model."""
        frozen(F)
        learning(f_k)

        def loss() -> Tensor:
            with torch.no_grad():
                x = G(torch.randn(self.B_s, self.d, generator=rng, device=rng.device))
                teacher = F(x).softmax(1)
            return L_SL(f_k(x).softmax(1), teacher).mean()

        server.optimise(list(f_k.parameters()), loss, steps=self.I_k, opt=sgd(self.eta_k, momentum=self.momentum))

    def local_update(self, client: Client, msg: Train) -> OnDevice:
        received = {name: p.detach().clone() for name, p in client.model.named_parameters()}
        given = {"received": received, "mu": self.mu}
        opt = adam(self.eta) if self.opt == "adam" else sgd(self.eta)
        client.fit(local_loss, epochs=self.E, batch=self.B, opt=opt, given=given)
        return OnDevice(state_of(client.model))

    def absorb(self, client: Client, msg: Transferred) -> Absorbed:
        load(client.model, msg.w)
        return Absorbed()

    def predictor(self, s: Central, server: Server) -> nn.Module:
        return server.model(state=s.w)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("up", "OnDevice.w"): sum((plan.state(k) for k in plan.replied(0)), Size()),
            ("down", "Transferred.w"): sum((plan.state(k) for k in plan.asked(1)), Size()),
        }
