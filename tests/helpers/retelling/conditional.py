"""The server's conditional generator by hand, for the retellings of the methods that have one: FedZGE's Table 7."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, conv_transpose2d, leaky_relu, linear

Weights = dict[str, Tensor]


def weights(w: Mapping[str, Tensor]) -> Weights:
    """The generator's parameters as leaves of their own, in its order; running statistics are not used."""
    return {
        name: t.detach().clone().requires_grad_()
        for name, t in w.items()
        if "running" not in name and "tracked" not in name
    }


def images(w: Weights, h: Tensor, width: int) -> Tensor:
    """s = G(h, w) for 8 x 8 digits: linear, batch norm, twice a transposed convolution, a convolution, tanh."""

    def norm(x: Tensor, i: int) -> Tensor:  # by the batch
        return batch_norm(x, None, None, w[f"layers.{i}.weight"], w[f"layers.{i}.bias"], training=True)

    def part(i: int) -> tuple[Tensor, Tensor]:
        return w[f"layers.{i}.weight"], w[f"layers.{i}.bias"]

    x = linear(h, w["project.weight"], w["project.bias"]).view(-1, width, 2, 2)
    x = conv_transpose2d(norm(x, 0), *part(1), stride=2, padding=1)
    x = conv_transpose2d(leaky_relu(norm(x, 2), 0.2), *part(4), stride=2, padding=1)
    x = conv2d(leaky_relu(norm(x, 5), 0.2), *part(7), padding=1)
    return torch.tanh(norm(x, 8))


def dcgan(w: Weights, h: Tensor) -> Tensor:
    """s = G(h, w) for 8 x 8 digits by DFRD's authors: from one pixel to 4 x 4, ReLU, to 8 x 8, tanh."""
    x = conv_transpose2d(h[:, :, None, None], w["layers.0.weight"])
    return torch.tanh(conv_transpose2d(x.clamp(min=0), w["layers.2.weight"], stride=2, padding=1))


def drawn(draw: torch.Generator, p: Tensor, d: int, B: int) -> tuple[Tensor, Tensor]:
    """z ~ N(0, I), then y ~ p(y) by inversion of a uniform number."""
    z = torch.randn(B, d, generator=draw, dtype=torch.float64)
    u = torch.rand(B, generator=draw, dtype=torch.float64)
    edges = (p / p.sum()).cumsum(0)
    return z, (u[:, None] >= edges[None]).sum(1)


class Adam:
    """Adam's steps with their bias corrections, which go on as long as the object does."""

    def __init__(self, eta: float, betas: tuple[float, float] = (0.9, 0.999)):
        self.eta, self.betas, self.t = eta, betas, 0
        self.m: Weights = {}
        self.v: Weights = {}

    def step(self, w: Weights, loss: Tensor) -> None:
        self.t += 1
        for (name, t), g in zip(w.items(), torch.autograd.grad(loss, list(w.values())), strict=True):
            a, b = self.betas
            self.m[name] = a * self.m.get(name, torch.zeros_like(g)) + (1 - a) * g
            self.v[name] = b * self.v.get(name, torch.zeros_like(g)) + (1 - b) * g * g
            m, v = self.m[name] / (1 - a**self.t), self.v[name] / (1 - b**self.t)
            with torch.no_grad():
                t -= self.eta * m / (v.sqrt() + 1e-8)


class Momentum:
    """SGD with momentum and weight decay on a network."""

    def __init__(self, eta: float, mu: float, decay: float = 0.0):
        self.eta, self.mu, self.decay = eta, mu, decay
        self.v: Weights = {}

    def step(self, net: nn.Module, loss: Tensor) -> None:
        named = dict(net.named_parameters())
        for (name, t), g in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
            g = g + self.decay * t.detach()
            self.v[name] = self.mu * self.v[name] + g if name in self.v else g
            with torch.no_grad():
                t -= self.eta * self.v[name]


def kl(p: Tensor, q: Tensor, T: float = 1.0) -> Tensor:
    """KL[softmax p / T || softmax q / T], row by row."""
    a, b = (p / T).softmax(1), (q / T).softmax(1)
    return (a * (a / b).log()).sum(1)


def ce(logits: Tensor, y: Tensor) -> Tensor:
    return -logits.softmax(1)[torch.arange(len(y)), y].log()


def apart(s: Tensor, h: Tensor, squared: bool = False) -> Tensor:
    """DFRD, Eq. 4 as public code has it: exp(-1/B^2 sum_{j,k} mean|s_j - s_k| mean(h_j - h_k)^2); with mean squares of
    the images by DFRD's authors."""
    total = torch.zeros(())
    for j in range(len(s)):
        for k in range(len(s)):
            images = ((s[j] - s[k]) ** 2).mean() if squared else (s[j] - s[k]).abs().mean()
            total = total + images * ((h[j] - h[k]) ** 2).mean()
    return torch.exp(-total / len(s) ** 2)


def still(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """A network with its own statistics, whose weights nobody asks a gradient of."""
    for p in net.parameters():
        p.requires_grad_(False)
    return net.eval()
