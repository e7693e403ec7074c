"""Losses that many methods share. Each is pure and gives one value per row: see fedaudit.training.fit."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def ce(f: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of f(x) against the labels y."""
    return F.cross_entropy(f(x), y, reduction="none")


def kl(p_logits: Tensor, q_logits: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL[softmax(p / tau) || softmax(q / tau)] per row. The average is over the first argument's distribution.

    There is no factor tau^2: papers differ in it, and a method that has it writes it.
    """
    log_p, log_q = F.log_softmax(p_logits / tau, dim=-1), F.log_softmax(q_logits / tau, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
