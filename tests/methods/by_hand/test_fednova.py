"""Two rounds of FedNova by hand: clients of unequal size make unequal numbers of steps.

||a||_1 is retold as the sum over steps of how much each gradient counts in x - y: with plain SGD 1; with momentum rho,
the gradient of step s counts 1 + rho + ... + rho^(tau - s), because the buffer passes it on; with the proximal term,
each later step shrinks what was done by 1 - eta mu.
"""

from __future__ import annotations

import pytest
import torch
from by_hand import close, epoch, played, rng
from torch.nn.functional import cross_entropy

ETA, E, B = 0.05, 2, 32


def weight(tau, rho, mu):
    if mu:
        return sum((1 - ETA * mu) ** (tau - s) for s in range(1, tau + 1))
    return sum(rho**later for s in range(1, tau + 1) for later in range(tau - s + 1))


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.3)])
def test_rounds(tmp_path, rho, mu):
    options = {"E": E, "B": B, "eta": ETA, "momentum": rho, "mu": mu}
    ran = played("fednova", tmp_path, rounds=2, model="cnn_bn", set=options)
    n = {i: len(y) for i, (_, y) in ran.rows.items()}
    p = {i: n[i] / sum(n.values()) for i in n}
    x_t = dict(ran.states[0].x)
    weights = [name for name, _ in ran.net(x_t).named_parameters()]
    for t in (1, 2):
        y, tau = {}, {}
        for i, (rows, labels) in ran.rows.items():
            close(x_t, ran.down(t)[i].x, f"down {t} {i}")
            net, order = ran.net(x_t), rng(f"client {i}", "fit 1", t)
            buffer = {name: torch.zeros_like(x_t[name]) for name in weights}
            tau[i] = 0
            for _ in range(E):
                for b in epoch(order, len(rows), B):
                    grads = torch.autograd.grad(cross_entropy(net(rows[b]), labels[b]), list(net.parameters()))
                    with torch.no_grad():
                        for (name, w), g in zip(net.named_parameters(), grads, strict=True):
                            buffer[name] = rho * buffer[name] + g + mu * (w - x_t[name])
                            w -= ETA * buffer[name]
                    tau[i] += 1
            y[i] = net.state_dict()
            close(y[i], ran.up(t)[i].y, f"up {t} {i}")
            assert (tau[i], n[i]) == (ran.up(t)[i].tau, ran.up(t)[i].n)
        assert len(set(tau.values())) > 1, "with one number of steps it is FedAvg"
        a = {i: weight(tau[i], rho, mu) for i in y}
        tau_eff = sum(p[i] * a[i] for i in y)
        after = {name: sum(p[i] * y[i][name] for i in y) for name in x_t}
        for name, before in x_t.items():
            if name in weights:
                after[name] = before - tau_eff * sum(p[i] * (before - y[i][name]) / a[i] for i in y)
            elif not before.is_floating_point():
                after[name] = after[name].round().long()
        x_t = after
        close(x_t, ran.states[t].x, f"after {t}")
