"""Matrices reduced to their largest singular values, for `LowRank` states and `compress = "svd:E"`.

A tensor of two or more dimensions is a matrix with a row for each entry of the first. U (m x K), s (K) and V (K x n)
travel instead of it if they have fewer numbers. K is the least with sum_{i <= K} s_i^2 >= energy sum_i s_i^2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

PARTS = ("|U", "|s", "|V")  # appended to a tensor's name for its factors
Shapes = dict[str, list[int]]  # for each tensor that travels as factors: K, then its own shape


def factorised(
    tensors: Mapping[str, Tensor], energy: float, whole: Collection[str] = ()
) -> tuple[dict[str, Tensor], Shapes]:
    """Return the tensors that travel instead of `tensors`, by name, and the shapes of those that travel as factors.

    The tensors in `whole` always travel unchanged.
    """
    sent: dict[str, Tensor] = {}
    shapes: Shapes = {}
    for name, t in tensors.items():
        matrix = t.dim() > 1 and t.is_floating_point() and name not in whole
        found = factors(t, energy) if matrix and energy < 1 else None
        if found is None:
            sent[name] = t
        else:
            shapes[name] = [len(found[1]), *t.shape]
            sent |= {name + part: factor for part, factor in zip(PARTS, found, strict=True)}
    return sent, shapes


def factors(t: Tensor, energy: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return U, s and V of a tensor of two or more dimensions, or None if they are not smaller than it."""
    matrix = t.detach().flatten(1)
    if not bool(torch.isfinite(matrix).all()):
        return None  # it travels unchanged, and the codec reports the problem
    U, s, V = torch.linalg.svd(matrix, full_matrices=False)
    held = s.double().square().cumsum(0)
    K = int((held < energy * held[-1]).sum()) + 1 if len(s) and float(s[0]) > 0 else 0
    if K * (sum(matrix.shape) + 1) >= matrix.numel():
        return None
    return U[:, :K].contiguous(), s[:K].contiguous(), V[:K].contiguous()


def recombined(sent: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the tensors that the receiver gets: U diag(s) V in their own shapes, in the order of sending."""
    tensors: dict[str, Tensor] = {}
    for name, t in sent.items():
        whole = name[: -len(PARTS[0])] if name.endswith(PARTS) else name
        if whole not in shapes:
            tensors[name] = t
        elif name.endswith(PARTS[0]):
            rank, *shape = (int(n) for n in shapes[whole])
            if len(sent[whole + PARTS[1]]) != rank:
                raise ValueError(f"the factors of {whole} are not of rank {rank}")
            tensors[whole] = product(t, sent[whole + PARTS[1]], sent[whole + PARTS[2]], shape)
    return tensors


def product(U: Tensor, s: Tensor, V: Tensor, shape: Sequence[int]) -> Tensor:
    """Return U diag(s) V in the given shape, which is that of the original tensor."""
    rank = len(s)
    if not (U.shape == (shape[0], rank) and s.shape == (rank,) and V.shape == (rank, math.prod(shape[1:]))):
        raise ValueError(f"the factors do not make a matrix of rank {rank} and shape {list(shape)}")
    return (U * s @ V).reshape(shape)
