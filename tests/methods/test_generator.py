"""The generators that the server trains."""

from __future__ import annotations

import torch

from fedaudit.methods.datafree._generator import DCGAN


def test_the_authors_generator_at_32_pixels():
    """512, 256, 128 and 3 channels of 4 x 4 without a bias; norms behind the second and the third; N(0, 0.02)."""
    torch.manual_seed(0)
    G = DCGAN("mul", 64, (3, 32, 32), 10, 128)
    sizes = [tuple(p.shape) for p in G.layers.parameters() if p.dim() == 4]
    assert sizes == [(64, 512, 4, 4), (512, 256, 4, 4), (256, 128, 4, 4), (128, 3, 4, 4)]
    assert [type(layer).__name__ for layer in G.layers] == [
        "ConvTranspose2d", "ReLU", "ConvTranspose2d", "BatchNorm2d", "ReLU", "ConvTranspose2d", "BatchNorm2d", "ReLU",
        "ConvTranspose2d", "Tanh",
    ]  # fmt: skip
    assert all(0.019 < p.std() < 0.021 for p in G.layers.parameters() if p.dim() == 4)
    assert G(G.h(torch.randn(2, 64), torch.tensor([0, 1]))).shape == (2, 3, 32, 32)
    assert DCGAN("mul", 8, (1, 28, 28), 10, 8)(torch.randn(2, 8)).shape == (2, 1, 28, 28)
