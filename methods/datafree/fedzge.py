"""FedZGE. Ma, Wang and Zhang, "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation",
AAAI 2025, Algorithm 1.

A generator on the server makes images, clients answer with logits, and the generator's gradient is estimated from
answers to perturbed images: queries and answers travel, never a model. The paper leaves these points open or
contradicts itself, and we chose:

- Eq. 17 does not say what x^ is, one image or the batch. d is "the dimensionality of x^" in R^d, Eqs. 3-5 are
  expectations over single images, and one direction does nearly as well as twenty (Table 5): one image, it seems.
  `estimate = "image"` moves one image along a direction of its own, the others held; `"batch"` moves them all at once,
  and they share q numbers; `"split"` estimates the second factor of Eq. 16 alone. All three: _zeroth.py.
- Algorithm 1 has one query batch and one generator step a round, and Table 8 bills one. Appendix C has f and G
  "alternately trained for E = 10 iterations": E_G = 10 is that, each iteration with new images and queries (all
  billed), and f's E epochs shared out among them. Clients then distil on the last batch.
- Eq. 17 multiplies by d although u is Gaussian (d belongs to directions on the unit sphere). `scale = "unbiased"`
  drops it; Adam's step does not depend on it.
- Eq. 7 takes Euclidean norms: their product is in the hundreds for CIFAR, and e^-500 and its gradient are zero in
  single precision. It is not computed there. `distance = "rms"` divides each norm by the root of its dimension.
- The paper does not say whether Adam's state lasts from round to round. On the server, for G and f, it does. With
  `moments = "fresh"` it starts anew in each round and lasts for its E_G steps, so that with one step a round G's step
  is eta_G times the sign of the estimate. Kept moments gave the better global model (docs/results/fedzge.md). Clients
  start anew.
- Clients and f (in L_G) answer in evaluation mode, so that an answer depends on its own image alone; G runs on batch
  statistics.
- A global epoch is one step on all B images ("iterations"); the clients' batch size of 256 also holds for Eq. 20.
- Eqs. 4 and 20 have no factor tau^2; Adam would not notice it.
- Table 8 leaves out N_k, 8 bytes a client and query. Labels y^ stay on the server. Without local distillation nobody
  needs the ensemble's output and it is not sent: 63.15 GB, where Table 5 prints the 63.17 of the full method.

These settings are controls, and not part of the method. `gradient = "true"` (Figure 2) uploads the clients' weights,
and the ledger says so. `images = "frozen"` never trains the generator. `images = "real"` takes images of the public set
as x^, without a generator. E_k = 0 leaves the clients as they are.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit import (
    NUMBER,
    Client,
    Cohort,
    Down,
    Method,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    adam,
    ce,
    load,
    private,
    register,
    state_of,
)
from fedaudit.errors import SettingError
from fedaudit.methods.datafree._zeroth import ESTIMATES, Objective, true_gradient
from fedaudit.methods.shared._ensemble import Distilled, distil, ensemble, predict
from fedaudit.shape import Shape


class Query(Down):
    x: Tensor  # x^
    x_u: Tensor  # x^ + epsilon u_i, i = 1..q


class Answer(Up):
    f: Tensor = private("logits", via="model", unit="client", depends="all")  # of x^, then of its perturbations
    N: int = private("count", via="data", unit="client")


class OpenAnswer(Up):
    f: Tensor = private("logits", via="model", unit="client", depends="all")
    N: int = private("count", via="data", unit="client")
    theta: State = private("weights", via="model", unit="client")


class Consensus(Down):
    e: Tensor  # the ensemble's output on x^; made from all clients' releases, nobody's own


class Learned(Record):
    theta: State  # global model f
    theta_G: State  # generator G
    moments: dict[str, Tensor]  # of f's Adam, where they are kept
    moments_G: dict[str, Tensor]  # of G's
    agreement: float | None  # share of the last x^ that the ensemble takes for their y^


class Generator(nn.Module):
    """The generator of Table 7."""

    def __init__(self, d_z: int, shape: Shape, classes: int):
        super().__init__()
        C, H, W = shape
        if H % 4 or W % 4:
            raise SettingError(
                f"FedZGE's generator doubles its resolution twice, so it cannot make {H} x {W} images. Resize "
                f"them to a multiple of 4: --image-size {4 * math.ceil(max(H, W) / 4)}."
            )
        self.embedding = nn.Embedding(classes, d_z)
        self.layers = nn.Sequential(
            nn.Linear(2 * d_z, 128 * (H // 4) * (W // 4)),
            nn.Unflatten(1, (128, H // 4, W // 4)),
            nn.BatchNorm2d(128),
            nn.ConvTranspose2d(128, 128, 4, 2, 1),
            nn.BatchNorm2d(128),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(128, 64, 4, 2, 1),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, C, 3, 1, 1),
            nn.BatchNorm2d(C),
            nn.Tanh(),
        )

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([z, self.embedding(y)], 1))


def along(g: Tensor, x_hat: Tensor) -> Tensor:
    """Return a value whose gradient in theta_G is g times dG/dtheta_G, Eq. 18."""
    return (g * x_hat).sum()


def L_f(f: nn.Module, x: Tensor, e: Tensor, tau: float) -> Tensor:
    return distil(f, x, e, tau).mean()  # Eq. 4


@register("fedzge", tables="FedZGE")
class FedZGE(Method):
    single_replies: ClassVar[str] = "each client's answers to a query are weighted and compared with the others'"

    E_k: int = Field(10, ge=0)  # local training epochs; 0: the clients stay as they are
    B_k: int = 256  # local batch size
    E_prime: int = Field(10, ge=0)  # E'_k, local distillation epochs; 0: without L'_k
    E: int = Field(10, ge=0)  # global distillation epochs
    E_G: int = Field(1, ge=1)  # generator steps, each with its own images and queries
    B: int = Field(500, ge=2)  # synthetic images a query
    q: int = Field(10, ge=1)  # random directions
    eta_k: float = 0.01
    eta: float = 0.01
    eta_G: float = 0.001
    d_z: int = 100
    tau: float = 5.0
    beta_1: float = 1.0  # transferability; 0: without L_adv
    beta_2: float = 1.0  # diversity
    beta_3: float = 1.0  # equilibrium
    epsilon: float = Field(1e-3, gt=0)  # perturbation size
    estimate: Literal["image", "batch", "split"] = "image"
    scale: Literal["paper", "unbiased"] = "paper"
    distance: Literal["norm", "rms"] = "norm"
    moments: Literal["fresh", "kept"] = "kept"
    gradient: Literal["zeroth", "true"] = "zeroth"
    images: Literal["trained", "frozen", "real"] = "trained"

    images_only: ClassVar[str] = "trains a generator of images on the server"
    on_digits: ClassVar = {"E_k": 5, "B_k": 64, "E": 30, "B": 200, "q": 5, "estimate": "split"}
    quick: ClassVar = {"E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 16, "q": 2, "d_z": 8}
    presets: ClassVar = {
        **{name: {"B": 500, "q": 10, "E_k": 10, "E_prime": 10} for name in ("cifar10", "cifar100")},
        # Found by a search: docs/results/fedzge.md.
        "digits": {"E_k": 5, "B_k": 64, "E_prime": 1, "E": 20, "E_G": 5, "B": 200, "q": 5, "eta": 0.003},
    }

    def init(self, server: Server) -> Learned:  # line 1
        return Learned(state_of(server.model()), state_of(self.generator(server)), {}, {}, None)

    def generator(self, server: Server) -> Generator:
        return Generator(self.d_z, server.shape, server.classes).to(server.device)

    def round(self, s: Learned, server: Server, cohort: Cohort) -> Learned:
        f, G = load(server.model(), s.theta), load(self.generator(server), s.theta_G).train()
        moments, moments_G = s.moments, s.moments_G
        models: dict[int, nn.Module] = {}
        for i in range(self.E_G):
            z, y, x_hat = self.synthesise(G, server, i)
            x = x_hat.detach()
            u = torch.randn(self.directions, *x.shape, generator=server.rng(f"u {i}"), device=x.device)  # line 13
            ask = self.again if i else self.first_openly if self.openly else self.first
            replies: dict[int, Any] = cohort.ask(ask, Query(x, x + self.epsilon * u))  # lines 4-18
            N = {k: r.N for k, r in replies.items()}
            outputs = ensemble({k: r.f for k, r in replies.items()}, N)  # line 20
            e, e_u = outputs[: self.B], outputs[self.B :].view(self.directions, self.B, server.classes)
            if self.images == "trained":
                if self.openly:
                    models = models or {k: load(server.model(server.arch(k)), r.theta) for k, r in replies.items()}
                    g = true_gradient(self.L_G, f, x, {k: models[k] for k in N}, N, e, z, y)
                else:
                    g = self.estimated(f, x, u, e, e_u, z, y)
                theta_G, step = list(G.parameters()), partial(along, g, x_hat)
                moments_G = server.optimise(theta_G, step, steps=1, opt=adam(self.eta_G), moments=moments_G)  # Eq. 19
            theta, step = list(f.train().parameters()), partial(L_f, f, x, e, self.tau)
            epochs = self.E * (i + 1) // self.E_G - self.E * i // self.E_G
            moments = server.optimise(theta, step, steps=epochs, opt=adam(self.eta), moments=moments)  # Eq. 12
            f.eval()
        if self.E_prime:
            cohort.ask(self.local_distillation, Consensus(e))  # lines 28-34
        kept = (moments, moments_G) if self.moments == "kept" else ({}, {})
        agreement = None if self.images == "real" else (e.argmax(1) == y).double().mean().item()
        return Learned(state_of(f), state_of(G), *kept, agreement)

    @property
    def directions(self) -> int:
        return self.q if self.images == "trained" and self.gradient == "zeroth" else 0

    @property
    def openly(self) -> bool:
        """Return whether clients upload their models, for true gradients."""
        return self.images == "trained" and self.gradient == "true"

    def synthesise(self, G: Generator, server: Server, i: int) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.randn(self.B, self.d_z, generator=server.rng(f"z {i}"), device=server.device)  # line 10
        y = torch.randint(server.classes, (self.B,), generator=server.rng(f"y {i}"), device=server.device)  # line 11
        if self.images != "real":
            return z, y, G(z, y)  # line 12
        x = server.public[0]
        return z, y, x[torch.randint(len(x), (self.B,), generator=server.rng(f"x {i}"), device=server.device)]

    @property
    def L_G(self) -> Objective:
        return Objective(self.tau, self.beta_1, self.beta_2, self.beta_3, rms=self.distance == "rms")

    def estimated(self, f: nn.Module, x: Tensor, u: Tensor, e: Tensor, e_u: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Return Eq. 17; e and e_u are the ensemble's outputs at x and at x + epsilon u."""
        g = ESTIMATES[self.estimate](self.L_G, self.epsilon, f, x, u, e, e_u, z, y)
        return g * x[0].numel() if self.scale == "paper" else g  # d

    # --- on client k ---

    def first(self, client: Client, msg: Query) -> Answer:
        if self.E_k:
            client.fit(ce, epochs=self.E_k, batch=self.B_k, opt=adam(self.eta_k))  # lines 6-8, Eq. 1
        return self.again(client, msg)

    def again(self, client: Client, msg: Query) -> Answer:
        if self.E_prime:
            client.memory["x"] = msg.x
        queries = torch.cat([msg.x, msg.x_u.flatten(0, 1)])
        return Answer(predict(client.model, queries), len(client))  # line 17

    def first_openly(self, client: Client, msg: Query) -> OpenAnswer:
        answer = self.first(client, msg)
        return OpenAnswer(answer.f, answer.N, state_of(client.model))

    def local_distillation(self, client: Client, msg: Consensus) -> Distilled:
        given = {"tau": self.tau}
        x = client.memory.pop("x")
        client.fit(
            distil, (x, msg.e), epochs=self.E_prime, batch=self.B_k, opt=adam(self.eta_k), given=given
        )  # lines 31-33, Eq. 20
        return Distilled()

    def predictor(self, s: Learned, server: Server) -> nn.Module:
        return load(server.model(), s.theta)  # line 36

    def diagnostics(self, s: Learned) -> dict[str, float]:
        return {} if s.agreement is None else {"agreement of e with y^": s.agreement}

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:  # Table 8, E_G times
        x, f = plan.tensor(self.B, *plan.shape), plan.tensor(self.B, plan.classes)
        asked = sum(len(plan.asked(i)) for i in range(self.E_G))
        sent: dict[tuple[str, str], Size | int] = {
            ("down", "Query.x"): x * asked,
            ("down", "Query.x_u"): x * self.directions * asked,
        }
        for name, asks in (("OpenAnswer", range(self.openly)), ("Answer", range(self.openly, self.E_G))):
            if answers := sum(len(plan.replied(i)) for i in asks):
                sent["up", f"{name}.f"] = plan.tensor((1 + self.directions) * self.B, plan.classes) * answers
                sent["up", f"{name}.N"] = NUMBER * answers
        if self.openly:
            sent["up", "OpenAnswer.theta"] = sum(plan.state(k) for k in plan.replied(0))
        if self.E_prime:
            sent["down", "Consensus.e"] = f * len(plan.asked(self.E_G))
        return sent
