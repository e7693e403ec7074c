"""The parts of FedKTL: a fixed simplex of class vectors, a discrepancy of samples, and a small generator."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fedaudit import Server, adam
from fedaudit.methods.datafree._datafree import Generator
from fedaudit.methods.shared._prototypes import with_classifier
from fedaudit.training.models import Net


def simplex(classes: int, seed: int, device: torch.device) -> Tensor:
    """Return rows v_c of unit length, any two at the cosine -1 / (C - 1)."""
    rng = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(classes, classes, generator=rng, dtype=torch.float64))[0]
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    return ((classes / (classes - 1)) ** 0.5 * U @ centred).T.to(device, torch.get_default_dtype())


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples."""

    def k(p: Tensor, q: Tensor) -> Tensor:
        apart = (p[:, None] - q).square().sum(2)
        return sum(
            (torch.exp(-0.5 * apart / variance) for variance in (10, 15, 20, 50)), torch.zeros_like(apart)
        ).mean()

    return k(a, a) + k(b, b) - 2 * k(a, b)


class Both(nn.Module):
    """A client's model and h'_i on its embedding."""

    def __init__(self, model: Net, h: nn.Module) -> None:
        super().__init__()
        self.model, self.h = model, h

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        e = self.model.encode(x)
        return self.model.classify(e), self.h(e)


def transformer(server: Server, H: int) -> nn.Module:
    """Return F, a map from C entries to the generator's H latents."""
    C = server.classes
    return nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.ReLU(), nn.Linear(C, H)).to(server.device)


def rows(of: dict[int, Tensor], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the vectors of all classes as one batch, by ascending class; zeros if there are none.

    The batch has at least two rows, for batch norm.
    """
    found = [of[c] for c in sorted(of)] or [torch.zeros(shape, device=device)]
    return torch.stack(found if len(found) > 1 else found * 2)


def on_simplex(model: Net, v: Tensor) -> Net:
    """Return a model that predicts by the angles to v_c.

    The largest cosine is the largest product, which is linear in the embedding. So the model is one of its
    architecture, and can be published as any other.
    """
    last = cast(nn.Linear, model.classifier)
    return with_classifier(model, v @ last.weight, v @ last.bias)


def scripted(path: str, server: Server) -> nn.Module:
    """Return the generator that the setting gives as a file."""
    return torch.jit.load(path, map_location=server.device).eval()


def decoder(server: Server, H: int, width: int) -> Generator:
    """Return the generator that the server trains if none was given."""
    return Generator("none", H, server.shape, server.classes, width).to(server.device).eval()


def trained_decoder(server: Server, H: int, width: int, steps: int) -> Generator:
    """Train the generator as the decoder of a variational autoencoder of the public images, with latents N(0, I)."""
    G = decoder(server, H, width)
    x, rng = server.public[0], server.rng("decoder")
    size = x[0].numel()
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(size, 256), nn.ReLU(), nn.Linear(256, 2 * H)).to(x.device)

    def loss() -> Tensor:
        batch = x[torch.randint(len(x), (min(64, len(x)),), generator=rng, device=x.device)]
        mean, log_variance = encoder(batch).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=rng, device=x.device)
        apart = (G(mean + noise * (log_variance / 2).exp()) - batch).square().flatten(1).sum(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (apart + divergence).mean()

    server.optimise([*G.train().parameters(), *encoder.parameters()], loss, steps=steps, opt=adam(1e-3))
    return G.eval()
