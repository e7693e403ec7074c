"""Two rounds of FedGH by hand: full batches at the clients; one step of the header on all representations an epoch."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

eta, eta_s, E, S = 0.1, 0.5, 2, 3


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "S": S, "B_s": 1000, "eta_s": eta_s}
    ran = played("fedgh", tmp_path, rounds=2, model="cnn_bn/24:2,mlp/24:1", set=options)
    archs = ["cnn_bn/24", "cnn_bn/24", "mlp/24"]
    theta, own = dict(ran.states[0].theta), dict(ran.first)
    for t in (1, 2):
        V, labels = [], []
        for k, (x, y) in ran.rows.items():
            close(theta, ran.down(t)[k].theta, f"down {t} {k}")
            net = ran.net({**own[k], **theta}, archs[k])
            for _ in range(E):
                grads = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
                with torch.no_grad():
                    for w, grad in zip(net.parameters(), grads, strict=True):
                        w -= eta * grad
            own[k] = net.state_dict()
            close(own[k], ran.model(k, t), f"model {t} {k}")
            with torch.no_grad():
                h = net.eval().encode(x)
            sent = {s: h[y == s].mean(0) for s in sorted(set(y.tolist()))}
            close(sent, ran.up(t)[k].V, f"up {t} {k}")
            V += sent.values()
            labels += sent
        W, b = theta["classifier.weight"].clone(), theta["classifier.bias"].clone()
        for _ in range(S):  # the gradient of the mean cross-entropy of a linear layer
            p = (torch.stack(V) @ W.T + b).softmax(1)
            p[torch.arange(len(V)), labels] -= 1
            W, b = W - eta_s * p.T @ torch.stack(V) / len(V), b - eta_s * p.mean(0)
        theta = {"classifier.weight": W, "classifier.bias": b}
        close(theta, ran.states[t].theta, f"after {t}")
