"""Shared by FedZGE, MHAT and DS-FL: messages, outputs of many models made into one teacher, and learning from it.

Equation numbers are those of Ma, Wang and Zhang, AAAI 2025 (see fedzge.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit import Down, Record, Server, State, Up, in_chunks, kl, state_of
from fedaudit.errors import ContractError


class Auxiliary(Down):
    """A batch of the auxiliary set. It has the labels if a method uses them and they are labels of the task."""

    x_p: Tensor
    y_p: Tensor | None


class Distilled(Up):
    """A client has learned from the ensemble. The message is empty."""


class Walked(Record):
    """The server's state in methods that use an auxiliary set."""

    theta: State  # global model f
    order: Tensor  # in which the auxiliary set is walked through


def set_out(server: Server) -> Walked:
    """Return the state before the first round."""
    n = len(server.public[0])
    return Walked(state_of(server.model()), torch.randperm(n, generator=server.rng("order"), device=server.device))


@contextmanager
def single_precision() -> Iterator[None]:
    """Run convolutions and products of matrices without TF32, which a run's precision may allow in both.

    TF32 keeps 11 bits of an image: 1 + 0.001 u, FedZGE's query, would lose most of u. It keeps as many of what the
    last layer multiplies, whose differences are as small.
    """
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, batch: int = 1024) -> Tensor:
    """Return f(x) in evaluation mode, each row by itself, in pieces: a query batch can be thousands of images."""
    model.eval()
    with single_precision():
        return in_chunks(model, x, batch)


def ensemble(outputs: Mapping[int, Tensor], N: Mapping[int, int]) -> Tensor:
    """Return sum_k (N_k / N) f_k over the clients that answered, N the sum of theirs; by ascending client."""
    if not outputs:
        raise ContractError("ensemble: no client answered. Lower --dropout, or raise --quorum so that the run stops.")
    total = sum(N[k] for k in outputs)
    return torch.stack([outputs[k] * (N[k] / total) for k in sorted(outputs)]).sum(0)


def distil(f: Any, x: Tensor, e: Tensor, tau: float) -> Tensor:
    """Return KL(sigma(e; tau) || sigma(f(x); tau)), the teacher's output e first (Eqs. 2, 4, 20). They have no factor
    tau^2.
    """
    return kl(e, f(x), tau)


def distil_labelled(f: Any, x: Tensor, e: Tensor, y: Tensor, tau: float, lam: float) -> Tensor:
    """Return `distil`, plus the cross-entropy against the labels of the auxiliary set with weight lam."""
    out = f(x)
    return kl(e, out, tau) + lam * F.cross_entropy(out, y, reduction="none")


def imitate(f: Any, x: Tensor, p: Tensor) -> Tensor:
    """Return the cross-entropy of softmax(f(x)) against the soft labels p: their KL divergence, but for p's own
    entropy.
    """
    return -(p * F.log_softmax(f(x), dim=-1)).sum(-1)


def auxiliary(order: Tensor, t: int, B: int) -> Tensor:
    """Return which B rows of the auxiliary set round t uses: the set in a fixed random order, over and over.

    500 rows a round for 100 rounds are the 50,000 of the paper's auxiliary set, each seen once (Appendix C).
    """
    first = (t - 1) * B
    return order[torch.arange(first, first + B, device=order.device) % len(order)]
