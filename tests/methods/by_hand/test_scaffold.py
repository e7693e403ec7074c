"""Three rounds of SCAFFOLD by hand: two of three clients in each, of unequal numbers of steps."""

from __future__ import annotations

import math

import torch
from by_hand import close, epoch, played, rng
from torch.nn.functional import cross_entropy

eta_l, eta_g, E, B = 0.05, 0.7, 2, 32


def test_rounds(tmp_path):
    options = {"E": E, "B": B, "eta_l": eta_l, "eta_g": eta_g}
    ran = played("scaffold", tmp_path, rounds=3, model="cnn_bn", participation=0.67, set=options)
    x_t = dict(ran.states[0].x)
    weights = [name for name, _ in ran.net(x_t).named_parameters()]
    c = {name: torch.zeros_like(x_t[name]) for name in weights}
    own = {i: {name: torch.zeros_like(x_t[name]) for name in weights} for i in ran.rows}
    again = [i for t in (1, 2, 3) for i in ran.up(t)]
    assert len(again) == 6, "two of three answer in each round"
    assert len(set(again)) < len(again), "one of them a second time: its c_i counts"
    for t in (1, 2, 3):
        y, delta_c = {}, {}
        for i in ran.up(t):
            close(x_t, ran.down(t)[i].x, f"x {t} {i}")
            close(c, dict(zip(sorted(weights), ran.down(t)[i].c, strict=True)), f"c {t} {i}")
            rows, labels = ran.rows[i]
            net, order, K = ran.net(x_t), rng(f"client {i}", "fit 1", t), 0
            for _ in range(E):
                for b in epoch(order, len(rows), B):
                    grads = torch.autograd.grad(cross_entropy(net(rows[b]), labels[b]), list(net.parameters()))
                    with torch.no_grad():
                        for (name, w), g in zip(net.named_parameters(), grads, strict=True):
                            w -= eta_l * (g - own[i][name] + c[name])  # Eq. 3
                    K += 1
            assert math.isclose(K, E * len(rows) / B, abs_tol=E)
            y[i] = net.state_dict()
            plus = {name: own[i][name] - c[name] + (x_t[name] - y[i][name]) / (K * eta_l) for name in weights}  # Eq. 4
            delta_c[i] = {name: plus[name] - own[i][name] for name in weights}
            own[i] = plus
            close(y[i], ran.up(t)[i].y, f"y {t} {i}")
            close(delta_c[i], ran.up(t)[i].delta_c, f"delta c {t} {i}")
            close(own[i], ran.memory(i, t)["c_i"], f"memory {t} {i}")
        after = {name: sum(y[i][name] for i in y) / len(y) for name in x_t}
        for name, before in x_t.items():
            if name in weights:
                after[name] = before + eta_g * sum(y[i][name] - before for i in y) / len(y)  # Eq. 5
                c[name] = c[name] + sum(delta_c[i][name] for i in y) / 3  # of all clients, not of those that answered
            elif not before.is_floating_point():
                after[name] = after[name].round().long()
        x_t = after
        close(x_t, ran.states[t].x, f"after {t}")
        close(c, ran.states[t].c, f"c after {t}")
