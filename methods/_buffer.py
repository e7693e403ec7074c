"""The memory buffer B of DFFKE (Section 3.3): past synthetic data, kept as what regenerates it (Section 4.3).

`memory["B"]` maps a round s to {"Dec": the decoder's checkpoint of s, "E": {i: translated embeddings of client i}}.
Rounds are keys, never positions: a client that sat out a round lacks its key, and nothing after it shifts.

Section 4.3 gives 14.7 MB of embeddings per round on CIFAR-100. At h = 512 and four bytes those are 7,500 rows, which is
neither a client's 5,000 nor everybody's 50,000. Eq. 14 needs the rows of all clients, so all are kept: N is their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedaudit.rng import generator
from fedaudit.wire.codec import State, size_of

Memory = dict[str, Any]


def held(memory: Memory) -> dict[int, dict[str, Any]]:
    """What the buffer holds, by round, oldest first."""
    return memory.get("B", {})


def remember(memory: Memory, t: int, Dec: State, E: dict[int, Tensor], R: int | str) -> None:
    """Algorithm 1, line 21: add round t, and forget all but the R newest rounds that this client holds."""
    rounds = {**held(memory), t: {"Dec": Dec, "E": E}}
    keep = sorted(rounds) if R == "unlimited" else sorted(rounds)[max(len(rounds) - int(R), 0) :]
    memory["B"] = {s: rounds[s] for s in keep}


def allot(seed: int, i: int, rounds: list[int], n: int) -> dict[int, int]:
    """How many of B^t_i's n rows come from each round: as in a draw without replacement from n rows of each."""
    if not rounds:
        return {}
    drawn = torch.randperm(n * len(rounds), generator=generator(seed, i, "rounds"))[:n] // n
    counts = torch.bincount(drawn, minlength=len(rounds)).tolist()
    return {s: m for s, m in zip(rounds, counts, strict=True) if m}


def pick(seed: int, i: int, s: int, n: int, m: int) -> Tensor:
    """Which m of client i's n rows of round s are in B^t_i: the same for whoever holds that round.

    On the CPU, so that parties with other devices draw the same rows.
    """
    return torch.randperm(n, generator=generator(seed, i, s))[:m]


def buffer_bytes(memory: Memory) -> int:
    """What the buffer takes: every tensor in it, the decoders' buffers included."""
    sizes = [size_of(tensor) for past in held(memory).values() for tensor in (past["Dec"], *past["E"].values())]
    return sum(size.payload + size.buffers for size in sizes)


def formula_bytes(R: int, Dec: int, N: int, h: int, b: int = 4) -> int:
    """Section 4.3: R (|Dec| + N h b), for R rounds, a decoder of `Dec` bytes, N rows of width h, b bytes a number."""
    return R * (Dec + N * h * b)
