"""Three rounds of FedDyn by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

alpha, eta, E = 0.3, 0.1, 2


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "alpha": alpha}
    ran = played("feddyn", tmp_path, rounds=3, model="cnn_bn", set=options)
    theta = dict(ran.states[0].theta)
    weights = {name for name, _ in ran.net(theta).named_parameters()}
    h = {name: torch.zeros_like(theta[name]) for name in weights}
    g = {k: {name: torch.zeros_like(theta[name]) for name in weights} for k in ran.rows}
    for t in (1, 2, 3):
        told = {}
        for k, (x, y) in ran.rows.items():
            close(theta, ran.down(t)[k].theta, f"down {t} {k}")
            net = ran.net(theta)
            for _ in range(E):
                grads = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
                with torch.no_grad():
                    for (name, w), grad in zip(net.named_parameters(), grads, strict=True):
                        w -= eta * (grad - g[k][name] + alpha * (w - theta[name]))  # line 6
            told[k] = net.state_dict()
            g[k] = {name: g[k][name] - alpha * (told[k][name] - theta[name]) for name in weights}  # line 7
            close(told[k], ran.up(t)[k].theta, f"up {t} {k}")
            close(g[k], ran.memory(k, t)["g"], f"memory {t} {k}")
        for name in weights:
            h[name] = h[name] - alpha / 3 * sum(told[k][name] - theta[name] for k in told)  # line 13
        after = {name: sum(told[k][name] for k in told) / 3 for name in theta}
        counters = {name for name, v in theta.items() if not v.is_floating_point()}
        after = {name: v.round().long() if name in counters else v for name, v in after.items()}
        theta = {name: v - h[name] / alpha if name in weights else v for name, v in after.items()}  # line 14
        close(theta, ran.states[t].theta, f"after {t}")
        close(h, ran.states[t].h, f"h {t}")
