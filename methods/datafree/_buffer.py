"""The memory buffer B of DFFKE (Section 3.3): past synthetic data, and the sample B^t of it that a round reviews. The
buffer keeps what regenerates the data (Section 4.3).

`memory["B"]` maps a round s to {"Dec": the decoder's checkpoint of s, "E": {i: translated embeddings of client i}},
frozen: it stays as it came, and all clients of a process hold one copy. Rounds are keys, never positions: a client that
sat out a round lacks its key, and nothing after it shifts.

Section 4.3 gives 14.7 MB of embeddings per round on CIFAR-100. At h = 512 and four bytes those are 7,500 rows, which is
neither a client's 5,000 nor everybody's 50,000. Eq. 14 needs the rows of all clients, so all are kept: N is their sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedaudit import Frozen, State, freeze
from fedaudit.rng import generator
from fedaudit.wire.codec import FrozenPart

Memory = dict[str, Any]
Past = Frozen  # one round: {"Dec": State, "E": {i: Tensor}}
Rounds = int | Literal["unlimited"]


# --- what is held -----------------------------------------------------------------------------------------------------


def held(memory: Memory) -> dict[int, Past]:
    """Return what the buffer holds, by round, oldest first."""
    return memory.get("B", {})


def newest(rounds: Iterable[int], R: Rounds) -> list[int]:
    """Return the R newest of some rounds, oldest first."""
    ordered = sorted(rounds)
    return ordered if R == "unlimited" else ordered[max(len(ordered) - R, 0) :]


def a_round(Dec: State, E: Mapping[int, Tensor]) -> Past:
    """Return what the buffer holds of one round."""
    return freeze({"Dec": Dec, "E": dict(E)})


def remember(memory: Memory, t: int, past: Past, R: Rounds) -> None:
    """Add round t, and forget all but the R newest rounds that this client holds (Algorithm 1, line 21)."""
    rounds = {**held(memory), t: past}
    memory["B"] = {s: rounds[s] for s in newest(rounds, R)}


# --- what is reviewed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """B^t_i of every client i: n_i of client i's past rows, uniform over the rounds that i holds and has rows in; or so
    many times n_i, where it has as many.

    It follows from a seed that the server sends, so that teacher and student draw the same rows without sending them.
    """

    seed: int
    times: int = 1

    def counts(self, i: int, rounds: Iterable[int], n: int) -> dict[int, int]:
        """Return how many of B^t_i's rows come from each round, as in drawing without replacement from n rows of each:
        n rows, or `times` as many.
        """
        ordered = sorted(rounds)
        if not ordered:
            return {}
        drawn = torch.randperm(n * len(ordered), generator=generator(self.seed, i, "rounds"))[: self.times * n] // n
        counts = torch.bincount(drawn, minlength=len(ordered)).tolist()
        return {s: m for s, m in zip(ordered, counts, strict=True) if m}

    def rows(self, i: int, s: int, n: int, m: int) -> Tensor:
        """Return which m of client i's n rows of round s are in B^t_i: the same for everybody who holds that round.

        The draw is on the CPU, so that parties with other devices draw the same rows.
        """
        return torch.randperm(n, generator=generator(self.seed, i, s))[:m]

    def own(self, k: int, past: Mapping[int, Past], n: int) -> dict[int, FrozenPart]:
        """Return B^t_k by round, as embeddings: the rows on which client k answers."""
        mine = [s for s, p in past.items() if k in p.keys("E")]
        return {s: self.of_peer(k, s, past[s], m) for s, m in self.counts(k, mine, n).items()}

    def of_peer(self, i: int, s: int, past: Past, m: int) -> FrozenPart:
        """Return the m rows of round s in B^t_i, as embeddings: the rows on which client i has answered."""
        return past.part("E", i, rows=self.rows(i, s, past.rows("E", i), m))


# --- what it takes ----------------------------------------------------------------------------------------------------


def buffer_bytes(memory: Memory) -> int:
    """Return the bytes that the buffer takes: every tensor in it, the decoders' buffers included."""
    sizes = [past.size(*path) for past in held(memory).values() for path in (("Dec",), *_embeddings(past))]
    return sum(size.payload + size.buffers for size in sizes)


def _embeddings(past: Past) -> list[tuple[str, int]]:
    return [("E", i) for i in past.keys("E")]


def formula_bytes(R: int, Dec: int, N: int, h: int, b: int = 4) -> int:
    """Return R (|Dec| + N h b) of Section 4.3: R rounds, a decoder of `Dec` bytes, N rows of width h, b bytes each."""
    return R * (Dec + N * h * b)
