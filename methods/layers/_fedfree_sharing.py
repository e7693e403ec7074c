"""FedFree's knowledge-sharing module (Section 3.4): it brings client layers into the corresponding global layers.

It does so by Eqs. 3-5, which compare the outputs of two layers on Gaussian pseudo-data, or by the plain averaging of
Figure 4(b).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedaudit import Server, State, sgd
from fedaudit.methods.layers._fedfree_layers import Layer, Weights, centred, corresponding, kernel, named, weights_of

Mapped = dict[str, list[Weights]]  # client layers, their kernels dense, by the global layer j that they map to


def mapped_to(
    G: State, L: Mapping[int, State], ours: Mapping[str, Layer], theirs: Mapping[int, Mapping[str, Layer]]
) -> Mapped:
    """Return {theta_{i,l}} for each global layer: the layers of every client i, by type and depth.

    A layer whose type G lacks is left out.
    """
    mapped: Mapped = {}
    for i, layers in L.items():
        for name in dict.fromkeys(full.rpartition(".")[0] for full in layers):
            layer, (w, b) = theirs[i][name], weights_of(layers, name)
            j = corresponding(layer, ours)
            if j is not None:
                mapped.setdefault(j, []).append(Weights(kernel(w, layer.groups, len(G[f"{j}.weight"])), b))
    return mapped


def pseudo_data(G: State, mapped: Mapped, samples: int, server: Server) -> dict[str, Tensor]:
    """Return X^ ~ N(0, I) for each updated global layer: as many channels as it has, as large as the largest kernel."""
    rng, X = server.rng("pseudo-data"), {}
    for j, thetas in mapped.items():
        g = kernel(G[f"{j}.weight"])
        h, w = (max(k.shape[axis] for k in (g, *(theta.w for theta in thetas))) for axis in (2, 3))
        X[j] = torch.randn((samples, g.shape[1], h, w), generator=rng, device=server.device)
    return X


def output(layer: Weights, X: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return theta X^ on the shared block: samples x outputs."""
    w = centred(layer.w[:outputs, :inputs], *X.shape[2:])
    y = X[:, :inputs].flatten(1) @ w.flatten(1).T
    return y if layer.b is None else y + layer.b[:outputs]


def distillation_loss(g: Weights, thetas: Sequence[Weights], X: Tensor) -> Tensor:
    """Return L_D: the mean over client layers of ||g X^ - theta X^||^2; kernels as `kernel` gives them."""
    total = X.new_zeros(())
    for theta in thetas:
        outputs, inputs = (min(g.w.shape[axis], theta.w.shape[axis]) for axis in (0, 1))
        difference = output(g, X, outputs, inputs) - output(theta, X, outputs, inputs)
        total = total + difference.square().sum(1).mean()
    return total / len(thetas)


def transferred(
    G: State, mapped: Mapped, X: Mapping[str, Tensor], server: Server, *, steps: int, alpha: float
) -> State:
    """Return G^t: G^{t-1} after `steps` of gradient descent on L_D in the layers that client layers map to."""
    after = State(G, G.buffers)
    if not mapped:
        return after
    g = {}
    for j in mapped:
        w, b = weights_of(G, j)
        g[j] = Weights(w.clone().requires_grad_(), None if b is None else b.clone().requires_grad_())

    def L_D() -> Tensor:  # of all layers: each term depends on its own layer alone
        terms = [distillation_loss(Weights(kernel(g[j].w), g[j].b), thetas, X[j]) for j, thetas in mapped.items()]
        return torch.stack(terms).sum()  # Eq. 3

    numbers = [t for layer in g.values() for t in layer if t is not None]
    server.optimise(numbers, L_D, steps=steps, opt=sgd(alpha))  # Eq. 4 in w, Eq. 5 in b
    for j, layer in g.items():
        after.update({full: t.detach() for full, t in named(j, layer).items()})
    return after


def averaged(G: State, mapped: Mapped) -> State:
    """Return G with each number of a global layer as the mean over the client layers that have it (Figure 4(b))."""
    after = State(G, G.buffers)
    for j, thetas in mapped.items():
        w, b = weights_of(G, j)
        after[f"{j}.weight"] = average(kernel(w), [theta.w for theta in thetas]).view_as(w)
        if b is not None:
            after[f"{j}.bias"] = average(b, [theta.b for theta in thetas if theta.b is not None])
    return after


def average(g: Tensor, thetas: Sequence[Tensor]) -> Tensor:
    """Return g with each entry as the mean over the client tensors that have it; entries that none has stay."""
    total, count = torch.zeros_like(g), torch.zeros_like(g)
    for theta in thetas:
        shared = theta[tuple(slice(n) for n in g.shape[:2])]  # a bias has one dimension, a kernel four
        block = tuple(slice(n) for n in shared.shape[:2])
        ones = torch.ones_like(shared)
        if g.dim() == 4:
            shared, ones = (centred(t, *g.shape[2:]) for t in (shared, ones))
        total[block] += shared
        count[block] += ones
    return torch.where(count > 0, total / count.clamp(min=1), g)
