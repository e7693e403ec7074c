"""FedKTL. Zhang et al., "An Upload-Efficient Scheme for Transferring Knowledge From a Server-Side Pre-trained Generator
to Clients in Heterogeneous Federated Learning", CVPR 2024, Algorithm 1.

    client i: h_i ends in C entries, compared with the C columns v_c of one fixed simplex (ETF) by their cosines;
              L_A = -log e^{s cos(theta_y + m)} / (e^{s cos(theta_y + m)} + sum_{c != y} e^{s cos theta_c})
              P_i^c = mean of its unit vectors h_i(x) of class c, which goes up
    server:   F maps P_i^c into the latents of a generator G: min MMD(F(P), latents of G) + lambda MSE(F(P_i^c), Q^c),
              Q^c = mean_i F(P_i^c); the images I^c = G(Q^c) and Q^c go down
    client i: min  L_A + mu MSE(h'_i(I^c), Q^c), h'_i a linear layer of its own on the embedding

We do not have the paper; this is written from its published description. These points are left open, or done otherwise
here:

- G is a StyleGAN trained on other pictures. None is to be had without a network: `generator` is the path of any
  TorchScript module from latents (rows, H) to images in [-1, 1]. Without one the server trains a small decoder in
  `init`, with an encoder beside it as a variational autoencoder, on the *public set of the same data*: an easier
  generator than the paper's, and its latents are N(0, I).
- The projection of h_i into C entries is the model's own classifier; a client deploys it with the simplex behind it.
  The simplex follows from a seed that travels.
- h'_i stays with the client. MMD: Gaussian kernels with variances 10, 15, 20 and 50 and all pairs, one step per epoch.
- Models of batch norm see the images I^c as a batch of their own.
- s = 64 and m = 0.5, as in its authors' library, which also clips gradients. mu and lambda are 1: with mu = 10 the
  digits' small models diverge at a learning rate of 0.05. HtFLlib has mu = 50 and lambda = 1 with StyleGAN-XL (preset
  `htfllib`), clips gradients at 100, and draws new latents in each step of F; here they are drawn once a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from fedaudit import (
    NUMBER,
    Client,
    Cohort,
    Down,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    adam,
    in_chunks,
    load,
    private,
    register,
    state_of,
)
from fedaudit.methods.prototypes._transfer import (
    Both,
    decoder,
    mmd,
    on_simplex,
    rows,
    scripted,
    simplex,
    trained_decoder,
    transformer,
)
from fedaudit.methods.prototypes.fedproto import DFFKE
from fedaudit.methods.shared._libraries import HTFLLIB
from fedaudit.methods.shared._optimiser import WithOptimiser
from fedaudit.methods.shared._prototypes import ByClass, bill


class GlobalPairs(Down):
    seed: int  # of the simplex
    I: ByClass  # noqa: E741
    Q: ByClass


class Prototypes(Up):
    P: ByClass = private("prototypes", via="data", unit="client")


class Transferred(Record):
    seed: int
    G: State  # the decoder; nothing where a generator was given
    F: State
    I: ByClass  # noqa: E741
    Q: ByClass


def L_A(h: Tensor, y: Tensor, v: Tensor, s: float, m: float) -> Tensor:
    """Return L_A, one value per record: the angle to the own class counts as m larger than it is."""
    cos = (normalize(h) @ v.T).clamp(-1 + 1e-6, 1 - 1e-6)
    own = y[:, None] == torch.arange(len(v), device=y.device)
    return cross_entropy(s * torch.where(own, torch.cos(torch.acos(cos) + m), cos), y, reduction="none")


def transfer(f: Any, x: Tensor, y: Tensor, v: Tensor, I: Tensor, Q: Tensor, s: float, m: float, mu: float) -> Tensor:  # noqa: E741
    """Return L_A of each record plus a second term, the same for all; mu is 0 if there are no images."""
    return L_A(f(x)[0], y, v, s, m) + mu * mse_loss(f(I)[1], Q)


def alignment(F: Any, P: Tensor, c: Tensor, latents: Tensor, lam: float) -> Tensor:
    """Return MMD(F(P), latents) + lambda MSE(F(P_i^c), Q^c), of all prototypes at once."""
    Q = F(P)
    same = (c[:, None] == c).to(Q)
    return (mmd(Q, latents) + lam * mse_loss(Q, same @ Q / same.sum(1, keepdim=True))).reshape(1)


@register("fedktl", tables="DFFKE")
class FedKTL(WithOptimiser):
    """Transfer knowledge through a generator aligned with class means.

    A client sends one mean embedding for each class.
    """

    single_replies: ClassVar[str] = "the generator's latents are fitted to each client's class means"

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    mu: float = 1.0  # weight of the images
    s: float = 64.0  # scale of the cosines
    m: float = 0.5  # margin, in radians
    S: int = 100  # steps of F in a round
    eta_s: float = 0.01  # its learning rate, Adam
    lam: float = 1.0  # lambda, weight of the centres
    H: int = 64  # dimension of the generator's latents
    generator: str = ""  # path of a TorchScript module; none: a decoder is trained on the public set
    S_G: int = 300  # steps of the decoder
    width: int = 32  # its channels

    images_only: ClassVar[str] = "sends images that a generator on the server makes"
    on_digits: ClassVar[Mapping[str, Any]] = {"E": 5, "B": 16, "eta": 0.02}
    needs_public: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"S": 2, "S_G": 2, "H": 8, "width": 4}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke": DFFKE,
        "htfllib": {**HTFLLIB, "mu": 50.0, "lam": 1.0, "S": 100, "eta_s": 0.01, "s": 64.0, "m": 0.5},
    }

    def wants_public(self) -> bool:
        return not self.generator

    def init(self, server: Server) -> Transferred:
        seed = int(torch.randint(1 << 62, (), generator=server.rng("simplex"), device=server.device))
        G = State() if self.generator else state_of(trained_decoder(server, self.H, self.width, self.S_G))
        return Transferred(seed, G, state_of(transformer(server, self.H)), {}, {})

    def round(self, s: Transferred, server: Server, cohort: Cohort) -> Transferred:
        replies = cohort.ask(self.local_update, GlobalPairs(s.seed, s.I, s.Q))
        P = normalize(torch.stack([r.P[c] for r in replies.values() for c in sorted(r.P)]))
        c = torch.tensor([c for r in replies.values() for c in sorted(r.P)], device=server.device)
        F = load(transformer(server, self.H), s.F)
        latents = torch.randn(len(P), self.H, generator=server.rng("latents"), device=server.device)
        opt, given = adam(self.eta_s), {"lam": self.lam}
        server.fit(F, alignment, (P, c, latents), epochs=self.S, batch=len(P), opt=opt, given=given, separable=False)
        with torch.no_grad():
            mapped = F.eval()(P)
            Q = {int(j): mapped[c == j].mean(0) for j in c.unique()}
            images = self.G(s.G, server)(torch.stack(list(Q.values()))).clamp(-1, 1)  # I^c = G(Q^c)
        return Transferred(s.seed, s.G, state_of(F), dict(zip(Q, images, strict=True)), Q)

    def G(self, state: State, server: Server) -> nn.Module:
        return scripted(self.generator, server) if self.generator else load(decoder(server, self.H, self.width), state)

    def local_update(self, client: Client, msg: GlobalPairs) -> Prototypes:  # on client i
        h = nn.Linear(client.model.width, self.H).to(client.device)
        if "h" in client.memory:
            load(h, client.memory["h"])
        client.memory["seed"], v = msg.seed, simplex(client.classes, msg.seed, client.device)
        I, Q = rows(msg.I, client.shape, client.device), rows(msg.Q, (self.H,), client.device)  # noqa: E741
        given = {"v": v, "I": I, "Q": Q, "s": self.s, "m": self.m, "mu": self.mu if msg.I else 0.0}
        opt, both = self.optimiser(self.eta), Both(client.model, h)
        client.fit(transfer, epochs=self.E, batch=self.B, opt=opt, given=given, model=both)
        client.memory["h"] = state_of(h)
        return Prototypes(client.class_means(normalize(in_chunks(client.model.eval(), client.x)), "prototypes"))

    def personal(self, client: Client) -> nn.Module:
        if "seed" not in client.memory:
            return client.model
        return on_simplex(client.model, simplex(client.classes, client.memory["seed"], client.device))

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        first, asked, pixels = plan.t == 1, plan.asked(0), plan.shape[0] * plan.shape[1] * plan.shape[2]
        return {
            ("down", "GlobalPairs.seed"): NUMBER * len(asked),
            ("down", "GlobalPairs.I"): bill(plan, "GlobalPairs.I", asked, pixels, nobody=first),
            ("down", "GlobalPairs.Q"): bill(plan, "GlobalPairs.Q", asked, self.H, nobody=first),
            ("up", "Prototypes.P"): bill(plan, "Prototypes.P", plan.replied(0), plan.classes),
        }
