"""Two rounds of FedProx by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

mu, eta, E = 0.7, 0.1, 3


def test_rounds(tmp_path):
    ran = played("fedprox", tmp_path, rounds=2, model="cnn_bn", set={"E": E, "B": 1000, "eta": eta, "mu": mu})
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    w_t = dict(ran.states[0].w)
    for t in (1, 2):
        told = {}
        for k, (x, y) in ran.rows.items():
            close(w_t, ran.down(t)[k].w, f"down {t} {k}")
            net = ran.net(w_t)
            for _ in range(E):
                grads = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
                with torch.no_grad():
                    for (name, w), g in zip(net.named_parameters(), grads, strict=True):
                        w -= eta * (g + mu * (w - w_t[name]))  # the gradient of Eq. 2
            told[k] = net.state_dict()
            close(told[k], ran.up(t)[k].w, f"up {t} {k}")
            close(told[k], ran.model(k, t))
        w_t = {
            name: sum(n[k] / sum(n.values()) * told[k][name] for k in n)
            if v.is_floating_point()
            else torch.stack([told[k][name] for k in n]).double().mean().round().long()
            for name, v in w_t.items()
        }
        close(w_t, ran.states[t].w, f"after {t}")
