"""Two rounds of Per-FedAvg by hand: Fallah et al., NeurIPS 2020, Algorithm 1, with either approximation."""

from __future__ import annotations

import pytest
import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

TAU, B, ALPHA, BETA, DELTA = 3, 16, 0.05, 0.1, 1e-3


def endless(order, n):
    """Batches of one epoch after the other."""
    while True:
        yield from epoch(order, n, B)


def gradient(net, x, y):
    """grad f(w, D) at the network's weights; its batch norms see the batch."""
    return torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))


def move(net, start, direction, rate):
    """The network's weights become start - rate direction."""
    with torch.no_grad():
        for p, w, d in zip(net.parameters(), start, direction, strict=True):
            p.copy_(w - rate * d)


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("variant", ["FO", "HF"])
def test_two_rounds(tmp_path, variant):
    hyper = {"variant": variant, "tau": TAU, "B": B, "alpha": ALPHA, "beta": BETA, "delta": DELTA, "adapt": 1}
    ran = played("perfedavg", tmp_path, rounds=2, model="cnn_bn", set=hyper)
    assert len({len(y) for _, y in ran.rows.values()}) == 3, "clients of unequal size"
    w_k = {name: t.clone() for name, t in ran.states[0].w.items()}  # w_0
    for t in (1, 2):
        local = {}
        for i, (x, y) in ran.rows.items():
            close(w_k, ran.down(t)[i].w, f"round {t}: what client {i} is sent")
            net = ran.net(w_k)
            batches = endless(rng(f"client {i}", "fit 1", t), len(x))
            meta = rng(f"client {i}", "meta batches", t)
            for _ in range(TAU):
                w = weights(net)
                if variant == "FO":  # the second derivative is left out
                    D, D1 = next(batches), next(batches)
                else:
                    D, D1, D2 = (torch.randperm(len(x), generator=meta)[:B] for _ in range(3))
                move(net, w, gradient(net, x[D], y[D]), ALPHA)  # w~ = w - alpha grad f(w, D)
                u = gradient(net, x[D1], y[D1])  # grad f(w~, D')
                step = u
                if variant == "HF":  # u - alpha [grad f(w + delta u, D'') - grad f(w - delta u, D'')] / (2 delta)
                    move(net, w, u, -DELTA)
                    ahead = gradient(net, x[D2], y[D2])
                    move(net, w, u, DELTA)
                    behind = gradient(net, x[D2], y[D2])
                    step = [d - ALPHA * (a - b) / (2 * DELTA) for d, a, b in zip(u, ahead, behind, strict=True)]
                move(net, w, step, BETA)  # w <- w - beta step
            local[i] = {name: p.detach().clone() for name, p in net.state_dict().items()}
            close(local[i], ran.up(t)[i].w, f"round {t}: client {i}'s reply")

            own = ran.net(w_k)  # what i deploys: one step from the w that it was sent
            b = next(endless(rng(f"client {i}", "fit 2" if variant == "FO" else "fit 1", t), len(x)))
            move(own, weights(own), gradient(own, x[b], y[b]), ALPHA)
            close(dict(own.state_dict()), ran.model(i, t), f"round {t}: client {i}'s own model")
        w_k = {}
        for name, like in local[0].items():  # w_{k+1} = 1/n sum_i w^i, whatever their sizes
            mean = sum(local[i][name].double() for i in local) / 3
            w_k[name] = mean if like.is_floating_point() else mean.round().to(like.dtype)
        close(w_k, ran.states[t].w, f"the model after round {t}")
