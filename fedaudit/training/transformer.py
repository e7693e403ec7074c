"""Attention blocks, and a small transformer for texts of token ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedaudit.shape import Shape

PADDING = 0  # the id that stands for no token; it fills texts up to one length
NEVER = (
    -1e9
)  # the score of a hidden place before the softmax; finite, so that a text of padding alone has gradients too


class Block(nn.Module):
    """One transformer block: attention and an MLP, each with its norm first.

    torch's own attention layers use fused kernels. Those have no second derivative, which gradient inversion needs, and
    torch's FLOP counter misses their products on CPU. At some sixty patches or tokens the plain product costs nothing.
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
        """Return the block's output. `hidden` is (batch, place) and true at places that attention must not look at."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # batch, place, 3, head, width of a head
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None, :], NEVER)
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Token and place embeddings, blocks (Vaswani et al. 2017, the norms first), and the mean over a text's tokens.

    Attention never looks at padding, and the mean leaves it out: more padding does not change what a text gives.
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
