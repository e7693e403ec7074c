"""Attention blocks, and a small transformer for texts of token ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedaudit.shape import Shape

PADDING = 0  # the id of what is no token: texts of one length are made with it
NEVER = -1e9  # a score before the softmax: finite, so that a text of padding alone has gradients, too


class Block(nn.Module):
    """Pre-norm attention and MLP.

    torch's own attention layers use fused kernels, which have no second derivative (gradient inversion needs it) and
    whose products torch's FLOP counter misses on CPU. At some sixty patches or tokens the plain product costs nothing.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """`hidden`: (batch, place), true where nobody is to look."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # batch, place, 3, head, width of a head
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None, :], NEVER)
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Token and place embeddings, blocks (Vaswani et al. 2017, the norms first), and the mean over a text's tokens.

    Padding is looked at by nobody and counts for nothing: a text means the same with more of it.
    """

    def __init__(self, shape: Shape, *, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.tokens, width)
        self.places = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, shape[0], width), std=0.02))
        nn.init.trunc_normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = ids == PADDING
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x, hidden)
        read = (~hidden).to(x.dtype)[:, :, None]
        return (self.norm(x) * read).sum(1) / read.sum(1).clamp(min=1)
