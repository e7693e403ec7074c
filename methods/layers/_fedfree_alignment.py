"""FedFree's knowledge alignment module (Section 3.5): the knowledge gain entropy of Eq. 6, and Eq. 7's projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Entropy = Literal["shannon", "tsallis", "collision"]
Fill = Literal["zero", "keep"]
Span = tuple[Tensor, Tensor]  # the least and the largest number that the bins cover
Pair = tuple[str, str]  # a client's layer l and a global layer j


def entropy(weight: Tensor, bins: int, kind: Entropy = "shannon", q: float = 2.0, span: Span | None = None) -> Tensor:
    """Return H of the weights in equal bins over `span`, or over their own [min, max]."""
    w = weight.flatten()
    low, high = span if span is not None else w.aminmax()
    scaled = (w - low) / (high - low).clamp(min=torch.finfo(w.dtype).tiny)
    counts = (scaled * bins).long().clamp(max=bins - 1).bincount(minlength=bins)
    p = counts.double() / len(w)
    if kind == "shannon":
        return -torch.special.xlogy(p, p).sum()
    if kind == "tsallis":
        return (1 - (p**q).sum()) / (q - 1)
    return -p.square().sum().log()  # collision: Renyi's of order 2


def span_of(*weights: Tensor) -> Span:
    """Return the span from the least to the largest number in any of the tensors."""
    ends = torch.stack([torch.stack(w.aminmax()) for w in weights])
    return ends[:, 0].min(), ends[:, 1].max()


def gains(
    pairs: Sequence[Pair],
    theta: Mapping[str, Tensor],
    g: Mapping[str, Tensor],
    H: Callable[..., Tensor],
    bin_range: Literal["own", "common"],
    H_g: dict[str, Tensor],
) -> dict[Pair, float]:
    """Return KGE(theta_l, g_j) = H(g_j) - H(theta_l) of each pair (Eq. 6). `H_g` keeps H(g_j) for the next client."""
    if not pairs:
        return {}
    if bin_range == "common":  # both layers of a comparison in the same bins
        both = [(theta[name], g[j], span_of(theta[name], g[j])) for name, j in pairs]
        KGE = [H(of_g, span=span) - H(of_theta, span=span) for of_theta, of_g, span in both]
    else:
        H_theta = {name: H(theta[name]) for name, _ in pairs}
        H_g.update({j: H(g[j]) for j in {j: None for _, j in pairs} if j not in H_g})
        KGE = [H_g[j] - H_theta[name] for name, j in pairs]
    return dict(zip(pairs, torch.stack(KGE).tolist(), strict=True))


def project(g: Tensor | None, theta: Tensor, fill: Fill) -> Tensor:
    """Return Eq. 7: the first d_min numbers of theta are g's; the rest is 0, or stays."""
    flat = torch.zeros_like(theta).flatten() if fill == "zero" else theta.flatten().clone()
    if g is not None:
        d_min = min(g.numel(), theta.numel())
        flat[:d_min] = g.flatten()[:d_min]
    return flat.view_as(theta)
