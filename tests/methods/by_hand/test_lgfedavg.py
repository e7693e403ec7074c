"""Two rounds of LG-FedAvg by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

eta, E = 0.1, 2


def test_rounds(tmp_path):
    ran = played("lgfedavg", tmp_path, rounds=2, model="cnn_bn/24:2,mlp/24:1", set={"E": E, "B": 1000, "eta": eta})
    archs = ["cnn_bn/24", "cnn_bn/24", "mlp/24"]
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    theta_g, own = dict(ran.states[0].theta_g), dict(ran.first)
    assert set(theta_g) == {"classifier.weight", "classifier.bias"}
    for t in (1, 2):
        for k, (x, y) in ran.rows.items():
            close(theta_g, ran.down(t)[k].theta_g, f"down {t} {k}")
            net = ran.net({**own[k], **theta_g}, archs[k])
            for _ in range(E):
                grads = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
                with torch.no_grad():
                    for w, grad in zip(net.parameters(), grads, strict=True):
                        w -= eta * grad
            own[k] = net.state_dict()
            close(own[k], ran.model(k, t), f"model {t} {k}")
            close({name: own[k][name] for name in theta_g}, ran.up(t)[k].theta_g, f"up {t} {k}")
        theta_g = {name: sum(n[k] / sum(n.values()) * own[k][name] for k in n) for name in theta_g}
        close(theta_g, ran.states[t].theta_g, f"after {t}")
