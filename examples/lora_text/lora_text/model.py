"""lora_text: a transformer whose own weights are frozen, with low-rank adapters on its embedding and linear layers.

LoRA is Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022: W x + B A x with B = 0 at the start.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from lora_text.data import LENGTH, WORDS

BASE = Path(__file__).parent / "base.safetensors"  # written by `python -m lora_text.pretrain`
WIDTH, HEADS, DEPTH, RANK = 48, 4, 2, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, padding):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        score = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH / HEADS)).masked_fill(padding[:, None, None, :], -1e9)
        return self.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.first, self.second = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, padding):
        x = x + self.attention(self.first(x), padding)
        return x + self.narrow(torch.relu(self.wide(self.second(x))))


class Encoder(nn.Module):
    """The transformer itself: ids in, the mean of the last layer over a sentence's words out."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        padding = x == 0
        h = self.tokens(x) + self.places
        for block in self.blocks:
            h = block(h, padding)
        there = (~padding).to(h.dtype)[..., None]
        return (self.norm(h) * there).sum(1) / there.sum(1).clamp(min=1)


class LowRankLinear(nn.Module):
    """A frozen linear layer, and B A beside it."""

    def __init__(self, own):
        super().__init__()
        self.own, self.A = own, nn.Linear(own.in_features, RANK, bias=False)
        self.B = nn.Linear(RANK, own.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.own(x) + self.B(self.A(x))


class LowRankEmbedding(nn.Module):
    """A frozen embedding, and an embedding of few numbers that B widens beside it."""

    def __init__(self, own):
        super().__init__()
        self.own, self.A = own, nn.Embedding(own.num_embeddings, RANK)
        self.B = nn.Linear(RANK, own.embedding_dim, bias=False)
        nn.init.normal_(self.A.weight, std=1 / math.sqrt(RANK))
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.own(x) + self.B(self.A(x))


class Adapted(nn.Module):
    """The frozen transformer with adapters on its embedding, queries and values, and a head for the classes."""

    def __init__(self, classes):
        super().__init__()
        encoder = Encoder()
        if BASE.exists():
            encoder.load_state_dict(load_file(BASE))
        encoder.requires_grad_(False)
        encoder.tokens = LowRankEmbedding(encoder.tokens)
        for block in encoder.blocks:
            block.attention.q, block.attention.v = LowRankLinear(block.attention.q), LowRankLinear(block.attention.v)
        self.encoder, self.head = encoder, nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.head(self.encoder(x))
