"""Condensation by distribution matching, as FedAF and FedDM share it: all classes of a client in one forward pass.

Every step draws from the seeded global generator, works on tensors of fixed shapes and never waits for the device.
Batch norm is frozen (evaluation mode, the received statistics): rows then do not see each other, and one pass over all
classes gives what a loop over classes gives. Statistics of each class's own batch would set the first two moments of
real and condensed features equal in every layer, which are what Eq. 3 of FedAF is there to match.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fedaudit.training.models import Net

Start = Literal["average", "single", "noise"]
ROWS = {"cpu": 256, "cuda": 8192}  # of one forward pass without gradient: what the cache, or the memory, has room for


class Records:
    """The records of a client sorted by class, those of a class with fewer than `least` left out.

    `draw` takes B of each class (all, where there are no more) and `mean` averages what was computed of them by class.
    """

    def __init__(self, x: Tensor, y: Tensor, B: int, least: int = 1):
        found, inverse, count = y.unique(return_inverse=True, return_counts=True)
        order = inverse.argsort(stable=True)
        order = order[(count >= least)[inverse[order]]]
        self.x, self.y = x[order], y[order]
        self.classes: list[int] = found[count >= least].tolist()
        self.N: list[int] = count[count >= least].tolist()
        P, device = len(self.classes), x.device
        self.group = torch.arange(P, device=device).repeat_interleave(count[count >= least])
        self.first = [sum(self.N[:i]) for i in range(P)]
        drawn = [min(B, n) for n in self.N]
        self.whole = drawn == self.N
        self.take = self._places(drawn)
        row = self.group[self.take]  # the class of each row drawn
        share = 1 / torch.tensor(drawn, device=device, dtype=x.dtype)
        self.average = (row == torch.arange(P, device=device)[:, None]).to(x.dtype) * share[:, None]

    def _places(self, each: list[int]) -> Tensor:
        """The first `each` places of every class; round again where a class has fewer."""
        spans = [f + torch.arange(m) % n for f, m, n in zip(self.first, each, self.N, strict=True)]
        return torch.cat([torch.empty(0, dtype=torch.long), *spans]).to(self.x.device)

    def shuffled(self) -> Tensor:
        """A random order within each class: one sort for all of them."""
        return (2 * self.group + torch.rand(self.group.shape, device=self.x.device)).argsort()

    def draw(self) -> Tensor:
        return self.x if self.whole else self.x[self.shuffled()[self.take]]

    def mean(self, rows: Tensor) -> Tensor:
        return self.average @ rows

    def start(self, how: Start, IPC: int, averaged: int) -> Tensor:
        """Condensed images to begin with (class, image, channel, height, width): averages of so many records drawn at
        random, single records, or Gaussian noise."""
        shape = (len(self.classes), IPC, *self.x.shape[1:])
        if how == "noise":
            return torch.randn(shape, device=self.x.device).clamp_(-1, 1)
        places = self._places([IPC] * len(self.classes))
        times = averaged if how == "average" else 1
        total = torch.zeros(shape, device=self.x.device)
        for _ in range(times):
            total += self.x[self.shuffled()[places]].reshape(shape)
        return total / times


class Sampled:
    """A copy `f` of a received model w, to be evaluated at other weights in each step.

    All its parameters are views of one vector, so that fresh weights cost a few operations and not some for each layer.
    """

    def __init__(self, model: Net):
        self.f = copy.deepcopy(model).eval().requires_grad_(False)
        self.now = parameters_to_vector(self.f.parameters())
        vector_to_parameters(self.now, self.f.parameters())
        self.w = self.now.clone()
        middle, width = zip(*(_initial(self.f)[id(p)] for p in self.f.parameters()), strict=True)
        sizes = torch.tensor([p.numel() for p in self.f.parameters()])
        self.middle = torch.tensor(middle).repeat_interleave(sizes).to(self.w)
        self.width = torch.tensor(width).repeat_interleave(sizes).to(self.w)

    def interpolate(self, gamma: float) -> Net:
        """f at gamma w + (1 - gamma) w~ (FedAF, Eq. 17), w as received and w~ fresh: nothing accumulates."""
        self.now.uniform_(-1, 1).mul_(self.width).add_(self.middle)  # w~
        self.now.lerp_(self.w, gamma)
        return self.f

    def perturb(self, rho: float) -> Net:
        """f at w plus Gaussian noise that is cut to the ball of radius rho (FedDM)."""
        self.now.normal_()
        self.now.mul_((rho / self.now.norm()).clamp(max=1)).add_(self.w)
        return self.f


def _initial(model: nn.Module) -> dict[int, tuple[float, float]]:
    """Middle and half width of each parameter's distribution in PyTorch's default initialisation, by id.

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


@torch.no_grad()
def in_chunks(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x) without gradient, over so many rows at a time as the device likes."""
    return torch.cat([f(part) for part in x.split(ROWS.get(x.device.type, ROWS["cuda"]))])


def closure(loss: Callable[[Tensor], Tensor], S: Tensor) -> Callable[[], Tensor]:
    """`loss(S)` for `optimise`, with the images first put back into [-1, 1].

    On a GPU forward and backward pass are recorded once and replayed, since Python launches the many small kernels of a
    step slower than they run. A counter of FLOPs would not see what is replayed: under one nothing is recorded.
    """
    if S.is_cuda and not is_in_torch_dispatch_mode():
        sample = S.detach().clone().requires_grad_()
        loss = cast(Callable[[Tensor], Tensor], torch.cuda.make_graphed_callables(loss, (sample,)))

    def projected() -> Tensor:
        with torch.no_grad():
            S.clamp_(-1, 1)
        return loss(S)

    return projected


def dm(mu_real: Tensor, mu_syn: Tensor) -> Tensor:
    """sum_c ||mu^real_c - mu^syn_c||^2 (FedAF, Eq. 4)."""
    return (mu_real - mu_syn).square().sum()


def gathered(sets: Mapping[int, Mapping[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """What the clients sent, {client: {class: images}}, as images and labels, by ascending client and class."""
    images = [(c, sets[k][c]) for k in sorted(sets) for c in sorted(sets[k])]
    x = torch.cat([S for _, S in images])
    labels = torch.tensor([c for c, _ in images]).repeat_interleave(torch.tensor([len(S) for _, S in images]))
    return x, labels.to(x.device)
