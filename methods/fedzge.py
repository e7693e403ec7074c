"""FedZGE. Ma, Wang and Zhang, "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation",
AAAI 2025, Algorithm 1.

A generator on the server makes images, clients answer with logits, and the generator's gradient is estimated from
answers to perturbed images: queries and answers travel, never a model. Left open or contradicted, and chosen:

- Algorithm 1 has one query batch and one generator step a round; Appendix C's "alternately trained for E = 10
  iterations" would cost ten times the traffic of Table 8. We do as Algorithm 1 does; E counts Eq. 12's steps only.
- Eq. 17 differences the whole L_G, so all B images share q numbers: its cosine with the true gradient is some
  sqrt(q / (B d)), 0.003 in the paper's setting. `estimate = "split"` estimates only the second factor of Eq. 16, image
  by image, and takes everything else exactly: sqrt(q / d), 0.06.
- Eq. 17 multiplies by d, the size of one image, although u is Gaussian (d belongs to directions on the unit sphere,
  which is what the authors' published code draws). `scale = "unbiased"` drops it; Adam's step does not depend on it.
- Eq. 7 takes Euclidean norms: their product is in the hundreds for CIFAR, and e^-500 and its gradient are zero in any
  floating-point format. `distance = "rms"` divides each norm by the root of its dimension.
- Adam starts anew in each round, like every optimiser here (and in the authors' code). With the generator's single step
  a round, that step is eta_G times the sign of the estimate.
- Clients and f (in L_G) answer in evaluation mode, so that an answer depends on its own image alone; G runs on batch
  statistics.
- A global epoch is one step on all B images ("iterations"); the clients' batch size of 256 also holds for Eq. 20.
- Eqs. 4 and 20 have no factor tau^2; Adam would not notice it.
- Table 8 leaves out N_k, 8 bytes a client. Labels y^ stay on the server. Without local distillation nobody needs the
  ensemble's output and it is not sent: 63.15 GB, where Table 5 prints the 63.17 of the full method.
- Figure 2's true gradients (`gradient = "true"`) need the clients' weights: they are uploaded, and the ledger says so.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit import NUMBER, Down, Method, Record, State, Up, adam, ce, kl, load, private, register, state_of
from fedaudit.errors import SettingError
from fedaudit.methods._ensemble import distil, ensemble, predict


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


class Distilled(Up):
    pass


class Learned(Record):
    theta: State  # global model f
    theta_G: State  # generator G


class Generator(nn.Module):
    """Table 7."""

    def __init__(self, d_z: int, shape: tuple[int, int, int], classes: int):
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


# --- what the generator minimises; e is the ensemble's output, f the global model's ----------------------------------


def L_fid(e: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(e, y)  # Eq. 3


def L_adv(e: Tensor, f: Tensor, tau: float) -> Tensor:
    return -kl(e, f, tau).mean()  # Eq. 5


def L_div(x: Tensor, z: Tensor, rms: bool = False) -> Tensor:
    x, z = x.flatten(1).double(), z.double()
    apart = [torch.cdist(v, v, compute_mode="donot_use_mm_for_euclid_dist") for v in (x, z)]
    if rms:
        apart = [d / math.sqrt(v.shape[1]) for d, v in zip(apart, (x, z), strict=True)]
    return (-apart[0] * apart[1]).mean().exp()  # Eq. 7


def L_info(e: Tensor) -> Tensor:
    p = e.softmax(1).mean(0)  # Eq. 8
    return torch.xlogy(p, p).sum()  # Eq. 9


# --- zeroth-order estimates of a gradient at x, from differences along u_1..u_q; without the factor d ---------------


def along_batch(change: Tensor, u: Tensor, epsilon: float) -> Tensor:
    """Eq. 17. change: L(x + epsilon u_i) - L(x), one number per direction; u: q x B x image."""
    return torch.einsum("q,q...->...", (change / epsilon).to(u.dtype), u) / len(u)


def along_rows(change: Tensor, v: Tensor, u: Tensor, epsilon: float) -> Tensor:
    """Eq. 16 with its first factor v (B x classes) known. change: e(x + epsilon u_i) - e(x), q x B x classes."""
    slope = torch.einsum("qbc,bc->qb", change / epsilon, v).to(u.dtype)
    return torch.einsum("qb,qb...->b...", slope, u) / len(u)


@register("fedzge")
class FedZGE(Method):
    E_k: int = 10  # local training epochs
    B_k: int = 256  # local batch size
    E_prime: int = Field(10, ge=0)  # E'_k, local distillation epochs; 0: without L'_k
    E: int = 10  # global distillation epochs
    B: int = Field(500, ge=2)  # synthetic images a round
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
    estimate: Literal["paper", "split"] = "paper"
    scale: Literal["paper", "unbiased"] = "paper"
    distance: Literal["norm", "rms"] = "norm"
    gradient: Literal["zeroth", "true"] = "zeroth"

    quick: ClassVar = {"E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 16, "q": 2, "d_z": 8}
    presets: ClassVar = {name: {"B": 500, "q": 10, "E_k": 10, "E_prime": 10} for name in ("cifar10", "cifar100")}

    def init(self, server):  # line 1
        return Learned(state_of(server.model()), state_of(self.generator(server)))

    def generator(self, server):
        return Generator(self.d_z, server.shape, server.classes).to(server.device)

    def round(self, s, server, cohort):
        f, G = load(server.model(), s.theta), load(self.generator(server), s.theta_G)
        z = torch.randn(self.B, self.d_z, generator=server.rng("z"), device=server.device)  # line 10
        y = torch.randint(server.classes, (self.B,), generator=server.rng("y"), device=server.device)  # line 11
        x_hat = G(z, y)  # line 12; what led to it is kept for Eq. 18
        x = x_hat.detach()
        u = torch.randn(self.directions, *x.shape, generator=server.rng("u"), device=server.device)  # line 13
        ask = self.answer if self.gradient == "zeroth" else self.answer_openly
        replies = cohort.ask(ask, Query(x, x + self.epsilon * u))  # lines 4-18
        N = {k: r.N for k, r in replies.items()}
        outputs = ensemble({k: r.f for k, r in replies.items()}, N)  # line 20
        e, e_u = outputs[: self.B], outputs[self.B :].view(self.directions, self.B, server.classes)
        if self.gradient == "zeroth":
            g = self.estimated(f, x, u, e, e_u, z, y)
        else:
            models = {k: load(server.model(server.arch(k)), r.theta) for k, r in replies.items()}
            g = self.true(f, x, models, N, e, z, y)
        server.optimise(list(G.parameters()), lambda: (g * x_hat).sum(), steps=1, opt=adam(self.eta_G))  # Eqs. 18, 19
        server.fit(
            f, distil, (x, e), epochs=self.E, batch=self.B, opt=adam(self.eta), given={"tau": self.tau}
        )  # lines 25-27, Eqs. 4, 12
        if self.E_prime:
            cohort.ask(self.local_distillation, Consensus(e))  # lines 28-34
        return Learned(state_of(f), state_of(G))

    @property
    def directions(self) -> int:
        return self.q if self.gradient == "zeroth" else 0

    # --- the generator's gradient with respect to x^ ---

    def L_G(self, e, f, x, z, y):
        """Eq. 10, in double precision: Eq. 17 divides small differences of it by epsilon."""
        e, f = e.double(), f.double()
        L = L_fid(e, y)
        L = L + self.beta_1 * L_adv(e, f, self.tau) if self.beta_1 else L
        L = L + self.beta_2 * L_div(x, z, self.distance == "rms") if self.beta_2 else L
        return L + self.beta_3 * L_info(e) if self.beta_3 else L

    def estimated(self, f, x, u, e, e_u, z, y):
        """Eq. 17: f is the global model, e and e_u the ensemble's outputs at x and at x + epsilon u_i."""
        if self.estimate == "paper":
            x_u = x + self.epsilon * u
            f_u = predict(f, x_u.flatten(0, 1)).view_as(e_u)
            L = self.L_G(e, predict(f, x), x, z, y)
            L_u = torch.vmap(lambda e, f, x: self.L_G(e, f, x, z, y))(e_u, f_u, x_u)
            g = along_batch(L_u - L, u, self.epsilon)
        else:
            v, g = self.partial(f, x, e, z, y)
            g = g + along_rows(e_u.double() - e.double(), v, u, self.epsilon)
        return g * x[0].numel() if self.scale == "paper" else g  # d

    def true(self, f, x, models, N, e, z, y):
        """Eq. 16 by back-propagation through the clients' models."""
        v, g = self.partial(f, x, e, z, y)
        for k in sorted(models):
            at = x.clone().requires_grad_()
            through = (v * (N[k] / sum(N.values()))).to(x.dtype)
            g = g + torch.autograd.grad(models[k](at), at, through)[0]
        return g

    def partial(self, f, x, e, z, y):
        """dL_G/de, the first factor of Eq. 16, and dL_G/dx^ at constant e: for both no client is needed."""
        e, at = e.detach().clone().double().requires_grad_(), x.clone().requires_grad_()
        L = self.L_G(e, f(at), at, z, y)
        v, g = torch.autograd.grad(L, (e, at), materialize_grads=True)
        return v, g

    # --- on client k ---

    def answer(self, client, msg):
        client.fit(ce, epochs=self.E_k, batch=self.B_k, opt=adam(self.eta_k))  # lines 6-8, Eq. 1
        client.memory["x"] = msg.x
        queries = torch.cat([msg.x, msg.x_u.flatten(0, 1)])
        return Answer(predict(client.model, queries), len(client))  # line 17

    def answer_openly(self, client, msg):
        answer = self.answer(client, msg)
        return OpenAnswer(answer.f, answer.N, state_of(client.model))

    def local_distillation(self, client, msg):
        given = {"tau": self.tau}
        x = client.memory.pop("x")
        client.fit(
            distil, (x, msg.e), epochs=self.E_prime, batch=self.B_k, opt=adam(self.eta_k), given=given
        )  # lines 31-33, Eq. 20
        return Distilled()

    def predictor(self, s, server):
        return load(server.model(), s.theta)  # line 36

    def traffic(self, plan):  # Table 8
        x, f = plan.tensor(self.B, *plan.shape), plan.tensor(self.B, plan.classes)
        answer = "Answer" if self.gradient == "zeroth" else "OpenAnswer"
        sent = {
            ("down", "Query.x"): x * len(plan.asked(0)),
            ("down", "Query.x_u"): x * self.directions * len(plan.asked(0)),
            ("up", f"{answer}.f"): f * (1 + self.directions) * len(plan.replied(0)),
            ("up", f"{answer}.N"): NUMBER * len(plan.replied(0)),
        }
        if self.gradient == "true":
            sent["up", f"{answer}.theta"] = sum(plan.state(k) for k in plan.replied(0))
        if self.E_prime:
            sent["down", "Consensus.e"] = f * len(plan.asked(1))
        return sent
