"""Condensation by distribution matching, as FedAF and FedDM share it: all classes of a client in one forward pass.

Every step draws from the seeded global generator, works on tensors of fixed shapes and never waits for the device.

The papers leave some points open on which the two methods must agree to be compared. They are set here for both. The
defaults of `norm`, `clamp` and `restart` are the best of their eight combinations on Fashion-MNIST
(docs/results/fedaf.md):

- `norm` says how batch norm behaves while condensing. `"frozen"`: as received, in evaluation mode. Rows then do not see
  each other, and one pass over all classes gives what a loop over classes gives. But an untrained network's statistics
  are 0 and 1, so that in round 1 features are small and images hardly leave their start. `"joint"`: the statistics of
  the batch, over all classes together. The real records are one batch and the condensed images another, as in the code
  of dataset condensation (general knowledge). For a client with one class this makes the first two moments of real and
  condensed features equal in every layer. Those moments are what Eq. 3 of FedAF is there to match.
- `clamp` says when images are put back into [-1, 1]: after each `"step"`, or at the `"end"` only. At the end they have
  to be there, to travel with 8 bits a channel (FedAF, Appendix C). With `"end"` a client goes on from its unclamped
  images, while the server has the clamped ones. Public code of distribution matching never clamps, and floats reach its
  server: `"none"`. Then images travel as float32, four times the bytes that Appendix C counts, and are billed so.
- `sigma_x` is the unit in which the image learning rate counts. Published code standardises each channel; pixels here
  are in [-1, 1]. A step eta_S in units of sigma_x is a step eta_S sigma_x^2 here, momentum included. With the standard
  deviation of Fashion-MNIST (0.706 in [-1, 1]) the step is half as long. Public code of FedAF's first author divides
  by 0.2023, 0.1994 and 0.2010 on CIFAR-10 (0.402 in [-1, 1]: a sixth of the step), by 0.2673, 0.2564 and 0.2762 on
  CIFAR-100 (0.533), and by 0.5 on Fashion-MNIST (1, this range itself). The network is fed [-1, 1] in any case.
- `restart`: S_k starts anew in each round, or goes on where the last one ended ("update S_k" leans to the latter). The
  momentum of the images begins at zero in each round in either case.
- `aug`: the augmentation while condensing. It is nothing, or the siamese set of dataset condensation (`_siamese.py`),
  which is on by default in the code of [37] and named by neither paper. That code draws it anew for each class. Here
  one view serves all classes of a step. `aug_w`: the augmentation on the server, one view for each mini-batch, or
  (`"siamese-each"`, as in that code) one kind with parameters for each image. `aug_fill` and `aug_sigma` are what that
  code has by its units: the pixel outside of an image is the data set's mean, and brightness counts in deviations.
- `dm_scale`: Eq. 4 sums over the features; `"mean"` divides by their number, as a mean-squared-error loss does.
- `start`, `averaged`: FedAF's images begin as averages of records. The paper does not say of how many.
- `least` is the fewest records with which a class counts as held. Table 7's uploads are those of clients that condense
  classes of IPC records or more (`least = IPC`); no text says so. The default leaves out classes of one record only.

Privacy. A starting image is the first part of S_k that is near a record. `start = "single"` begins at the records
themselves. An average of one record is that record. Therefore a class of one record starts from noise, and with the
default `least` it is not condensed at all. Even so, images that match the mean embedding of very few records come to
resemble them: whoever publishes S_k should set `least` well above 2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedaudit import Client, Method, ce, sgd
from fedaudit.errors import SettingError
from fedaudit.methods.condensation._folded import Folded, Folding
from fedaudit.methods.condensation._siamese import BLACK, Augmentation, Fill, views
from fedaudit.training import forward
from fedaudit.training.models import Net

Start = Literal["average", "single", "noise"]
Norm = Literal["frozen", "joint"]
Scale = Literal["sum", "mean"]
Clamp = Literal["step", "end", "none"]
AHEAD = 64  # steps for which records are drawn at once on a GPU
ROWS = {
    "cpu": 256,
    "cuda": 8192,
}  # in one forward pass without gradient: as many as the cache, or the memory, has room for


# Mean and deviation of the pixels, in [-1, 1], by which the public code of FedAF's first author standardises them.
AUTHORS_PIXELS: dict[str, tuple[Fill, float]] = {
    "cifar10": ((-0.0172, -0.0356, -0.107), 0.402),
    "cifar100": ((0.0142, -0.0268, -0.1182), 0.533),
    "fashion-mnist": ((0.0,), 1.0),
}


def as_the_authors(data: str) -> dict[str, Any]:
    """Return the settings that stand for what public code of the authors does on this data set: pixels standardised by
    the set's own deviations, images that are neither clamped nor rounded, augmentation in the same units.
    """
    mean, deviation = AUTHORS_PIXELS[data]
    return {
        "sigma_x": deviation, "clamp": "none", "aug": "siamese", "aug_w": "siamese-each", "aug_fill": mean,
        "aug_sigma": deviation,
    }  # fmt: skip


class Condensing(Method):
    """The hyper-parameters of condensation and of training on what it made."""

    single_replies: ClassVar[str] = "each client's condensed images are trained on by the server"

    images_only: ClassVar[str] = "condenses records into images"

    IPC: int = 50  # condensed images per class
    steps: int = 1000  # of condensation, a round
    B: int = 256  # records of each class in a step
    eta_S: float = 1.0  # image learning rate
    sigma_x: float = Field(default=1.0, gt=0)  # the unit of a pixel in which eta_S counts
    norm: Norm = "frozen"
    clamp: Clamp = "end"
    aug: Literal["none", "siamese"] = "none"
    dm_scale: Scale = "sum"
    start: Start = "average"
    averaged: int = Field(default=10, ge=1)  # records in a starting average
    restart: bool = False  # S_k starts anew in each round, or else where the last one ended
    least: int = Field(default=2, ge=1)  # fewest records that make a class held
    E: int = 500  # epochs on the server
    B_w: int = 256  # batch size on the server
    eta_w: float = 0.001  # learning rate on the server
    aug_w: Augmentation = "none"  # of a mini-batch on the server
    aug_fill: Fill = BLACK  # the pixel outside of an image, in [-1, 1]: one number, or one for each channel
    aug_sigma: float = Field(default=1.0, gt=0)  # the deviation in which an augmentation's brightness counts
    momentum: float = Field(default=0.9, ge=0, lt=1)  # of both optimisers

    def begin(self, client: Client, D: Records) -> Tensor:
        """Return S_k (class, image, channel, height, width) before the first step of this round."""
        if not self.restart and "S" in client.memory:
            return cast(Tensor, client.memory["S"]).clone().requires_grad_()
        return D.start(self.start, self.IPC, self.averaged).requires_grad_()

    def descend(self, client: Client, S: Tensor, D: Records, loss: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
        """Run SGD on the images, and return {class: images} as they leave."""

        def step() -> Tensor:
            if self.clamp == "step":
                with torch.no_grad():
                    S.clamp_(-1, 1)
            return loss(S)

        opt = sgd(self.eta_S * self.sigma_x**2, momentum=self.momentum)
        client.optimise([S], step, steps=self.steps, opt=opt, repeats=True, before=D.ahead if S.is_cuda else None)
        self._check(client, S)
        if not self.restart:
            client.memory["S"] = S.detach().clamp(-1, 1) if self.clamp == "step" else S.detach()
        return dict(zip(D.classes, S.detach() if self.clamp == "none" else S.detach().clamp(-1, 1), strict=True))

    @property
    def pixel_bytes(self) -> int:
        """Return how many bytes a pixel takes on the way: one, or four if it may leave [-1, 1]."""
        return 4 if self.clamp == "none" else 1

    def seen(self, *images: Tensor) -> tuple[Tensor, ...]:
        """Return real and condensed images after the augmentation of a step."""
        return views(self.aug, *images, fill=self.aug_fill, unit=self.aug_sigma)

    @property
    def of_views(self) -> dict[str, Any]:
        """Return what the server's loss has to know to augment a mini-batch."""
        return {"aug": self.aug_w, "fill": self.aug_fill, "unit": self.aug_sigma}

    def _check(self, client: Client, S: Tensor) -> None:
        if not bool(S.isfinite().all()):
            raise SettingError(
                f"The condensed images of client {client.id} are not finite after {self.steps} steps: with an image "
                f"learning rate of {self.eta_S} in units of sigma_x = {self.sigma_x} they left the range ever faster, "
                "because this model's features answer too strongly to a pixel. Set sigma_x=... to the deviation of the "
                "data set's pixels (CIFAR-10: 0.402) or eta_S=... lower, or clamp=step, which keeps them in [-1, 1]."
            )


class Records:
    """The records of a client sorted by class, without the classes that have fewer than `least` records.

    With P classes held and N_c records of class c, `x` is (sum of N_c, channel, height, width). `draw` takes m_c =
    min(B, N_c) of each class, (sum of m_c, ...), and `mean` averages what was computed of them, (P, ...).
    """

    def __init__(self, x: Tensor, y: Tensor, B: int, least: int = 1):
        found, inverse, count = y.unique(return_inverse=True, return_counts=True)
        order = inverse.argsort(stable=True)
        order = order[(count >= least)[inverse[order]]]
        self.x, self.y = x[order], y[order]
        self.classes: list[int] = found[count >= least].tolist()
        self.N: list[int] = count[count >= least].tolist()
        P, device = len(self.classes), x.device
        self.group = torch.arange(P, device=device).repeat_interleave(count[count >= least])  # of each record, 0..P-1
        drawn = [min(B, n) for n in self.N]  # m_c
        self.whole = drawn == self.N
        first = [sum(self.N[:i]) for i in range(P)]
        spans = [f + torch.arange(m) for f, m in zip(first, drawn, strict=True)]
        self.take = torch.cat([torch.empty(0, dtype=torch.long), *spans]).to(device)  # the first m_c of each class
        self.drawn: Tensor | None = None  # which records the next `draw` is to take, where that was settled before
        share = 1 / torch.tensor(drawn, device=device, dtype=x.dtype)
        row = self.group[self.take]  # the class of each row drawn
        self.average = (row == torch.arange(P, device=device)[:, None]).to(x.dtype) * share[:, None]  # (P, sum of m_c)

    def draw(self) -> Tensor:
        if self.whole:
            return self.x
        if self.drawn is not None:
            return self.x[self.drawn]
        shuffled = (2 * self.group + torch.rand(self.group.shape, device=self.x.device)).argsort()  # within each class
        return self.x[shuffled[self.take]]

    def ahead(self, step: int) -> None:
        """Settle beforehand which records `draw` takes in this step: one sort serves many steps, and none is inside
        them.
        """
        if self.whole:
            return
        if step % AHEAD == 0:
            u = torch.rand(AHEAD, len(self.group), device=self.x.device)
            self.next = (2 * self.group + u).argsort(1)[:, self.take]
        if self.drawn is None:
            self.drawn = self.next[0].clone()
        self.drawn.copy_(self.next[step % AHEAD])

    def mean(self, rows: Tensor) -> Tensor:
        return self.average @ rows

    def start(self, how: Start, IPC: int, averaged: int) -> Tensor:
        """Return the first condensed images (class, image, channel, height, width), all different.

        `how` says what they are: averages of so many records, drawn at random for each image; single records, and
        averages once these are used up; or noise.
        """
        noise = torch.randn(len(self.classes), IPC, *self.x.shape[1:], device=self.x.device, dtype=self.x.dtype)
        noise = noise.clamp_(-1, 1)
        if how == "noise":
            return noise
        made = []
        for x, from_noise in zip(self.x.split(self.N), noise, strict=True):
            own = x[torch.rand(len(x), device=x.device).argsort()[:IPC]] if how == "single" else x[:0]
            rest = from_noise if len(x) == 1 else _averages(x, IPC, max(averaged, 2))
            made.append(torch.cat([own, rest])[:IPC])
        return torch.stack(made)


def _averages(x: Tensor, IPC: int, averaged: int) -> Tensor:
    """Return IPC averages of records, which are drawn at random anew for each image.

    In a class with few records, plain averages would repeat: two records have eleven averages of ten. There the shares
    of the records are drawn from a Dirichlet distribution, with the mean and the covariance that `averaged` draws with
    replacement would give them. No two images are then the same, and hardly one is nearly a record.
    """
    n = len(x)
    if n < 3 * averaged:
        share = torch.distributions.Dirichlet(x.new_full((IPC, n), (averaged - 1) / n)).sample()
        return (share @ x.flatten(1)).unflatten(1, x.shape[1:])
    which = torch.rand(IPC, n, device=x.device).topk(averaged, dim=1).indices
    return x[which].mean(1)


class Sampled:
    """A copy `f` of a received model w, to be evaluated at other weights in each step.

    All its parameters are views of one vector, so that fresh weights cost a few operations in all, and not some for
    each layer. On a GPU, convolutions keep the channels of a weight and of their output next to each other
    (`channels_last`). The fast kernels take them in that order, so nothing is reordered between layers.
    """

    def __init__(
        self, model: Net, norm: Norm = "frozen", channels_last: bool | None = None, folded: bool | None = None
    ):
        self.f = copy.deepcopy(model).eval().requires_grad_(False)
        self.norm = norm
        if norm == "joint":
            for m in self.f.modules():
                if isinstance(m, _BatchNorm):
                    m.train().momentum = 0.0  # the batch's statistics; those received are not touched
        parameters = list(self.f.parameters())
        last = parameters[0].is_cuda if channels_last is None else channels_last
        stored = [p.detach().permute(0, 2, 3, 1) if last and p.dim() == 4 else p.detach() for p in parameters]
        self.now = torch.cat([p.flatten() for p in stored])
        for p, part, as_stored in zip(parameters, self.now.split([p.numel() for p in stored]), stored, strict=True):
            view = part.view(as_stored.shape)
            p.data = view.permute(0, 3, 1, 2) if last and p.dim() == 4 else view
        self.w = self.now.clone()
        fold = norm == "frozen" and (parameters[0].is_cuda if folded is None else folded)
        self._folded = Folded.of(self.f) if fold else None
        self._weights: list[Folding] | None = None  # folded, at the weights of this step
        middle, width = zip(*(_initial(self.f)[id(p)] for p in parameters), strict=True)
        sizes = torch.tensor([p.numel() for p in parameters])
        self.middle = torch.tensor(middle).repeat_interleave(sizes).to(self.w)
        self.width = torch.tensor(width).repeat_interleave(sizes).to(self.w)

    def interpolate(self, gamma: float) -> Net:
        """Return f at gamma w + (1 - gamma) w~ (FedAF, Eq. 17), w as received and w~ fresh: nothing accumulates."""
        self._weights = None
        self.now.uniform_(-1, 1).mul_(self.width).add_(self.middle)  # w~
        self.now.lerp_(self.w, gamma)
        return self.f

    def perturb(self, rho: float) -> Net:
        """Return f at w plus Gaussian noise that is cut to the ball of radius rho (FedDM)."""
        self._weights = None
        self.now.normal_()
        self.now.mul_((rho / self.now.norm()).clamp(max=1)).add_(self.w)
        return self.f

    def encode(self, x: Tensor) -> Tensor:
        """Return the embeddings of f as it is now. On a GPU, frozen norms are folded into the convolutions."""
        if self._folded is None:
            return self.f.encode(x)
        if self._weights is None:
            self._weights = self._folded.weights()  # once for real and condensed images
        return self._folded(x, self._weights)

    def real(self, x: Tensor) -> Tensor:
        """Return the embeddings of real records, without gradient; with joint statistics in one pass."""
        if self.norm == "frozen":
            return in_chunks(self.encode, x)
        with torch.no_grad():
            return self.encode(x)


def _initial(model: nn.Module) -> dict[int, tuple[float, float]]:
    """Return middle and half width of each parameter's distribution in PyTorch's default initialisation, by id.

    Linear and convolutional layers: uniform, 1 / sqrt(fan-in). Norms: 1 and 0. Anything else (the class token and the
    positions of a transformer) stays near 0, as it starts.
    """
    found: dict[int, tuple[float, float]] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, p in own.items():
            if isinstance(module, nn.Linear | nn.Conv2d):
                found[id(p)] = 0.0, 1 / math.sqrt(own["weight"][0].numel())  # fan-in: all but the output dimension
            elif name == "weight" and p.dim() == 1:
                found[id(p)] = 1.0, 0.0
            else:
                found[id(p)] = 0.0, 0.0
    return found


def in_chunks(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return f(x) without gradient, computed over as many rows at a time as suit the device."""
    return forward.in_chunks(f, x, ROWS.get(x.device.type, ROWS["cuda"]))


def dm(mu_real: Tensor, mu_syn: Tensor, scale: Scale = "sum") -> Tensor:
    """Return sum_c ||mu^real_c - mu^syn_c||^2 (FedAF, Eq. 4); scale = "mean" divides by the number of features."""
    distance = (mu_real - mu_syn).square().sum()
    return distance / mu_real.shape[1] if scale == "mean" else distance


def seen_ce(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    aug: Augmentation,
    fill: Fill = BLACK,
    unit: float = 1.0,
) -> Tensor:
    """Return the cross-entropy of a mini-batch whose images all go through one view, or each through its own."""
    (seen,) = views(aug, x, fill=fill, unit=unit)
    return ce(f, seen, y)


def gathered(sets: Mapping[int, Mapping[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the clients' {client: {class: images}} as images and labels, by ascending client and class."""
    images = [(c, sets[k][c]) for k in sorted(sets) for c in sorted(sets[k])]
    if not images:
        raise SettingError("No client condensed a class: none holds one of `least` records. Set least=... lower.")
    x = torch.cat([S for _, S in images])
    labels = torch.tensor([c for c, _ in images]).repeat_interleave(torch.tensor([len(S) for _, S in images]))
    return x, labels.to(x.device)
