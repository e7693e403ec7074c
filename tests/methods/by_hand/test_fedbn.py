"""Two rounds of FedBN by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

eta, E = 0.1, 2


def test_rounds(tmp_path):
    ran = played("fedbn", tmp_path, rounds=2, model="cnn_bn", set={"E": E, "B": 1000, "eta": eta})
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    shared = dict(ran.states[0].w)
    assert not any("bn" in name for name in shared)
    own = {k: {name: v for name, v in ran.first[k].items() if "bn" in name} for k in ran.rows}
    for t in (1, 2):
        told = {}
        for k, (x, y) in ran.rows.items():
            close(shared, ran.down(t)[k].w, f"down {t} {k}")
            net = ran.net({**shared, **own[k]})
            for _ in range(E):
                grads = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
                with torch.no_grad():
                    for w, grad in zip(net.parameters(), grads, strict=True):
                        w -= eta * grad
            every = net.state_dict()
            told[k] = {name: every[name] for name in shared}
            own[k] = {name: every[name] for name in own[k]}
            close(told[k], ran.up(t)[k].w, f"up {t} {k}")
            close(every, ran.model(k, t), f"model {t} {k}")
        shared = {name: sum(n[k] / sum(n.values()) * told[k][name] for k in n) for name in shared}
        close(shared, ran.states[t].w, f"after {t}")
