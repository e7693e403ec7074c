"""FedZGE. Ma, Wang and Zhang, "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation",
AAAI 2025, Algorithm 1.

A generator on the server makes images, clients answer with logits, and the generator's gradient is estimated from
answers to perturbed images: queries and answers travel, never a model. The paper leaves these points open or
contradicts itself, and we chose:

- Eq. 17 does not say what x^ is, one image or the batch. d is "the dimensionality of x^" in R^d, Eqs. 3-5 are
  expectations over single images, and one direction does nearly as well as twenty (Table 5): one image, it seems.
  `estimate = "image"` moves one image along a direction of its own, the others held; `"batch"` moves them all at once,
  and they share q numbers; `"split"` estimates the second factor of Eq. 16 alone. All three: _zeroth.py. The authors'
  code contradicts that argument: it takes one difference of the whole batch's loss along each direction.
- Algorithm 1 has one query batch and one generator step a round, and Table 8 bills one. Appendix C has f and G
  "alternately trained for E = 10 iterations": E_G = 10 is that, each iteration with new images and queries (all
  billed), and f's E epochs shared out among them. Clients then distil on the last batch.
- Eq. 17 multiplies by d although u is Gaussian (d belongs to directions on the unit sphere). `scale = "unbiased"`
  drops it; Adam's step does not depend on it. The authors' code scales each image's Gaussian direction to length 1
  (`directions = "sphere"`), where d is right, and where epsilon = 0.001 is 1.8e-5 a pixel on CIFAR.
- Eq. 7 takes Euclidean norms: their product is in the hundreds for CIFAR, and e^-500 and its gradient are zero in
  single precision. It is not computed there. `distance = "rms"` divides each norm by the root of its dimension. The
  authors' code has mean squares in place of both norms (`"ms"`), under which the term acts.
- The paper does not say whether Adam's state lasts from round to round. On the server, for G and f, it does. With
  `moments = "fresh"` it starts anew in each round and lasts for its E_G steps, so that with one step a round G's step
  is eta_G times the sign of the estimate. Kept moments gave the better global model (docs/results/fedzge.md). Clients
  start anew.
- Clients and f (in L_G) answer in evaluation mode, so that an answer depends on its own image alone; G runs on batch
  statistics. The authors' clients answer in training mode: each batch of B queries is normalised by its own statistics
  (`answers = "batch"`). f in L_G is in evaluation mode there too.
- A global epoch is one step on all B images ("iterations"); the clients' batch size of 256 also holds for Eq. 20. In
  the authors' code a step of Eq. 20 is on all B images (`B_prime = "all"`).
- Rates are constant. In the authors' code all three, of f's steps, of local training and of Eq. 20, fall along a cosine
  within the round (`schedule = "cosine"`).
- Eq. 20 has the rate of local training, in the authors' code too. The command of its README has three epochs at 2e-5,
  options that its program does not know: what is left of another state, in which Eq. 20 hardly acted (`eta_prime`).
- f is tested at the end of a round, in evaluation mode. The authors' code tests in training mode, where 256 test images
  at a time are normalised by their own statistics, and takes the best of f's E inner steps by the test set. `tested =
  "batch"` scores f in that mode too, under `global_points`; `"inner"` scores each inner step so. Their best is selected
  on the test set, and a table has to say so.
- Eqs. 4 and 20 have no factor tau^2. The authors' code has it, and Adam hardly notices it.
- Table 8 leaves out N_k, 8 bytes a client and query. Labels y^ stay on the server. Without local distillation nobody
  needs the ensemble's output and it is not sent: 63.15 GB, where Table 5 prints the 63.17 of the full method.

The preset `authors` is the public code's reading of all these points; the run's own setting has to say `init = "own"`
besides, because there each client and the server start from weights of their own. That code trains the generator with
transposed convolutions without a bias, and on real images in [0, 1] beside generated ones in [-1, 1]. Here both are in
[-1, 1], and the convolutions have a bias. Its term L_info of a perturbed batch takes the logarithm of the unperturbed
p, a slip that is not repeated here. It divides Eq. 17 by B once more, lets the rate of Eq. 20 fall over E_k epochs
whatever E'_k is, makes a step of a last batch of one record, and moves running statistics in tests. With these points
mended the two do the same (docs/results/authors.md).

These settings are controls, and not part of the method. `gradient = "true"` (Figure 2) uploads the clients' weights,
and the ledger says so. `images = "frozen"` never trains the generator. `images = "real"` takes images of the public set
as x^, without a generator. E_k = 0 leaves the clients as they are.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

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
from fedaudit.methods.datafree._zeroth import ESTIMATES, Distance, Objective, true_gradient
from fedaudit.methods.shared._batch_statistics import OnBatchStatistics, predict_on_batches
from fedaudit.methods.shared._ensemble import Distilled, distil, ensemble, predict
from fedaudit.shape import Shape
from fedaudit.training.fit import Schedule


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
    inner: dict[int, State] = dataclasses.field(default_factory=dict)  # f after each inner step of the round, if kept


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
    """Train a generator by asking black boxes.

    A client sends logits on the server's images, and its size.
    """

    E_k: int = Field(10, ge=0)  # local training epochs; 0: the clients stay as they are
    B_k: int = 256  # local batch size
    E_prime: int = Field(10, ge=0)  # E'_k, local distillation epochs; 0: without L'_k
    E: int = Field(10, ge=0)  # global distillation epochs
    E_G: int = Field(1, ge=1)  # generator steps, each with its own images and queries
    B: int = Field(500, ge=2)  # synthetic images a query
    q: int = Field(10, ge=1)  # random directions
    eta_k: float = 0.01
    eta_prime: float | None = None  # of Eq. 20; None: eta_k
    eta: float = 0.01
    eta_G: float = 0.001
    d_z: int = 100
    tau: float = 5.0
    beta_1: float = 1.0  # transferability; 0: without L_adv
    beta_2: float = 1.0  # diversity
    beta_3: float = 1.0  # equilibrium
    epsilon: float = Field(1e-3, gt=0)  # perturbation size
    directions: Literal["gaussian", "sphere"] = "gaussian"
    estimate: Literal["image", "batch", "split"] = "image"
    scale: Literal["paper", "unbiased"] = "paper"
    distance: Distance = "norm"
    moments: Literal["fresh", "kept"] = "kept"
    schedule: Schedule = "constant"  # of all rates but the generator's, within a round
    answers: Literal["running", "batch"] = "running"  # the statistics by which a client's batch norms answer a query
    B_prime: Annotated[int, Field(ge=1)] | Literal["local", "all"] = "local"  # batch of Eq. 20: B_k, or all B images
    tested: Literal["end", "batch", "inner"] = "end"  # points of a round that are scored by test batch statistics
    gradient: Literal["zeroth", "true"] = "zeroth"
    images: Literal["trained", "frozen", "real"] = "trained"

    images_only: ClassVar[str] = "trains a generator of images on the server"
    on_digits: ClassVar = {"E_k": 5, "B_k": 64, "E": 30, "B": 200, "q": 5}
    quick: ClassVar = {"E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 16, "q": 2, "d_z": 8}
    presets: ClassVar = {
        **{name: {"B": 500, "q": 10, "E_k": 10, "E_prime": 10} for name in ("cifar10", "cifar100")},
        # The authors' public code. The setting has to say init = "own" besides.
        "authors": {
            "B": 500,
            "q": 10,
            "E_k": 10,
            "E_prime": 10,
            "estimate": "batch",
            "directions": "sphere",
            "distance": "ms",
            "moments": "fresh",
            "schedule": "cosine",
            "answers": "batch",
            "B_prime": "all",
            "tested": "batch",
        },
        # Found by a search: docs/results/fedzge.md.
        "digits": {"E_k": 5, "B_k": 64, "E_prime": 1, "E": 20, "E_G": 5, "B": 200, "q": 5, "eta": 0.003},
    }

    def init(self, server: Server) -> Learned:  # line 1
        return Learned(state_of(server.model()), state_of(self.generator(server)), {}, {}, None)

    def generator(self, server: Server) -> Generator:
        return Generator(self.d_z, server.shape, server.classes).to(server.device)

    def round(self, s: Learned, server: Server, cohort: Cohort) -> Learned:
        f, G = server.model(state=s.theta), load(self.generator(server), s.theta_G).train()
        moments, moments_G = s.moments, s.moments_G
        models: dict[int, nn.Module] = {}
        inner: dict[int, State] = {}
        for i in range(self.E_G):
            z, y, x_hat = self.synthesise(G, server, i)
            x = x_hat.detach()
            u = self.drawn_directions(x, server.rng(f"u {i}"))  # line 13
            ask = self.again if i else self.first_openly if self.openly else self.first
            query = Query(x, x + self.epsilon * u)
            replies: dict[int, Any] = cohort.ask(ask, query) if self.openly else {}  # lines 4-18
            N = {k: r.N for k, r in replies.items()}
            if self.openly:
                outputs = ensemble({k: r.f for k, r in replies.items()}, N)  # line 20
            else:
                mean: Any = cohort.mean(ask, query, by="N")
                outputs = mean.value.f
            e, e_u = outputs[: self.B], outputs[self.B :].view(self.queried, self.B, server.classes)
            if self.images == "trained":
                if self.openly:
                    models = models or {k: server.model(server.arch(k), state=r.theta) for k, r in replies.items()}
                    g = true_gradient(self.L_G, f, x, {k: models[k] for k in N}, N, e, z, y)
                else:
                    g = self.estimated(f, x, u, e, e_u, z, y)
                theta_G, step = list(G.parameters()), partial(along, g, x_hat)
                moments_G = server.optimise(theta_G, step, steps=1, opt=adam(self.eta_G), moments=moments_G)  # Eq. 19
            theta, step = list(f.train().parameters()), partial(L_f, f, x, e, self.tau)
            epochs = self.E * (i + 1) // self.E_G - self.E * i // self.E_G
            opt = adam(self.eta, schedule=self.schedule)
            keep = partial(self.keep_inner, inner, f) if self.tested == "inner" else None
            moments = server.optimise(theta, step, steps=epochs, opt=opt, moments=moments, before=keep)  # Eq. 12
            if keep is not None and epochs:
                keep(epochs)
            f.eval()
        if self.E_prime:
            cohort.ask(self.local_distillation, Consensus(e))  # lines 28-34
        kept = (moments, moments_G) if self.moments == "kept" else ({}, {})
        agreement = None if self.images == "real" else (e.argmax(1) == y).double().mean().item()
        return Learned(state_of(f), state_of(G), *kept, agreement, inner)

    def needs_single_replies(self) -> str:
        return "a true gradient goes through each client's model" if self.openly else ""

    def keep_inner(self, inner: dict[int, State], f: nn.Module, step: int) -> None:
        """Keep f as it is after so many inner steps, under the next number."""
        if step:
            inner[len(inner) + 1] = state_of(f)

    def drawn_directions(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return u_i, i = 1..q, for each image: Gaussian, or scaled to length 1."""
        u = torch.randn(self.queried, *x.shape, generator=rng, device=x.device)
        if self.directions != "sphere":
            return u
        return u / u.flatten(2).norm(dim=2).clamp_min(torch.finfo(u.dtype).tiny)[..., None, None, None]

    @property
    def queried(self) -> int:
        """Return how many perturbations of a batch are asked for."""
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
        return Objective(self.tau, self.beta_1, self.beta_2, self.beta_3, self.distance)

    def estimated(self, f: nn.Module, x: Tensor, u: Tensor, e: Tensor, e_u: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Return Eq. 17; e and e_u are the ensemble's outputs at x and at x + epsilon u."""
        g = ESTIMATES[self.estimate](self.L_G, self.epsilon, f, x, u, e, e_u, z, y)
        return g * x[0].numel() if self.scale == "paper" else g  # d

    # --- on client k ---

    def first(self, client: Client, msg: Query) -> Answer:
        if self.E_k:
            opt = adam(self.eta_k, schedule=self.schedule)
            client.fit(ce, epochs=self.E_k, batch=self.B_k, opt=opt)  # lines 6-8, Eq. 1
        return self.again(client, msg)

    def again(self, client: Client, msg: Query) -> Answer:
        if self.E_prime:
            client.memory["x"] = msg.x
        if self.answers == "batch":
            return Answer(predict_on_batches(client.model, msg.x, *msg.x_u), len(client))  # line 17
        queries = torch.cat([msg.x, msg.x_u.flatten(0, 1)])
        return Answer(predict(client.model, queries), len(client))  # line 17

    def first_openly(self, client: Client, msg: Query) -> OpenAnswer:
        answer = self.first(client, msg)
        return OpenAnswer(answer.f, answer.N, state_of(client.model))

    def local_distillation(self, client: Client, msg: Consensus) -> Distilled:
        given = {"tau": self.tau}
        x = client.memory.pop("x")
        batch = {"local": self.B_k, "all": self.B}.get(str(self.B_prime), self.B_prime)
        opt = adam(self.eta_k if self.eta_prime is None else self.eta_prime, schedule=self.schedule)
        client.fit(
            distil, (x, msg.e), epochs=self.E_prime, batch=int(batch), opt=opt, given=given
        )  # lines 31-33, Eq. 20
        return Distilled()

    def predictor(self, s: Learned, server: Server) -> nn.Module:
        return server.model(state=s.theta)  # line 36

    def global_points(self, s: Learned, server: Server) -> dict[str, nn.Module]:
        if self.tested == "end":
            return {}
        inner = {f"test batch statistics, inner step {i}": w for i, w in s.inner.items()}
        of = {"test batch statistics": s.theta, **inner}
        return {name: OnBatchStatistics(server.model(state=w)) for name, w in of.items()}

    def diagnostics(self, s: Learned) -> dict[str, float]:
        return {} if s.agreement is None else {"agreement of e with y^": s.agreement}

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:  # Table 8, E_G times
        x, f = plan.tensor(self.B, *plan.shape), plan.tensor(self.B, plan.classes)
        asked = sum(len(plan.asked(i)) for i in range(self.E_G))
        sent: dict[tuple[str, str], Size | int] = {
            ("down", "Query.x"): x * asked,
            ("down", "Query.x_u"): x * self.queried * asked,
        }
        for name, asks in (("OpenAnswer", range(self.openly)), ("Answer", range(self.openly, self.E_G))):
            if answers := sum(len(plan.replied(i)) for i in asks):
                sent["up", f"{name}.f"] = plan.tensor((1 + self.queried) * self.B, plan.classes) * answers
                sent["up", f"{name}.N"] = NUMBER * answers
        if self.openly:
            sent["up", "OpenAnswer.theta"] = sum(plan.state(k) for k in plan.replied(0))
        if self.E_prime:
            sent["down", "Consensus.e"] = f * len(plan.asked(self.E_G))
        return sent
