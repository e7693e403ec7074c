"""FedGen. Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
Algorithm 1: FedAvg, and a generator of latent features that clients learn from beside their own records.

    server:   min_w  E_{y ~ p^(y), z ~ G_w(z|y)} l(sigma(1/K sum_k g(z; theta_k^p)), y)          (4)
    client k: min_theta_k  L_k(theta_k) + E_{y ~ p^(y), z ~ G_w(z|y)} l(h(z; theta_k^p), y)       (5)

The predictor theta^p is the classifier on the embedding; p^(y) follows from the label counts c_k, a release.

We do not have the paper; this is written from its published description and, where that leaves room, from what its
authors' code does. We chose:

- The generator that FedZGE's Tables 2, 3, 9 and 10 bill: 90.92 - 83.31 GB is 2,043,377 parameters (2,052,377 at 100
  classes) in each download, the same on ResNet-18, -34 and -50, whose embeddings have 512 and 2,048 entries. That is
  the *image* generator of FedZGE's own Table 7, and not a generator of latents. `space = "image"` is that one; it makes
  images that go through the whole model (with all its settings: `--preset fedzge`). The default is the paper's: noise
  and one-hot label, a hidden layer with batch norm and ReLU, a linear layer into the embedding (302,080 parameters at
  512 entries and 10 classes).
- Eq. 4 takes the loss of averaged logits (`teacher = "logits"`); the code adds the clients' own losses, client k's
  weighed by its share c_k^y / c^y of the label (`"losses"`), and a diversity term (`lambda_div`, absent from Eq. 4).
- PFLlib and HtFLlib average the logits by records (`teacher = "samples"`) and draw noise uniformly from [0, 1)
  (`noise = "uniform"`).
- Eq. 5's two terms weigh the same (`alpha`; the code begins at 10 and decays). The code also draws a record's output
  towards that of a latent of its label. That is in no equation, and not here.
- Algorithm 1 uses G from the first round, when it is random; the code from the second (`first = 2`).
- Step 7 draws new latents in each step. A loss here is pure: B^ of them are drawn once a local update, and serve all of
  its steps. Eq. 5's expectation is the same. Clients run G on its travelled batch-norm statistics.
- p^(y) is uniform at first, then sum_k c_k^y of the round's clients. It travels (4 bytes a class), which Table 8 omits.
- theta is the plain mean (Algorithm 1); the code weighs by records (`weights = "samples"`: the sums of the counts).
- With `space = "image"`, batch-norm models see synthetic batches in training, and their running statistics follow.
"""

from __future__ import annotations

import functools
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
    Part,
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
    state_of,
)
from fedaudit import weighted_mean as mean_of
from fedaudit.methods.datafree._datafree import frozen
from fedaudit.methods.datafree._generator import Generator, Sampler, diversity, dynamic_weights, label_distribution
from fedaudit.methods.shared._libraries import PFLIB
from fedaudit.methods.shared._local_training import WithViews
from fedaudit.shape import Shape
from fedaudit.training import models
from fedaudit.wire.message import model_size


class Broadcast(Down):
    theta: State
    w: State  # the generator
    p: Tensor  # p^(y)


class Update(Up):
    theta: State = private("weights", via="model", unit="client")
    c: Tensor = private("label_counts", via="data", unit="client")  # c_k^y, y = 1..C


class Learned(Record):
    theta: State
    w: State
    p: Tensor


class Latents(nn.Module):
    """z = G_w(epsilon, y) in the space of embeddings."""

    def __init__(self, d: int, hidden: int, width: int, classes: int):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(d + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
        )

    def forward(self, epsilon: Tensor, y: Tensor) -> Tensor:
        classes = torch.arange(self.classes, device=y.device)
        return self.layers(torch.cat([epsilon, (y[:, None] == classes).to(epsilon)], 1))


class Images(nn.Module):
    """x = G_w(epsilon, y): FedZGE's Table 7, the label embedded beside the noise."""

    def __init__(self, d: int, shape: Shape, classes: int, width: int):
        super().__init__()
        self.G = Generator("cat", d, shape, classes, width)

    def forward(self, epsilon: Tensor, y: Tensor) -> Tensor:
        return self.G(self.G.h(epsilon, y))


def L_logits(teachers: Tensor, y: Tensor) -> Tensor:
    """Return Eq. 4: the loss of the averaged logits, one value per row.

    `teachers` holds logits (clients, rows, classes).
    """
    return cross_entropy(teachers.mean(0), y, reduction="none")


def L_samples(teachers: Tensor, p: Tensor, y: Tensor) -> Tensor:
    """Return the loss of the logits averaged by p, the clients' shares of the records, one value per row."""
    return cross_entropy((p.to(teachers)[:, None, None] * teachers).sum(0), y, reduction="none")


def L_losses(teachers: Tensor, share: Tensor, y: Tensor) -> Tensor:
    """Return the clients' own losses weighed by their share of the label, one value per row.

    `share` is (clients, classes).
    """
    each = cross_entropy(teachers.flatten(0, 1), y.repeat(len(teachers)), reduction="none").view(len(teachers), -1)
    return (share[:, y] * each).sum(0)


def local_loss(f: Any, x: Tensor, y: Tensor, z: Tensor, y_hat: Tensor, alpha: float) -> Tensor:
    """Return Eq. 5, one value per record: the second term is the same for all of them."""
    return cross_entropy(f(x), y, reduction="none") + alpha * cross_entropy(f.classify(z), y_hat)


def local_loss_on_images(f: Any, x: Tensor, y: Tensor, z: Tensor, y_hat: Tensor, alpha: float) -> Tensor:
    return cross_entropy(f(x), y, reduction="none") + alpha * cross_entropy(f(z), y_hat)


@register("fedgen", tables="FedAF FedZGE")
class FedGen(WithViews):
    """Train clients with a generator of embeddings. A client sends its weights and its label counts."""

    single_replies: ClassVar[str] = "the generator learns from each client's model, weighted by its own label counts"

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # beta, local learning rate
    B_hat: int = 128  # generated samples of a local update
    alpha: float = 1.0  # weight of the generated samples
    first: int = 1  # round from which on they are used
    I_g: int = 50  # steps of the generator in a round
    B_g: int = 128  # batch of the generator
    eta_g: float = 3e-4  # alpha, learning rate of the generator, Adam
    d: int = 64  # dimension of the noise; 100 with space = "image"
    hidden: int = 512  # width of the generator; its channels are 128 with space = "image"
    space: Literal["latent", "image"] = "latent"
    noise: Literal["normal", "uniform"] = "normal"
    teacher: Literal["logits", "samples", "losses"] = "logits"
    lambda_div: float = 0.0  # diversity
    weights: Literal["equal", "samples"] = "equal"

    quick: ClassVar[Mapping[str, Any]] = {"I_g": 2, "B_g": 16, "B_hat": 16, "d": 8, "hidden": 16}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fedzge": {"space": "image", "d": 100, "hidden": 128, "B_g": 500},  # as the rival in that paper
        "fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9},  # likewise
        "pflib": {
            **PFLIB, "B_hat": 10, "I_g": 1000, "B_g": 10, "eta_g": 0.005, "d": 512, "hidden": 512, "noise": "uniform",
            "teacher": "samples", "weights": "samples",
        },
    }  # fmt: skip

    def cannot_take(self, shape: Shape) -> str | None:
        images = self.space == "latent" or shape.kind == "images"
        return None if images else f"fedgen with space = image generates images, and the records are {shape}"

    def init(self, server: Server) -> Learned:
        p = torch.full((server.classes,), 1 / server.classes, device=server.device)  # uniform
        theta = server.model()
        return Learned(state_of(theta), state_of(self.generator(server, theta.width)), p)

    def part(self) -> Part | None:
        """Return which part of a model travels: all of it."""
        return None

    def generator(self, party: Any, width: int) -> nn.Module:
        return make_generator(self, width, party.shape, party.classes).to(party.device)

    def round(self, s: Learned, server: Server, cohort: Cohort) -> Record:  # on the server
        replies: dict[int, Any] = cohort.ask(self.local_update, Broadcast(s.theta, s.w, s.p))  # lines 3-12
        c = torch.stack([r.c for r in replies.values()]).clamp_min(0)  # noise could have made one negative
        records = c.sum(1).clamp_min(1).tolist() if self.weights == "samples" else [1.0] * len(replies)
        theta = mean_of({k: r.theta for k, r in replies.items()}, dict(zip(replies, records, strict=True)))  # line 13
        teachers = Many(frozen(load(server.model(server.arch(k)), r.theta, self.part())) for k, r in replies.items())
        w = self.learn_generator(server, s.w, teachers, c)
        return Learned(theta, w, label_distribution(c))

    def learn_generator(self, server: Server, w: State, teachers: Any, c: Tensor) -> State:  # line 14
        G = load(self.generator(server, teachers[0].width), w).train()
        draw = Sampler(label_distribution(c), self.d, self.B_g, server.rng("epsilon and y"), self.noise)
        share, p = dynamic_weights(c), c.double().sum(1) / c.double().sum().clamp_min(1)

        def loss() -> Tensor:
            epsilon, y = draw()
            z = G(epsilon, y)
            logits = torch.stack(teachers(z) if self.space == "image" else teachers.classify(z))
            if self.teacher == "losses":
                rows = L_losses(logits, share, y)
            else:
                rows = L_logits(logits, y) if self.teacher == "logits" else L_samples(logits, p, y)  # Eq. 4
            return rows.mean() + (self.lambda_div * diversity(z, epsilon, "mean") if self.lambda_div else 0)

        server.optimise(list(G.parameters()), loss, steps=self.I_g, opt=adam(self.eta_g))
        return state_of(G)

    def local_update(self, client: Client, msg: Broadcast) -> Update:  # on client k
        load(client.model, msg.theta, self.part())
        G = frozen(load(self.generator(client, client.model.width), msg.w))
        with torch.no_grad():
            epsilon, y_hat = Sampler(msg.p, self.d, self.B_hat, client.rng("epsilon and y"), self.noise)()
            z = G(epsilon, y_hat)  # line 7
        loss = local_loss_on_images if self.space == "image" else local_loss
        given = {"z": z, "y_hat": y_hat, "alpha": self.alpha if client.t >= self.first else 0.0}
        opt = self.optimiser(self.eta)
        client.fit(loss, epochs=self.E, batch=self.B, opt=opt, given=given, augment=self.augment)  # line 9, Eq. 5
        c = torch.bincount(client.y.cpu(), minlength=client.classes).float()  # line 8
        return Update(state_of(client.model, self.part()), c)  # line 11

    def predictor(self, s: Learned, server: Server) -> nn.Module | None:
        return server.model(state=s.theta)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:  # FedZGE, Table 8, and p^(y)
        width = _width(plan.server_arch, plan.shape, plan.classes)
        p = plan.tensor(plan.classes)
        return {
            ("down", "Broadcast.theta"): plan.state(part=self.part()) * len(plan.asked(0)),
            ("down", "Broadcast.w"): _generator_size(self, width, plan.shape, plan.classes) * len(plan.asked(0)),
            ("down", "Broadcast.p"): p * len(plan.asked(0)),
            ("up", "Update.theta"): sum((plan.state(k, self.part()) for k in plan.replied(0)), Size()),
            ("up", "Update.c"): p * len(plan.replied(0)),
        }


def make_generator(method: FedGen, width: int, shape: Shape, classes: int) -> nn.Module:
    if method.space == "image":
        return Images(method.d, shape, classes, method.hidden)
    return Latents(method.d, method.hidden, width, classes)


@functools.cache
def _width(arch: str, shape: Shape, classes: int) -> int:
    return int(models.describe(arch, shape, classes)["width"])


@functools.cache
def _generator_size(method: FedGen, width: int, shape: Shape, classes: int) -> Size:
    with torch.device("meta"):
        return model_size(make_generator(method, width, shape, classes))
