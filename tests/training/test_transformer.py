"""The transformer by numpy: attention head by head, place by place, and the mean over what is no padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedaudit.shape import Shape
from fedaudit.training.models import build
from fedaudit.training.transformer import PADDING, Block, Transformer


def random(module, seed):
    """Return a module in double precision whose numbers all differ."""
    rng = torch.Generator().manual_seed(seed)
    module = module.double()
    for p in module.parameters():
        nn.init.normal_(p, std=0.7, generator=rng)
    return module


def normed(x, norm):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return x * norm.weight.detach().numpy() + norm.bias.detach().numpy()


def linear(x, layer):
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def block_by_hand(block, x, hidden):
    """One text of (places, width); each place looks at those that are not hidden."""
    width = x.shape[1]
    q, k, v = np.split(linear(normed(x, block.norm1), block.qkv), 3, axis=1)
    size, out = width // block.heads, np.zeros_like(x)
    for head in range(block.heads):
        own = slice(head * size, (head + 1) * size)
        for i in range(len(x)):
            seen = [j for j in range(len(x)) if not hidden[j]] or list(range(len(x)))
            e = np.array([q[i, own] @ k[j, own] / math.sqrt(size) for j in seen])
            e = np.exp(e - e.max())
            out[i, own] = sum(weight * v[j, own] for weight, j in zip(e / e.sum(), seen, strict=True))
    x = x + linear(out, block.proj)
    inner = linear(normed(x, block.norm2), block.mlp[0])
    inner = inner * np.array([[0.5 * (1 + math.erf(value / math.sqrt(2))) for value in row] for row in inner])
    return x + linear(inner, block.mlp[2])


def test_a_block_by_numpy():
    block = random(Block(6, 2), 1)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    hidden = torch.tensor([[False, True, False, False, True], [False] * 5])
    for mask in (hidden, None):
        found = block(x, mask).detach().numpy()
        for i in range(2):
            wanted = block_by_hand(block, x[i].numpy(), [False] * 5 if mask is None else mask[i].tolist())
            assert found[i] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_a_transformer_by_numpy():
    """Three texts of four places: one full, one with padding, one of padding alone, which gives 0."""
    model = random(Transformer(Shape((4,), tokens=7), width=6, depth=2, heads=3), 3)
    ids = torch.tensor([[3, 1, 6, 2], [5, 2, PADDING, PADDING], [PADDING] * 4])
    found = model(ids).detach().numpy()
    for i, text in enumerate(ids.tolist()):
        hidden = [token == PADDING for token in text]
        x = model.tokens.weight.detach().numpy()[text] + model.places[0].detach().numpy()
        for block in model.blocks:
            x = block_by_hand(block, x, hidden)
        rows = [row for row, out in zip(normed(x, model.norm), hidden, strict=True) if not out]
        wanted = sum(rows) / len(rows) if rows else np.zeros(6)
        assert found[i] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_the_sizes_of_the_transformer_that_a_name_stands_for():
    net = build("transformer", shape=Shape((5,), tokens=9), classes=3)
    assert (net.encoder.tokens.weight.shape, net.encoder.places.shape) == ((9, 64), (1, 5, 64))
    assert [block.heads for block in net.encoder.blocks] == [4, 4]
    assert (net.classifier.in_features, net.classifier.out_features, net.width) == (64, 3, 64)
    assert net(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 3)
